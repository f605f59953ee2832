package ledger

import (
	"context"
	"crypto/rand"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// autoStart is the part of the limit that the first batch is, inverted.
	autoStart = 1000
	// idleBatch is how long, in microseconds, a batch may lie unused before it
	// is given back.
	idleBatch = 1_000_000
	// shortPart is the part of a window, inverted, for which no batch is fetched
	// after one that cannot become smaller found too little left.
	shortPart = 10
)

// reservation is what was taken of one bucket in advance.
type reservation struct {
	// tokens are left, taken in the period, which ends by the store's clock.
	tokens int64
	period int64
	ends   int64
	// lent is what requests have borrowed that wait for the rest of their cost.
	lent int64
	// size is that of the last batch, or what is left to be learnt from it;
	// 0 if there was none.
	size int64
	// began is when the last batch came, or 0 once it was learnt from; used is
	// when some of it was last used or given back.
	began, used int64
	// short is the store's instant before which no batch is fetched, because
	// there was not enough left.
	short int64
	// coming is how much is being fetched, or 0; claims wait for it.
	coming  int64
	claimed int64
	claims  []*claim
	// isStale is set if the bucket was reset since that is being fetched.
	isStale bool
	// resets is how often the bucket was reset.
	resets int64
	// request is one for the bucket, to give tokens back.
	request store.Request
}

// claim is a request that waits for a batch.
type claim struct {
	*taking
	place int
}

func (v *reservation) isEmpty() bool { return v.tokens == 0 && v.coming == 0 && v.lent == 0 }

// ration is how large the next batch is, if so many processes share the limit.
// Nothing is taken in advance while their number is unknown.
func (v *reservation) ration(r *store.Request, processes int64) int64 {
	capacity := max(r.Capacity(), 0)
	if r.Batch != store.BatchAuto {
		return min(r.Batch, capacity)
	}
	if processes == 0 {
		return 0
	}
	size := v.size
	if size == 0 {
		size = capacity / autoStart
	}
	return min(max(size, 1), max((capacity/100*r.BatchShare+capacity%100*r.BatchShare/100)/processes, 1), capacity)
}

// adapt learns from a batch that is used up.
func (v *reservation) adapt(r *store.Request, processes, now int64) {
	if v.size == 0 || processes == 0 || r.Capacity() < 1 {
		return
	}
	share := float64(r.Limit.Window.Microseconds()) * float64(v.size) * float64(processes) / float64(r.Capacity())
	if float64(now-v.began) <= share {
		v.size = min(v.size+(v.size+1)/2, store.MaxInteger)
	}
}

// waste learns from tokens that nobody used.
func (v *reservation) waste() {
	v.size = max(v.size/2, 1)
	v.tokens = 0
}

// shortfall learns from a batch that was refused.
func (v *reservation) shortfall(r *store.Request, st *store.State) {
	v.size = max(min(v.size, st.Remaining)/2, 1)
	if r.Batch != store.BatchAuto || st.Remaining <= 1 {
		v.short = min(st.Reset, st.Now+r.Limit.Window.Microseconds()/shortPart)
	}
}

// add takes in a batch, and returns leftovers of another period, which cannot
// be used any more.
func (v *reservation) add(r *store.Request, st *store.State, size, now int64) (leftover store.Request) {
	period := st.Receipt.Period
	if v.tokens > 0 && v.period != period {
		leftover = v.giveBack()
	}
	v.period, v.ends = period, period
	if r.Limit.Algorithm == store.SlidingWindow {
		v.ends += r.Limit.Window.Microseconds()
	}
	v.tokens += size
	v.size, v.began, v.used = size, now, now
	v.request = *r
	return leftover
}

// abandon drops what was taken of a bucket that was reset, and returns how much
// that was.
func (v *reservation) abandon() (tokens int64) {
	tokens, v.tokens = v.tokens, 0
	v.period, v.ends, v.began, v.short = 0, 0, 0, 0
	v.isStale = v.coming > 0
	v.resets++
	return tokens
}

// use spends some tokens, if there are so many that can still be used.
func (v *reservation) use(cost, storeNow, now int64) bool {
	if v.tokens < cost || storeNow >= v.ends {
		return false
	}
	v.tokens -= cost
	v.used = now
	return true
}

// surplus returns the refund of what is too much: all, if it was not used for so
// long.
func (v *reservation) surplus(l *Ledger, idle, now int64) store.Request {
	if v.tokens == 0 || v.coming > 0 {
		return store.Request{}
	}
	if l == nil || now-v.used >= idle {
		return v.giveBack()
	}
	r := &v.request
	if ration := v.ration(r, l.processes(r)); r.Batch == store.BatchAuto && ration > 0 && v.tokens > ration {
		return v.refund(v.tokens - ration)
	}
	return store.Request{}
}

// giveBack returns the refund of all tokens.
func (v *reservation) giveBack() store.Request {
	r := v.refund(v.tokens)
	v.waste()
	return r
}

// refund takes out so many tokens, and returns the refund of them.
func (v *reservation) refund(tokens int64) store.Request {
	v.tokens -= tokens
	r := v.request
	r.Cost, r.Receipt = tokens, store.Receipt{Period: v.period}
	return r
}

const (
	// membershipZone is where processes count themselves. No zone can be called
	// so.
	membershipZone = "*processes"
	// membershipPeriod is how often a process says that it is there, and
	// membershipLease is how long it counts if it does not.
	membershipPeriod = time.Second
	membershipLease  = 5 * time.Second
)

// membership counts the processes that take batches from a store: each holds a
// lease there.
type membership struct {
	ledger *Ledger
	// count is how many there are; 0 while that is unknown, or the others may
	// not know of this one.
	count atomic.Int64
	begin sync.Once
	life  context.Context
	end   context.CancelFunc
	ended sync.WaitGroup
}

func newMembership(l *Ledger) *membership {
	p := &membership{ledger: l}
	p.life, p.end = context.WithCancel(context.Background())
	return p
}

// processes is how many processes share the limit of r, or 0 if that is not
// known yet.
func (l *Ledger) processes(r *store.Request) int64 {
	if r.Batch != store.BatchAuto {
		return 1
	}
	l.membership.begin.Do(func() { l.membership.ended.Go(l.membership.keep) })
	return l.membership.count.Load()
}

// keep renews the lease, and gives it back at the end.
func (p *membership) keep() {
	lease := []store.Request{{
		Limit:  &store.Limit{Zone: membershipZone, Algorithm: store.Concurrency, Window: membershipLease},
		Events: store.MaxMembers, Cost: 1, ID: rand.Text(),
	}}
	tick := time.NewTicker(membershipPeriod)
	defer tick.Stop()
	for said := false; ; {
		if st := p.ledger.store.Charge(p.life, lease)[0]; st.Err == nil {
			if said {
				p.count.Store(max(st.Used, 1))
			}
			said = true
		}
		select {
		case <-tick.C:
		case <-p.life.Done():
			p.ledger.store.RefundDetached(lease)
			return
		}
	}
}

// leave ends the lease.
func (p *membership) leave() {
	p.end()
	p.ended.Wait()
}
