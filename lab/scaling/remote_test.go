package scaling

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// remote is what a ledger is in front of: a primary and a replica that run the
// algorithms, as far away as those of the simulation. It is for bubbles of
// package synctest.
type remote struct {
	mu               sync.Mutex
	primary, replica map[string]algorithm.Bucket
	// made are the calls from the instant measured on until another.
	made            [kinds]float64
	measured, until time.Time
}

var _ ledger.Remote = (*remote)(nil)

func newRemote() *remote {
	return &remote{primary: map[string]algorithm.Bucket{}, replica: map[string]algorithm.Bucket{}}
}

func bucketIn(buckets map[string]algorithm.Bucket, r *store.Request) algorithm.Bucket {
	b, ok := buckets[r.Limit.Zone]
	if !ok {
		b = algorithm.New(r.Limit)
		buckets[r.Limit.Zone] = b
	}
	return b
}

func travelOnce() { time.Sleep(travel * time.Microsecond) }

// note counts a call about one bucket. Leases of processes are none.
func (s *remote) note(k kind, reqs []store.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); !now.Before(s.measured) && now.Before(s.until) && reqs[0].Limit.Algorithm == store.FixedWindow {
		s.made[k] += float64(len(reqs))
	}
}

// write runs an operation in the primary and, some time later, in the replica.
func (s *remote) write(op algorithm.Operation, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range reqs {
		now, r := time.Now().UnixMicro(), reqs[i]
		states[i] = op.Run(bucketIn(s.primary, &r), &r, now)
		time.AfterFunc(lag*time.Microsecond, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			op.Run(bucketIn(s.replica, &r), &r, now)
		})
	}
	return states
}

// Check asks the replica, and the primary where that shows no open window.
func (s *remote) Check(_ context.Context, reqs []store.Request) []store.State {
	if !reqs[0].Primary {
		s.note(check, reqs)
		travelOnce()
		s.mu.Lock()
		st := bucketIn(s.replica, &reqs[0]).View(&reqs[0], time.Now().UnixMicro(), false)
		s.mu.Unlock()
		travelOnce()
		if st.Reset != 0 {
			st.Replica = true
			return []store.State{st}
		}
	}
	return s.call(open, algorithm.Check, reqs, 0)
}

// call makes a call to the primary, after some time.
func (s *remote) call(k kind, op algorithm.Operation, reqs []store.Request, after time.Duration) []store.State {
	s.note(k, reqs)
	time.Sleep(after)
	travelOnce()
	states := s.write(op, reqs)
	travelOnce()
	return states
}

func (s *remote) Charge(_ context.Context, reqs []store.Request) []store.State {
	return s.call(charge, algorithm.Charge, reqs, 0)
}

func (s *remote) Take(_ context.Context, reqs []store.Request) []store.State {
	return s.call(take, algorithm.Take, reqs, 0)
}

func (s *remote) Refund(_ context.Context, reqs []store.Request) []store.State {
	return s.call(refund, algorithm.Refund, reqs, 0)
}

func (s *remote) ChargeDetached(reqs []store.Request) {
	s.ChargeReported(reqs, func(int, store.State) {})
}

func (s *remote) RefundDetached(reqs []store.Request) {
	s.RefundReported(reqs, func(int, store.State) {})
}

func (s *remote) ChargeReported(reqs []store.Request, report func(int, store.State)) {
	go s.report(charge, algorithm.Charge, reqs, report)
}

func (s *remote) RefundReported(reqs []store.Request, report func(int, store.State)) {
	go s.report(refund, algorithm.Refund, reqs, report)
}

func (s *remote) report(k kind, op algorithm.Operation, reqs []store.Request, report func(int, store.State)) {
	for i, st := range s.call(k, op, reqs, linger*time.Microsecond) {
		report(i, st)
	}
}

func (*remote) Owner(string) string { return "shard" }
