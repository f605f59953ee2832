package ledger

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// plain is a store with the required methods only.
type plain struct{ store.Store }

// TestFlightsNeverPassTheLimit: of concurrent requests, some of which turn out free,
// never more are admitted than the limit allows, and in the end all of it is used.
func TestFlightsNeverPassTheLimit(t *testing.T) {
	const events, workers = 50, 64
	memoryStore := memory.New(memory.NewBuckets(), memory.Options{})
	for name, s := range map[string]store.Store{"memory": memoryStore, "plain": plain{memoryStore}} {
		flights := NewFlights()
		limit := store.Limit{Zone: name, Algorithm: store.FixedWindow, Window: time.Hour}
		var charged, inFlight atomic.Int64
		var wg sync.WaitGroup
		for worker := range workers {
			// Two views, as during a reload.
			l := NewLocal(flights, s)
			wg.Go(func() {
				for i := range 200 {
					reqs := []store.Request{{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1}}
					st := admit(l, reqs[0])
					if !st.Allowed {
						if st.RetryAfter <= 0 || st.InFlight && st.RetryAfter != time.Second {
							t.Errorf("%s: refused %+v", name, st)
						}
						continue
					}
					if n := inFlight.Add(1) + charged.Load(); n > events+workers {
						t.Errorf("%s: %d requests are admitted", name, n)
					}
					if (worker+i)%3 == 0 {
						inFlight.Add(-1)
						reqs[0].Cost = 0
						l.Settle(storetest.Posts(reqs), []int64{1})
						continue
					}
					charged.Add(1)
					inFlight.Add(-1)
					l.Settle(storetest.Posts(reqs), nil)
				}
			})
		}
		wg.Wait()
		if n := charged.Load(); n != events {
			t.Errorf("%s: %d were charged of %d", name, n, events)
		}
		if n := flights.Len(); n != 0 {
			t.Errorf("%s: %d buckets have something in flight", name, n)
		}
	}
}

// TestFlightRefusal: a refusal reports that only the client's own requests are in
// the way.
func TestFlightRefusal(t *testing.T) {
	l := NewLocal(NewFlights(), memory.New(memory.NewBuckets(), memory.Options{}))
	limit := store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	ask := func(cost int64) store.State {
		return admit(l, store.Request{Limit: &limit, ClientKey: "alice", Events: 5, Cost: cost})
	}
	if st := ask(3); !st.Allowed || st.Used != 0 {
		t.Errorf("first: %+v", st)
	}
	if st := ask(1); !st.Allowed || st.Used != 3 || st.Remaining != 2 {
		t.Errorf("second: %+v", st)
	}
	if st := ask(2); st.Allowed || !st.InFlight || st.RetryAfter != time.Second || st.Used != 4 || st.Remaining != 1 {
		t.Errorf("third: %+v", st)
	}
	if st := ask(6); st.Allowed || st.InFlight || st.RetryAfter != store.Never {
		t.Errorf("a request that never fits: %+v", st)
	}
	l.Settle([]*store.Request{{Limit: &limit, ClientKey: "alice", Events: 5, Cost: 3}}, nil)
	if st := ask(2); st.Allowed || !st.InFlight || st.Used != 4 {
		t.Errorf("after the first request was charged: %+v", st)
	}
	l.Settle([]*store.Request{{Limit: &limit, ClientKey: "alice", Events: 5}}, []int64{1})
	if st := ask(2); !st.Allowed || st.Used != 3 {
		t.Errorf("after the second request was free: %+v", st)
	}
}

// panickingStore panics when it is asked about or charged for one client.
type panickingStore struct {
	store.Store
	client, in string
}

func (s panickingStore) Check(ctx context.Context, asks []*store.Ask) {
	if s.in == "check" && asks[0].ClientKey == s.client {
		panic(s.in)
	}
	s.Store.Check(ctx, asks)
}

func (s panickingStore) Charge(ctx context.Context, asks []*store.Ask) {
	if s.in == "charge" && asks[0].ClientKey == s.client {
		panic(s.in)
	}
	s.Store.Charge(ctx, asks)
}

// TestStoreThatPanicsLeavesNothingInFlight, in the bucket that it panics for and in those
// before and after it, and no later request waits for a flight.
func TestStoreThatPanicsLeavesNothingInFlight(t *testing.T) {
	limit := &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	for _, in := range []string{"check", "charge"} {
		t.Run(in, func(t *testing.T) {
			l := NewLocal(NewFlights(), panickingStore{memory.New(memory.NewBuckets(), memory.Options{}), "b", in})
			var reqs []store.Request
			for _, client := range []string{"a", "b", "c"} {
				reqs = append(reqs, store.Request{Limit: limit, ClientKey: client, Events: 10, Cost: 1})
			}
			for range 2 {
				func() {
					defer func() {
						if got := recover(); got != in {
							t.Errorf("the panic is %v", got)
						}
					}()
					l.Admit(t.Context(), store.Asks(reqs))
					l.Settle(storetest.Posts(reqs), nil)
				}()
				if got := l.Figures(); got.Buckets != 0 || got.InFlight != 0 {
					t.Errorf("%+v, want nothing in flight", got)
				}
			}
		})
	}
}

// TestMemoryDecidesAlone, and spends the cost, unless that is foreseen.
func TestMemoryDecidesAlone(t *testing.T) {
	l := NewLocal(NewFlights(), memory.New(memory.NewBuckets(), memory.Options{}))
	r := store.Request{Limit: &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}, ClientKey: "a", Events: 2, Cost: 1}
	for n := range int64(3) {
		for times, decide := range []func(*store.Request) store.State{l.ForeseeAlone, l.ForeseeAlone, l.AdmitAlone} {
			if st := decide(&r); st.Allowed != (n < 2) || st.Used != min(n+1, 2) {
				t.Errorf("request %d, asked %d times before: %+v", n, times, st)
			}
		}
	}
	if n := l.Figures().InFlight; n != 0 {
		t.Errorf("%d are in flight", n)
	}
}
