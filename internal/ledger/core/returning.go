package core

import (
	"errors"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// wholeBucket is what a reset in flight is about to give back.
const wholeBucket = 1 << 52

// returning is what is on its way back to a bucket, by refunds in flight and resets, and the
// takes that wait for it.
type returning struct {
	// cost is on its way, ways is how many refunds and resets bring it.
	cost int64
	ways int
	// claimed is the part for which waiters wait, in order of arrival; arrived is what has
	// arrived for them and is not enough for the first one yet.
	claimed, arrived int64
	waiters          []*Claim
}

// Claim is what a refused take claims of what is on its way back, or of what has arrived.
type Claim struct {
	Waiter
	need int64
	// Arrived is set if what it claims has come back already. Otherwise the waiter gets a
	// turn once that has, or nothing more does.
	Arrived bool
	// given is set if what it claims has come back since.
	given bool
}

// RefundSent notes that a refund is in flight: until RefundArrived, answers may lack it.
func (b *Bucket) RefundSent(cost int64, m *Moment) {
	b.refunds++
	b.disturbed = m.Now
	b.expect(cost)
}

// RefundArrived takes in the answer to a refund that was sent then, and remembers for a while that it is
// over, because answers that lack it may come yet. What is known stays: the primary is asked next.
func (b *Bucket) RefundArrived(r *store.Request, st *store.State, sent int64, m *Moment) {
	b.refunds--
	b.ensureExtra().refunded = m.Now
	if st.Err == nil && st.Now != 0 {
		b.showFrom(r, st, sent, m)
	}
	b.receive(r.Cost, m)
	b.written, b.disturbed = m.Now, m.Now
	b.until = max(b.until, m.Now+m.Trust)
}

// answer is what the primary has said of a bucket.
type answer struct {
	known algorithm.Known
	// now is the store's instant of it, and at is when it arrived.
	now, at int64
}

// show notes an answer of the primary, asked for then, for views, which show the last one once something
// has come back. Answers to calls at the same time need not arrive in order.
func (b *Bucket) show(r *store.Request, st *store.State, asked int64, m *Moment) {
	if last := b.extras().shown; last != nil && (asked > last.at || st.Now >= last.now) {
		*last = answer{saidOf(r, st), st.Now, m.Now}
	}
}

// showFrom is show, and makes views show answers from now on, unless this one is from before a reset.
func (b *Bucket) showFrom(r *store.Request, st *store.State, asked int64, m *Moment) {
	if b.predatesReset(asked) {
		return
	}
	if rare := b.ensureExtra(); rare.shown == nil {
		rare.shown = new(answer)
	}
	b.show(r, st, asked, m)
}

// saidOf is what a state says of a bucket, which is its last count if the bucket cannot be copied.
func saidOf(r *store.Request, st *store.State) (k algorithm.Known) {
	if k.Content = st.Content; !algorithm.Of(r.Limit.Algorithm).Copies() {
		k.Content[confirmedUsed] = st.Used
	}
	return k
}

// asShown is the bucket as views show it.
func (b *Bucket) asShown(limit *store.Limit) Bucket {
	c, last := *b, b.extras().shown
	if last == nil {
		return c
	}
	c.known = last.known
	if algorithm.Of(limit.Algorithm).Copies() {
		// It may be on its way.
		c.known.KeepPenalty(limit, b.known)
	}
	if c.pending != nil {
		p := *c.pending
		p.base, c.pending = c.known, &p
	}
	return c
}

// expect notes that cost is on its way back.
func (b *Bucket) expect(cost int64) {
	rare := b.ensureExtra()
	if rare.returning == nil {
		rare.returning = new(returning)
	}
	rare.returning.cost += cost
	rare.returning.ways++
}

// receive notes that what expect has noted has arrived, or never will.
func (b *Bucket) receive(cost int64, m *Moment) {
	v := b.extras().returning
	if v == nil {
		return
	}
	v.cost -= cost
	v.arrived += cost
	v.ways--
	b.extra.back = min(b.extra.back+v.wake(m), wholeBucket)
	if v.ways == 0 {
		b.extra.returning = nil
	}
}

// wake ends the waiting of the first takes for which enough has arrived, or of all if nothing
// more does. It returns what has arrived for none of them.
func (v *returning) wake(m *Moment) (rest int64) {
	for len(v.waiters) > 0 && (v.ways == 0 || v.waiters[0].need <= v.arrived) {
		first := v.waiters[0]
		first.given = first.need <= v.arrived
		v.arrived -= first.need
		v.remove(0)
		m.turn(first.Waiter, Again)
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

// ClaimReturn claims what a request that was refused needs of what has come back
// since it was asked, or will. It returns nil if that is not enough.
func (b *Bucket) ClaimReturn(w Waiter, asked int64) *Claim {
	r, st, rare := w.Request, w.State, b.extras()
	need := max(r.Cost-st.Remaining, 1)
	switch v := rare.returning; {
	case st.InFlight, st.Penalty != 0, st.RetryAfter == store.Never:
		// What is in flight here refuses the take, whatever comes back: its own refund does.
		return nil
	case v == nil || v.claimed+need > v.cost+v.arrived:
		// No more than the whole bucket can be free.
		back := min(rare.back, r.Capacity()) - need
		if back < 0 || !mayLack(asked, max(rare.refunded, rare.reset)) {
			return nil
		}
		b.extra.back = back
		return &Claim{Waiter: w, need: need, Arrived: true}
	default:
		c := &Claim{Waiter: w, need: need}
		v.claimed += need
		v.waiters = append(v.waiters, c)
		return c
	}
}

// AwaitReturn lets a request wait that claims nothing of what is on its way back. It returns nil if nothing is.
func (b *Bucket) AwaitReturn(w Waiter) *Claim {
	v := b.extras().returning
	if v == nil {
		return nil
	}
	c := &Claim{Waiter: w}
	v.waiters = append(v.waiters, c)
	return c
}

// Withdraw ends the waiting of c, and leaves what has arrived for it to those behind it. It
// reports whether c has waited: if not, its waiter has got its turn.
func (b *Bucket) Withdraw(c *Claim, m *Moment) (waited bool) {
	rest, v := int64(0), b.extras().returning
	if c.Arrived || c.given {
		rest = c.need
	} else if v != nil {
		if i := slices.Index(v.waiters, c); i >= 0 {
			v.remove(i)
			rest, waited = v.wake(m), true
		}
	}
	if rest > 0 {
		rare := b.ensureExtra()
		rare.back = min(rare.back+rest, wholeBucket)
	}
	return waited
}

// MaxRetakes is how often a refused take is repeated because of what came back while it was
// asked. All takes together are repeated for no more than has come back.
const MaxRetakes = 4

// Retakes are how a call of takes goes on that the store refused while something was on its
// way back to their buckets. So a client that sends one request after the other is not refused
// because of what its last one gives back.
type Retakes struct {
	// Asked is when the takes were asked the last time, Until when they wait no longer for what
	// comes back; 0 until they have to.
	Asked, Until int64
	count        int
}

// ToRepeat returns the places of the takes that the store refused, or none once they were repeated
// often enough. They are to be repeated if each has a claim, and otherwise none.
func (t *Retakes) ToRepeat(asks []*store.Ask) (places []int) {
	if t.count >= MaxRetakes {
		return nil
	}
	for i, a := range asks {
		if a.Err == nil && !a.Allowed {
			places = append(places, i)
		}
	}
	return places
}

// Claimed notes that the takes are repeated, at once or when those that wait have got their
// turns. They wait for up to timeout together.
func (t *Retakes) Claimed(waits bool, timeout, now int64) {
	if t.Until == 0 {
		t.Until = now + timeout
	}
	switch {
	case !waits:
		t.count++
	case now >= t.Until:
		t.count = MaxRetakes
	}
}

// Stands reports whether a state stands although the take was answered with st: it is a refusal,
// and repeating its take ended in an error, and spent nothing.
func Stands(was, st *store.State) bool {
	return was.RetryAfter != 0 && errors.Is(st.Err, store.ErrNotExecuted)
}

// ResetSent notes that the bucket is being emptied. It sends held charges, so that the reset
// can wait for them, and lets none be held until it is over: a tick could make the bucket anew.
func (b *Bucket) ResetSent(m *Moment) (n Next) {
	b.resets = true
	b.expect(wholeBucket)
	if b.IsHeld() {
		b.sendNext(&n, m)
	}
	return n
}

// ResetFailed notes that the bucket was not emptied.
func (b *Bucket) ResetFailed(m *Moment) {
	b.resets = false
	b.receive(wholeBucket, m)
}

// ResetDone drops what is known of a bucket that was emptied, its waiting charges and
// its tokens. Requests ask the primary for a while, because replicas may be stale.
func (b *Bucket) ResetDone(m *Moment) {
	b.known, b.trusted, b.soleWriter, b.asked = algorithm.Known{}, 0, 0, 0
	b.disturbed, b.resets, b.uncertain = m.Now, false, false
	rare := b.ensureExtra()
	rare.reset, rare.failed, rare.alone, rare.loose, rare.shown = m.Now, 0, 0, 0, nil
	b.receive(wholeBucket, m)
	if b.check != nil {
		b.check.counted = 0
	}
	if p := b.pending; p != nil {
		p.base, p.took, p.heard, p.waiting = algorithm.Known{}, 0, nil, nil
		if p.isStale = p.phase == sent; !p.isStale {
			b.pending = nil
		}
	}
	if b.batch != nil {
		m.Counts.TokensExpired += b.batch.abandon()
	}
	b.until = max(b.until, m.Now+m.leastTrust())
}
