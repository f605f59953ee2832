package storetest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Admitter is a store that holds the cost of requests in flight and charges it later, as
// ledgers do.
type Admitter interface {
	Admit(ctx context.Context, reqs []store.Request, states []store.State)
	Settle(reqs []store.Request, held []int64)
}

// DifferingLimits holds a store to what a client can use if its requests have different
// limits: for each L, at most L passes of the requests whose own limit is L or less. A
// store that is an [Admitter] admits some of the requests. The clock stands, so that
// nothing drains and no window ends.
func DifferingLimits(t *testing.T, open Open) {
	f := newFixture(t, open)
	for name, kind := range f.kinds() {
		t.Run(name, func(t *testing.T) {
			number := 0
			rapid.Check(t, func(rt *rapid.T) {
				number++
				r := kind
				r.ClientKey = fmt.Sprint("client ", number)
				newTraffic(t, f.store, r).history(rt)
			})
			for _, admits := range []bool{false, true} {
				r := kind
				r.ClientKey = fmt.Sprint("client of all, admitted: ", admits)
				newTraffic(t, f.store, r).atOnce(admits)
			}
		})
	}
}

func testDifferingLimits(f *fixture) {
	DifferingLimits(f.T, func(*testing.T, *Clock) store.Store { return f.store })
}

// differing are the limits of one client's requests.
var differing = []int64{3, 10, 30, 60}

// traffic is of one client, and what has passed of it.
type traffic struct {
	*testing.T
	store store.Store
	// kind is a request without limit and cost.
	kind     store.Request
	admitter Admitter

	mu      sync.Mutex
	number  int
	passed  map[int64]int64
	running []store.Request
}

func newTraffic(t *testing.T, s store.Store, kind store.Request) *traffic {
	tr := &traffic{T: t, store: s, kind: kind, passed: map[int64]int64{}}
	if a, ok := s.(Admitter); ok && !algorithm.Of(kind.Limit.Algorithm).Lease {
		tr.admitter = a
	}
	return tr
}

// request returns a request of that limit, cost, and size of batches.
func (tr *traffic) request(events, cost, batch int64) store.Request {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.number++
	r := tr.kind
	r.Events, r.Cost, r.ID = events, cost, fmt.Sprintf("%08d", tr.number)
	if algorithm.Of(r.Limit.Algorithm).Unbatched == "" {
		r.Batch = batch
	}
	return r
}

// note counts a request that has passed, or that was refunded.
func (tr *traffic) note(r *store.Request, cost int64) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, most := range differing {
		if r.Events <= most {
			tr.passed[most] += cost
		}
		if tr.passed[most] > most {
			tr.Errorf("%d of limits up to %d have passed: %+v", tr.passed[most], most, *r)
		}
	}
}

func (tr *traffic) take(r store.Request) {
	st := tr.store.Take(tr.Context(), []store.Request{r})[0]
	if st.Err != nil || !st.Allowed {
		return
	}
	tr.note(&r, r.Cost)
	r.Receipt = st.Receipt
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.running = append(tr.running, r)
}

func (tr *traffic) admit(r store.Request) {
	states := make([]store.State, 1)
	tr.admitter.Admit(tr.Context(), []store.Request{r}, states)
	if states[0].Err == nil && states[0].Allowed {
		tr.note(&r, r.Cost)
		tr.admitter.Settle([]store.Request{r}, nil)
	}
}

func (tr *traffic) history(t *rapid.T) {
	admits := tr.admitter != nil && rapid.Bool().Draw(t, "charge after")
	batch := rapid.SampledFrom([]int64{0, 0, 5, 40, store.BatchAuto}).Draw(t, "batch")
	for range rapid.IntRange(1, 60).Draw(t, "requests") {
		if n := len(tr.running); n > 0 && rapid.IntRange(0, 5).Draw(t, "refund") == 0 {
			i := rapid.IntRange(0, n-1).Draw(t, "which")
			r := tr.running[i]
			tr.running = append(tr.running[:i], tr.running[i+1:]...)
			tr.note(&r, -r.Cost)
			tr.store.Refund(tr.Context(), []store.Request{r})
			continue
		}
		r := tr.request(rapid.SampledFrom(differing).Draw(t, "events"), rapid.Int64Range(0, 4).Draw(t, "cost"), batch)
		if admits {
			tr.admit(r)
		} else {
			tr.take(r)
		}
		if tr.Failed() {
			t.Fatalf("after %d requests", tr.number)
		}
	}
}

// atOnce sends requests of all limits from many goroutines.
func (tr *traffic) atOnce(admits bool) {
	atOnce(func(g int) {
		for i := range 20 {
			r := tr.request(differing[(g+i)%len(differing)], int64(1+i%3), []int64{0, 15}[g%2])
			if admits && tr.admitter != nil {
				tr.admit(r)
			} else {
				tr.take(r)
			}
		}
	})
	if tr.passed[60] < 50 {
		tr.Errorf("%d of 60 have passed", tr.passed[60])
	}
}
