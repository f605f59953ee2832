package calls

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The delays in virtual time.
const (
	travel = 500 * time.Microsecond // of a message between a process and a server
	linger = 2 * time.Millisecond   // how long charges and refunds wait for others
	lag    = time.Millisecond       // of the replica
	serves = 2 * time.Millisecond   // the duration of an admitted request
)

// kind is one of the ways to call Redis.
type kind int

const (
	check   kind = iota // asks a replica
	opening             // asks the primary, which opens a window if there is none
	charge
	take
	refund
	kinds
)

// remote is what a ledger is in front of: a primary and a replica that run the
// algorithms, in virtual time.
type remote struct {
	mu               sync.Mutex
	primary, replica map[string]algorithm.Bucket
	made             [kinds]float64 // from the instant measured on until another
	cost             [kinds]int64   // that was written, at any time
	measured, until  time.Time
}

var _ store.Remote = (*remote)(nil)

func bucketIn(buckets map[string]algorithm.Bucket, r *store.Request) algorithm.Bucket {
	b, ok := buckets[r.Limit.Zone]
	if !ok {
		b = algorithm.New(r.Limit)
		buckets[r.Limit.Zone] = b
	}
	return b
}

// note counts a call about one bucket. Leases of processes are none.
func (s *remote) note(k kind, reqs []store.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); !now.Before(s.measured) && now.Before(s.until) && reqs[0].Limit.Algorithm == store.FixedWindow {
		s.made[k] += float64(len(reqs))
	}
}

// write runs an operation in the primary and, some time later, in the replica.
func (s *remote) write(k kind, op algorithm.Operation, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range reqs {
		now, r := time.Now().UnixMicro(), reqs[i]
		states[i] = op.Run(bucketIn(s.primary, &r), &r, now)
		if (k != take || states[i].Allowed) && r.Limit.Algorithm == store.FixedWindow {
			s.cost[k] += r.Cost
		}
		time.AfterFunc(lag, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			op.Run(bucketIn(s.replica, &r), &r, now)
		})
	}
	return states
}

// Check asks the replica, and the primary where that shows no open window.
func (s *remote) Check(_ context.Context, asks []*store.Ask) {
	if !asks[0].Primary {
		s.note(check, requestsOf(asks))
		time.Sleep(travel)
		s.mu.Lock()
		st := bucketIn(s.replica, &asks[0].Request).View(&asks[0].Request, time.Now().UnixMicro(), false)
		s.mu.Unlock()
		time.Sleep(travel)
		if st.Reset != 0 {
			st.Replica = true
			asks[0].State = st
			return
		}
	}
	s.answer(opening, algorithm.Check, asks)
}

func requestsOf(asks []*store.Ask) (reqs []store.Request) {
	for _, a := range asks {
		reqs = append(reqs, a.Request)
	}
	return reqs
}

// answer makes a call to the primary, and waits for it.
func (s *remote) answer(k kind, op algorithm.Operation, asks []*store.Ask) {
	for i, st := range s.call(k, op, requestsOf(asks), 0) {
		asks[i].State = st
	}
}

// call makes a call to the primary, after some time.
func (s *remote) call(k kind, op algorithm.Operation, reqs []store.Request, after time.Duration) []store.State {
	s.note(k, reqs)
	time.Sleep(after + travel)
	states := s.write(k, op, reqs)
	time.Sleep(travel)
	return states
}

func (s *remote) Charge(_ context.Context, asks []*store.Ask) {
	s.answer(charge, algorithm.Charge, asks)
}

func (s *remote) Take(_ context.Context, asks []*store.Ask) {
	s.answer(take, algorithm.Take, asks)
}

func (s *remote) Refund(_ context.Context, asks []*store.Ask) {
	s.answer(refund, algorithm.Refund, asks)
}

func (s *remote) Penalize(_ context.Context, asks []*store.Ask) {
	s.answer(charge, algorithm.Penalize, asks)
}

func (s *remote) Peek(ctx context.Context, asks []*store.Ask) {
	s.Check(ctx, asks)
}

func (*remote) Reset(context.Context, store.Request) error { return errors.ErrUnsupported }

func (s *remote) PenalizeDetached(reqs []*store.Request) {
	go s.call(charge, algorithm.Penalize, storetest.Posted(reqs), linger)
}

func (*remote) Hurry(string) {}

func (*remote) Warm(context.Context) {}

func (s *remote) ChargeReported(reqs []*store.Request, report func(int, store.State)) {
	go s.report(charge, algorithm.Charge, reqs, report)
}

func (s *remote) RefundReported(reqs []*store.Request, report func(int, store.State)) {
	go s.report(refund, algorithm.Refund, reqs, report)
}

func (s *remote) report(k kind, op algorithm.Operation, reqs []*store.Request, report func(int, store.State)) {
	for i, st := range s.call(k, op, storetest.Posted(reqs), linger) {
		if report != nil {
			report(i, st)
		}
	}
}

func (*remote) Owner(string) string { return "shard" }

func (*remote) Owners(string) []string { return []string{"shard"} }

// virtual is the traffic of one client through the ledgers of some processes in turn.
type virtual struct {
	processes int
	before    bool
	batch     int64
	limit     int64
	warm      time.Duration // before anything is counted; 0 means 2.5 s
}

const virtualWindow = 4 * time.Second

// perRequest sends requests at random instants, and returns what calls one costs. It
// requires that the servers hold what was admitted.
func (v virtual) perRequest(t *testing.T, rate float64, counted time.Duration) (one [kinds]float64) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		servers := &remote{primary: map[string]algorithm.Bucket{}, replica: map[string]algorithm.Bucket{}}
		servers.measured = start.Add(max(v.warm, 5*time.Second/2))
		servers.until = servers.measured.Add(counted)
		ledgers := make([]*ledger.Ledger, v.processes)
		// Charges that wait behind another one when their window ends are given up.
		var expired atomic.Int64
		opts := usual
		opts.OnUndelivered = func(_ string, _ *store.Limit, _ algorithm.Operation, requests int64, _ error) { expired.Add(requests) }
		for i := range ledgers {
			ledgers[i] = ledger.New(ledger.NewRegistry(nil), servers, opts)
		}
		r := store.Request{
			Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: virtualWindow},
			ClientKey: "client", Events: v.limit, Cost: 1, Batch: v.batch,
		}
		var running sync.WaitGroup
		var admitted atomic.Int64
		random, requests := rand.New(rand.NewPCG(2026, 1)), 0.0
		for at, n := start, 0; ; n++ {
			if at = at.Add(time.Duration(random.ExpFloat64() / rate * float64(time.Second))); !at.Before(servers.until) {
				break
			}
			time.Sleep(time.Until(at))
			if !at.Before(servers.measured) {
				requests++
			}
			running.Go(func() { admitted.Add(v.send(ledgers[n%len(ledgers)], r)) })
		}
		running.Wait()
		for _, l := range ledgers {
			l.Flush(t.Context())
			l.Leave()
		}
		time.Sleep(time.Second) // What was given back arrives.
		if requests == 0 {
			t.Fatalf("%+v: no request was counted", v)
		}
		held, n := servers.cost[charge]+expired.Load()+servers.cost[take]-servers.cost[refund], admitted.Load()
		if held < n || v.batch == 0 && held > n {
			t.Errorf("%+v: %d admitted, %d charged, %d expired, %d taken, %d given back", v, n, servers.cost[charge], expired.Load(), servers.cost[take], servers.cost[refund])
		}
		for k, n := range servers.made {
			one[k] = n / requests
		}
	})
	return one
}

// send makes one request, and returns how many were admitted.
func (v virtual) send(l *ledger.Ledger, r store.Request) int64 {
	reqs := []store.Request{r}
	if v.before {
		if store.Answers(context.Background(), l.Take, reqs)[0].Allowed {
			return 1
		}
		return 0
	}
	if !store.Answers(context.Background(), l.Admit, reqs)[0].Allowed {
		return 0
	}
	time.Sleep(serves)
	l.Settle(storetest.Posts(reqs), nil)
	return 1
}

func sum(one [kinds]float64) (all float64) {
	for _, n := range one {
		all += n
	}
	return all
}

// TestLedgerSavesCalls are the savings of which docs/capacity.md tells.
func TestLedgerSavesCalls(t *testing.T) {
	const wide, tight = 1_000_000, 1_000
	alone := virtual{processes: 1, limit: wide}.perRequest(t, 40, virtualWindow)
	spread := virtual{processes: 4, limit: wide}.perRequest(t, 40, virtualWindow)
	if alone[check] > 0.5*spread[check] {
		t.Errorf("%.2f checks a request of a client that comes to one process, %.2f otherwise", alone[check], spread[check])
	}
	if hot := (virtual{processes: 2, limit: wide}).perRequest(t, 8_000, virtualWindow); hot[charge] > 0.2 || hot[check] > 0.5 {
		t.Errorf("a hot client costs %.2f charges and %.2f checks a request", hot[charge], hot[check])
	}
	for _, v := range []virtual{{processes: 4, limit: tight}, {processes: 4, limit: tight, before: true}} {
		const rate = 5_000
		// Until it is full, and what each process asks about a client that is.
		if a := v.perRequest(t, rate, virtualWindow); rate*sum(a) > 3*(tight/virtualWindow.Seconds()+4) {
			t.Errorf("%+v: a client that is over its limit costs %.0f calls a second", v, rate*sum(a))
		}
	}
}

// TestBatchesServeHotClientsOnly requires that batches cut the takes of a hot client to a
// fraction, and make a rare one dearer.
func TestBatchesServeHotClientsOnly(t *testing.T) {
	fixed := virtual{processes: 4, limit: 1_000_000, before: true, batch: 1_000}
	if c := fixed.perRequest(t, 4_000, virtualWindow); sum(c) > 0.01 {
		t.Errorf("batch: %.4f calls a request of a hot client", sum(c))
	}
	auto := virtual{processes: 4, limit: 4_000, before: true, batch: store.BatchAuto, warm: 10 * virtualWindow}
	if c := auto.perRequest(t, 800, virtualWindow); sum(c) > 0.1 {
		t.Errorf("batch auto: %.4f calls a request of a client near its limit", sum(c))
	}
	auto.limit, auto.warm = 1_000_000, 0
	for _, v := range []virtual{auto, fixed} {
		if c := v.perRequest(t, 0.02, 10*time.Minute); sum(c) < 1.5 {
			t.Errorf("%+v: %.2f calls a request of a client that comes once", v, sum(c))
		}
	}
}

// TestBatchAutoShrinksFarBelowTheLimit: what is left of a batch when its window ends halves
// the next, and nothing makes it grow again.
func TestBatchAutoShrinksFarBelowTheLimit(t *testing.T) {
	v := virtual{processes: 4, limit: 8_000, before: true, batch: store.BatchAuto, warm: 10 * virtualWindow}
	near, far := v.perRequest(t, 1_800, virtualWindow), v.perRequest(t, 200, virtualWindow)
	if sum(far) < 5*sum(near) {
		t.Errorf("%.4f calls a request at 90 %% of the limit, %.4f at 10 %%", sum(near), sum(far))
	}
}
