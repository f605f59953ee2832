package core

import (
	"errors"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// returning is what is on its way back to a bucket by this process's refunds and resets, and the takes that
// wait for it.
type returning struct {
	// refunds are when those in flight were sent, in order, and ends the same of those that only end what is held;
	// resets is how many resets empty the bucket.
	refunds, ends []int64
	resets        int
	// waiters are in order.
	waiters []returnWaiter
}

// returnWaiter is a take that waits for what was sent until it came.
type returnWaiter struct {
	Waiter
	came int64
}

// refunding is the number of refunds in flight.
func (b *Bucket) refunding() int64 {
	if v := b.extras().returning; v != nil {
		return int64(len(v.refunds))
	}
	return 0
}

// ending is the number of refunds in flight that only end what is held.
func (b *Bucket) ending() int64 {
	if v := b.extras().returning; v != nil {
		return int64(len(v.ends))
	}
	return 0
}

// ensureReturning returns what is on its way, to add to it.
func (b *Bucket) ensureReturning() *returning {
	rare := b.ensureExtra()
	if rare.returning == nil {
		rare.returning = new(returning)
	}
	return rare.returning
}

// RefundSent notes that a refund is in flight: until RefundArrived, answers may lack it. One without a cost only ends
// what is held.
func (b *Bucket) RefundSent(r *store.Request, m *Moment) {
	v := b.ensureReturning()
	if r.Cost == 0 {
		v.ends = append(v.ends, m.Now)
		return
	}
	v.refunds = append(v.refunds, m.Now)
	b.disturbed = m.Now
}

// RefundArrived takes in the answer to a refund that was sent then, and remembers for a while that it is
// over, because answers that lack it may come yet. What is known stays: the primary is asked next.
func (b *Bucket) RefundArrived(r *store.Request, st *store.State, sent int64, m *Moment) {
	b.hearHeld(r, st, sent)
	rare := b.ensureExtra()
	if v := rare.returning; v != nil {
		those := &v.refunds
		if r.Cost == 0 {
			those = &v.ends
		}
		if i := slices.Index(*those, sent); i >= 0 {
			*those = slices.Delete(*those, i, i+1)
		}
		b.wake(m)
	}
	if r.Cost == 0 {
		if *rare == (extra{}) {
			b.extra = nil
		}
		return
	}
	rare.refunded = m.Now
	if st.Err == nil && st.Now != 0 {
		b.showFrom(r, st, sent, m)
	}
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

// wake gives their turns to the takes for which nothing is on its way any more.
func (b *Bucket) wake(m *Moment) {
	v := b.extra.returning
	for len(v.waiters) > 0 && v.resets == 0 && isAfter(v.refunds, v.waiters[0].came) && isAfter(v.ends, v.waiters[0].came) {
		m.turn(v.waiters[0].Waiter, Again)
		v.waiters = v.waiters[1:]
	}
	if len(v.refunds)+len(v.ends) == 0 && v.resets == 0 {
		b.extra.returning = nil
	}
}

// isAfter reports whether all that was sent, in order, was sent after an instant.
func isAfter(sent []int64, at int64) bool { return len(sent) == 0 || sent[0] > at }

// AwaitReturn reports whether a take waits for what this process has sent back to the bucket, so that a client that
// sends one request after the other is not refused because of what its last one gives back. It does not if
// there is room as far as is known, nor for the ends of what is held unless AwaitsEnd says so. Its turn comes once all
// has arrived that was sent before it.
func (b *Bucket) AwaitReturn(w Waiter, m *Moment) bool {
	v := b.extras().returning
	if v == nil || b.silent || w.Request.Cost > w.Request.Capacity() || b.hasRoom(w.Request, m) {
		return false
	}
	if len(v.refunds) == 0 && v.resets == 0 && !b.AwaitsEnd(w.Request, m) {
		return false
	}
	v.waiters = append(v.waiters, returnWaiter{w, m.Now})
	return true
}

// hasRoom reports whether recent answers leave room for a take, which other processes may have used up since.
// Leases need twice the room, because less is known of them.
func (b *Bucket) hasRoom(r *store.Request, m *Moment) bool {
	if algorithm.Of(r.Limit.Algorithm).Lease {
		rare := b.extras()
		return rare.took != 0 && m.Now-rare.took <= m.Trust && 2*(rare.leased+b.taking+r.Cost) <= r.Capacity()
	}
	rest, isServed := b.Rest(r, m)
	heard := b.trusted
	if algorithm.Of(r.Limit.Algorithm).Copies() {
		// Answers to writes at the same time raise what is known.
		heard = max(heard, b.written)
	}
	isKnown := heard != 0 && m.Now-heard <= m.Trust && !b.resets
	return isServed || rest.Cost == 0 || isKnown && b.usedOf(r, m)+b.unheard(m)+b.taking+rest.Cost <= r.Capacity()
}

// WaitNot ends the waiting of a take, and reports whether it has waited: if not, it has got its turn.
func (b *Bucket) WaitNot(w Waiter) bool {
	v := b.extras().returning
	if v == nil {
		return false
	}
	n := len(v.waiters)
	v.waiters = slices.DeleteFunc(v.waiters, func(other returnWaiter) bool {
		return other.Call == w.Call && other.Place == w.Place
	})
	return len(v.waiters) < n
}

// Stands reports whether a state stands although the take was answered with st: it is a refusal,
// and repeating its take ended in an error, and spent nothing.
func Stands(was, st *store.State) bool {
	return was.RetryAfter != 0 && errors.Is(st.Err, store.ErrNotExecuted)
}

// ResetSent notes that the bucket is being emptied. It sends delayed charges, so that the reset
// can wait for them, and delays none until it is over: a tick could make the bucket anew.
func (b *Bucket) ResetSent(m *Moment) (n Next) {
	b.resets = true
	b.ensureReturning().resets++
	if b.IsDelayed() {
		b.sendNext(&n, m)
	}
	return n
}

// ResetFailed notes that the bucket was not emptied.
func (b *Bucket) ResetFailed(m *Moment) {
	b.resets = false
	b.emptied(m)
}

// emptied notes that a reset in flight has ended.
func (b *Bucket) emptied(m *Moment) {
	if v := b.extras().returning; v != nil {
		v.resets = max(v.resets-1, 0)
		b.wake(m)
	}
}

// ResetDone drops what is known of a bucket that was emptied, its waiting charges and
// its tokens. Requests ask the primary for a while, because replicas may be stale.
func (b *Bucket) ResetDone(m *Moment) {
	b.known, b.trusted, b.soleWriter, b.asked = algorithm.Known{}, 0, 0, 0
	b.disturbed, b.resets, b.uncertain, b.unheld = m.Now, false, false, false
	rare := b.ensureExtra()
	rare.reset, rare.failed, rare.alone, rare.loose, rare.shown, rare.held = m.Now, 0, 0, 0, nil, heldAnswer{}
	b.emptied(m)
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
