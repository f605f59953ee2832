package limiter

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// deafStore allows what it is asked for, or answers no take, and notes its other calls.
type deafStore struct {
	takeError error
	asked     []string
}

func (*deafStore) Check(_ context.Context, asks []*store.Ask) {
	setAll(asks, store.State{Allowed: true, Now: 1})
}

func (s *deafStore) Take(_ context.Context, asks []*store.Ask) {
	setAll(asks, store.State{Allowed: true, Now: 1, Err: s.takeError})
}

func (s *deafStore) Charge(_ context.Context, asks []*store.Ask) {
	s.note("charge", asks)
}

func (s *deafStore) Refund(_ context.Context, asks []*store.Ask) {
	s.note("refund", asks)
}

func (s *deafStore) Penalize(_ context.Context, asks []*store.Ask) {
	s.note("penalize", asks)
}

func (s *deafStore) Peek(ctx context.Context, asks []*store.Ask) {
	s.Check(ctx, asks)
}

func (s *deafStore) Reset(_ context.Context, r store.Request) error {
	s.note("reset", []*store.Ask{{Request: r}})
	return nil
}

func (s *deafStore) note(operation string, asks []*store.Ask) {
	for _, a := range asks {
		s.asked = append(s.asked, fmt.Sprint(operation, " ", a.Cost))
	}
	setAll(asks, store.State{})
}

func setAll(asks []*store.Ask, st store.State) {
	for _, a := range asks {
		a.State = st
	}
}

// wasAsked returns an error unless these were the calls.
func (s *deafStore) wasAsked(want ...string) error {
	if !slices.Equal(s.asked, want) {
		return fmt.Errorf("the store is called to %q, want %q", s.asked, want)
	}
	return nil
}

// deafModule opens a deafStore.
type deafModule struct{ store store.Store }

func (m deafModule) OpenStore(string) (store.Store, error) { return m.store, nil }
func (deafModule) CloseStore()                             {}
func (deafModule) OnErrorDefault() string                  { return stores.OnErrorAllow }

// newTestHandler is a handler with one zone, which counts in s.
func newTestHandler(t *testing.T, z *Zone, s store.Store) *Limiter {
	t.Helper()
	handle := &stores.Handle{Name: t.Name(), Module: deafModule{s}, Logger: zap.NewNop()}
	if _, err := handle.Enter(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(handle.Unload)
	z.Name, z.Key, z.Events, z.Window = "test", []string{"static"}, Quantity{Number: 10}, time.Hour
	if z.Cost == (Quantity{}) {
		z.Cost = Quantity{Number: 1}
	}
	z.Free.Add(http.StatusNotModified)
	return New(Config{Zones: []*Zone{z}, Logger: zap.NewNop(), Now: time.Now, Store: handle})
}

// answeredWith serves one request by a handler with the zone, in front of a chain that
// answers with status, and returns the client's status.
func answeredWith(t *testing.T, z *Zone, s store.Store, status int) int {
	t.Helper()
	return newTestHandler(t, z, s).answeredWith(status).Code
}

// answeredWith serves one request in front of a chain that answers with status.
func (l *Limiter) answeredWith(status int) *httptest.ResponseRecorder {
	return l.answered(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
}

// answered serves one request in front of a chain.
func (l *Limiter) answered(chain http.HandlerFunc) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil)
	err := l.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		chain(w, r)
		return nil
	}))
	if err != nil {
		w.Code = statusOf(err)
	}
	return w
}

// TestTakeOfUnknownOutcome: a cost that may be spent is not spent again, and is
// refunded only where that cannot refund too much.
func TestTakeOfUnknownOutcome(t *testing.T) {
	uncertain := fmt.Errorf("%w: no answer in time", store.ErrUncertain)
	notExecuted := fmt.Errorf("%w: connection refused", store.ErrNotExecuted)
	for name, test := range map[string]struct {
		zone   *Zone
		err    error
		status int
		want   int
		asked  []string
	}{
		"uncertain": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorAllow}, err: uncertain, status: 200, want: 200,
		},
		"uncertain, and free": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorAllow}, err: uncertain, status: 304, want: 304,
		},
		"uncertain, and refused": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorDeny}, err: uncertain, status: 200, want: 503,
		},
		"uncertain in a log": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorAllow, Algorithm: store.SlidingLog}, err: uncertain, status: 200, want: 200,
			asked: []string{"charge 1", "refund 0"},
		},
		"uncertain in a log, and free": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorAllow, Algorithm: store.SlidingLog}, err: uncertain, status: 304, want: 304,
			asked: []string{"refund 1"},
		},
		"uncertain in a log, and refused": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorDeny, Algorithm: store.SlidingLog}, err: uncertain, status: 200, want: 503,
			asked: []string{"refund 1"},
		},
		"uncertain lease": {
			zone: &Zone{OnError: stores.OnErrorAllow, Algorithm: store.Concurrency}, err: uncertain, status: 200, want: 200,
			asked: []string{"refund 1"},
		},
		"uncertain lease, and refused": {
			zone: &Zone{OnError: stores.OnErrorDeny, Algorithm: store.Concurrency}, err: uncertain, status: 200, want: 503,
			asked: []string{"refund 1"},
		},
		"not executed": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorAllow}, err: notExecuted, status: 200, want: 200,
			asked: []string{"charge 1"},
		},
		"not executed, and free": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorAllow}, err: notExecuted, status: 304, want: 304,
		},
		"not executed, and refused": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorDeny}, err: notExecuted, status: 200, want: 503,
		},
		"not executed lease": {
			zone: &Zone{OnError: stores.OnErrorAllow, Algorithm: store.Concurrency}, err: notExecuted, status: 200, want: 200,
		},
		"counted locally, outcome uncertain": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorLocal}, err: uncertain, status: 200, want: 200,
		},
		"counted locally, not executed": {
			zone: &Zone{ChargeBefore: true, OnError: stores.OnErrorLocal}, err: notExecuted, status: 200, want: 200,
			asked: []string{"charge 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &deafStore{takeError: test.err}
			if got := answeredWith(t, test.zone, s, test.status); got != test.want {
				t.Errorf("status is %d, want %d", got, test.want)
			}
			if err := s.wasAsked(test.asked...); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestObservedTakeOfUnknownOutcome is refunded if the local counts would have refused it, when
// the response begins, and is not renewed.
func TestObservedTakeOfUnknownOutcome(t *testing.T) {
	for _, algorithm := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		t.Run(algorithm.String(), func(t *testing.T) {
			s := &deafStore{takeError: fmt.Errorf("%w: no answer in time", store.ErrUncertain)}
			h := newTestHandler(t, &Zone{ChargeBefore: true, OnError: stores.OnErrorLocal, Algorithm: algorithm, Enforce: new(float64)}, s)
			h.Zones[0].Cost.Number = h.Zones[0].Events.Number + 1
			w := h.answered(func(_ http.ResponseWriter, r *http.Request) {
				if trackerOf(r).own[0].lease() != nil {
					t.Error("the request has a lease")
				}
			})
			if err := s.wasAsked("refund 11"); err != nil || w.Code != http.StatusOK {
				t.Errorf("status %d, %v", w.Code, err)
			}
		})
	}
}

// forgetfulStore is a deafStore whose resets have an outcome.
type forgetfulStore struct {
	*deafStore
	resetError error
}

func (s *forgetfulStore) Reset(ctx context.Context, r store.Request) error {
	_ = s.deafStore.Reset(ctx, r)
	return s.resetError
}

// TestForgivingAfterTakesThatFailed: the bucket in the store may hold earlier failures, and the
// take itself.
func TestForgivingAfterTakesThatFailed(t *testing.T) {
	uncertain := fmt.Errorf("%w: no answer in time", store.ErrUncertain)
	notExecuted := fmt.Errorf("%w: connection refused", store.ErrNotExecuted)
	for name, test := range map[string]struct {
		zone             *Zone
		takeErr, failure error
		asked            []string
	}{
		"counted locally":         {&Zone{OnError: stores.OnErrorLocal}, notExecuted, nil, []string{"reset 1"}},
		"uncertain":               {&Zone{OnError: stores.OnErrorAllow}, uncertain, nil, []string{"reset 1"}},
		"uncertain in a log":      {&Zone{OnError: stores.OnErrorAllow, Algorithm: store.SlidingLog}, uncertain, nil, []string{"reset 1", "refund 1"}},
		"that cannot be forgiven": {&Zone{OnError: stores.OnErrorAllow, Algorithm: store.SlidingLog}, uncertain, notExecuted, []string{"reset 1", "refund 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &forgetfulStore{&deafStore{takeError: test.takeErr}, test.failure}
			test.zone.ChargeBefore = true
			test.zone.Forgives.Add(http.StatusOK)
			answeredWith(t, test.zone, s, http.StatusOK)
			if err := s.wasAsked(test.asked...); err != nil {
				t.Error(err)
			}
		})
	}
}

// panickingStore is a deafStore that panics in one operation.
type panickingStore struct {
	*deafStore
	in string
}

func (s panickingStore) Check(ctx context.Context, asks []*store.Ask) {
	if s.in == "check" {
		panic(s.in)
	}
	s.deafStore.Check(ctx, asks)
}

func (s panickingStore) Charge(ctx context.Context, asks []*store.Ask) {
	if s.in == "charge" {
		panic(s.in)
	}
	s.deafStore.Charge(ctx, asks)
}

// TestStoreThatPanics charges nothing, and is left; the next request of the client does not wait
// for it.
func TestStoreThatPanics(t *testing.T) {
	for _, in := range []string{"check", "charge"} {
		for _, atEnd := range []bool{false, true} {
			t.Run(fmt.Sprint(in, ", settled at the end: ", atEnd), func(t *testing.T) {
				isClosed := false
				t.Cleanup(func() {
					if !isClosed {
						t.Error("the store is still in use")
					}
				})
				s := &deafStore{}
				h := newTestHandler(t, &Zone{SettleAtEnd: atEnd}, panickingStore{s, in})
				h.Store.OnClose(func() { isClosed = true })
				for range 2 {
					func() {
						defer func() {
							if got := recover(); got != in {
								t.Errorf("the panic is %v", got)
							}
						}()
						h.answeredWith(http.StatusOK)
					}()
				}
				if err := s.wasAsked(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// returningStore is a deafStore that can be charged again.
type returningStore struct {
	*deafStore
	chargeError error
}

func (s *returningStore) Charge(ctx context.Context, asks []*store.Ask) {
	s.deafStore.Charge(ctx, asks)
	setAll(asks, store.State{Err: s.chargeError})
}

// TestLocalSlotIsHandedOver by the next renewal to the store that is back, and refunded
// there at the end. A slot that never reached the store is not refunded.
func TestLocalSlotIsHandedOver(t *testing.T) {
	notExecuted := fmt.Errorf("%w: connection refused", store.ErrNotExecuted)
	uncertain := fmt.Errorf("%w: no answer in time", store.ErrUncertain)
	for name, test := range map[string]struct {
		err   error
		asked []string
	}{
		"back":       {nil, []string{"charge 1", "charge 1", "refund 1"}},
		"maybe back": {uncertain, []string{"charge 1", "charge 1", "refund 1"}},
		"still away": {notExecuted, []string{"charge 1", "charge 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &returningStore{&deafStore{takeError: notExecuted}, test.err}
			h := newTestHandler(t, &Zone{OnError: stores.OnErrorLocal, Algorithm: store.Concurrency}, s)
			w := h.answered(func(_ http.ResponseWriter, r *http.Request) {
				e := trackerOf(r).own[0]
				used := func() int64 {
					return store.Answers(t.Context(), e.open.Local.Buckets.Peek, []store.Request{e.zones[0].ask.Request})[0].Used
				}
				e.lease().renew()
				e.lease().renew()
				if n := used(); n != 1 {
					t.Errorf("%d slots are taken in the local counts, want 1", n)
				}
			})
			if w.Code != http.StatusOK {
				t.Errorf("status %d", w.Code)
			}
			if err := s.wasAsked(test.asked...); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestForgivingWhatCameMeanwhile: what counts in the bucket when the response begins decides, and
// not what did when the request arrived.
func TestForgivingWhatCameMeanwhile(t *testing.T) {
	for name, zone := range map[string]*Zone{
		"fixed_window":   {ChargeBefore: true},
		"sliding_window": {ChargeBefore: true, Algorithm: store.SlidingWindow},
		"sliding_log":    {ChargeBefore: true, Algorithm: store.SlidingLog},
		"gcra":           {ChargeBefore: true, Algorithm: store.GCRA},
		"batch":          {ChargeBefore: true, Batch: 3},
		"at the end":     {ChargeBefore: true, SettleAtEnd: true},
		"charge after":   {},
	} {
		t.Run(name, func(t *testing.T) {
			zone.Forgives.Add(http.StatusOK)
			m := newSite(t, zone)
			fail := func() {
				m.clock.Advance(time.Millisecond)
				m.serve(t.Context(), func(w http.ResponseWriter, _ *http.Request) error {
					w.WriteHeader(http.StatusUnauthorized)
					return nil
				})
			}
			m.serve(t.Context(), func(w http.ResponseWriter, _ *http.Request) error {
				for range 4 {
					fail()
				}
				w.WriteHeader(http.StatusOK)
				return nil
			})
			if used := m.used(); used != 0 {
				t.Errorf("%d are used after the success", used)
			}
			fail()
			if used := m.used(); used != 1 {
				t.Errorf("%d are used after one more failure", used)
			}
		})
	}
}

// refundingStore is a forgetfulStore whose refunds have an outcome.
type refundingStore struct {
	*forgetfulStore
	refunded store.State
}

func (s *refundingStore) Refund(ctx context.Context, asks []*store.Ask) {
	s.forgetfulStore.Refund(ctx, asks)
	setAll(asks, s.refunded)
}

// TestForgivingAnEmptyBucket is a refund, unless that shows more or fails.
func TestForgivingAnEmptyBucket(t *testing.T) {
	notExecuted := fmt.Errorf("%w: connection refused", store.ErrNotExecuted)
	uncertain := fmt.Errorf("%w: no answer in time", store.ErrUncertain)
	for name, test := range map[string]struct {
		refunded store.State
		reset    error
		asked    []string
	}{
		"nothing else":                 {store.State{Now: 1}, nil, []string{"refund 1"}},
		"others":                       {store.State{Now: 1, Used: 2}, nil, []string{"refund 1", "reset 1"}},
		"a penalty":                    {store.State{Now: 1, Penalty: 2}, nil, []string{"refund 1", "reset 1"}},
		"others, and the reset fails":  {store.State{Now: 1, Used: 2}, uncertain, []string{"refund 1", "reset 1"}},
		"an uncertain refund":          {store.State{Err: uncertain}, nil, []string{"refund 1", "reset 1"}},
		"a refund that fails":          {store.State{Err: notExecuted}, nil, []string{"refund 1", "reset 1"}},
		"a refund and a reset that do": {store.State{Err: notExecuted}, notExecuted, []string{"refund 1", "reset 1", "refund 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &refundingStore{&forgetfulStore{&deafStore{}, test.reset}, test.refunded}
			zone := &Zone{ChargeBefore: true}
			zone.Forgives.Add(http.StatusOK)
			answeredWith(t, zone, s, http.StatusOK)
			if err := s.wasAsked(test.asked...); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestTakeIsUndoneUnderItsID: a request that takes again does so under another ID, although it
// was refused, because the ledger may refund a take that it has refused itself.
func TestTakeIsUndoneUnderItsID(t *testing.T) {
	for _, algorithm := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		l := newTestHandler(t, &Zone{Algorithm: algorithm, ChargeBefore: true}, memory.New(memory.NewBuckets(), memory.Options{}))
		e := &evaluation{limiter: l}
		e.add(&resolved{zone: &l.Zones[0].bound[ownStore], req: store.Request{Limit: &l.Zones[0].limit, Events: 10, Cost: 1, ID: "first"}})
		e.undo()
		if id := e.zones[0].ask.ID; id == "first" || id == "" {
			t.Errorf("%s: the ID is %q", algorithm, id)
		}
	}
}

// TestForgivenBucketCountsAnew: a request that takes after a success has emptied the bucket is charged once, while
// one from before still runs.
func TestForgivenBucketCountsAnew(t *testing.T) {
	zone := &Zone{ChargeBefore: true}
	zone.Forgives.Add(http.StatusOK)
	m := newSite(t, zone)
	answer := func(status int) {
		m.serve(t.Context(), func(w http.ResponseWriter, _ *http.Request) error {
			w.WriteHeader(status)
			return nil
		})
	}
	m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error {
		answer(http.StatusOK)
		answer(http.StatusUnauthorized)
		if used := m.used(); used != 1 {
			t.Errorf("%d are used after a failure, want 1", used)
		}
		return nil
	})
}
