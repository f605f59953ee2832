package simulation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Run is one history: zones with their clients, two Caddys, and what goes wrong.
type Run struct {
	*world
	seed  uint64
	zones []*zone
	// takes is set if all requests take, and mixed if some do, in the same buckets.
	takes, mixed bool
	onError      string
	// waits is set if some refused requests wait.
	waits   bool
	net     *network
	caddys  []*process
	clients []*client
	end     int64
	// sequential is set if each client sends its next request once the last one has ended.
	sequential bool
	// faults is set if messages are lost or servers are away, resets if operators reset.
	faults, resets bool
	failure        string
	// Trace, if set, gets a line for each step.
	Trace io.Writer
	// requests is how many requests were made; unanswered, how many of them wait for an answer.
	requests, unanswered int
}

// zone is a limit for each client.
type zone struct {
	limit store.Limit
	// events and burst are those of most requests; some have a lower limit if they differ.
	events, burst, cost int64
	batched, differ     bool
	batch               int64
	// penalty is how long those are refused that were refused once, or 0.
	penalty time.Duration
}

func (z *zone) String() string {
	return fmt.Sprintf("%s, align %v, window %v, events %d, burst %d, cost %d, batched %v, differ %v, penalty %v",
		z.limit.Algorithm, z.limit.Align, z.limit.Window, z.events, z.burst, z.cost, z.batched, z.differ, z.penalty)
}

// request is one of a client to the zone.
func (s *Run) request(c *client) store.Request {
	r := store.Request{Limit: &c.limit, ClientKey: c.key, Events: c.events, Burst: c.burst, Cost: c.cost, ID: strconv.Itoa(s.requests)}
	if c.differ && s.chance(0.5) {
		r.Events = max(r.Events/2, 1)
	}
	if c.batched {
		r.Batch = c.batch
	}
	return r
}

// client is what the run knows of a client in a zone: the truth.
type client struct {
	*zone
	key string
	// beside are the same client in all zones, in the order in which they are asked.
	beside []*client
	// penalizedUntil is until when penalizedBy has penalized the client, by the primary's clock, at the
	// instant penalized.
	penalizedUntil, penalized int64
	penalizedBy               *process
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
	// spent is what the primary had counted at the last note, and over, when that last became less, what it
	// was before.
	spent int64
	over  moment
	// heldSince is since when what is held is all that is in the way of the client's requests, or 0.
	heldSince int64
	// missing are costs that the primary may never have heard of.
	missing []admission
	// resets are those of the windows of late, each with the time of the first answer that had it; reset is until when an operator's reset of the
	// client may not have been seen.
	resets map[int64]int64
	reset  int64
}

type admission struct {
	at, cost, reset, events int64
	by                      *process
	// byAnotherClock is set if the process had not heard the primary's clock yet.
	byAnotherClock bool
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
			if t.Windowed() {
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
	s := &Run{world: w, seed: seed, sequential: w.chance(0.1)}
	s.takes, s.waits = s.sequential || w.chance(0.4), !s.sequential && w.chance(0.3)
	s.mixed = !s.takes && !s.waits && seed%2 == 0
	for i := range oneOf(w, 1, 1, 1, 2) {
		s.zones = append(s.zones, s.newZone("zone"+strconv.Itoa(i)))
	}
	s.end = windows * s.zones[0].limit.Window.Microseconds()
	s.onError = oneOf(w, allow, deny, local, local)
	s.net = &network{world: w, skew: w.between(-7200e6, 7200e6), lag: oneOf[int64](w, 0, 0, 1000, 50_000, 3_000_000)}
	s.net.servers, s.net.ran = at(w, s.net.skew), s.ran
	s.faults, s.resets = w.chance(0.5), w.chance(0.2)
	trust := oneOf[int64](w, -1, 500_000, 1_000_000, 1_000_000, 1_000_000)
	delay := oneOf[int64](w, 0, 25_000, 50_000)
	caddys := oneOf(w, 1, 2, 2)
	if s.sequential {
		caddys = 1
	}
	for i := range caddys {
		s.caddys = append(s.caddys, s.newProcess("caddy"+strconv.Itoa(i), trust, delay))
	}
	for i := range 1 + w.rng.IntN(3) {
		var beside []*client
		for _, z := range s.zones {
			beside = append(beside, &client{zone: z, key: "client" + strconv.Itoa(i), resets: map[int64]int64{}})
		}
		for _, c := range beside {
			c.beside = beside
		}
		s.clients = append(s.clients, beside...)
		s.come(beside)
	}
	if s.faults {
		s.after(w.between(0, 10e6), s.fault)
	}
	if s.resets {
		s.after(w.between(0, s.zones[0].limit.Window.Microseconds()*3), s.reset)
	}
	return s
}

// newProcess returns a Caddy. What it forgets is asked again, where replicas have it; where messages
// are lost, it counts anew.
func (s *Run) newProcess(name string, trust, delay int64) *process {
	p := &process{world: s.world, name: name, net: s.net, trust: trust, delay: delay, processes: 2, buckets: map[string]*entry{}}
	p.lost, p.looks, p.doubted, p.kept, p.repeated, p.covered = s.lost, s.looks, s.doubted, s.kept, s.repeated, s.covered
	p.evicted = func(e *entry, m *core.Moment) { s.evicted(p, e, m) }
	if !s.sequential {
		// What has come back is forgotten too.
		p.evicts = s.net.lag == 0 && !s.faults || s.faults && s.chance(0.3)
		p.leaves = oneOf(s.world, 0, 0.01, 0.05)
	}
	return p
}

// newZone returns a zone. A second one has windows of about the same length.
func (s *Run) newZone(name string) *zone {
	w := s.world
	z := &zone{limit: oneOf(w, kinds()...)}
	z.limit.Zone, z.limit.Window = name, oneOf(w, 2*time.Second, 10*time.Second, time.Minute, 10*time.Minute, time.Hour)
	if len(s.zones) > 0 {
		z.limit.Window = s.zones[0].limit.Window * oneOf[time.Duration](w, 1, 2) / oneOf[time.Duration](w, 1, 2)
	}
	z.events, z.cost = oneOf[int64](w, 1, 2, 5, 5, 20, 20, 100), oneOf[int64](w, 1, 1, 1, 2, 3)
	if s.sequential {
		// Many requests give back what they took when there is no more.
		z.events = min(z.events, 5)
	}
	if z.limit.Algorithm.HasBurst() && w.chance(0.5) {
		z.burst = oneOf[int64](w, 1, 3, 10)
	}
	z.batched = s.takes && algorithm.Of(z.limit.Algorithm).Unbatched == "" && w.chance(0.5)
	z.batch = oneOf(w, max(z.events/4, 1), max(z.events/4, 1), store.BatchAuto)
	z.differ = w.chance(0.3)
	if algorithm.Of(z.limit.Algorithm).Copies() && w.chance(0.2) {
		z.penalty = z.limit.Window / oneOf[time.Duration](w, 1, 5)
	}
	return z
}

// client returns the client of a bucket.
func (s *Run) client(key string) *client {
	for _, c := range s.clients {
		if c.limit.Zone+"/"+c.key == key {
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
	return fmt.Sprintf("%v, takes %v, mixed %v, sequential %v, on_error %s, waits %v, %d caddys, trust %d, delay %d, lag %d, faults %v, resets %v",
		s.zones, s.takes, s.mixed, s.sequential, s.onError, s.waits, len(s.caddys), s.caddys[0].trust, s.caddys[0].delay, s.net.lag, s.faults, s.resets)
}

// come plans the next request of a client: now and then several at once, or none for long.
func (s *Run) come(beside []*client) {
	c := beside[0]
	pause := c.limit.Window.Microseconds() * c.cost / c.capacity()
	switch s.rng.IntN(10) {
	case 0, 1:
		pause = 2000
	case 2:
		pause *= 5
	}
	s.after(s.between(0, max(pause, 1000)*3/2), func() {
		if s.now < s.end {
			s.askAny(beside)
			if !s.sequential {
				s.crowd(beside)
				s.come(beside)
			}
		}
	})
}

func (s *Run) askAny(beside []*client) {
	s.ask(beside, s.caddys[s.rng.IntN(len(s.caddys))], &arrival{at: s.now})
}

// crowd makes some requests come at about the same time, now and then, so that batches overtake takes.
func (s *Run) crowd(beside []*client) {
	if !beside[0].batched || !s.chance(0.2) {
		return
	}
	for range 8 {
		s.after(s.between(0, 1500), func() { s.askAny(beside) })
	}
}

// ended is what the client of a visit does next, if it sends one request after the other.
func (s *Run) ended(v *visit) {
	switch {
	case !s.sequential:
	case s.now < s.end && s.chance(0.9):
		s.ask(v.clients, v.by, &arrival{at: s.now})
	default:
		s.come(v.clients)
	}
}

func (z *zone) capacity() int64 {
	if z.burst > 0 {
		return z.burst
	}
	return z.events
}

// arrival is when a request came, and how often it has looked whether it is its turn.
type arrival struct {
	at    int64
	looks int
}

// visit is one request of a client: what it asks of each zone, and what it is answered.
type visit struct {
	by      *process
	takes   bool
	began   *arrival
	clients []*client
	reqs    []store.Request
	states  []store.State
	// alone and unknown are of those zones about which the process decided alone, and whose takes have
	// an unknown outcome; held is what the visit holds.
	alone, unknown []bool
	held           []int64
}

// isHeldEarly reports whether the visit may hold something before all zones have answered.
func (v *visit) isHeldEarly() bool { return len(v.clients) > 1 && !v.takes }

// ask makes a request to all zones.
func (s *Run) ask(clients []*client, p *process, began *arrival) {
	s.requests++
	s.unanswered++
	n := len(clients)
	takes := s.takes || s.mixed && s.chance(0.5)
	v := &visit{by: p, takes: takes, began: began, clients: clients, alone: make([]bool, n), unknown: make([]bool, n), held: make([]int64, n)}
	for _, c := range clients {
		r := s.request(c)
		if takes {
			r.Hold = uint32(store.HearsHeld + s.requests)
		}
		v.reqs = append(v.reqs, r)
	}
	if v.isHeldEarly() {
		for i, c := range clients {
			s.land(c, -v.reqs[i].Cost)
		}
	}
	answered := func(states []store.State) {
		s.unanswered--
		v.states = states
		s.answered(v)
	}
	if takes {
		p.take(v.reqs, answered)
	} else {
		p.admit(v.reqs, answered)
	}
}

// olderAnswers is the part of a window, as its divisor, for which a process that had a client to
// itself relies on an older answer once.
const olderAnswers = 10

// longestService is how long a request takes at most.
const longestService = 500_000

// serve lets a request run, and calls f when it ends, with whether its status is free.
func (s *Run) serve(f func(free bool)) {
	s.after(s.between(0, oneOf[int64](s.world, 1000, 50_000, longestService)), func() { f(s.chance(s.free())) })
}

// free is the part of requests that turn out to be free.
func (s *Run) free() float64 {
	if s.sequential {
		return 0.9
	}
	return 0.15
}

// onFailure applies on_error to zone i, whose store failed, and reports whether that denies the
// request.
func (s *Run) onFailure(v *visit, i int) (isDenied bool) {
	st := &v.states[i]
	if errors.Is(st.Err, context.Canceled) {
		// The client has left.
		return true
	}
	v.unknown[i] = v.takes && errors.Is(st.Err, store.ErrUncertain)
	if st.Err == nil || s.onError == allow {
		return false
	}
	if s.onError == deny {
		return true
	}
	*st, v.alone[i] = v.by.alone(v.reqs[i]), true
	return false
}

// answered is what becomes of a request once all zones have answered.
func (s *Run) answered(v *visit) {
	isRefused := false
	for i := range v.clients {
		isRefused = s.hears(v, i) || isRefused
	}
	if isRefused {
		for i := range v.clients {
			s.settle(v, i, true)
		}
		s.refusedOne(v)
		if s.waits && len(v.clients) == 1 && v.states[0].Err == nil && !v.alone[0] {
			s.wait(v)
		}
		return
	}
	for i, c := range v.clients {
		if st := &v.states[i]; st.Err == nil {
			s.admitted(c, v.by, &v.reqs[i], st, v.alone[i])
		}
	}
	s.serve(func(free bool) {
		for i, c := range v.clients {
			if free {
				s.unadmit(c, &v.reqs[i], v.by)
			}
			s.settle(v, i, free)
		}
		s.ended(v)
	})
}

// refusedOne holds a refusal of a client that sends one request after the other to what the primary
// has counted once all refunds have arrived. Then the client goes on.
func (s *Run) refusedOne(v *visit) {
	if s.sequential {
		s.after(refundTime, func() {
			s.leavesNoRoom(v)
			s.ended(v)
		})
	}
}

// hears takes in the answer of zone i, and reports whether that refuses the request.
func (s *Run) hears(v *visit, i int) (refuses bool) {
	c, r, st := v.clients[i], &v.reqs[i], &v.states[i]
	s.note("%s, request %s of %s in %s: %+v", v.by.name, r.ID, c.key, c.limit.Zone, *st)
	isDenied := s.onFailure(v, i)
	if st.Allowed && (!v.takes || v.alone[i]) {
		v.held[i] = r.Cost
	}
	switch {
	case v.takes:
	case v.held[i] == 0 && v.isHeldEarly():
		s.land(c, r.Cost)
	case v.held[i] > 0 && !v.isHeldEarly():
		s.land(c, -r.Cost)
	}
	if st.Err != nil || st.Allowed {
		return isDenied
	}
	if len(v.clients) == 1 || *st != (store.State{}) {
		// Otherwise another zone is known to refuse, so this one was not asked.
		s.refused(c, v.by, r, st, v.alone[i])
		s.penalize(v, i)
	}
	return true
}

// penalize keeps a client refused, if the zone does so after a refusal like that of zone i.
func (s *Run) penalize(v *visit, i int) {
	c, r, st := v.clients[i], v.reqs[i], &v.states[i]
	if c.penalty == 0 || v.alone[i] || st.Penalty != 0 || st.InFlight || st.RetryAfter == store.Never {
		return
	}
	r.Until = st.Now + c.penalty.Microseconds()
	if epoch+s.net.skew+s.now > c.penalizedUntil {
		// Of several, the first one counts.
		c.penalizedUntil, c.penalized, c.penalizedBy = r.Until, s.now, v.by
	}
	v.by.penalize(r)
}

// settle ends what a visit has in zone i. It is charged, unless it is free.
func (s *Run) settle(v *visit, i int, free bool) {
	c, p, r, st, held := v.clients[i], v.by, v.reqs[i], &v.states[i], v.held[i]
	s.note("%s, request %s of %s ends in %s, free %v", p.name, r.ID, c.key, c.limit.Zone, free)
	switch {
	case v.takes:
	case free:
		s.land(c, held)
	case held == 0:
		s.land(c, -r.Cost)
	}
	isTaken := v.takes && st.Err == nil && st.Allowed && !v.alone[i]
	r.Receipt = st.Receipt
	if isTaken {
		r.NoteHold(st)
	}
	spends, end := r, r
	end.Cost = 0
	if free {
		spends.Cost = 0
	}
	switch {
	case isTaken && free:
		p.restore(r)
	case v.unknown[i]:
		if held > 0 {
			p.settleUnknown(spends, held)
		}
	case isTaken:
		c.served += r.Cost
		p.refund(end)
	default:
		c.served += spends.Cost
		if held > 0 || spends.Cost > 0 {
			p.settle(spends, held)
		}
	}
}

// mostLooks is how often a request that waits looks whether it is its turn, at most.
const mostLooks = 20

// wait makes a refused request wait for up to a quarter of a window, and then ask again.
func (s *Run) wait(v *visit) {
	c, r := v.clients[0], v.reqs[0]
	if v.began.looks++; v.began.looks > mostLooks {
		return
	}
	left := v.began.at + c.limit.Window.Microseconds()/4 - s.now
	v.by.ahead(r, time.Duration(left)*time.Microsecond, func(st store.State) {
		s.note("%s, request %s of %s waits: %+v", v.by.name, r.ID, c.key, st)
		pause := st.RetryAfter.Microseconds()
		switch {
		case st.Err != nil:
		case st.Allowed:
			s.after(1000, func() { s.ask(v.clients, v.by, v.began) })
		case pause <= left:
			s.after(cmp.Or(pause, 1e6), func() { s.wait(v) })
		}
	})
}

// ran notes what the primary has executed.
func (s *Run) ran(op algorithm.Operation, r *store.Request, st *store.State) {
	s.note("primary ran %v of %d for %s: %+v", op, r.Cost, r.ClientKey, *st)
	c := s.client(keyOf(r))
	switch op {
	case opCharge:
		c.counted += r.Cost
		s.land(c, r.Cost)
	case opTake:
		if st.Allowed {
			c.counted += r.Cost
		}
		s.land(c, 0)
	case opRefund:
		c.counted -= r.Cost
		// Until now it counted.
		c.truth = append(c.truth, moment{s.now, st.Used + r.Cost + c.unlanded})
		s.land(c, 0)
	}
	if held := s.held(c); !held.InFlight {
		c.heldSince = 0
	} else if c.heldSince == 0 {
		c.heldSince = s.now
	}
}

// held is what the primary would say of what is held to a request of a client.
func (s *Run) held(c *client) store.State {
	r := store.Request{Limit: &c.limit, ClientKey: c.key, Events: c.events, Burst: c.burst, Cost: c.cost, Hold: store.HearsHeld}
	return s.net.servers.look(r, s.net.clock(), false)
}

// doubted notes a take of unknown outcome. If it is served alone and was never executed, the
// store never hears of it.
func (s *Run) doubted(r store.Request) {
	c := s.client(keyOf(&r))
	c.uncertain += r.Cost
	c.missing = append(c.missing, admission{at: s.now, cost: r.Cost})
}

func (s *Run) kept(r store.Request) { s.client(keyOf(&r)).kept += r.Cost }

func (s *Run) lost(e *entry, n core.Next) {
	s.note("given up for %s: %d, %v", n.ClientKey, n.Lost, n.Err)
	c := s.client(e.key)
	c.missing = append(c.missing, admission{at: s.now, cost: n.Lost * c.cost})
	if errors.Is(n.Err, store.ErrUncertain) {
		c.uncertain += n.Lost * c.cost
	} else {
		c.lost += n.Lost * c.cost
	}
}

// flaky is the number of the fault that leaves some writes not executed.
const flaky = 4

// fault begins one, for a while.
func (s *Run) fault() {
	if s.now >= s.end {
		return
	}
	length := s.between(10_000, oneOf[int64](s.world, 200_000, 3e6, s.zones[0].limit.Window.Microseconds()))
	restore := func() {}
	kind := s.rng.IntN(5)
	if s.sequential && s.chance(0.5) {
		kind = flaky
	}
	switch kind {
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
	case flaky:
		s.net.flaky = oneOf(s.world, 0.02, 0.2)
		restore = func() { s.net.flaky = 0 }
	}
	s.note("down %v, away %v, lossy %v, slow %v, flaky %v for %v", s.net.down, s.net.away, s.net.lossy, s.net.slow, s.net.flaky, time.Duration(length)*time.Microsecond)
	s.after(length, func() {
		restore()
		s.note("well again")
		s.after(s.between(0, 3*s.zones[0].limit.Window.Microseconds()), s.fault)
	})
}

// reset lets an operator reset a client.
func (s *Run) reset() {
	if s.now >= s.end {
		return
	}
	c := s.clients[s.rng.IntN(len(s.clients))]
	r := store.Request{Limit: &c.limit, ClientKey: c.key, Events: c.events, Burst: c.burst}
	c.reset = math.MaxInt64
	s.caddys[s.rng.IntN(len(s.caddys))].reset(r, func() {
		// Replicas and other processes see it later, and what runs is charged anew.
		c.reset = s.now + s.net.lag + 2*core.UsualTrust.Microseconds() + 2*longestService + s.zones[0].limit.Window.Microseconds()/olderAnswers
		if s.takes || s.mixed {
			// What others took before, and give back after it, is given back to this window too.
			c.reset += s.zones[0].limit.Window.Microseconds()
		}
		c.admitted, c.truth = nil, nil
		clear(c.resets)
		s.after(s.between(0, 5*s.zones[0].limit.Window.Microseconds()), s.reset)
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
	s.net.down, s.net.away, s.net.lossy, s.net.slow, s.net.flaky = false, false, 0, 0, 0
	// Requests that wait may go on later.
	for until, latest := s.end+30e6, s.end+30e6+s.longestWait(); ; until += 30e6 {
		s.run(until)
		if s.failure != "" || until >= latest || !s.isBusy() {
			break
		}
	}
	s.atEnd()
	return s.requests, s.failure
}

// longestWait is how long a request waits at most, with those before it.
func (s *Run) longestWait() (longest int64) {
	for _, c := range s.clients {
		longest = max(longest, 2*c.limit.Window.Microseconds())
	}
	return longest
}

// isBusy reports whether a request is in flight somewhere.
func (s *Run) isBusy() bool {
	for _, p := range s.caddys {
		for _, e := range p.buckets {
			if e.Gauges().InFlight > 0 {
				return true
			}
		}
	}
	return s.unanswered > 0
}
