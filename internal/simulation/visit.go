package simulation

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// arrival is when a request came, and how often it has looked whether it is its turn.
type arrival struct {
	at    int64
	looks int
}

// visit is one request of a client, with its ask and its answer for each zone.
type visit struct {
	by      *process
	view    *view
	rng     *stream
	takes   bool
	began   *arrival
	clients []*client
	reqs    []store.Request
	states  []store.State
	// late is how a take of unknown outcome ends, or nil. alone is set for the zones that the process decided alone. held
	// is the cost that the visit holds.
	late  []*store.Late
	alone []bool
	held  []int64
	// refused are zones that the store has refused, and failed are zones whose last take was not executed.
	refused, failed map[string]bool
}

// isHeldEarly reports whether the visit may hold something before all zones have answered.
func (v *visit) isHeldEarly() bool { return len(v.clients) > 1 && !v.takes }

// come plans the next request of a client: now and then several at once, or none for long.
func (s *Run) come(beside []*client) {
	c := beside[0]
	pause := c.limit.Window * time.Duration(c.cost) / time.Duration(c.capacity())
	switch c.rng.IntN(10) {
	case 0, 1:
		pause = 2 * time.Millisecond
	case 2:
		pause *= 5
	}
	s.after(c.rng.between(0, max(pause, time.Millisecond)*3/2), func() {
		if s.now() < s.end && s.failure == "" {
			s.askAny(beside)
			if !s.sequential {
				s.crowd(beside)
				s.come(beside)
			}
		}
	})
}

func (s *Run) askAny(beside []*client) {
	s.ask(beside, s.caddys[beside[0].rng.IntN(len(s.caddys))], &arrival{at: s.now()})
}

// crowd makes some requests come at about the same time, now and then, so that batches overtake takes.
func (s *Run) crowd(beside []*client) {
	if c := beside[0]; c.batched && c.rng.chance(0.2) {
		for range 8 {
			s.after(c.rng.between(0, 1500*time.Microsecond), func() { s.askAny(beside) })
		}
	}
}

// ended is what the client of a visit does next, if it sends one request after the other.
func (s *Run) ended(v *visit) {
	switch {
	case !s.sequential:
	case s.now() < s.end && s.failure == "" && !v.by.dead && v.rng.chance(0.9):
		s.ask(v.clients, v.by, &arrival{at: s.now()})
	default:
		s.come(v.clients)
	}
}

// asking marks the context of a visit.
type asking struct{}

// ask makes a request to all zones.
func (s *Run) ask(clients []*client, p *process, began *arrival) {
	s.requests++
	s.unanswered++
	c, n := clients[0], len(clients)
	c.made++
	v := &visit{
		by: p, view: p.view, rng: s.stream(c.key, c.made), began: began, clients: clients, alone: make([]bool, n), late: make([]*store.Late, n),
		held: make([]int64, n), refused: map[string]bool{}, failed: map[string]bool{},
	}
	v.takes = s.takes || s.mixed && v.rng.chance(0.5)
	for _, c := range clients {
		r := s.request(c)
		if v.takes {
			r.Hold = uint32(store.HearsHeld + clients[0].made) //nolint:gosec // few
		}
		v.reqs = append(v.reqs, r)
	}
	if v.isHeldEarly() {
		for i, c := range clients {
			s.land(c, -v.reqs[i].Cost)
		}
	}
	v.view.users++
	go s.serve(v)
}

// serve asks about a visit, and goes on when it is answered.
func (s *Run) serve(v *visit) {
	ctx, leave := context.WithCancel(context.WithValue(context.Background(), asking{}, v))
	defer leave()
	if v.rng.chance(s.leaves) {
		defer time.AfterFunc(v.rng.between(0, oneOf(v.rng, 2*time.Millisecond, checkTimeout)), leave).Stop()
	}
	asks := store.Asks(v.reqs)
	if v.takes {
		v.view.Take(ctx, asks)
	} else {
		v.view.Admit(ctx, asks)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unanswered--
	for i, a := range asks {
		v.reqs[i], v.states = a.Request, append(v.states, a.State)
	}
	if v.takes {
		s.tookRightly(v)
	}
	if v.by.dead {
		// So have its clients' connections.
		for i := range v.clients {
			v.abandon(i)
		}
		v.by.leave(v.view)
		s.ended(v)
		return
	}
	s.answered(v)
}

// abandon notes that the visit is neither served nor given back in zone i, because its process has ended.
func (v *visit) abandon(i int) {
	if v.takes {
		v.clients[i].kept += v.reqs[i].Cost
	}
}

// longestService is how long a request takes at most.
const longestService = 500 * time.Millisecond

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
	if v.takes && errors.Is(st.Err, store.ErrUncertain) {
		v.late[i] = store.LateOf(st.Err)
	}
	if errors.Is(st.Err, context.Canceled) {
		// The client has left.
		return true
	}
	if st.Err == nil || s.onError == allow {
		return false
	}
	if s.onError == deny {
		return true
	}
	*st, v.alone[i] = v.view.AdmitAlone(&v.reqs[i]), true
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
			go s.wait(v)
			return
		}
		v.by.leave(v.view)
		return
	}
	for i, c := range v.clients {
		if st := &v.states[i]; st.Err == nil {
			s.admitted(c, v.by, &v.reqs[i], st, v.alone[i])
		}
	}
	isFree := v.rng.chance(s.free())
	s.after(v.rng.between(0, oneOf(v.rng, time.Millisecond, 50*time.Millisecond, longestService)), func() {
		defer v.by.leave(v.view)
		for i, c := range v.clients {
			if v.by.dead {
				v.abandon(i)
				continue
			}
			if isFree {
				s.unadmit(c, &v.reqs[i], v.by)
			}
			s.settle(v, i, isFree)
		}
		s.ended(v)
	})
}

// refusedOne holds a refusal of a client that sends one request after the other to what the primary
// has counted once all refunds have arrived. Then the client goes on.
func (s *Run) refusedOne(v *visit) {
	if s.sequential {
		s.after(refundTime*time.Microsecond, func() {
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
	if s.net.clock() > c.penalizedUntil {
		// Of several, the first one counts.
		c.penalizedUntil, c.penalized, c.penalizedBy = r.Until, s.now(), v.by
	}
	v.view.PenalizeDetached([]*store.Request{&r})
}

// settle ends what a visit has in zone i. It is charged, unless it is free.
func (s *Run) settle(v *visit, i int, free bool) {
	c, r, st, held := v.clients[i], v.reqs[i], &v.states[i], v.held[i]
	s.note("%s, request %s of %s ends in %s, free %v", v.by.name, r.ID, c.key, c.limit.Zone, free)
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
		v.view.RefundDetached([]*store.Request{&r})
	case v.late[i] != nil:
		c.served += spends.Cost
		v.view.SettleUnknown([]*store.Request{&spends}, []int64{held}, []*store.Late{v.late[i]})
	case isTaken:
		c.served += r.Cost
		if end.MayHold() {
			v.view.RefundDetached([]*store.Request{&end})
		}
	default:
		c.served += spends.Cost
		if held > 0 || spends.Cost > 0 {
			v.view.Settle([]*store.Request{&spends}, []int64{held})
		}
	}
}

// mostLooks is how often a request that waits looks whether it is its turn, at most.
const mostLooks = 20

// wait makes a refused request wait for up to a quarter of a window, and then ask again.
func (s *Run) wait(v *visit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer v.by.leave(v.view)
	c, r := v.clients[0], v.reqs[0]
	key := keyOf(&r)
	pause := time.Duration(0)
	for v.began.looks++; v.began.looks <= mostLooks; v.began.looks++ {
		// Others may wait for the same instant, and which of them is first is random.
		pause += v.rng.between(0, time.Millisecond)
		s.mu.Unlock()
		time.Sleep(pause)
		s.mu.Lock()
		if v.by.dead {
			return
		}
		left := time.Duration(v.began.at-s.now())*time.Microsecond + c.limit.Window/4
		if v.view.Account(&r) == nil {
			delete(v.by.looked, key)
		}
		s.mu.Unlock()
		st := v.view.CheckAhead(context.WithValue(context.Background(), looking{}, true), r, left)
		s.mu.Lock()
		s.note("%s, request %s of %s waits: %+v", v.by.name, r.ID, c.key, st)
		switch {
		case st.Err != nil, !st.Allowed && st.RetryAfter > left:
			return
		case st.Allowed:
			s.after(time.Millisecond, func() {
				if !v.by.dead {
					s.ask(v.clients, v.by, v.began)
				}
			})
			return
		}
		pause = cmp.Or(st.RetryAfter, time.Second)
	}
}
