package ledger

import (
	"context"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// resetTimeout bounds the wait for charges in flight, so that they do not arrive
// after the reset.
const resetTimeout = 500 * time.Millisecond

// walkSize is how many entries of a stripe are visited at a time, so that requests need not
// wait for long: see BenchmarkWalk.
const walkSize = 256

// Walk visits the buckets that are known, as [store.Operable] says. A state counts what is in
// flight, and charges that the store has not confirmed.
func (l *Ledger) Walk(reqs []store.Request, about func(i int, r *store.Request) bool, visit func(i int, clientKey string, st *store.State)) {
	asked := l.registry.limits.Asked(reqs)
	var entries []*entry
	var r store.Request
	var st store.State
	for n := range l.registry.stripes {
		p := &l.registry.stripes[n]
		p.mu.Lock()
		entries = slices.AppendSeq(entries[:0], p.entries.all)
		p.mu.Unlock()
		for some := range slices.Chunk(entries, walkSize) {
			p.mu.Lock()
			m := l.moment()
			for _, e := range some {
				i, ok := asked.Find(e.id.Limit)
				if !ok || e.Worth(&m) == core.Expired {
					continue
				}
				r = reqs[i]
				r.ClientKey = e.id.Key
				e.asked.Recall(&r)
				if about(i, &r) {
					if st = e.Estimate(&r, &m); !l.isShadowed(e, &r, st.Used, &m) {
						visit(i, e.id.Key, &st)
					}
				}
			}
			p.mu.Unlock()
		}
	}
}

// isShadowed reports whether the bucket of another owner stands for that of an entry, whose stripe is locked: the
// fullest, or any for that of a shard which is no owner any more.
func (l *Ledger) isShadowed(e *entry, r *store.Request, used int64, m *core.Moment) bool {
	if e.id.Shard == 0 {
		return false
	}
	owners := l.Owners(e.id.Key)
	own := slices.IndexFunc(owners, func(name string) bool { return l.number(name) == e.id.Shard })
	for n, name := range owners {
		id := e.id
		id.Shard = l.number(name)
		other, _ := e.stripe.entries.find(id, id.Hash(l.registry.seed))
		if n == own || other == nil || other.Worth(m) == core.Expired {
			continue
		}
		if its := other.Estimate(r, m).Used; own < 0 || its > used || its == used && n < own {
			return true
		}
	}
	return false
}

// Delays returns why charges wait until a shard executes them again, or nil if none do.
func (l *Ledger) Delays(shard string) error {
	l.registry.mu.Lock()
	defer l.registry.mu.Unlock()
	if queue := l.registry.retryQueues[shard]; queue != nil {
		return queue.why
	}
	return nil
}

// Recall implements [store.Operable].
func (l *Ledger) Recall(r *store.Request) bool {
	e := l.look(r)
	if e == nil {
		return false
	}
	defer e.stripe.mu.Unlock()
	return e.asked.Recall(r)
}

// Account returns what is known of a bucket beyond what the store says, or nil.
func (l *Ledger) Account(r *store.Request) *store.Account {
	e := l.look(r)
	if e == nil {
		return nil
	}
	m := l.moment()
	defer e.stripe.mu.Unlock()
	if e.Worth(&m) == core.Expired {
		return nil
	}
	a := e.Account(r, &m)
	return &a
}

// Reset implements [store.Store]. After an error, what is known stays, and so do, in any case,
// requests in flight. Other processes notice the reset when their trust in the primary's last answer
// runs out.
func (l *Ledger) Reset(ctx context.Context, r store.Request) error {
	// An operator's request says nothing of the client's limit.
	r.Events, r.Burst = 0, 0
	// A response that empties the bucket may outlast its config, as charges do.
	s := l.writer().Remote
	l.sendReset(&r)
	l.awaitCharges(&r, l.registry.clock().Add(resetTimeout))
	err := s.Reset(ctx, r)
	m := l.moment()
	e := l.enter(&r, &m)
	if err != nil {
		e.ResetFailed(&m)
	} else {
		e.ResetDone(&m)
	}
	e.release(&m)
	return err
}

// sendReset notes that a bucket is being emptied, and sends its held charges, for which the
// reset waits.
func (l *Ledger) sendReset(r *store.Request) {
	w, m := l.writer(), l.moment()
	var out outgoing
	e := l.enter(r, &m)
	n := e.ResetSent(&m)
	w.finish(e, &n, nil, &out, &m)
	w.send(&out)
}
