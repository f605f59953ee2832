package stores

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// countingModule counts how often its store is opened and closed.
type countingModule struct{ opened, closed atomic.Int64 }

func (m *countingModule) OpenStore(string) (store.Store, error) {
	m.opened.Add(1)
	return memory.New(memory.NewBuckets(), memory.Options{}), nil
}
func (m *countingModule) CloseStore()            { m.closed.Add(1) }
func (m *countingModule) OnErrorDefault() string { return OnErrorAllow }

func newHandle(t *testing.T) (*Handle, *countingModule) {
	t.Helper()
	m := new(countingModule)
	h := &Handle{Name: t.Name(), Module: m, Logger: zap.NewNop()}
	if _, err := h.Enter(); err != nil {
		t.Fatal(err)
	}
	return h, m
}

func TestStoreIsClosedByTheLastToLeave(t *testing.T) {
	h, m := newHandle(t)
	if _, err := h.Enter(); err != nil {
		t.Fatal(err)
	}
	h.Unload()
	if m.closed.Load() != 0 {
		t.Fatal("the store is closed under a request")
	}
	h.Leave()
	if m.closed.Load() != 1 {
		t.Fatalf("the store is closed %d times", m.closed.Load())
	}
}

func TestOvertakenRequestOpensTheStoreAgain(t *testing.T) {
	h, m := newHandle(t)
	h.Unload()
	open, err := h.Enter()
	if err != nil || open == nil || open.Base == nil {
		t.Fatalf("no store: %v", err)
	}
	h.Leave()
	if m.opened.Load() != 2 || m.closed.Load() != 2 {
		t.Fatalf("opened %d times, closed %d times", m.opened.Load(), m.closed.Load())
	}
}

func TestStoreIsNeverUsedClosed(t *testing.T) {
	h, m := newHandle(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5000 {
				open, err := h.Enter()
				if err != nil || open == nil {
					t.Errorf("entered nothing: %v", err)
					return
				}
				if m.opened.Load() <= m.closed.Load() {
					t.Error("entered a closed store")
				}
				h.Leave()
			}
		})
	}
	h.Unload()
	wg.Wait()
	if o, c := m.opened.Load(), m.closed.Load(); o != c || o < 1 {
		t.Errorf("opened %d times, closed %d times", o, c)
	}
}

// remoteModule opens stores that have other writers, as far as a ledger knows.
type remoteModule struct{ remote *remoteStore }

func (m remoteModule) OpenStore(string) (store.Store, error) { return m.remote, nil }
func (remoteModule) CloseStore()                             {}
func (remoteModule) OnErrorDefault() string                  { return OnErrorAllow }

// remoteStore is a store in memory that cannot be reached while it is away.
type remoteStore struct {
	*memory.Store
	away atomic.Bool
	// resets, if it is there, is what each reset waits for, and each refund that is reported.
	resets chan struct{}
}

func (s *remoteStore) Reset(ctx context.Context, r store.Request) error {
	if s.resets != nil {
		<-s.resets
	}
	return s.Store.Reset(ctx, r)
}

func (s *remoteStore) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	if s.away.Load() {
		for i := range reqs {
			report(i, store.State{Err: store.ErrNotExecuted})
		}
		return
	}
	for i, st := range store.Answers(context.Background(), s.Charge, storetest.Posted(reqs)) {
		report(i, st)
	}
}

func (s *remoteStore) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	if s.resets != nil {
		go func() {
			<-s.resets
			for i, st := range store.Answers(context.Background(), s.Refund, storetest.Posted(reqs)) {
				report(i, st)
			}
		}()
		return
	}
	for i, st := range store.Answers(context.Background(), s.Refund, storetest.Posted(reqs)) {
		report(i, st)
	}
}

func (s *remoteStore) PenalizeDetached(reqs []*store.Request) {
	store.Answers(context.Background(), s.Penalize, storetest.Posted(reqs))
}

func (*remoteStore) Owner(string) string { return "a" }

func (*remoteStore) Owners(string) []string { return []string{"a"} }

func (*remoteStore) Hurry(string) {}

func (*remoteStore) Warm(context.Context) {}

var _ store.Remote = (*remoteStore)(nil)

func newRemoteHandle(t *testing.T) (*Handle, *remoteStore) {
	t.Helper()
	s := &remoteStore{Store: memory.New(memory.NewBuckets(), memory.Options{})}
	h := &Handle{Name: t.Name(), Module: remoteModule{s}, Logger: zap.NewNop()}
	if _, err := h.Enter(); err != nil {
		t.Fatal(err)
	}
	return h, s
}

// TestRejectedConfigDeliversNothing of others, though it has started, and what it served itself counts in its own store.
func TestRejectedConfigDeliversNothing(t *testing.T) {
	running, good := newRemoteHandle(t)
	defer running.Unload()
	running.Run()
	rejected, bad := newRemoteHandle(t)
	r := store.Request{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: "alice", Events: 100, Cost: 1,
	}
	charge := func() { running.open.Load().Charge([]*store.Request{new(r)}) }
	charge()
	own, err := rejected.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer rejected.Leave()
	other := r
	other.ClientKey = "bob"
	own.Charge([]*store.Request{new(other)})
	rejected.Unload()
	charge()
	own.Charge([]*store.Request{new(other)})
	good.awaitUsed(t, r, 2)
	bad.awaitUsed(t, other, 2)
	bad.awaitUsed(t, r, 0)
	good.awaitUsed(t, other, 0)
}

// TestConfigThatHasEndedDoesNotRun: its store may end just before Caddy's acceptance is noticed.
func TestConfigThatHasEndedDoesNotRun(t *testing.T) {
	running, good := newRemoteHandle(t)
	defer running.Unload()
	running.Run()
	ended, bad := newRemoteHandle(t)
	if _, err := ended.Enter(); err != nil {
		t.Fatal(err)
	}
	defer ended.Leave()
	ended.Unload()
	ended.Run()
	r := store.Request{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: "alice", Events: 100, Cost: 1,
	}
	running.open.Load().Charge([]*store.Request{new(r)})
	good.awaitUsed(t, r, 1)
	bad.awaitUsed(t, r, 0)
}

// TestOvertakenRequestChargesTheRunningStore: the shards of the running config may own
// its bucket by now.
func TestOvertakenRequestChargesTheRunningStore(t *testing.T) {
	overtaken, _ := newRemoteHandle(t)
	overtaken.Run()
	running, good := newRemoteHandle(t)
	defer running.Unload()
	running.Run()
	overtaken.Unload()
	open, err := overtaken.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer overtaken.Leave()
	r := store.Request{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: "alice", Events: 100, Cost: 1,
	}
	open.Charge([]*store.Request{new(r)})
	good.awaitUsed(t, r, 1)
}

// TestForgivingIsBounded: so many buckets of the store are emptied at the same time, and no more.
func TestForgivingIsBounded(t *testing.T) {
	h, s := newRemoteHandle(t)
	defer h.Unload()
	h.Run()
	s.resets = make(chan struct{})
	limit := &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	ended := make(chan error, maxForgiving)
	for i := range maxForgiving {
		h.Forgive(store.Request{Limit: limit, ClientKey: fmt.Sprint(i)}, func(_ *Opened, err error) { ended <- err })
	}
	another := []store.Request{{Limit: limit, ClientKey: "another", Events: 10, Cost: 1}}
	open, err := h.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Leave()
	store.Answers(t.Context(), open.Local.Buckets.Charge, another)
	var refused error
	h.Forgive(another[0], func(_ *Opened, err error) { refused = err })
	if !errors.Is(refused, errForgiving) {
		t.Errorf("one more: %v", refused)
	}
	if n := store.Answers(t.Context(), open.Local.Buckets.Peek, another)[0].Used; n != 0 {
		t.Errorf("the local counts have %d of it, want 0", n)
	}
	close(s.resets)
	for range maxForgiving {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// TestReportedRefundsAreBounded: so many are awaited at the same time, and others are not sent, nor
// forgotten.
func TestReportedRefundsAreBounded(t *testing.T) {
	h, s := newRemoteHandle(t)
	defer h.Unload()
	h.Run()
	s.resets = make(chan struct{})
	limit := &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	ended := make(chan error, maxForgiving+1)
	refund := func(client int) {
		r := store.Request{Limit: limit, ClientKey: strconv.Itoa(client), Events: 10, Cost: 1}
		h.RefundReported(r, func(st store.State) { ended <- st.Err })
	}
	for client := range maxForgiving {
		refund(client)
	}
	refund(maxForgiving)
	if err := <-ended; !errors.Is(err, errForgiving) || !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("one more: %v", err)
	}
	close(s.resets)
	for range maxForgiving {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if n := h.open.Load().forgiving.Load(); n != 0 {
		t.Errorf("%d count as awaited although all have arrived", n)
	}
}

// TestLeaseEndsWhereItWasTaken, although another config runs: leases are not copied to
// another owner.
func TestLeaseEndsWhereItWasTaken(t *testing.T) {
	overtaken, first := newRemoteHandle(t)
	overtaken.Run()
	open, err := overtaken.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer overtaken.Leave()
	r := store.Request{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.Concurrency, Window: time.Hour},
		ClientKey: "alice", Events: 100, Cost: 1, ID: "lease",
	}
	open.Take(t.Context(), store.Asks([]store.Request{r}))
	first.awaitUsed(t, r, 1)
	running, _ := newRemoteHandle(t)
	defer running.Unload()
	running.Run()
	overtaken.Unload()
	open.Refund([]*store.Request{new(r)})
	first.awaitUsed(t, r, 0)
}

// awaitUsed waits until the bucket of r has that count.
func (s *remoteStore) awaitUsed(t *testing.T, r store.Request, want int64) {
	t.Helper()
	r.Cost = 0
	used := int64(-1)
	// The charge is sent in the background: the store is asked until it is there.
	for began := time.Now(); used != want && time.Since(began) < time.Minute; time.Sleep(time.Millisecond) {
		used = store.Answers(t.Context(), s.Check, []store.Request{r})[0].Used
	}
	if used != want {
		t.Errorf("%d charges have reached the store of the running config, want %d", used, want)
	}
}

// TestErrorsAreLoggedByKind: one of each kind a minute, so that an outage shows after a timeout.
func TestErrorsAreLoggedByKind(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	h := &Handle{Name: t.Name(), Logger: zap.New(core)}
	now := time.Now()
	for range 3 {
		h.ReportError(now, "api", "k", context.DeadlineExceeded)
		h.ReportError(now, "api", "k", io.EOF)
	}
	if n := logs.Len(); n != 2 {
		t.Errorf("%d entries, want one of each kind: %v", n, logs.All())
	}
	h.ReportError(now.Add(telemetry.ReportInterval), "api", "k", io.EOF)
	if last := logs.All()[logs.Len()-1]; logs.Len() != 3 || last.ContextMap()["times"] != int64(3) {
		t.Errorf("the last entry is %v, want one for 3 times", last)
	}
}

// TestForesightCountsNothing, in memory either, where requests are decided without the store.
func TestForesightCountsNothing(t *testing.T) {
	h, _ := newRemoteHandle(t)
	defer h.Unload()
	open := h.open.Load()
	r := store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Hour}, ClientKey: "alice", Events: 1, Cost: 1}
	for n, of := range []*Opened{open.Foresight(t.Context()), open.Foresight(t.Context()).Local.Opened, open.Local.Opened} {
		for range 2 {
			if st := of.Accounts.AdmitAlone(new(r)); !st.Allowed && n < 2 || st.Err != nil {
				t.Errorf("%d: %+v", n, st)
			}
		}
	}
	if st := store.Answers(t.Context(), open.Local.Buckets.Peek, []store.Request{r})[0]; st.Used != 1 {
		t.Errorf("%d count in memory, want the one that was no foresight", st.Used)
	}
}

// moved is a store whose shards have these copies of each bucket.
type moved struct {
	store.Operable
	found store.Inspection
}

func (s moved) Inspect(context.Context, store.Request) store.Inspection { return s.found }

// TestPeekShowsThePresentOwner: the one before is shown only while the present one has nothing yet.
func TestPeekShowsThePresentOwner(t *testing.T) {
	for _, exists := range []bool{true, false} {
		shown := store.Inspection{Copies: []store.Copy{{Exists: exists, State: store.State{Used: 1}}}}
		shown.Previous = []store.Inspection{{Copies: []store.Copy{{Exists: true, State: store.State{Used: 2}}}}}
		o := &Opened{Operable: moved{found: shown}}
		if st := o.Peek(t.Context(), store.Request{}); (st.Used == 1) != exists {
			t.Errorf("the present owner has the bucket %t, and %d are shown", exists, st.Used)
		}
	}
}

// TestUncertainChargesAreNotLost: operators are told of those that no shard will get.
func TestUncertainChargesAreNotLost(t *testing.T) {
	began, o := time.Now(), &Opened{Name: t.Name()}
	NoteLost(o.Name, "a", new(store.Limit), algorithm.Charge, 1, store.ErrUncertain)
	if err := o.Lost("a", began); err != nil {
		t.Errorf("lost: %v", err)
	}
	NoteLost(o.Name, "a", new(store.Limit), algorithm.Charge, 1, store.ErrNotExecuted)
	if o.Lost("a", began) == nil {
		t.Error("a charge that was not executed is not lost")
	}
}
