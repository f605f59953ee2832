package core

import (
	"context"
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// autoMost is the inverse of the share of the limit that the batches of all
	// processes hold at most.
	autoMost = 10
	// autoStart is the inverse of the share of the limit that the first
	// automatic batch is.
	autoStart = 1000
	// shortPart is the inverse of the part of a window for which no batch is
	// fetched after the smallest one was refused.
	shortPart = 10
)

// IdleBatch is how long, in microseconds, tokens may lie unused before they are given back.
const IdleBatch = 1_000_000

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// batch has the tokens of one bucket: events that were taken in advance.
type batch struct {
	// tokens are left, of the period, which ends at ends by the store's clock.
	tokens  int64
	receipt store.Receipt
	ends    int64
	// hold is the number under which the store holds the last batch, or 0.
	hold uint32
	// lent is what requests have borrowed that wait for the rest of their cost.
	lent int64
	// size is that of the last batch, as adapted since; 0 if there was none.
	size int64
	// began is when the last batch came, or 0 once it was used up; used is when
	// tokens were last used or given back.
	began, used int64
	// short is the store's instant before which no batch is fetched for a capacity of no
	// more than shortOf, because the last one was refused.
	short, shortOf int64
	// heard is when the store last answered a take, or a request was sent to ask it.
	heard int64
	// coming is the size of the batch in flight, or 0; claimed is what the
	// waiters and the request that fetches need of it.
	coming, claimed int64
	waiters         []Waiter
	// resets counts the resets of the bucket; fetched is how many there were when the batch
	// in flight was sent for.
	resets, fetched int64
	// request is a request of the bucket, to give tokens back.
	request store.Request
	// capacity and events are the most of the requests that were seen, whose limits may differ.
	capacity, events int64
}

func (v *batch) isEmpty() bool { return v.tokens == 0 && v.hold == 0 && v.coming == 0 && v.lent == 0 }

// batchSize returns the size of the next batch, given the last one (0: none yet) and the
// number of processes that share the limit. Nothing is taken in
// advance while their number is unknown.
func batchSize(r *store.Request, last, processes int64) int64 {
	capacity := max(r.Capacity(), 0)
	if r.Batch != store.BatchAuto {
		return min(r.Batch, capacity)
	}
	if processes == 0 {
		return 0
	}
	if last == 0 {
		last = capacity / autoStart
	}
	return min(max(last, 1), max(capacity/autoMost/processes, 1), capacity)
}

// grownBatch returns the next size, given how many microseconds a batch of size lasted:
// a larger one if that is less than the limit allows.
func grownBatch(r *store.Request, size, processes, took int64) int64 {
	if size == 0 || processes == 0 || r.Capacity() < 1 {
		return size
	}
	share := float64(r.Limit.Window.Microseconds()) * float64(size) * float64(processes) / float64(r.Capacity())
	if float64(took) > share {
		return size
	}
	return min(size+(size+1)/2, store.MaxInteger)
}

func (v *batch) waste() {
	v.size = max(v.size/2, 1)
	v.tokens = 0
}

// shortfall shrinks the next batch after the store refused one.
func (v *batch) shortfall(r *store.Request, st *store.State) {
	v.size = max(min(v.size, st.Remaining)/2, 1)
	if r.Batch != store.BatchAuto || st.Remaining <= 1 {
		if st.Now >= v.short {
			v.shortOf = 0
		}
		v.short = min(st.Reset, st.Now+r.Limit.Window.Microseconds()/shortPart)
		v.shortOf = max(v.shortOf, r.Capacity())
	}
}

func (v *batch) isShort(r *store.Request, storeNow int64) bool {
	return storeNow < v.short && r.Capacity() <= v.shortOf
}

// isOpen reports whether there are tokens of a period that has not ended.
func (v *batch) isOpen(storeNow int64) bool { return v.tokens > 0 && storeNow < v.ends }

// wait lets a request have a part of the batch in flight, if enough
// of it is unclaimed: no waiter waits in vain for a batch that arrives.
func (v *batch) wait(w Waiter) bool {
	cost := w.Request.Cost
	if cost == 0 || v.claimed+cost > v.coming {
		return false
	}
	v.claimed += cost
	v.waiters = append(v.waiters, w)
	return true
}

// add takes in a batch, and returns the refund of tokens of another period, or of none if the batch before is held no
// more.
func (v *batch) add(r *store.Request, st *store.State, size, now int64) (leftover store.Request) {
	if v.tokens > 0 && v.receipt != st.Receipt {
		leftover = v.giveBack()
	} else {
		leftover = v.ending()
	}
	v.receipt, v.ends = st.Receipt, st.Receipt.Period
	if algorithm.Of(r.Limit.Algorithm).Clocked() {
		v.ends += r.Limit.Window.Microseconds()
	}
	v.tokens += size
	v.size, v.began, v.used = size, now, now
	v.request = *r
	if st.IsHeld {
		v.hold = r.Hold
	}
	return leftover
}

// see notes the limit of a request.
func (v *batch) see(r *store.Request) {
	v.capacity, v.events = max(v.capacity, r.Capacity()), max(v.events, r.Events)
}

// isBelow reports whether a request has a lower limit than others, for which the store may have found
// room for the tokens.
func (v *batch) isBelow(r *store.Request) bool {
	return r.Capacity() < v.capacity || r.Events < v.events
}

// abandon drops the tokens of a bucket that was reset, and returns their number.
func (v *batch) abandon() (tokens int64) {
	tokens, v.tokens = v.tokens, 0
	v.receipt, v.ends, v.hold, v.began, v.short = store.Receipt{}, 0, 0, 0, 0
	v.resets++
	return tokens
}

func (v *batch) giveBack() store.Request {
	r := v.refund(v.tokens)
	v.waste()
	return r
}

// refund removes tokens, and returns the request that refunds them.
func (v *batch) refund(tokens int64) store.Request {
	v.tokens -= tokens
	r := v.request
	if r.Cost, r.Receipt, r.Hold = tokens, v.receipt, min(r.Hold, store.HearsHeld); v.tokens == 0 {
		r.Hold, v.hold = max(r.Hold, v.hold), 0
	}
	return r
}

// ending returns a refund of nothing that ends what the store holds of the last batch, if anything.
func (v *batch) ending() (r store.Request) {
	if v.hold != 0 {
		r = v.request
		r.Cost, r.Hold, v.hold = 0, v.hold, 0
	}
	return r
}

// Rest is the part of a request that the batch does not cover. isServed reports
// whether there is none, or a batch in flight has room for it. None serves a request without a cost.
func (b *Bucket) Rest(r *store.Request, m *Moment) (rest store.Request, isServed bool) {
	rest = *r
	if r.Batch == 0 || r.Cost == 0 {
		return rest, false
	}
	rest.Cost -= b.tokens(r, m)
	return rest, rest.Cost == 0 || b.batch != nil && b.batch.claimed+r.Cost <= b.batch.coming
}

// tokens is how much of a request's cost the batch covers: nothing, unless the
// request fits by its own limit beside what has been spent without the tokens. By the highest limit of
// all requests the store has found room for the tokens, and what is known may be too much.
func (b *Bucket) tokens(r *store.Request, m *Moment) int64 {
	v := b.batch
	if v == nil || r.Batch == 0 || !v.isOpen(m.Now+b.clock) || r.Cost > r.Capacity() {
		return 0
	}
	if st := b.known.View(r, b.unheard(m)-v.tokens, m.Now+b.clock); !st.Allowed && (st.Penalty != 0 || v.isBelow(r)) {
		return 0
	}
	return min(v.tokens, r.Cost)
}

// serve serves a request from the batch, if that covers all of it.
func (b *Bucket) serve(r *store.Request, st *store.State, m *Moment) bool {
	if r.Cost == 0 || b.tokens(r, m) < r.Cost {
		return false
	}
	b.batch.tokens -= r.Cost
	b.batch.used = m.Now
	b.showTokens(r, st, m)
	return true
}

// Claim serves a request from the batch, or returns what it
// has to do, and the size of the batch if it fetches one.
func (b *Bucket) Claim(w Waiter, m *Moment) (do Do, size int64) {
	if b.batch == nil {
		b.batch = new(batch)
	}
	r, v, storeNow := w.Request, b.batch, m.Now+b.clock
	v.see(r)
	switch {
	case v.isOpen(storeNow) && !b.silent && m.Now-v.heard > m.leastTrust():
		// Others may have set a penalty. While the store is silent, none does.
		v.heard = m.Now
		return Take, 0
	case b.serve(r, w.State, m):
		return Nothing, 0
	case v.isOpen(storeNow) && v.tokens >= r.Cost:
		// Its own limit refuses it, or a penalty does.
		return Take, 0
	case v.coming > 0:
		if v.wait(w) {
			return Wait, 0
		}
		return Take, 0
	}
	if v.tokens > 0 && storeNow >= v.ends {
		m.Counts.TokensExpired += v.tokens
		v.waste()
	} else if v.tokens < r.Cost && v.began != 0 {
		v.size, v.began = grownBatch(r, v.size, m.Processes, m.Now-v.began), 0
	}
	size = batchSize(r, v.size, m.Processes)
	if r.Cost == 0 || r.Cost > size || v.isShort(r, storeNow) {
		return Take, 0
	}
	v.coming, v.claimed, v.fetched = size, r.Cost, v.resets
	return Fetch, size
}

// Reclaimable returns the places of the refused requests of a call if batches may serve them.
// Where one has none the call is refused, whatever the others find.
func Reclaimable(asks []*store.Ask) (places []int) {
	for i, a := range asks {
		switch {
		case a.Err != nil || a.Allowed:
		case a.Batch == 0:
			return nil
		default:
			places = append(places, i)
		}
	}
	return places
}

// Reclaim serves a request that the store has refused from a batch that was
// fetched since. If it cannot, it returns Wait, Nothing, or Take, also if a refund that the refusal may lack has arrived
// since the call began.
func (b *Bucket) Reclaim(w Waiter, began int64, m *Moment) Do {
	r, st := w.Request, w.State
	v, tokens := b.batch, b.tokens(r, m)
	switch {
	case b.serve(r, st, m):
	case v != nil && v.wait(w):
		return Wait
	case tokens > 0 && tokens+st.Remaining >= r.Cost, !st.Allowed && mayLack(began, b.extras().refunded):
		return Take
	}
	return Nothing
}

// Fetched takes in the outcome of a fetch of w, and serves it and those that wait. Do is Take
// if w has to take its cost from the store, or else Nothing. leftover is refunded, if it has a
// cost or ends what is held.
func (b *Bucket) Fetched(w Waiter, request *store.Request, st *store.State, m *Moment) (do Do, leftover store.Request) {
	v := b.batch
	isStale := v.fetched != v.resets
	waiters := append([]Waiter{w}, v.waiters...)
	v.coming, v.claimed, v.waiters = 0, 0, nil
	m.Counts.Fetches++
	switch {
	case st.Err == nil && st.Allowed:
		m.Counts.TokensFetched += request.Cost
		leftover = v.add(request, st, request.Cost, m.Now)
		m.Counts.TokensReturned += leftover.Cost
	case st.Err == nil:
		v.shortfall(request, st)
	}
	for n, w := range waiters {
		turn := Again
		switch {
		case st.Err != nil && w.State.RetryAfter != 0:
			// What the store has refused before stays refused.
			turn = Nothing
		case n > 0 && errors.Is(st.Err, context.Canceled):
			// The client that fetched has left, which says nothing to the others.
		case st.Err != nil:
			*w.State, turn = *st, Nothing
		case st.Allowed && b.serve(w.Request, w.State, m):
			if turn = Nothing; v.hold != 0 && v.hold == w.Request.Hold {
				// All of it is for this request, whose settlement ends the hold.
				w.State.IsHeld, v.hold = true, 0
			}
		}
		if n > 0 {
			m.turn(w, turn)
		} else if turn == Again {
			do = Take
		}
	}
	// A batch that is stale may predate the reset.
	if isSpent := v.tokens == 0 || isStale; isSpent && leftover.Cost == 0 && !leftover.MayHold() {
		leftover = v.ending()
	}
	if isStale {
		m.Counts.TokensExpired += v.abandon()
	}
	return do, leftover
}

// showTokens sets the state of a request that the batch served.
func (b *Bucket) showTokens(r *store.Request, st *store.State, m *Moment) {
	asked := *r
	asked.Cost = 0
	*st = b.known.View(&asked, 0, m.Now+b.clock)
	st.Allowed, st.RetryAfter = true, 0
	st.Used = max(st.Used-b.batch.tokens, r.Cost)
	st.Remaining = max(st.Limit-st.Used, 0)
	st.Receipt = b.batch.receipt
}

// hideTokens makes the store's answer show what was used, without the tokens that are
// left.
func (b *Bucket) hideTokens(r *store.Request, st *store.State, m *Moment) {
	if v := b.batch; v == nil || r.Batch == 0 || st.Err != nil || !v.isOpen(m.Now+b.clock) {
		return
	}
	st.Used = max(st.Used-b.batch.tokens, 0)
	if st.Penalty == 0 {
		st.Remaining = max(st.Limit-st.Used, 0)
	}
}

// Loan is the part of a request's cost that comes from a batch, while the
// store decides about the rest. The zero value is none.
type Loan struct {
	tokens  int64
	receipt store.Receipt
	resets  int64
}

// Borrow takes as much of a request's cost out of the batch as it has, and makes the request
// cost the rest.
func (b *Bucket) Borrow(r *store.Request, m *Moment) Loan {
	tokens := b.tokens(r, m)
	if tokens == 0 {
		return Loan{}
	}
	v := b.batch
	v.tokens -= tokens
	v.lent += tokens
	r.Cost -= tokens
	return Loan{tokens, v.receipt, v.resets}
}

// Repay ends a loan, once the store has answered about the rest, and
// makes the answer show what was used without the tokens that are left. What it returns is
// refunded, if it has a cost.
func (b *Bucket) Repay(r *store.Request, l Loan, st *store.State, m *Moment) (refund store.Request) {
	v := b.batch
	if l.tokens > 0 {
		v.lent -= l.tokens
	}
	switch {
	case l.tokens == 0:
	case st.Err != nil && r.Cost == 0:
		// The store was only to be heard: the tokens cover the whole cost.
		whole := *r
		whole.Cost = l.tokens
		b.showTokens(&whole, st, m)
		st.Receipt = l.receipt
		return refund
	case st.Err == nil && st.Allowed:
		if st.Receipt != l.receipt {
			// The cost is of two windows or buckets, and cannot be refunded.
			st.Receipt = store.Receipt{}
		}
	case v.resets != l.resets:
		// The tokens are no part of the bucket since its reset.
		m.Counts.TokensExpired += l.tokens
	case v.receipt == l.receipt:
		v.tokens += l.tokens
	default:
		// The store knows what is left of the tokens' window.
		m.Counts.TokensReturned += l.tokens
		refund = *r
		refund.Cost, refund.Receipt = l.tokens, l.receipt
	}
	b.hideTokens(r, st, m)
	return refund
}

// Restore puts a refund back into the batch, and reports whether it is of it. The batch takes over what the
// refund would end, unless the store holds it already.
func (b *Bucket) Restore(r *store.Request, m *Moment) bool {
	v := b.batch
	if v == nil || r.Batch == 0 || r.Cost == 0 || v.receipt == (store.Receipt{}) || v.receipt != r.Receipt || m.Now+b.clock >= v.ends {
		return false
	}
	v.tokens += r.Cost
	if v.used = m.Now; v.hold == 0 && r.MayHold() {
		v.hold, r.Hold = r.Hold, store.HearsHeld
	}
	return true
}

// BatchLimit returns the limit whose share decides how many tokens the batch keeps: that of
// the last request that fetched one.
func (b *Bucket) BatchLimit() *store.Request { return &b.batch.request }

// Surplus gives back tokens beyond the ration, or all that were unused for idle
// microseconds. What it returns is refunded, if it has a cost or ends what is held.
func (b *Bucket) Surplus(idle int64, m *Moment) (refund store.Request) {
	v := b.batch
	r := &v.request
	switch ration := batchSize(r, v.size, m.Processes); {
	case v.coming > 0:
		return refund
	case v.tokens == 0:
		return v.ending()
	case m.Now-v.used >= idle:
		refund = v.giveBack()
	case r.Batch == store.BatchAuto && ration > 0 && v.tokens > ration:
		refund = v.refund(v.tokens - ration)
	}
	if m.Now+b.clock < v.ends {
		m.Counts.TokensReturned += refund.Cost
		return refund
	}
	m.Counts.TokensExpired += refund.Cost
	refund.Cost = 0
	return refund
}

// LoseTokens drops the tokens, which nobody can give back.
func (b *Bucket) LoseTokens(m *Moment) {
	v := b.batch
	if v.coming > 0 {
		return
	}
	if v.hold = 0; v.tokens > 0 {
		m.Counts.TokensExpired += v.tokens
		v.waste()
	}
}
