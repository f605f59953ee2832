package limiter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// leases are the leases of running requests.
type leases struct {
	// life ends with the process, and renewals with it.
	life context.Context
	end  context.CancelFunc

	mu sync.Mutex
	// all is nil once the process ends.
	all map[*lease]bool
}

// running are the leases of all requests of the process.
var running = newLeases()

func newLeases() *leases {
	l := &leases{all: map[*lease]bool{}}
	l.life, l.end = context.WithCancel(context.Background())
	return l
}

// add adds a lease, and reports whether the process goes on.
func (r *leases) add(l *lease) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all != nil {
		r.all[l] = true
	}
	return r.all != nil
}

func (r *leases) remove(l *lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, l)
}

// EndLeases gives back the slots of all requests that still run, at the end of the process. Upgraded
// connections are such requests, which no server waits for.
// A lease whose store does not return before ctx ends is lost.
func EndLeases(ctx context.Context) { running.endAll(ctx) }

func (r *leases) endAll(ctx context.Context) {
	r.mu.Lock()
	all := r.all
	r.all = nil
	r.mu.Unlock()
	// A renewal holds its lease's lock.
	r.end()
	ended := make(chan *lease, len(all))
	for l := range all {
		go func() {
			l.end()
			ended <- l
		}()
	}
	for len(all) > 0 {
		select {
		case l := <-ended:
			delete(all, l)
		case <-ctx.Done():
			for l := range all {
				l.noteLost(ctx.Err())
			}
			return
		}
	}
}

// noteLost notes slots that were not given back. Their store may hold the lock.
func (l *lease) noteLost(why error) {
	open := l.of.open
	for _, z := range l.of.zones {
		if req := &z.ask.Request; z.isLease && z.answer != hasNoRoom {
			stores.NoteLost(open.Name, open.Accounts.Owner(req.ClientKey), req.Limit, algorithm.Refund, 1, fmt.Errorf("%w: %w", store.ErrUncertain, why))
		}
	}
}

// lease keeps the slots that an evaluation has taken while its request runs.
type lease struct {
	of *evaluation
	mu sync.Mutex
	// timer renews; it is nil once the slots were given back.
	timer  Timer
	period time.Duration
	// handedOver are zones whose local slots the store may count as well.
	handedOver []*inZone
}

// Timer is a [time.Timer] that calls a function, or one of a clock that is no machine's.
type Timer interface {
	Stop() bool
	Reset(d time.Duration) bool
}

// renewals is how often a lease is renewed while it lasts: all but one may fail.
const renewals = 3

// holdLeases begins to renew the slots that were taken. Nothing else is taken
// afterwards.
func (e *evaluation) holdLeases() {
	if e.rare != nil && e.rare.lease != nil {
		return
	}
	period := time.Duration(0)
	for _, z := range e.zones {
		if z.holdsSlot() {
			if every := z.limit.Window / renewals; period == 0 || every < period {
				period = every
			}
		}
	}
	if period == 0 {
		return
	}
	lease := &lease{of: e, period: period}
	// renew may run before the timer is set.
	lease.mu.Lock()
	defer lease.mu.Unlock()
	lease.timer = e.limiter.afterFunc(period, lease.renew)
	e.ensureRare().lease = lease
	if !running.add(lease) {
		lease.giveBack()
	}
}

// afterFunc calls f when so much of the limiter's time has passed.
func (l *Limiter) afterFunc(d time.Duration, f func()) Timer {
	if l.AfterFunc == nil {
		return time.AfterFunc(d, f)
	}
	return l.AfterFunc(d, f)
}

// holdsSlot reports whether the request has, or may have, a slot in the zone that lasts until it
// ends. It reads the spend of lease zones only; others may be settling.
func (z *inZone) holdsSlot() bool {
	return z.isLease && (z.isTaken() || z.isUncertain()) && z.answer != hasNoRoom
}

// renew makes the slots last for another window.
func (l *lease) renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(running.life, l.period)
	defer cancel()
	for _, z := range l.of.zones {
		if !z.holdsSlot() {
			continue
		}
		open, req := l.of.open, z.ask.Request
		if z.alone == localTaken || z.alone == localMirrored {
			open.Local.Charge([]*store.Request{new(req)})
		}
		// If this fails the slot may be lost; the request goes on. A local slot counts
		// in the store from now on, if that is back.
		if st := store.Answers(ctx, open.Accounts.Charge, []store.Request{req})[0]; z.isLocal() && !errors.Is(st.Err, store.ErrNotExecuted) && !slices.Contains(l.handedOver, z) {
			l.handedOver = append(l.handedOver, z)
		}
	}
	l.timer.Reset(l.period)
}

// end gives the slots back. It waits for a renewal that runs, which could take back a slot that is given
// back.
func (l *lease) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		l.giveBack()
	}
}

// giveBack gives the slots back; mu is held.
func (l *lease) giveBack() {
	l.giveBackWith((*inZone).holdsSlot)
}

// giveBackWith gives back what some zones hold, the slots among it; mu is held.
func (l *lease) giveBackWith(some func(z *inZone) bool) {
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	// Last, because the end of the process waits for the leases in the map.
	defer running.remove(l)
	l.of.giveBack(some)
	for _, z := range l.handedOver {
		l.of.open.Refund([]*store.Request{new(z.ask.Request)})
	}
}

// maxAbortedShare bounds, as a multiple of the capacity, a client's requests that run and
// those that it aborted and that may run on behind Caddy: nobody who cancels and tries again
// is refused, and a flood of cancelled requests is bounded.
const maxAbortedShare = 2

const (
	// maxAborting is for how many clients of a zone aborted requests are remembered: some
	// 5 MB. Beyond it the others' are forgotten, in no order.
	maxAborting = 10_000
	// abortedPeriods is into how many periods the time is divided for which they are
	// remembered. Requests of one period are forgotten together.
	abortedPeriods = 8
	// sweptAborting is how many clients an insertion looks at when there is no room.
	sweptAborting = 16
)

// abortedRequests are the requests of a zone with leases that their clients have aborted
// of late.
type abortedRequests struct {
	mu sync.Mutex
	// clients have their aborted requests by client key, in the order in which they are
	// forgotten; none is empty.
	clients map[string][]aborted
	// count is the number of clients.
	count atomic.Int64
}

// aborted are requests that were aborted at about the same time: the first one at an instant in
// microseconds since the epoch. They count until another, which what ends later does not move.
type aborted struct{ first, until, cost int64 }

// note notes an aborted request, of which others are to know for so long.
func (a *abortedRequests) note(clientKey string, cost int64, now time.Time, lasts time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, period := now.UnixMicro(), lasts.Microseconds()/abortedPeriods
	until := at + lasts.Microseconds()
	requests := a.live(clientKey, at)
	if i := slices.IndexFunc(requests, func(r aborted) bool { return at-r.first < period }); i >= 0 {
		requests[i].until, requests[i].cost = max(requests[i].until, until), requests[i].cost+cost
	} else {
		if a.clients == nil {
			a.clients = map[string][]aborted{}
		}
		if len(requests) == 0 && len(a.clients) >= maxAborting {
			a.makeRoom(at)
		}
		requests = append(requests, aborted{at, until, cost})
	}
	slices.SortFunc(requests, func(x, y aborted) int { return cmp.Compare(x.until, y.until) })
	a.set(clientKey, requests)
}

// live returns the client's requests that still count, and forgets the others. mu is held.
func (a *abortedRequests) live(clientKey string, now int64) []aborted {
	all := a.clients[clientKey]
	// Those from the future are from before the clock was set back.
	live := slices.DeleteFunc(all, func(r aborted) bool { return r.until <= now || r.first > now })
	if len(live) < len(all) {
		a.set(clientKey, live)
	}
	return live
}

// set sets a client's requests. mu is held.
func (a *abortedRequests) set(clientKey string, requests []aborted) {
	if len(requests) == 0 {
		delete(a.clients, clientKey)
	} else {
		a.clients[clientKey] = requests
	}
	a.count.Store(int64(len(a.clients)))
}

// makeRoom forgets clients whose requests no longer count or, without one, any client. mu is
// held.
func (a *abortedRequests) makeRoom(now int64) {
	looked, last := 0, ""
	for clientKey := range a.clients {
		if last = clientKey; looked == sweptAborting {
			break
		}
		looked++
		a.live(clientKey, now)
	}
	if len(a.clients) >= maxAborting {
		a.set(last, nil)
	}
}

// wait returns how long a client has to wait until no more than most of its aborted requests
// count; 0 if that is so.
func (a *abortedRequests) wait(clientKey string, most int64, now time.Time) (wait time.Duration, cost int64) {
	if a.count.Load() == 0 {
		return 0, 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	requests := a.live(clientKey, now.UnixMicro())
	for _, r := range requests {
		cost += r.cost
	}
	excess := cost - most
	for _, r := range requests {
		if excess <= 0 {
			break
		}
		excess -= r.cost
		wait = time.Duration(r.until-now.UnixMicro()) * time.Microsecond
	}
	return wait, cost
}

// noteAborted notes that the client has aborted the request, unless it has run for as long
// as others commonly do, and for leastWait: short requests do not hide the long ones.
func (e *evaluation) noteAborted(t *tracker) {
	now, took := e.limiter.Now(), t.took(e.limiter)
	for _, z := range e.zones {
		if lasts := max(z.pace.mayTake(z.limit.Window), leastWait); z.holdsSlot() && z.ask.Cost > 0 && took < lasts {
			z.aborted.note(z.decidedBy(), z.ask.Cost, now, lasts)
		}
	}
}

// boundAborted refuses a request that has just got a slot in the zone, and gives that back, if
// too many run already with those that the client has aborted.
func (z *inZone) boundAborted() {
	if z.refuseAborted(z.ask.Cost) {
		z.of.giveBack(func(other *inZone) bool { return other == z })
		if z.lose(); !z.isLocal() {
			z.alone = localNone
		}
	}
}

// refuseAborted makes the zone, whose state shows a part of the request's cost, refuse a request
// beyond the bound on what runs and what the client has aborted, and reports whether it does.
func (z *inZone) refuseAborted(shown int64) bool {
	st, req := &z.ask.State, &z.ask.Request
	most := min(req.Capacity(), math.MaxInt64/maxAbortedShare) * maxAbortedShare
	used := st.Used - shown
	wait, cost := z.aborted.wait(z.decidedBy(), most-used-req.Cost, z.of.limiter.Now())
	if wait <= 0 {
		return false
	}
	st.Allowed, st.InFlight, st.RetryAfter = false, true, wait
	st.Used, st.Remaining = used+cost, 0
	z.answer = hasNoRoom
	return true
}
