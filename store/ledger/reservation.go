package ledger

import (
	"context"
	"crypto/rand"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
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
	// idleBatch is how long, in microseconds, tokens may lie unused before they
	// are given back; reapPause is the interval at which that is checked.
	idleBatch = 1_000_000
	reapPause = 250 * time.Millisecond
	// shortPart is the inverse of the part of a window for which no batch is
	// fetched after the smallest one was refused.
	shortPart = 10

	// membershipZone is the zone in which processes count themselves. No
	// configured zone can have its name.
	membershipZone = "*processes"
	// membershipPeriod is the interval at which a process renews its lease, and
	// membershipLease how long the lease lasts otherwise.
	membershipPeriod = time.Second
	membershipLease  = 5 * time.Second
)

// reservation holds the tokens of one bucket that were taken in advance.
type reservation struct {
	// tokens are left, of the period, which ends at ends by the store's clock.
	tokens       int64
	period, ends int64
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
	waiters         []*waiter
	// isStale is set if the bucket was reset while the batch is in flight.
	isStale bool
	// resets counts the resets of the bucket.
	resets int64
	// request is a request of the bucket, to give tokens back.
	request store.Request
}

func (v *reservation) isEmpty() bool { return v.tokens == 0 && v.coming == 0 && v.lent == 0 }

// BatchSize returns the size of the next batch, given the last one (0: none yet) and the
// number of processes that share the limit. Nothing is taken in
// advance while their number is unknown.
func BatchSize(r *store.Request, last, processes int64) int64 {
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

// GrownBatch returns the next size, given how many microseconds a batch of size lasted:
// a larger one if that is less than the limit allows.
func GrownBatch(r *store.Request, size, processes, took int64) int64 {
	if size == 0 || processes == 0 || r.Capacity() < 1 {
		return size
	}
	share := float64(r.Limit.Window.Microseconds()) * float64(size) * float64(processes) / float64(r.Capacity())
	if float64(took) > share {
		return size
	}
	return min(size+(size+1)/2, store.MaxInteger)
}

func (v *reservation) waste() {
	v.size = max(v.size/2, 1)
	v.tokens = 0
}

// shortfall shrinks the next batch after the store refused one.
func (v *reservation) shortfall(r *store.Request, st *store.State) {
	v.size = max(min(v.size, st.Remaining)/2, 1)
	if r.Batch != store.BatchAuto || st.Remaining <= 1 {
		if st.Now >= v.short {
			v.shortOf = 0
		}
		v.short = min(st.Reset, st.Now+r.Limit.Window.Microseconds()/shortPart)
		v.shortOf = max(v.shortOf, r.Capacity())
	}
}

func (v *reservation) isShort(r *store.Request, storeNow int64) bool {
	return storeNow < v.short && r.Capacity() <= v.shortOf
}

// isOpen reports whether there are tokens of a period that has not ended.
func (v *reservation) isOpen(storeNow int64) bool { return v.tokens > 0 && storeNow < v.ends }

// isDue reports whether a request has to ask the store although there are tokens: others
// may have set a penalty. While the store is silent, none does.
func (v *reservation) isDue(e *entry, now, trust int64) bool {
	return v.isOpen(now+e.clock) && !e.silent && now-v.heard > trust
}

// wait lets the request at a place have a part of the batch in flight, if enough
// of it is unclaimed: no waiter waits in vain for a batch that arrives.
func (v *reservation) wait(t *taking, place int) bool {
	cost := t.reqs[place].Cost
	if cost == 0 || v.claimed+cost > v.coming {
		return false
	}
	v.claimed += cost
	v.waiters = append(v.waiters, t.wait(place))
	return true
}

// add takes in a batch, and returns the refund of tokens of another period.
func (v *reservation) add(r *store.Request, st *store.State, size, now int64) (leftover store.Request) {
	period := st.Receipt.Period
	if v.tokens > 0 && v.period != period {
		leftover = v.giveBack()
	}
	v.period, v.ends = period, period
	if algorithm.Of(r.Limit.Algorithm).Clocked {
		v.ends += r.Limit.Window.Microseconds()
	}
	v.tokens += size
	v.size, v.began, v.used = size, now, now
	v.request = *r
	return leftover
}

// abandon drops the tokens of a bucket that was reset, and returns their number.
func (v *reservation) abandon() (tokens int64) {
	tokens, v.tokens = v.tokens, 0
	v.period, v.ends, v.began, v.short = 0, 0, 0, 0
	v.isStale = v.coming > 0
	v.resets++
	return tokens
}

// surplus returns the refund of tokens beyond the ration, or of all that were idle.
func (v *reservation) surplus(l *Ledger, idle, now int64) store.Request {
	if v.tokens == 0 || v.coming > 0 {
		return store.Request{}
	}
	if l == nil || now-v.used >= idle {
		return v.giveBack()
	}
	r := &v.request
	if ration := BatchSize(r, v.size, l.processes(r)); r.Batch == store.BatchAuto && ration > 0 && v.tokens > ration {
		return v.refund(v.tokens - ration)
	}
	return store.Request{}
}

func (v *reservation) giveBack() store.Request {
	r := v.refund(v.tokens)
	v.waste()
	return r
}

// refund removes tokens, and returns the request that refunds them.
func (v *reservation) refund(tokens int64) store.Request {
	v.tokens -= tokens
	r := v.request
	r.Cost, r.Receipt = tokens, store.Receipt{Period: v.period}
	return r
}

// noteReserved has unused tokens of the entry, whose page is locked, given back.
func (b *Books) noteReserved(e *entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.reserved) == 0 {
		go b.reap()
	}
	b.reserved[e] = true
}

func (b *Books) reap() {
	for {
		time.Sleep(reapPause)
		if b.giveBack(idleBatch) {
			return
		}
	}
}

// giveBack gives back the tokens that were unused for idle, and those beyond the
// rations, which shrink as processes join. It reports whether none is left.
func (b *Books) giveBack(idle int64) bool {
	b.mu.Lock()
	entries := slices.Collect(maps.Keys(b.reserved))
	b.mu.Unlock()
	l, now := b.current(), b.now()
	var refunds []store.Request
	for _, e := range entries {
		e.page.mu.Lock()
		v := e.reservation
		switch refund := v.surplus(l, idle, now); {
		case refund.Cost == 0:
		case l != nil && now+e.clock < v.ends:
			e.page.counts.TokensReturned += refund.Cost
			refunds = append(refunds, refund)
		default:
			e.page.counts.TokensExpired += refund.Cost
		}
		if v.tokens == 0 {
			b.mu.Lock()
			delete(b.reserved, e)
			b.mu.Unlock()
		}
		e.page.mu.Unlock()
	}
	l.refund(refunds)
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.reserved) == 0
}

// membership counts the processes that take batches from a store: each holds a
// lease in it.
type membership struct {
	// count is the number of processes; 0 while it is unknown, or others may not
	// have counted this one.
	count atomic.Int64
	begin sync.Once
	life  context.Context
	end   context.CancelFunc
	ended sync.WaitGroup
}

// processes is the number of processes that share the limit of r, or 0 while it
// is unknown.
func (l *Ledger) processes(r *store.Request) int64 {
	if r.Batch != store.BatchAuto {
		return 1
	}
	l.membership.begin.Do(func() { l.membership.ended.Go(l.keepMembership) })
	return l.membership.count.Load()
}

// keepMembership renews the lease until the view ends, and gives it back.
func (l *Ledger) keepMembership() {
	m := &l.membership
	lease := []store.Request{{
		Limit:  &store.Limit{Zone: membershipZone, Algorithm: store.Concurrency, Window: membershipLease},
		Events: store.MaxMembers, Cost: 1, ID: rand.Text(),
	}}
	tick := time.NewTicker(membershipPeriod)
	defer tick.Stop()
	for isCounted := false; ; {
		if st := store.Answers(m.life, l.store.Charge, lease)[0]; st.Err == nil {
			if isCounted {
				m.count.Store(max(st.Used, 1))
			}
			isCounted = true
		}
		select {
		case <-tick.C:
		case <-m.life.Done():
			l.store.RefundReported(lease, nil)
			return
		}
	}
}
