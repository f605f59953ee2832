package simulation

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger/core"
)

// Run is one history: a zone with its clients, two Caddys, and what goes wrong.
type Run struct {
	*world
	seed  uint64
	limit store.Limit
	// events and burst are those of most requests; some have a lower limit.
	events, burst, cost int64
	takes, batched      bool
	onError             string
	differ              bool
	net                 *network
	caddys              []*process
	clients             []*client
	end                 int64
	// faults is set if messages are lost or servers are away, resets if operators reset.
	faults, resets bool
	failure        string
	// Trace, if set, gets a line for each step.
	Trace io.Writer
	// requests is how many requests were made.
	requests int
}

// client is what the run knows of a client: the truth.
type client struct {
	key string
	// served is the cost of requests that were served and are charged, counted what the
	// primary has counted; uncertain what was reported to have an unknown outcome, and lost
	// to be given up.
	served, counted, uncertain, lost int64
	// kept is what was to be refunded and may not have been.
	kept int64
	// admitted are the requests that were admitted by what a store, or a Caddy alone, has
	// counted.
	admitted []admission
	// unlanded is the cost that was admitted and is neither in the primary nor free.
	unlanded int64
	// truth is what was spent or about to be, at each of its changes of late.
	truth []moment
	// missing are costs that the primary may never have heard of.
	missing []admission
	// resets are those of the windows of late; reset is until when an operator's reset of the
	// client may not have been seen.
	resets map[int64]bool
	reset  int64
}

type admission struct {
	at, cost, reset, events int64
	by                      *process
	alone                   bool
}

// The ways of on_error.
const (
	allow = "allow"
	deny  = "deny"
	local = "local"
)

// kinds are the limits whose charges or takes the core decides about.
func kinds() (all []store.Limit) {
	for a := range store.Algorithms {
		if t := algorithm.Of(a); !t.Lease {
			all = append(all, store.Limit{Algorithm: a})
			if t.Windowed {
				all = append(all, store.Limit{Algorithm: a}, store.Limit{Algorithm: a, Align: true})
			}
		}
	}
	return all
}

// windows is about how many windows a history lasts.
const windows = 20

// NewRun returns the history of a seed, on servers of that kind.
func NewRun(seed uint64, at Servers) *Run {
	w := newWorld(seed)
	s := &Run{world: w, seed: seed, limit: oneOf(w, kinds()...)}
	s.limit.Zone = "zone"
	s.limit.Window = oneOf(w, 2*time.Second, 10*time.Second, time.Minute, 10*time.Minute, time.Hour)
	s.end = windows * s.limit.Window.Microseconds()
	s.events, s.cost = oneOf[int64](w, 1, 2, 5, 5, 20, 20, 100), oneOf[int64](w, 1, 1, 1, 2, 3)
	if s.limit.Algorithm.HasBurst() && w.chance(0.5) {
		s.burst = oneOf[int64](w, 1, 3, 10)
	}
	s.takes = w.chance(0.4)
	s.batched = s.takes && algorithm.Of(s.limit.Algorithm).Unbatched == "" && w.chance(0.5)
	s.onError, s.differ = oneOf(w, allow, deny, local, local), w.chance(0.3)
	s.net = &network{world: w, skew: w.between(-7200e6, 7200e6), lag: oneOf[int64](w, 0, 0, 1000, 50_000, 3_000_000)}
	s.net.servers, s.net.ran = at(w, s.net.skew), s.ran
	s.faults, s.resets = w.chance(0.5), w.chance(0.2)
	trust := oneOf[int64](w, -1, 500_000, 1_000_000, 1_000_000, 1_000_000)
	delay := oneOf[int64](w, 0, 25_000, 50_000)
	for i := range oneOf(w, 1, 2, 2) {
		p := &process{world: w, name: "caddy" + strconv.Itoa(i), net: s.net, trust: trust, delay: delay, buckets: map[string]*entry{}, local: map[string]algorithm.Bucket{}, lost: s.lost, doubted: s.doubted, kept: s.kept, evicts: !s.faults && s.net.lag == 0, processes: 2}
		s.caddys = append(s.caddys, p)
	}
	for i := range 1 + w.rng.IntN(3) {
		c := &client{key: "client" + strconv.Itoa(i), resets: map[int64]bool{}}
		s.clients = append(s.clients, c)
		s.come(c)
	}
	if s.faults {
		s.after(w.between(0, 10e6), s.fault)
	}
	if s.resets {
		s.after(w.between(0, s.limit.Window.Microseconds()*3), s.reset)
	}
	return s
}

func (s *Run) client(key string) *client {
	for _, c := range s.clients {
		if c.key == key {
			return c
		}
	}
	return nil
}

func (s *Run) fail(format string, args ...any) {
	if s.failure == "" {
		s.failure = fmt.Sprintf("seed %d at %v (%s): ", s.seed, time.Duration(s.now)*time.Microsecond, s) + fmt.Sprintf(format, args...)
	}
}

// String describes what is simulated.
func (s *Run) String() string {
	return fmt.Sprintf("%s, align %v, window %v, events %d, burst %d, cost %d, takes %v, batched %v, on_error %s, differ %v, %d caddys, trust %d, delay %d, lag %d, faults %v, resets %v",
		s.limit.Algorithm, s.limit.Align, s.limit.Window, s.events, s.burst, s.cost, s.takes, s.batched, s.onError, s.differ, len(s.caddys), s.caddys[0].trust, s.caddys[0].delay, s.net.lag, s.faults, s.resets)
}

// come plans the next request of a client: now and then several at once, or none for long.
func (s *Run) come(c *client) {
	pause := s.limit.Window.Microseconds() * s.cost / s.capacity()
	switch s.rng.IntN(10) {
	case 0, 1:
		pause = 2000
	case 2:
		pause *= 5
	}
	s.after(s.between(0, max(pause, 1000)*3/2), func() {
		if s.now < s.end {
			s.request(c)
			s.come(c)
		}
	})
}

func (s *Run) capacity() int64 {
	if s.burst > 0 {
		return s.burst
	}
	return s.events
}

func (s *Run) request(c *client) {
	s.requests++
	r := store.Request{Limit: &s.limit, ClientKey: c.key, Events: s.events, Burst: s.burst, Cost: s.cost, ID: strconv.Itoa(s.requests)}
	if s.differ && s.chance(0.5) {
		r.Events = max(r.Events/2, 1)
	}
	if s.batched {
		r.Batch = max(s.events/4, 1)
	}
	p := s.caddys[s.rng.IntN(len(s.caddys))]
	if s.takes {
		p.take([]store.Request{r}, func(states []store.State) { s.took(c, p, r, states[0]) })
		return
	}
	p.admit([]store.Request{r}, func(states []store.State) { s.checked(c, p, r, states[0]) })
}

// olderAnswers is the part of a window, as its divisor, for which a process that had a client to
// itself relies on an older answer once.
const olderAnswers = 10

// longestService is how long a request takes at most.
const longestService = 500_000

// serve lets a request run, and calls f when it ends, with whether its status is free.
func (s *Run) serve(f func(free bool)) {
	s.after(s.between(0, oneOf[int64](s.world, 1000, 50_000, longestService)), func() { f(s.chance(0.15)) })
}

// onFailure is what on_error makes of an answer, if the store failed: it may decide alone, or deny.
func (s *Run) onFailure(p *process, r *store.Request, st store.State) (_ store.State, isAlone, isDenied bool) {
	if st.Err == nil || s.onError == allow {
		return st, false, false
	}
	if s.onError == deny {
		return st, false, true
	}
	st = p.alone(*r)
	s.note("%s alone, request %s: %+v", p.name, r.ID, st)
	return st, true, false
}

// checked is what becomes of a request that was checked.
func (s *Run) checked(c *client, p *process, r store.Request, st store.State) {
	s.note("%s, request %s of %s: %+v", p.name, r.ID, c.key, st)
	held := int64(0)
	st, isAlone, isDenied := s.onFailure(p, &r, st)
	if isDenied {
		return
	}
	switch {
	case st.Err != nil:
	case !st.Allowed:
		s.refused(c, p, &r, &st, isAlone)
		return
	default:
		held = r.Cost
		s.land(c, -r.Cost)
		s.admitted(c, p, &r, &st, isAlone)
	}
	s.serve(func(free bool) {
		s.note("%s, request %s of %s ends, free %v", p.name, r.ID, c.key, free)
		if free {
			s.unadmit(c, &r, p, isAlone)
			s.land(c, held)
			r.Cost = 0
		} else if held == 0 {
			s.land(c, -r.Cost)
		}
		c.served += r.Cost
		if held > 0 || r.Cost > 0 {
			p.settle(r, held)
		}
	})
}

// took is what becomes of a request that took.
func (s *Run) took(c *client, p *process, r store.Request, st store.State) {
	s.note("%s, take %s of %s: %+v", p.name, r.ID, c.key, st)
	held, isUnknown := int64(0), errors.Is(st.Err, store.ErrUncertain)
	st, isAlone, isDenied := s.onFailure(p, &r, st)
	if isDenied {
		return
	}
	if st.Err == nil && !st.Allowed {
		s.refused(c, p, &r, &st, isAlone)
		return
	}
	if st.Err == nil {
		s.admitted(c, p, &r, &st, isAlone)
		if isAlone {
			held = r.Cost
		}
	}
	isTaken := st.Err == nil && !isAlone
	r.Receipt = st.Receipt
	s.serve(func(free bool) {
		s.note("%s, take %s of %s ends, free %v", p.name, r.ID, c.key, free)
		spends := r
		if free {
			s.unadmit(c, &r, p, isAlone)
			spends.Cost = 0
		}
		switch {
		case isTaken && free:
			p.restore(r)
		case isTaken:
			c.served += r.Cost
		case isUnknown:
			if held > 0 {
				p.settleUnknown(spends, held)
			}
		default:
			c.served += spends.Cost
			if held > 0 || spends.Cost > 0 {
				p.settle(spends, held)
			}
		}
	})
}

// ran notes what the primary has executed.
func (s *Run) ran(op algorithm.Operation, r *store.Request, st *store.State) {
	s.note("primary ran %v of %d for %s: %+v", op, r.Cost, r.ClientKey, *st)
	c := s.client(r.ClientKey)
	switch {
	case op == opCharge:
		c.counted += r.Cost
		s.land(c, r.Cost)
	case op == opTake && st.Allowed:
		c.counted += r.Cost
		s.land(c, 0)
	case op == opRefund:
		c.counted -= r.Cost
		s.land(c, 0)
	}
}

// doubted notes a take of unknown outcome. If it is served alone and was never executed, the
// store never hears of it.
func (s *Run) doubted(r store.Request) {
	c := s.client(r.ClientKey)
	c.uncertain += r.Cost
	c.missing = append(c.missing, admission{at: s.now, cost: r.Cost})
}

func (s *Run) kept(r store.Request) { s.client(r.ClientKey).kept += r.Cost }

func (s *Run) lost(n core.Next) {
	s.note("given up for %s: %d, %v", n.ClientKey, n.Lost, n.Err)
	c := s.client(n.ClientKey)
	c.missing = append(c.missing, admission{at: s.now, cost: n.Lost * s.cost})
	if errors.Is(n.Err, store.ErrUncertain) {
		c.uncertain += n.Lost * s.cost
	} else {
		c.lost += n.Lost * s.cost
	}
}

// fault begins one, for a while.
func (s *Run) fault() {
	if s.now >= s.end {
		return
	}
	length := s.between(10_000, oneOf[int64](s.world, 200_000, 3e6, s.limit.Window.Microseconds()))
	restore := func() {}
	switch s.rng.IntN(4) {
	case 0:
		s.net.down = true
		restore = func() { s.net.down = false }
	case 1:
		s.net.away = true
		restore = func() { s.net.away = false }
	case 2:
		s.net.lossy = oneOf(s.world, 0.02, 0.2)
		restore = func() { s.net.lossy = 0 }
	case 3:
		s.net.slow = oneOf(s.world, 0.05, 0.5)
		restore = func() { s.net.slow = 0 }
	}
	s.note("down %v, away %v, lossy %v, slow %v for %v", s.net.down, s.net.away, s.net.lossy, s.net.slow, time.Duration(length)*time.Microsecond)
	s.after(length, func() {
		restore()
		s.note("well again")
		s.after(s.between(0, 3*s.limit.Window.Microseconds()), s.fault)
	})
}

// reset lets an operator reset a client.
func (s *Run) reset() {
	if s.now >= s.end {
		return
	}
	c := s.clients[s.rng.IntN(len(s.clients))]
	r := store.Request{Limit: &s.limit, ClientKey: c.key, Events: s.events, Burst: s.burst}
	c.reset = math.MaxInt64
	s.caddys[s.rng.IntN(len(s.caddys))].reset(r, func() {
		// Replicas and other processes see it later, and what runs is charged anew.
		c.reset = s.now + s.net.lag + 2*core.UsualTrust.Microseconds() + 2*longestService + s.limit.Window.Microseconds()/olderAnswers
		if s.takes {
			// What others took before, and give back after it, is given back to this window too.
			c.reset += s.limit.Window.Microseconds()
		}
		c.admitted, c.truth = nil, nil
		clear(c.resets)
		s.after(s.between(0, 5*s.limit.Window.Microseconds()), s.reset)
	})
}

// note adds a line to the trace, if there is one.
func (s *Run) note(format string, args ...any) {
	if s.Trace != nil {
		fmt.Fprintf(s.Trace, "%v "+format+"\n", append([]any{time.Duration(s.now) * time.Microsecond}, args...)...)
	}
}

// Length is how long the history lasts.
func (s *Run) Length() time.Duration { return time.Duration(s.end) * time.Microsecond }

// Do runs the history, and returns what was broken, or nothing. The failure names the seed.
func (s *Run) Do() (requests int, failure string) {
	for s.failure == "" && len(s.queue) > 0 && s.queue[0].at <= s.end {
		s.run(s.queue[0].at)
	}
	if s.failure != "" {
		return s.requests, s.failure
	}
	s.net.down, s.net.away, s.net.lossy, s.net.slow = false, false, 0, 0
	s.run(s.end + 30e6)
	s.atEnd()
	return s.requests, s.failure
}
