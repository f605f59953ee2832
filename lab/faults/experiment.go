package faults

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// pace is how often each client sends a request.
const pace = 25 * time.Millisecond

// crew is the number of clients in each role.
var crew = [...]int{regular: 4, greedy: 1, late: 1, bystander: 2}

type crowd struct {
	clients []*client
	ask     asking
	url     string
	ctx     context.Context
	end     context.CancelFunc
	running sync.WaitGroup
}

// recruit assigns the roles: mine are clients of the shard with the fault, others those of
// the other one. Greedy clients have the limit events.
func recruit(ask asking, url string, mine, others []string, events int64) (*crowd, error) {
	t := &crowd{ask: ask, url: url}
	t.ctx, t.end = context.WithCancel(context.Background())
	for i, n := range crew {
		names, r := &mine, role(i)
		if r == bystander {
			names = &others
		}
		if len(*names) < n {
			return nil, fmt.Errorf("there are %d clients for %d", len(*names), n)
		}
		for _, name := range (*names)[:n] {
			c := &client{name: name, role: r, events: plenty}
			if r == greedy {
				c.events = events
			}
			t.clients = append(t.clients, c)
		}
		*names = (*names)[n:]
	}
	return t, nil
}

func (t *crowd) start(isOne func(*client) bool) {
	for _, c := range t.only(isOne) {
		t.running.Go(func() { c.run(t.ctx, t.ask, t.url, pace) })
	}
}

func (t *crowd) stop() {
	t.end()
	t.running.Wait()
}

func (t *crowd) only(isOne func(*client) bool) []*client { return traffic.Those(t.clients, isOne) }

func served(clients []*client) (n int64) {
	for _, c := range clients {
		n += c.served()
	}
	return n
}

type role int

const (
	regular   role = iota // has an open window and stays far below its limit
	greedy                // reaches its limit
	late                  // sends its first request during the fault
	bystander             // belongs to the other shard
)

// client sends one request after the other.
type client struct {
	name   string
	role   role
	events int64 // its limit
	mu     sync.Mutex
	seen   []response
}

// response is one response to a client.
type response struct {
	begun, ended     time.Time
	status           int    // 0 where there was no response
	limited          bool   // set if the headers name a limit
	remaining, reset string // remaining and reset are those of the headers
}

// plenty is the limit of all but greedy clients.
const plenty = 1_000_000

// run sends a request every pace, or as soon as the previous one is answered. When ctx
// ends, it waits for the request in flight.
func (c *client) run(ctx context.Context, ask asking, url string, pace time.Duration) {
	http := traffic.NewClient(1)
	defer http.CloseIdleConnections()
	next := time.Now()
	for ctx.Err() == nil {
		r := ask(c, http, url)
		c.mu.Lock()
		c.seen = append(c.seen, r)
		c.mu.Unlock()
		if next = next.Add(pace); next.Before(time.Now()) {
			next = time.Now()
		}
		if traffic.Pause(ctx, time.Until(next)) != nil {
			return
		}
	}
}

// asking asks once about a client.
type asking func(c *client, client *http.Client, url string) response

// request sends a request.
func request(c *client, client *http.Client, url string) response {
	x := traffic.Ask(client, url, map[string]string{"X-Client": c.name, "X-Events": strconv.FormatInt(c.events, 10)})
	return response{
		begun: x.Begun, ended: x.Ended, status: x.Status, limited: x.Header.Get("X-RateLimit-Limit") != "",
		remaining: x.Header.Get("X-RateLimit-Remaining"), reset: x.Header.Get("X-RateLimit-Reset"),
	}
}

func (c *client) responses() []response {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen[:len(c.seen):len(c.seen)]
}

func (c *client) count(is func(*response) bool) (n int64) {
	for _, r := range c.responses() {
		if is(&r) {
			n++
		}
	}
	return n
}

func (c *client) served() int64    { return c.count((*response).isServed) }
func (r *response) isServed() bool { return r.status == http.StatusOK }

// isUnchecked reports whether a request was served without a check of the limit.
func (r *response) isUnchecked() bool { return r.isServed() && !r.limited }

func (r *response) isNormal() bool {
	return r.limited && (r.status == http.StatusOK || r.status == http.StatusTooManyRequests)
}

// isSettledSince reports whether the last few requests began after then, with the right
// responses.
func (c *client) isSettledSince(then time.Time, isRight func(*response) bool) bool {
	seen := last(c.responses())
	for _, r := range seen {
		if !isRight(&r) || r.begun.Before(then) {
			return false
		}
	}
	return len(seen) == few
}

// few is the number of responses in a row that count as a lasting state.
const few = 5

func last(seen []response) []response { return seen[max(0, len(seen)-few):] }

func (c *client) String() string {
	return [...]string{"regular", "greedy", "late", "bystander"}[c.role] + " client " + c.name
}

type experiment struct {
	*outcome
	settings
	broken, other *shard
	site          *site.Site
	crowd         *crowd
	samples       []sample // from the end of the fault on
}

// sample is how many of the requests that had been served at an instant were not
// counted shortly after.
type sample struct {
	at   time.Time
	owed int64
}

func isLate(c *client) bool      { return c.role == late }
func isNotLate(c *client) bool   { return c.role != late }
func isBystander(c *client) bool { return c.role == bystander }
func isConcerned(c *client) bool { return c.role != bystander }
func isAny(*client) bool         { return true }

func (e *experiment) run(ctx context.Context) error {
	e.crowd.start(isNotLate)
	if err := e.awaitNormal(ctx, time.Now(), isNotLate); err != nil {
		return fmt.Errorf("before the fault: %w", err)
	}
	e.start = time.Now()
	if err := traffic.Pause(ctx, e.before); err != nil {
		return err
	}
	if err := e.bring(ctx); err != nil {
		return fmt.Errorf("bring the fault on: %w", err)
	}
	sampling, stop := context.WithCancel(ctx)
	var sampled sync.WaitGroup
	sampled.Go(func() { e.sample(sampling) })
	err := e.recover(ctx)
	stop()
	sampled.Wait()
	if err != nil {
		return err
	}
	e.site.Stop() // Caddy delivers pending charges before it ends.
	return e.count(ctx)
}

// bring begins and ends the fault, and starts the late clients in between.
func (e *experiment) bring(ctx context.Context) error {
	e.broken.late = time.AfterFunc(e.during/4, func() { e.crowd.start(isLate) })
	e.broken.awaitRequests = func(ctx context.Context, then time.Time) error {
		return traffic.Poll(ctx, time.Minute, func() error {
			for _, c := range e.crowd.only(func(c *client) bool { return isConcerned(c) && isNotLate(c) }) {
				if !slices.ContainsFunc(c.responses(), func(r response) bool { return r.begun.After(then) }) {
					return fmt.Errorf("%s has had no request during the fault", c)
				}
			}
			return nil
		})
	}
	e.begin = time.Now()
	err := e.fault.bring(ctx, e.broken, e.during)
	e.end = time.Now()
	if e.broken.late.Stop() { // the fault was shorter than e.during
		e.crowd.start(isLate)
	}
	return err
}

// recover waits until responses are normal again and no charge is in flight.
func (e *experiment) recover(ctx context.Context) error {
	err := e.awaitNormal(ctx, e.end, isAny)
	if err == nil {
		err = traffic.Pause(ctx, time.Until(e.end.Add(e.after)))
	}
	e.crowd.stop()
	if err != nil {
		return fmt.Errorf("after the fault: %w", err)
	}
	return e.settle(ctx)
}

// awaitNormal waits until the store has decided the last few requests of clients since
// then.
func (e *experiment) awaitNormal(ctx context.Context, then time.Time, isOne func(*client) bool) error {
	return traffic.Poll(ctx, time.Minute, func() error {
		if err := e.count(ctx); err != nil {
			return err
		}
		for _, c := range e.crowd.only(isOne) {
			if !c.isSettledSince(then, func(r *response) bool { return e.isNormal(c, r) }) {
				return fmt.Errorf("responses to %s are not normal: %s", c, describe(last(c.responses())))
			}
		}
		return nil
	})
}

// quiet is longer than charges that are still to come can take: the retry queue of a
// shard runs once a second.
const quiet = 2500 * time.Millisecond

// settle waits until every served request is charged, except for charges that are
// known to have failed, or until nothing has been charged for a while.
func (e *experiment) settle(ctx context.Context) error {
	since := time.Now()
	return traffic.Poll(ctx, time.Minute, func() error {
		known := e.buckets
		if err := e.count(ctx); err != nil {
			return err
		}
		if !maps.Equal(e.buckets, known) {
			since = time.Now()
		}
		all, err := e.site.Metrics()
		if err != nil {
			return err
		}
		e.metrics = metricsIn(all)
		owed := missing(e.crowd.only(isConcerned), e.buckets)
		isOwed := owed > e.metrics.failed(faulty) || missing(e.crowd.only(isBystander), e.buckets) > 0
		if isOwed && time.Since(since) < quiet {
			return fmt.Errorf("%d charges are missing", owed)
		}
		return nil
	})
}

func (e *experiment) sample(ctx context.Context) {
	const period = 25 * time.Millisecond
	for {
		// Requests that are served after this are not in the sample.
		s := sample{at: time.Now(), owed: served(e.crowd.only(isConcerned))}
		if buckets, err := e.broken.Buckets(ctx, zone); err == nil {
			for _, b := range buckets {
				s.owed -= b.Count
			}
			e.samples = append(e.samples, s)
		}
		if traffic.Pause(ctx, period) != nil {
			return
		}
	}
}

func (e *experiment) count(ctx context.Context) error {
	mine, err := e.broken.Buckets(ctx, zone)
	if err != nil {
		return err
	}
	others, err := e.other.Buckets(ctx, zone)
	maps.Copy(mine, others)
	e.buckets = mine
	return err
}
