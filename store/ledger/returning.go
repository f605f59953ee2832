package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// wholeBucket is what a reset in flight is about to give back.
	wholeBucket = 1 << 52
	// maxRetakes is how often a refused take is repeated because of what came back while it was
	// asked. All takes together are repeated for no more than has come back.
	maxRetakes = 4
)

// returning is what is on its way back to a bucket, by refunds in flight and resets, and the
// takes that wait for it. The page's lock guards it.
type returning struct {
	// cost is on its way, ways is how many refunds and resets bring it.
	cost int64
	ways int
	// claimed is the part for which waiters wait, in order of arrival; arrived is what has
	// arrived for them and is not enough for the first one yet.
	claimed, arrived int64
	waiters          []*claimant
}

// claimant is a refused take that waits for a part of what is on its way, or is to be repeated
// for what has arrived.
type claimant struct {
	entry     *entry
	clientKey string
	need      int64
	// come is closed when that has arrived, or nothing more does; nil if it had arrived before.
	come chan struct{}
}

// expect notes that cost is on its way back.
func (e *entry) expect(cost int64) {
	past := e.rarely()
	if past.returning == nil {
		past.returning = new(returning)
	}
	past.returning.cost += cost
	past.returning.ways++
}

// receive notes that what expect has noted has arrived, or never will. The bucket's entry may
// be a new one.
func (e *entry) receive(cost int64) {
	v := e.past().returning
	if v == nil {
		return
	}
	v.cost -= cost
	v.arrived += cost
	v.ways--
	e.rare.back = min(e.rare.back+v.wake(), wholeBucket)
	if v.ways == 0 {
		e.rare.returning = nil
	}
}

// wake ends the waiting of the first takes for which enough has arrived, or of all if nothing
// more does. It returns what has arrived for none of them.
func (v *returning) wake() (rest int64) {
	for len(v.waiters) > 0 && (v.ways == 0 || v.waiters[0].need <= v.arrived) {
		first := v.waiters[0]
		v.arrived -= first.need
		v.remove(0)
		close(first.come)
	}
	if len(v.waiters) == 0 {
		rest, v.arrived = max(v.arrived, 0), 0
	}
	return rest
}

func (v *returning) remove(i int) {
	v.claimed -= v.waiters[i].need
	v.waiters = slices.Delete(v.waiters, i, i+1)
}

// retake repeats takes that the store refused while something was on its way back to their
// buckets, once that has arrived, for up to the view's timeout. So a client that sends one
// request after the other is not refused because of what its last one gives back.
func (t *taking) retake(asked int64) {
	var until time.Time
	for retakes := 0; retakes < maxRetakes; {
		refused, claims := t.claimReturns(asked)
		if len(refused) == 0 {
			return
		}
		if until.IsZero() {
			until = t.ledger.books.clock().Add(t.ledger.opts.Timeout)
		}
		waits := slices.ContainsFunc(claims, func(c *claimant) bool { return c.come != nil })
		if !waits {
			retakes++
		} else if !t.ledger.books.clock().Before(until) {
			retakes = maxRetakes
		}
		for _, c := range claims {
			t.ledger.awaitReturn(t.ctx, c, until)
		}
		hasLeft := t.ctx.Err() != nil
		asked = t.ledger.books.now()
		if hasLeft || t.takeAgain(refused) {
			t.withdraw(claims)
			return
		}
	}
}

// claimReturns returns the requests that the store refused, unless there is one to whose bucket
// nothing comes back, and what they claim of it.
func (t *taking) claimReturns(asked int64) (refused []int, claims []*claimant) {
	for i := range t.reqs {
		st := &t.states[i]
		if st.Err != nil || st.Allowed {
			continue
		}
		c := t.ledger.claimReturn(&t.reqs[i], st, asked)
		if c == nil {
			t.withdraw(claims)
			return nil, nil
		}
		refused, claims = append(refused, i), append(claims, c)
	}
	return refused, claims
}

func (t *taking) withdraw(claims []*claimant) {
	for _, c := range claims {
		t.ledger.withdraw(c)
	}
}

// claimReturn claims what a request, refused with st, needs of what has come back to its bucket
// since it was asked, or will. It returns nil if that is not enough.
func (l *Ledger) claimReturn(r *store.Request, st *store.State, asked int64) *claimant {
	e := l.find(r)
	if e == nil {
		return nil
	}
	defer e.page.mu.Unlock()
	past := e.past()
	need := max(r.Cost-st.Remaining, 1)
	switch v := past.returning; {
	case st.InFlight, st.Penalty != 0, st.RetryAfter == store.Never:
		// What is in flight here refuses the take, whatever comes back: its own refund does.
		return nil
	case v == nil || v.claimed+need > v.cost+v.arrived:
		// No more than the whole bucket can be free.
		back := min(past.back, r.Capacity()) - need
		if back < 0 || !mayLack(asked, max(past.refunded, past.reset)) {
			return nil
		}
		e.rare.back = back
		return &claimant{entry: e, need: need}
	default:
		c := &claimant{e, r.ClientKey, need, make(chan struct{})}
		v.claimed += need
		v.waiters = append(v.waiters, c)
		return c
	}
}

// awaitReturn waits until what c needs has arrived, for as long as there is time and the
// client stays.
func (l *Ledger) awaitReturn(ctx context.Context, c *claimant, until time.Time) {
	if c.come == nil {
		return
	}
	l.store.Hurry(c.clientKey)
	timer := time.NewTimer(until.Sub(l.books.clock()))
	defer timer.Stop()
	select {
	case <-c.come:
	case <-timer.C:
		l.withdraw(c)
	case <-ctx.Done():
		l.withdraw(c)
	}
}

// withdraw ends the waiting of c, and leaves what has arrived for it to those behind it.
func (l *Ledger) withdraw(c *claimant) {
	c.entry.page.mu.Lock()
	defer c.entry.page.mu.Unlock()
	rest, v := int64(0), c.entry.past().returning
	if c.come == nil {
		rest = c.need
	} else if v != nil {
		if i := slices.Index(v.waiters, c); i >= 0 {
			v.remove(i)
			rest = v.wake()
		}
	}
	if rest > 0 {
		past := c.entry.rarely()
		past.back = min(past.back+rest, wholeBucket)
	}
}
