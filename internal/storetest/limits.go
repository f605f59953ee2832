package storetest

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Admitter is a store that holds the cost of requests in flight and charges it later, as
// ledgers do.
type Admitter interface {
	Admit(ctx context.Context, asks []*store.Ask)
	Settle(reqs []*store.Request, held []int64)
}

// DifferingLimits holds a store to what a client can use if its requests have different
// limits: for each L, at most L passes of the requests whose own limit is L or less. A
// store that is an [Admitter] admits some of the requests. The clock stands, so that
// nothing drains and no window ends; what drains is tried apart.
func DifferingLimits(t *testing.T, open Open) {
	f := newFixture(t, open)
	testDifferingLimits(f)
	testDifferingRates(f)
}

func testDifferingLimits(f *fixture) {
	t := f.T
	for name, kind := range f.kinds() {
		t.Run(name, func(t *testing.T) {
			number := 0
			histories(t, func(d draws) {
				number++
				r := kind
				r.ClientKey = fmt.Sprint("client ", number)
				newTraffic(t, f.store, r).history(d)
			})
			for _, admits := range []bool{false, true} {
				r := kind
				r.ClientKey = fmt.Sprint("client of all, admitted: ", admits)
				newTraffic(t, f.store, r).atOnce(admits)
			}
		})
	}
}

// differing are the limits of one client's requests.
var differing = []int64{3, 10, 30, 60}

// testDifferingRates holds what drains to the limits of a client's requests, over an hour at most: for
// each L, of the requests whose own limit is L or less no more pass than their burst, and L
// in each window since. Some are refunded, a while later. What passes is most of what may.
func testDifferingRates(f *fixture) {
	for _, burst := range []int64{0, 5} {
		for _, share := range []int{1, 4, 40} {
			f.Run(fmt.Sprintf("burst %d, one in %d slow", burst, share), func(t *testing.T) { f.mixRates(t, burst, share) })
		}
	}
}

func (f *fixture) mixRates(t *testing.T, burst int64, share int) {
	const seed = 20261126
	minutes := int64(sweep.Size(10, 60))
	random := rand.New(rand.NewPCG(seed, uint64(share)))
	limit := f.limit("rates", time.Minute)
	limit.Algorithm = store.GCRA
	passed, running, start := map[int64]int64{}, []store.Request{}, f.now()
	for f.now()-start < minutes*60e6 {
		r := store.Request{Limit: limit, ClientKey: fmt.Sprint(burst, share), Events: 60, Burst: burst, Cost: 1 + random.Int64N(2)}
		if random.IntN(share) == 0 {
			r.Events = differing[random.IntN(len(differing))]
		}
		if st := f.take(r); st.Allowed {
			r.Receipt = st.Receipt
			running = append(running, r)
			f.passed(t, passed, &r, r.Cost, start)
		}
		if n := len(running); n > 3 {
			i := random.IntN(n)
			r, running = running[i], append(running[:i], running[i+1:]...)
			if random.IntN(4) == 0 {
				f.refund(r)
				f.passed(t, passed, &r, -r.Cost, start)
			}
		}
		f.clock.Advance(time.Duration(random.Int64N(int64(2 * time.Second))))
	}
	if n := passed[60]; n < minutes*60/10 {
		t.Errorf("%d passed", n)
	}
}

// passed counts a request that has passed, or that was refunded.
func (f *fixture) passed(t *testing.T, passed map[int64]int64, r *store.Request, cost, start int64) {
	t.Helper()
	for _, most := range differing {
		if r.Events <= most {
			passed[most] += cost
		}
		may := cmp.Or(r.Burst, most) + (f.now()-start)*most/micros(time.Minute)
		if passed[most] > may {
			t.Fatalf("%d of limits up to %d have passed by %d s, want at most %d", passed[most], most, (f.now()-start)/1e6, may)
		}
	}
}

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
	st := answers(tr.Context(), tr.store.Take, []store.Request{r})[0]
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
	asked := store.Ask{Request: r}
	tr.admitter.Admit(tr.Context(), []*store.Ask{&asked})
	if asked.Err == nil && asked.Allowed {
		tr.note(&r, r.Cost)
		tr.admitter.Settle([]*store.Request{&r}, nil)
	}
}

func (tr *traffic) history(d draws) {
	admits := tr.admitter != nil && d.Draw("charge after", 0, 1) == 1
	batch := pick(d, "batch", 0, 0, 5, 40, int64(store.BatchAuto))
	for range d.Draw("requests", 1, 60) {
		if n := len(tr.running); n > 0 && d.Draw("refund", 0, 5) == 0 {
			i := d.Draw("which", 0, int64(n-1))
			r := tr.running[i]
			tr.running = append(tr.running[:i], tr.running[i+1:]...)
			tr.note(&r, -r.Cost)
			answers(tr.Context(), tr.store.Refund, []store.Request{r})
			continue
		}
		r := tr.request(pick(d, "events", differing...), d.Draw("cost", 0, 4), batch)
		if admits {
			tr.admit(r)
		} else {
			tr.take(r)
		}
		if tr.Failed() {
			d.Fatalf("after %d requests", tr.number)
		}
	}
}

// atOnce sends requests of all limits from many goroutines.
func (tr *traffic) atOnce(admits bool) {
	atOnce(func(g int) {
		for i := range 8 {
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
