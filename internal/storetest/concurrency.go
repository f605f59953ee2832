package storetest

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const goroutines = 32

// atOnce calls do in many goroutines and waits for all of them.
func atOnce(do func(g int)) {
	begin := make(chan struct{})
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			<-begin
			do(g)
		})
	}
	close(begin)
	wg.Wait()
}

// testConcurrentCharges expects that no charge is lost, and that each sees a different
// count.
func testConcurrentCharges(f *fixture) {
	const charges = 25
	r := f.request()
	var seen [goroutines][charges]store.State
	atOnce(func(g int) {
		for i := range charges {
			seen[g][i] = f.charge(r)
		}
	})
	f.wantUsed("check after all", f.check(r), goroutines*charges)

	reset := f.now() + micros(time.Minute)
	counts := map[int64]bool{}
	for g := range seen {
		last := int64(0)
		for _, s := range seen[g] {
			if s.Used <= last || s.Used > goroutines*charges || s.Reset != reset || s.Allowed != (s.Used <= 5) {
				f.Fatalf("charge after %d: %+v", last, s)
			}
			last = s.Used
			counts[s.Used] = true
		}
	}
	if len(counts) != goroutines*charges {
		f.Errorf("%d charges saw %d counts", goroutines*charges, len(counts))
	}
}

// testConcurrentFirstChecks moves the clock between checks, so that each would open a
// different window.
func testConcurrentFirstChecks(f *fixture) {
	for round := range 10 {
		r := f.request()
		r.Limit = f.limit(strconv.Itoa(round), time.Minute)
		var seen [goroutines]store.State
		atOnce(func(g int) {
			f.clock.Advance(time.Millisecond)
			seen[g] = f.check(r)
		})
		reset := f.check(r).Reset
		for _, s := range seen {
			if s.Reset != reset || s.Used != 0 || !s.Allowed {
				f.Fatalf("check of the window that ends at %d: %+v", reset, s)
			}
		}
	}
}

// testConcurrentReopening has checks and charges meet a window that has closed.
func testConcurrentReopening(f *fixture) {
	r := f.request()
	for range 10 {
		old := f.charge(r).Reset
		f.clock.Advance(time.Minute)
		var seen [goroutines]store.State
		atOnce(func(g int) {
			f.clock.Advance(time.Millisecond)
			if g%2 == 0 {
				seen[g] = f.charge(r)
			} else {
				seen[g] = f.check(r)
			}
		})
		last := f.check(r)
		f.wantUsed("check after all", last, goroutines/2)
		for _, s := range seen {
			if s.Reset != last.Reset || s.Reset <= old {
				f.Fatalf("answer about the window that ends at %d: %+v", last.Reset, s)
			}
		}
		f.clock.Advance(time.Minute)
	}
}

// testContextEnded accepts an answer as well as a failure. The error of a failed charge
// has to be true.
func testContextEnded(f *fixture) {
	cancelled, cancel := context.WithCancel(f.Context())
	cancel()
	late, cancel := context.WithDeadline(f.Context(), time.Now().Add(-time.Second))
	defer cancel()

	for name, ctx := range map[string]context.Context{"cancelled": cancelled, "past its deadline": late} {
		r := f.request()
		r.ClientKey = name
		r.Events = 1000
		other := r
		other.ClientKey += ", too"
		reqs := []store.Request{r, other}
		for _, s := range answers(ctx, f.store.Check, reqs) {
			if errors.Is(s.Err, errUnset) {
				f.Errorf("check with a context %s: %v", name, s.Err)
			}
		}
		for i, s := range answers(ctx, f.store.Charge, reqs) {
			switch used := f.check(reqs[i]).Used; {
			case s.Err == nil:
				f.wantUsed("check after a charge that was answered", store.State{Used: used}, 1)
			case errors.Is(s.Err, store.ErrNotExecuted):
				f.wantUsed("check after a charge that was not executed", store.State{Used: used}, 0)
			case !errors.Is(s.Err, store.ErrUncertain):
				f.Errorf("charge with a context %s: error %q shows no outcome", name, s.Err)
			}
		}
		f.wantAlive()
	}
}

// wantAlive requires that the store still answers.
func (f *fixture) wantAlive() {
	f.Helper()
	r := f.request()
	r.ClientKey = "alive"
	used := f.check(r).Used
	f.wantUsed("charge with a live context", f.charge(r), used+1)
}
