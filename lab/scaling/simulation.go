package scaling

import (
	"math/rand/v2"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// The delays, in microseconds like all instants here.
const (
	second     = int64(time.Second / time.Microsecond)
	travel     = 500   // of a message between a Caddy and a server of Redis
	linger     = 2_000 // how long charges and refunds wait for others on their lane
	serving    = 2_000 // the duration of an admitted request
	lag        = 1_000 // of replicas
	trust      = int64(ledger.DefaultTrust / time.Microsecond)
	trustPart  = 10 // the window divided by the longest time for which an answer counts
	hold       = int64(ledger.UsualChargeDelay / time.Microsecond)
	idleBatch  = second     // how long a batch may lie unused
	reapPause  = second / 4 // between two searches for idle batches
	shortPart  = 10         // the window divided by the pause of batches
	batchShare = 10         // the most that batches hold, in percent of the limit
)

// route is the choice of a Caddy for a request.
type route uint8

const (
	sticky   route = iota // always the same Caddy for one client
	anyCaddy              // a random one
	inTurn                // one after the other
)

// setting is a zone with a fixed window, and the Caddys that it runs in.
type setting struct {
	name      string
	processes int
	route     route
	before    bool  // set for charge before
	batch     int64 // 0, a number, or [store.BatchAuto]
	limit     int64
	window    int64
	align     bool
	atOnce    bool // set for charge_delay 0
	checked   bool // set for ledger_trust below 1s
	// lone is set if no other clients come: theirs begin the ticks at which charges leave.
	lone bool
	// strangers is set if most clients that a process does not know are unknown to the
	// replicas too: then the store asks the primary first.
	strangers bool
}

func (s *setting) open(now int64) window {
	if s.align {
		return window{reset: now - now%s.window + s.window}
	}
	return window{reset: now + s.window}
}

func (s *setting) sharers() int64 {
	if s.batch == store.BatchAuto {
		return int64(s.processes)
	}
	return 1
}

// ration is the size of the next batch, given the learned size.
func (s *setting) ration(size int64) int64 { return ledger.BatchSize(s.request(), size, s.sharers()) }

// request is a request as the ledger sees it.
func (s *setting) request() *store.Request {
	return &store.Request{
		Limit:  &store.Limit{Window: time.Duration(s.window) * time.Microsecond},
		Events: s.limit, Batch: s.batch, BatchShare: batchShare,
	}
}

// window is the state of a bucket of a fixed window.
type window struct{ used, reset int64 }

func (w window) isOpen(now int64) bool { return w.reset > now }

func (w window) spent(now int64) int64 {
	if w.isOpen(now) {
		return w.used
	}
	return 0
}

// raise takes the later of two windows, or the higher count of the same window. It
// reports whether the other is behind.
func (w *window) raise(o window) (less bool) {
	if o.reset > w.reset || o.reset == w.reset && o.used > w.used {
		*w = o
		return false
	}
	return o != *w
}

// kind is one of the ways to call Redis.
type kind uint8

const (
	check kind = iota // asks a replica
	open              // asks the primary, which opens a window if there is none
	charge
	take
	refund
	kinds
)

var kindNames = [kinds]string{"check", "open", "charge", "take", "refund"}

// calls counts the calls of requests to Redis.
type calls struct {
	requests, admitted float64
	waited             float64        // requests that waited for an answer of Redis
	made               [kinds]float64 // the calls
}

func (c *calls) add(o calls, times float64) {
	c.requests += times * o.requests
	c.admitted += times * o.admitted
	c.waited += times * o.waited
	for k := range o.made {
		c.made[k] += times * o.made[k]
	}
}

func (c calls) perRequest() (one calls) {
	if c.requests > 0 {
		one.add(c, 1/c.requests)
	}
	return one
}

func (c calls) sum() (sum float64) {
	for _, n := range c.made {
		sum += n
	}
	return sum
}

// primary is how many go to the primary: all but checks.
func (c calls) primary() float64 { return c.sum() - c.made[check] }

// occurrence is a kind of event.
type occurrence uint8

// At the same instant, occurrences happen in this order.
const (
	replicated occurrence = iota // a write arrives at the replica
	atServer                     // a check arrives at a server
	answered                     // its reply arrives
	charged                      // a charge arrives at the primary
	confirmed                    // its reply arrives
	taken                        // a take arrives at the primary
	told                         // its reply arrives
	refunded                     // a refund arrives at the primary
	returned                     // its reply arrives
	settled                      // a request ends
	ticked                       // the charges that wait leave
	reaped                       // a search for idle batches
	occurrences
)

// delays are the times from the cause of each occurrence. As they are constant, the events
// of an occurrence form a queue.
var delays = [occurrences]int64{
	replicated: lag, atServer: travel, answered: travel, charged: linger + travel, confirmed: travel,
	taken: travel, told: travel, refunded: linger + travel, returned: travel, settled: serving, ticked: hold, reaped: reapPause,
}

// event is an occurrence that is scheduled.
type event struct {
	at              int64
	process         int
	word            window // the server's reply
	said, asked     int64  // the instants of the reply at the server, and of the request
	cost            int64
	replica, allows bool
}

type line struct {
	events []event
	head   int
}

func (l *line) push(e event) {
	if l.head > 64 && 2*l.head > len(l.events) {
		l.events = l.events[:copy(l.events, l.events[l.head:])]
		l.head = 0
	}
	l.events = append(l.events, e)
}

func (l *line) isEmpty() bool { return l.head == len(l.events) }

type schedule struct{ lines [occurrences]line }

func (s *schedule) push(what occurrence, now int64, e event) {
	e.at = now + delays[what]
	s.lines[what].push(e)
}

func (s *schedule) next(before int64) (what occurrence, ok bool) {
	for o := range s.lines {
		if l := &s.lines[o]; !l.isEmpty() && l.events[l.head].at < before {
			what, before, ok = occurrence(o), l.events[l.head].at, true
		}
	}
	return what, ok
}

func (s *schedule) pop(what occurrence) event {
	l := &s.lines[what]
	l.head++
	return l.events[l.head-1]
}

// client is one client's requests, its bucket on the servers of its shard, and the
// knowledge of each process. Buckets are independent, so clients are simulated one after
// the other.
type client struct {
	*setting
	schedule
	random                            *rand.Rand
	now                               int64
	primary, replica                  window
	books                             []book
	home                              int
	number                            int64
	measured                          int64 // the instant at which counting begins
	counts, ignored                   calls // since measured, and before
	admitted, charged, fetched, given int64 // all that ever were
	most                              int64 // the most that the primary ever counted in a window
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

// epoch is the begin of the simulation, so that no instant is 0.
const epoch = 1_000_000 * second

// run sends requests at given pauses, counts from one instant to another, both relative
// to the epoch, and then completes the calls in flight.
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

func (c *client) advance(until int64) {
	for what, ok := c.next(until); ok; what, ok = c.next(until) {
		e := c.pop(what)
		c.now = e.at
		c.happen(what, &e)
	}
}

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
	c.tally().requests++
	if c.before {
		c.claim(p)
	} else {
		c.admit(p)
	}
}

func (c *client) tally() *calls {
	if c.now < c.measured {
		return &c.ignored
	}
	return &c.counts
}

func (c *client) call(k kind)         { c.tally().made[k]++ }
func (c *client) wait(requests int64) { c.tally().waited += float64(requests) }

func (c *client) pass() {
	c.admitted++
	c.tally().admitted++
}

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
		c.settle(b, e.process)
	case ticked:
		b.ticks = false
		if b.isHeld {
			c.deliver(b, e.process)
		}
	case charged:
		c.write(e.cost)
		c.charged += e.cost
		c.push(confirmed, c.now, event{process: e.process, word: c.primary, said: c.now})
	case confirmed:
		b.conclude(c.setting, e.word, e.said, c.now)
		if b.waiting > 0 && b.alone != 0 && b.holds(c.setting, c.now, b.waiting) {
			c.awaitTick(b, e.process)
		} else {
			c.deliver(b, e.process)
		}
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
	}
}

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

// admit decides about a request of charge after at a process, or makes it wait for a
// reply.
func (c *client) admit(p int) {
	b := &c.books[p]
	switch {
	case b.refuses(c.now, c.limit):
	case b.fitsUnasked(c.setting, c.now):
		c.hold(b, p)
	case b.asking > 0:
		b.next++
	default:
		c.ask(b, p, 1)
	}
}

func (c *client) hold(b *book, p int) {
	b.flight++
	c.pass()
	c.push(settled, c.now, event{process: p})
}

// ask sends a check for some requests to a replica, or to the primary if only that can
// decide.
func (c *client) ask(b *book, p int, requests int64) {
	b.asking = requests
	isUnknown := c.strangers && !b.known.isOpen(c.now)
	c.askServer(p, !isUnknown && !b.wantsPrimary(c.now, c.limit), c.now)
}

func (c *client) askServer(p int, replica bool, asked int64) {
	if replica {
		c.call(check)
	} else {
		c.call(open)
	}
	c.push(atServer, c.now, event{process: p, replica: replica, asked: asked})
}

func (c *client) reply(e *event) {
	answer := *e
	answer.said = c.now
	if answer.word = c.replica; !e.replica {
		if !c.primary.isOpen(c.now) {
			c.write(0)
		}
		answer.word = c.primary
	}
	c.push(answered, c.now, answer)
}

func (c *client) answer(b *book, e *event) {
	if e.replica && !e.word.isOpen(e.said) {
		// The store asks the primary to open a window.
		c.askServer(e.process, false, e.asked)
		return
	}
	if b.hear(e.word, e.replica, e.asked) && !b.trusts(c.now) {
		c.askServer(e.process, false, c.now)
		return
	}
	asking, next := b.asking, b.next
	b.asking, b.next = 0, 0
	c.wait(asking)
	for range asking {
		switch j, _ := b.judge(c.now, c.limit); j {
		case fits:
			c.hold(b, e.process)
		case unclear:
			b.held++
		}
	}
	if next == 0 {
		return
	}
	if b.refuses(c.now, c.limit) {
		c.wait(next)
		return
	}
	c.ask(b, e.process, next)
}

// settle charges a request that has ended, at once or with the next tick.
func (c *client) settle(b *book, p int) {
	holds := b.holds(c.setting, c.now, 1)
	b.waiting++
	switch {
	case holds && !b.sent && b.waiting == 1:
		c.awaitTick(b, p)
	case holds && b.isHeld && b.alone != 0:
	default:
		c.deliver(b, p)
	}
}

func (c *client) awaitTick(b *book, p int) {
	b.isHeld = true
	if b.ticks {
		return
	}
	b.ticks = true
	begun := c.now
	if !c.lone {
		begun -= begun % hold
	}
	c.push(ticked, begun, event{process: p})
}

func (c *client) deliver(b *book, p int) {
	if b.sent || b.waiting == 0 {
		return
	}
	b.send(b.waiting, c.now)
	b.waiting, b.isHeld = 0, false
	c.call(charge)
	c.push(charged, c.now, event{process: p, cost: b.sentCost})
}

// claim decides about a request of charge before at a process, or makes it take, or wait
// for a take in flight.
func (c *client) claim(p int) {
	b := &c.books[p]
	if (c.batch == 0 || !b.isServed(c.now)) && c.refusesTake(b) {
		return
	}
	if c.batch == 0 {
		c.take(p, 0)
		return
	}
	b.met = true
	switch {
	case b.use(c.now):
		c.pass()
	case b.coming > 0 && b.claimed < b.coming:
		b.claimed++
	case b.coming > 0:
		c.take(p, 0)
	default:
		b.learn(c.setting, c.now)
		size := c.ration(b.size)
		if size < 1 || c.now < b.short {
			c.take(p, 0)
			return
		}
		b.coming, b.claimed = size, 1
		c.take(p, size)
	}
}

// refusesTake reports whether the book refuses a request. When trust has run out, it lets
// one request through.
func (c *client) refusesTake(b *book) bool {
	if j, _ := b.judge(c.now, c.limit); !b.met || j != full {
		return false
	}
	if !b.trusts(c.now) && (b.asked == 0 || c.now-b.asked > trust) {
		b.asked = c.now
		return false
	}
	return true
}

// take takes a batch or, if the size is 0, for one request.
func (c *client) take(p int, size int64) {
	c.call(take)
	c.push(taken, c.now, event{process: p, cost: size, asked: c.now})
}

func (c *client) serve(e *event) {
	cost := max(e.cost, 1)
	answer := *e
	answer.allows, answer.said = c.primary.spent(c.now)+cost <= c.limit, c.now
	if answer.allows {
		c.write(cost)
		c.fetched += cost
	}
	answer.word = c.primary
	c.push(told, c.now, answer)
}

func (c *client) tell(b *book, e *event) {
	if !e.allows || b.met {
		b.met = true
		b.hear(e.word, false, e.asked)
		b.confirmed = c.now
	}
	if e.cost == 0 {
		c.wait(1)
		if e.allows {
			c.pass()
		}
		return
	}
	claims := b.claimed
	b.coming, b.claimed = 0, 0
	if e.allows {
		ends := b.ends
		c.giveBack(b, e.process, b.add(e.cost, e.word.reset, c.now), ends)
	} else {
		b.shortfall(c.setting, e.word, e.said)
	}
	for range claims {
		if e.allows && b.use(c.now) {
			c.wait(1)
			c.pass()
		} else {
			c.take(e.process, 0)
		}
	}
	if b.tokens > 0 && !b.isReaped {
		b.isReaped = true
		c.push(reaped, c.now, event{process: e.process})
	}
}

func (c *client) giveBack(b *book, p int, tokens, ends int64) {
	if tokens == 0 {
		return
	}
	b.refunds++
	c.given += tokens
	c.call(refund)
	c.push(refunded, c.now, event{process: p, cost: tokens, word: window{reset: ends}})
}

func (c *client) reap(b *book, p int) {
	if tokens := b.surplus(c.setting, c.now); c.now < b.ends {
		c.giveBack(b, p, tokens, b.ends)
	}
	b.isReaped = b.tokens > 0
	if b.isReaped {
		c.push(reaped, c.now, event{process: p})
	}
}
