package main

import (
	"math/rand/v2"
	"slices"
)

// client is one client's requests, its bucket on the servers of its shard, and
// what each process knows of it. Buckets have nothing to do with each other, so
// that clients can be simulated one after the other.
type client struct {
	*setting
	schedule
	random           *rand.Rand
	now              int64
	primary, replica window
	books            []book
	home             int
	number           int64
	// counts are calls and requests from the instant measured on.
	counts   calls
	measured int64
	// admitted, charged, fetched and given back are all that ever was.
	admitted, charged, fetched, given int64
	// most is the most that the primary ever counted in a window.
	most int64
}

func newClient(s *setting, seed, number uint64) *client {
	c := &client{setting: s, random: rand.New(rand.NewPCG(seed, number)), books: make([]book, s.processes)}
	c.home = c.random.IntN(s.processes)
	return c
}

// start begins another client, in the memory of this one.
func (c *client) start() {
	clear(c.books)
	for i := range c.lines {
		c.lines[i] = line{events: c.lines[i].events[:0]}
	}
	*c = client{setting: c.setting, schedule: c.schedule, random: c.random, books: c.books, home: c.random.IntN(c.processes)}
}

// epoch is when the simulation begins: no instant is 0.
const epoch = 1_000_000 * second

// run lets requests come at given pauses, counts those from an instant until
// another, relative to the epoch, and then lets end what is on its way.
func (c *client) run(pause func() int64, from, until int64) calls {
	c.measured = epoch + from
	for at := epoch + pause(); at < epoch+until; at += pause() {
		c.advance(at)
		c.now = at
		c.arrive()
	}
	c.advance(epoch + until)
	counts := c.counts
	c.advance(1 << 62)
	return counts
}

// advance lets happen what does before an instant.
func (c *client) advance(until int64) {
	for {
		what, ok := c.next(until)
		if !ok {
			return
		}
		e := c.pop(what)
		c.now = e.at
		c.happen(what, &e)
	}
}

// arrive is a request.
func (c *client) arrive() {
	p := c.home
	switch c.route {
	case sticky:
	case anyCaddy:
		p = c.random.IntN(c.processes)
	case inTurn:
		p = int(c.number % int64(c.processes))
	}
	c.number++
	if c.isMeasured() {
		c.counts.requests++
	}
	if c.before {
		c.claim(p)
	} else {
		c.admit(p)
	}
}

func (c *client) isMeasured() bool { return c.now >= c.measured }

func (c *client) call(k kind) {
	if c.isMeasured() {
		c.counts.made[k]++
	}
}

func (c *client) wait(requests int64) {
	if c.isMeasured() {
		c.counts.waited += float64(requests)
	}
}

// pass notes requests that are admitted.
func (c *client) pass(requests int64) {
	c.admitted += requests
	if c.isMeasured() {
		c.counts.admitted += float64(requests)
	}
}

// happen lets something happen.
func (c *client) happen(what occurrence, e *event) {
	b := &c.books[e.process]
	switch what {
	case replicated:
		c.replica = e.word
	case atServer:
		c.reply(e)
	case answered:
		c.answer(b, e)
	case settled:
		b.flight--
		b.waiting++
		c.deliver(b, e.process)
	case charged:
		c.write(e.cost)
		c.charged += e.cost
		c.push(confirmed, c.now, event{process: e.process, word: c.primary, said: c.now})
	case confirmed:
		b.conclude(c.setting, e.word, e.said, c.now)
		c.deliver(b, e.process)
		held := b.held
		b.held = 0
		for range held {
			c.admit(e.process)
		}
	case taken:
		c.serve(e)
	case told:
		c.tell(b, e)
	case refunded:
		if c.primary.reset == e.word.reset && c.primary.isOpen(c.now) {
			c.write(-e.cost)
		}
		c.push(returned, c.now, *e)
	case returned:
		b.refunds--
		b.confirmed = c.now
	case reaped:
		c.reap(b, e.process)
	case occurrences:
	}
}

// write changes the bucket in the primary, and some time later in its replicas.
func (c *client) write(cost int64) {
	if !c.primary.isOpen(c.now) {
		c.primary = c.open(c.now)
	}
	c.primary.used += cost
	c.most = max(c.most, c.primary.used)
	if !c.before {
		c.push(replicated, c.now, event{word: c.primary})
	}
}

// kept is what processes have taken and not used, wherever that is.
func (c *client) kept() int64 { return c.fetched - c.given - c.admitted }

// isDone tells whether nothing is on its way any more.
func (c *client) isDone() bool {
	return !slices.ContainsFunc(c.lines[:], func(l line) bool { return !l.isEmpty() }) &&
		!slices.ContainsFunc(c.books, func(b book) bool {
			return b.flight+b.waiting+b.asking+b.next+b.held+b.coming+b.refunds > 0 || b.sent
		})
}
