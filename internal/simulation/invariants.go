package simulation

import (
	"errors"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// admitted notes an admission, and holds it to the limits.
func (s *Run) admitted(c *client, p *process, r *store.Request, st *store.State, alone bool) {
	s.isOneWindow(c, st, alone)
	ahead, reset := st.Now-s.net.clock(), st.Reset
	if r.Batch != 0 && !alone && st.Receipt == (store.Receipt{}) {
		// Its batch was of the window before.
		reset = 0
	}
	c.admitted = append(c.admitted, admission{
		at: s.now(), cost: r.Cost, reset: reset, events: r.Events, by: p, byAnotherClock: alone && (ahead < -slack || ahead > slack),
	})
	s.forgetOld(c)
	if s.mustBePenalized(c, p) {
		s.fail("%s admitted %s under a penalty: %+v", p.name, c.key, *st)
	}
	if s.now() < c.reset || st.Replica && s.faults && c.limit.Algorithm == store.SlidingLog {
		// What a replica lacks of a log cannot be added while the primary is away.
		return
	}
	// One Caddy admits no more than the limit, whatever fails, but for charges of which nobody
	// knows whether they have counted.
	most := r.Capacity() + s.missing(c)
	if of := s.spent(c, r, st, func(a *admission) bool { return a.by == p }); of > most {
		s.fail("%s admitted %d of %d to %s by itself: %+v", p.name, of, most, c.key, *st)
	}
	if s.faults {
		return
	}
	// Takes admit no more than the limit together, while the store decides.
	if !s.takes {
		s.areSeen(c, p, r, st)
		return
	}
	if of := s.spent(c, r, st, func(*admission) bool { return true }); of > r.Capacity() {
		s.fail("%d of %d admitted to %s by takes: %+v", of, r.Capacity(), c.key, *st)
	}
}

// areSeen holds checks to the limit, but for what other processes have admitted so recently that this
// one cannot have seen it, and one request on an older answer for each of them.
func (s *Run) areSeen(c *client, p *process, r *store.Request, st *store.State) {
	since := s.now() - (s.net.lag + s.opts.ChargeDelay + max(s.opts.Trust, 0) + 2*longestService).Microseconds()
	unseen := func(a *admission) bool { return a.by != p && a.at > since }
	of := s.spent(c, r, st, func(a *admission) bool { return !unseen(a) })
	if most := r.Capacity() + int64(len(s.caddys)-1)*c.cost; of > most {
		s.fail("%s admitted %s, of whose %d it can have seen %d: %+v", p.name, c.key, most, of, *st)
	}
}

// unadmit forgets the admission of a request that turned out to be free.
func (s *Run) unadmit(c *client, r *store.Request, p *process) {
	for i := len(c.admitted) - 1; i >= 0; i-- {
		if a := c.admitted[i]; a.by == p && a.events == r.Events && a.cost == r.Cost {
			c.admitted = slices.Delete(c.admitted, i, i+1)
			return
		}
	}
}

// missing is the cost that the primary may lack.
func (s *Run) missing(c *client) (sum int64) {
	s.noteLost()
	for len(c.missing) > 0 && s.now()-c.missing[0].at > 2*c.limit.Window.Microseconds() {
		c.missing = c.missing[1:]
	}
	for _, m := range c.missing {
		sum += m.cost
	}
	return sum
}

func (s *Run) forgetOld(c *client) {
	for len(c.admitted) > 0 && s.now()-c.admitted[0].at > 2*c.limit.Window.Microseconds() {
		c.admitted = c.admitted[1:]
	}
}

// slack is by how much an admission and its event in the store may be apart.
const slack = 200_000

// spent is what certainly counts of some admissions to a client, in the window of the newest or
// by the algorithm, for requests of no higher limit than that of r.
func (s *Run) spent(c *client, r *store.Request, st *store.State, some func(a *admission) bool) (sum int64) {
	window := c.limit.Window.Microseconds()
	level, last := 0.0, int64(0)
	for i := range c.admitted {
		a := &c.admitted[i]
		if !some(a) || a.events > r.Events {
			continue
		}
		switch c.limit.Algorithm {
		case store.FixedWindow:
			// Without a window that is known nobody can say which one it is, nor by a clock that
			// is not the primary's.
			if a.reset == st.Reset && a.reset != 0 && (!c.limit.Align || !a.byAnotherClock) {
				sum += a.cost
			}
		case store.SlidingLog:
			if s.now()-a.at < window-slack {
				sum += a.cost
			}
		case store.SlidingWindow:
			if !a.byAnotherClock {
				sum += s.inWindow(c, a)
			}
		case store.GCRA:
			drained := float64(a.at-last) / float64(window) * float64(c.events)
			level, last = max(level-drained, 0)+float64(a.cost), a.at
			// All may have been spent that much apart from when they were admitted.
			sum = int64(level) - slack*c.events/window - 1
		}
	}
	if c.limit.Algorithm == store.SlidingWindow {
		sum /= weights
	}
	return sum
}

// weights are the units of weighted costs.
const weights = 1 << 20

// inWindow is the weighted cost of an admission in a sliding window of the primary's clock.
func (s *Run) inWindow(c *client, a *admission) int64 {
	window, now := c.limit.Window.Microseconds(), s.net.clock()
	start := now - now%window
	switch at := now - s.now() + a.at; {
	case at-slack >= start:
		return a.cost * weights
	case at+slack >= start, at < start-window+slack:
		// Which window counts it is not certain.
		return 0
	}
	return a.cost * (weights - (now-start)*weights/window - 1)
}

// isOneWindow requires that all answers of a window have one reset: two resets are a window
// apart, at least, unless a late charge, of which there are some with faults, has brought its own reset: then
// the other window was over.
func (s *Run) isOneWindow(c *client, st *store.State, alone bool) {
	isWindowed := algorithm.Of(c.limit.Algorithm).Windowed() && !c.limit.Align
	if !isWindowed || st.Err != nil || alone || s.now() < c.reset || st.Reset == 0 {
		return
	}
	if _, isKnown := c.resets[st.Reset]; !isKnown {
		c.resets[st.Reset] = st.Now
	}
	for reset := range c.resets {
		earlier, later := min(reset, st.Reset), max(reset, st.Reset)
		if d := later - earlier; d != 0 && d < c.limit.Window.Microseconds() && (!s.faults || c.resets[later]+slack < earlier) {
			s.fail("a reset of %d after one of %d, which is no window apart", st.Reset, reset)
		}
		if st.Reset-reset > 2*c.limit.Window.Microseconds() {
			delete(c.resets, reset)
		}
	}
}

// refused requires that a refusal says how long to wait, and that it is consistent.
func (s *Run) refused(c *client, p *process, r *store.Request, st *store.State, alone bool) {
	switch {
	case st.RetryAfter <= 0:
		s.fail("%s refused %s without a time to wait: %+v", p.name, c.key, *st)
	case r.Cost > r.Capacity() && st.RetryAfter != store.Never:
		s.fail("%s refused %s for a time, although it never fits: %+v", p.name, c.key, *st)
	case r.Cost == 0:
		s.fail("%s refused %s, which costs nothing: %+v", p.name, c.key, *st)
	}
	// Where all that is in the way may come back, nobody is refused for long.
	isFinal := r.Hold != 0 && !alone && !st.InFlight && st.Penalty == 0 && st.RetryAfter != store.Never
	if isFinal && !s.faults && s.now() >= c.reset && !c.differ && c.heldSince != 0 && s.now()-c.heldSince > s.lookback() && s.held(c).InFlight {
		s.fail("%s refused %s, although what is in the way was held for %d microseconds: %+v", p.name, c.key, s.now()-c.heldSince, *st)
	}
	s.isOneWindow(c, st, alone || st.InFlight || st.Penalty != 0)
	// Where nothing fails, a refusal is due to what was spent, or was about to be: requests that were admitted at the same
	// instant may be heard of after it.
	s.after(time.Nanosecond, func() {
		if most := s.mostUsed(c); !s.faults && s.now() >= c.reset && st.Penalty == 0 && most+r.Cost <= r.Capacity() {
			s.fail("%s refused %s, of whose %d at most %d were used: %+v", p.name, c.key, r.Capacity(), most, *st)
		}
	})
}

// refundTime is how long all refunds of a request take at most, where nothing fails.
const refundTime = 5000

// leavesNoRoom requires that a request that was refused did not fit beside what its client's requests
// before it had spent, and not given back: the client had sent the refunds before it asked.
func (s *Run) leavesNoRoom(v *visit) {
	if s.faults || s.resets || len(s.caddys) > 1 {
		return
	}
	for i, c := range v.clients {
		r, st := &v.reqs[i], &v.states[i]
		then := v.began.at - refundTime
		if most := max(s.used(c, then), s.used(c, s.now())); st.Penalty != 0 || most+r.Cost > r.Capacity() {
			return
		}
	}
	s.fail("%s refused %s, which had given back enough: %+v", v.by.name, v.clients[0].key, v.states)
}

// took notes an answer of the store to a take.
func (s *Run) took(p *process, v *visit, a *store.Ask) {
	r := &a.Request
	key := keyOf(r)
	cost := s.client(key).cost
	// A batch of that size may be all that is taken.
	mayFetch := r.Cost > cost || r.Batch == store.BatchAuto || r.Batch != 0 && min(r.Batch, r.Capacity()) <= cost
	switch {
	case a.Err == nil && a.Allowed && r.Cost > cost:
		p.period[key] = a.Reset
	case a.Err == nil && !a.Allowed && !mayFetch:
		v.refused[key], v.failed[key] = true, false
	default:
		v.failed[key] = errors.Is(a.Err, store.ErrNotExecuted)
	}
}

// tookRightly requires that a request that the store has refused stays refused if repeating its take
// spent nothing, and that it is served from its batch if that has enough for it. A refused request may be served by
// tokens that another one took meanwhile. Requests of a lower limit may be refused by that, and others by a penalty.
func (s *Run) tookRightly(v *visit) {
	for i, c := range v.clients {
		r, st := &v.reqs[i], &v.states[i]
		if key := keyOf(r); v.refused[key] && v.failed[key] && st.Err != nil {
			s.fail("%s was refused, and a take that was not executed made that %+v", c.key, *st)
		}
	}
	c, r, st := v.clients[0], &v.reqs[0], &v.states[0]
	mayTakeAll := len(v.clients) == 1 && !s.resets && c.penalty == 0 && r.Events == c.events
	isRefused := st.Err == nil && !st.Allowed && !st.InFlight
	if r.Batch == 0 || !mayTakeAll || !isRefused || v.by.period[keyOf(r)] != st.Reset {
		return
	}
	// Of what was used, the answer shows no tokens that are left.
	if a := v.view.Account(r); a != nil && a.Reserved >= r.Cost && st.Used+r.Cost <= r.Capacity() {
		s.fail("%s was refused, although its batch has enough: %+v", c.key, *st)
	}
}

// mustBePenalized reports whether a process has set a penalty so long ago that it counts in any case.
func (s *Run) mustBePenalized(c *client, p *process) bool {
	return c.penalizedBy == p && !s.faults && !s.resets && s.now() > c.penalized+2*longestService.Microseconds() && s.net.clock() < c.penalizedUntil-2*longestService.Microseconds()
}

// looks requires that requests that wait ask the primary once for each time of trust.
func (s *Run) looks(p *process, r *store.Request) {
	key := keyOf(r)
	before, isKnown := p.looked[key]
	p.looked[key] = s.now()
	ago := s.now() - before
	keeps := algorithm.Of(r.Limit.Algorithm).Copies() && !s.faults && !s.resets && !s.crowded
	if isKnown && keeps && !s.takes && !s.mixed && ago <= s.opts.Trust.Microseconds() {
		s.fail("a request of %s that waits asked the primary %d microseconds after another", r.ClientKey, ago)
	}
}

// lookback is how old a truth may justify a refusal: messages take time, and requests wait for
// a charge. What another Caddy has refunded is seen once trust has run out.
func (s *Run) lookback() int64 {
	if len(s.caddys) == 1 || !s.takes && !s.mixed {
		return 150_000
	}
	return 150_000 + 2*max(s.opts.Trust.Microseconds(), 0)
}

type moment struct{ at, used int64 }

// justOver is for how long a window that has ended may be known as open.
const justOver = 5000

// land notes that so much of what was admitted is in the primary by now, or free; less than
// nothing is admitted.
func (s *Run) land(c *client, cost int64) {
	s.noteTruth(c)
	c.unlanded -= cost
	s.noteTruth(c)
}

func (s *Run) noteTruth(c *client) {
	for len(c.truth) > 0 && s.now()-c.truth[0].at > s.lookback() {
		c.truth = c.truth[1:]
	}
	used := s.used(c, s.now())
	if used < c.spent {
		c.over = moment{s.now(), c.spent}
	}
	c.spent = used
	c.truth = append(c.truth, moment{s.now(), used + c.unlanded})
}

// used is what the primary has counted of a client at an instant.
func (s *Run) used(c *client, at int64) int64 {
	r := c.some()
	return s.net.servers.look(r, s.net.serverTime(at), false).Used
}

// mostUsed is the most that was used of late.
func (s *Run) mostUsed(c *client) int64 {
	s.noteTruth(c)
	// A window that has just ended may be known as open, and the primary may have another one by now.
	most := s.used(c, s.now()-justOver) + c.unlanded
	if c.over.at != 0 && s.now()-c.over.at <= justOver {
		most += c.over.used
	}
	for _, m := range c.truth {
		most = max(most, m.used)
	}
	if c.limit.Algorithm == store.GCRA {
		// What is in flight has not begun to drain, as far as a process knows.
		most += 1 + s.lookback()*c.events/c.limit.Window.Microseconds()
	}
	return most
}

// atEnd requires that nothing is in flight, that all requests were answered, and that the primary has counted what was
// served, once.
func (s *Run) atEnd() {
	if s.unanswered > 0 {
		s.fail("%d requests got no answer", s.unanswered)
	}
	s.noteLost()
	for _, p := range s.caddys {
		if f := p.registry.Figures(); f.InFlight > 0 || f.Unsent > 0 || p.view.IsNeeded() {
			s.fail("%s has left in flight at the end: %+v", p.name, f)
		}
	}
	for _, c := range s.clients {
		spare := c.uncertain + c.lost
		if c.counted > c.served+c.uncertain+c.kept+s.tokens(c) {
			s.fail("%s was served only %d, and %d were counted; %d have an unknown outcome", c.key, c.served, c.counted, c.uncertain)
		}
		// A batch is held as long as it has tokens.
		if st := s.held(c); int64(st.Held) > s.batched(c) && !s.faults {
			s.fail("%d of %s are held at the end", st.Held, c.key)
		}
		if c.counted < c.served-spare && !s.resets && (!s.faults || algorithm.Of(c.limit.Algorithm).Windowed()) {
			s.fail("%s was served %d, and %d were counted; %d have an unknown outcome, %d are lost", c.key, c.served, c.counted, c.uncertain, c.lost)
		}
	}
}

// tokens is what Caddys have left of batches, or what was lost of them with its window.
func (s *Run) tokens(c *client) int64 {
	sum := s.batched(c)
	for _, p := range s.everStarted() {
		sum += p.registry.Figures().TokensExpired
	}
	return sum
}

// batched is how many events of a client are in batches.
func (s *Run) batched(c *client) (sum int64) {
	for _, p := range s.everStarted() {
		if a := p.view.Account(new(c.some())); a != nil {
			sum += a.Reserved
		}
	}
	return sum
}
