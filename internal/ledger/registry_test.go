package ledger

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Owes reports whether charges or refunds are undelivered, or tokens are to be given
// back, by whichever view.
func (l *Ledger) Owes() bool {
	l.registry.mu.Lock()
	defer l.registry.mu.Unlock()
	return l.registry.owing.Load() > 0 || len(l.registry.reserved) > 0
}

// Len returns the number of buckets in the registry.
func (b *Registry) Len() int { return int(b.count.Load()) }

// Len returns the number of buckets with requests in flight.
func (f *Flights) Len() int { return int(f.Figures().Buckets) }

// TestRegistryIsBounded: a full book forgets idle entries.
func TestRegistryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most, clients = 5_000, 20_000
		s := newSimulation(1)
		l := New(NewRegistry(nil), s, Options{MaxBuckets: most, OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			t.Errorf("%d charges were lost: %v", n, err)
		}})
		for i := range clients {
			r := requestOf(fmt.Sprint(i), 10)
			l.ChargeDetached([]*store.Request{new(r)})
			if i%100 == 0 {
				pass(10 * time.Millisecond)
			}
		}
		pass(time.Second)
		synctest.Wait()
		if n := l.registry.Len(); n < most/2 || n > most+stripeCount {
			t.Errorf("%d buckets are remembered, the bound is %d", n, most)
		}
		l.Leave()
	})
}

// TestIdleEntriesAreSwept before the bound is reached.
func TestIdleEntriesAreSwept(t *testing.T) {
	simulated(t, func(t *testing.T, _ *simulation, l *Ledger) {
		for i := range 25_000 {
			r := requestOf(fmt.Sprint(i), 10)
			l.ChargeDetached([]*store.Request{new(r)})
			if i%100 == 0 {
				pass(time.Second)
				synctest.Wait()
			}
		}
		// Entries of the last minute, and as many expired ones not swept yet.
		if n := l.registry.Len(); n > 3*60*100 {
			t.Errorf("%d buckets are remembered, although only 6,000 are in use", n)
		}
		pass(time.Second)
		synctest.Wait()
	})
}

// TestBoundInAnOutage: charges dropped for the bound are reported.
func TestBoundInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most, clients = 1000, 5000
		s := newSimulation(1)
		lost := int64(0)
		l := New(NewRegistry(nil), s, Options{MaxBuckets: most, OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			if !errors.Is(err, errNoRoom) {
				t.Errorf("%d charges were lost: %v", n, err)
			}
			lost += n
		}})
		s.down = true
		for i := range clients {
			l.ChargeDetached([]*store.Request{new(requestOf(fmt.Sprint(i), 10))})
			if i%100 == 0 {
				pass(100 * time.Millisecond)
			}
		}
		if n := l.registry.Len(); n > most+stripeCount+100 {
			t.Errorf("%d buckets are remembered, the bound is %d", n, most)
		}
		s.setDown(false, false)
		pass(20 * time.Second)
		synctest.Wait()
		spent := int64(0)
		for i := range clients {
			spent += s.used(requestOf(fmt.Sprint(i), 10))
		}
		if spent+lost != clients || spent < most/2 {
			t.Errorf("of %d charges %d arrived and %d are reported as lost", clients, spent, lost)
		}
		l.Leave()
	})
}

// TestMemoryPerBucket measures the memory of a bucket that was charged once.
func TestMemoryPerBucket(t *testing.T) {
	const buckets, most = 100_000, 256
	s := newSimulation(1)
	l := New(NewRegistry(nil), s, Options{})
	requests := make([]store.Request, buckets)
	for i := range requests {
		requests[i] = requestOf(fmt.Sprintf("2001:db8:1234:%x::/64", i), 10)
		requests[i].ID = ""
	}
	before := heap()
	for i := range requests {
		r := requests[i]
		m := core.Moment{Now: 1}
		e := l.enter(&r, &m)
		e.AheadAnswered(&r, &store.State{Now: 1, Content: store.Content{1, int64(time.Hour)}}, &core.Check{At: 1}, &m)
		e.release(&m)
	}
	used := (heap() - before) / buckets
	runtime.KeepAlive(requests)
	if t.Logf("%d bytes", used); used > most {
		t.Errorf("a bucket takes %d bytes, want at most %d", used, most)
	}
	runtime.KeepAlive(l)
	l.Leave()
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// gotCharges ends an outage, and requires that one of the stores has charges of a
// client then, and the others none.
func gotCharges(t *testing.T, stores []*simulation, r store.Request, at int, charges int64) {
	t.Helper()
	for _, s := range stores {
		s.setDown(false, false)
	}
	pass(3 * time.Second)
	synctest.Wait()
	for i, s := range stores {
		want := int64(0)
		if i == at {
			want = charges
		}
		if got := s.used(r); got != want {
			t.Errorf("store %d has %d, want %d", i, got, want)
		}
	}
}

// TestPendingChargesGoToTheRunningConfig, and neither to one that may yet be
// rejected nor to one that only serves a long request.
func TestPendingChargesGoToTheRunningConfig(t *testing.T) {
	for name, test := range map[string]struct {
		runs func(before, after *Ledger)
		want int
	}{
		"neither yet":         {func(_, _ *Ledger) {}, 0},
		"the previous config": {func(before, _ *Ledger) { before.Run() }, 0},
		"both, reloading":     {func(before, after *Ledger) { before.Run(); after.Run() }, 1},
		"the rejected one has left": {func(before, after *Ledger) {
			before.Run()
			after.Run()
			after.Leave()
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// Two views on the same registry, of configs that differ in their shards.
				stores := []*simulation{newSimulation(1), newSimulation(2)}
				registry := NewRegistry(nil)
				before, after := New(registry, stores[0], Options{}), New(registry, stores[1], Options{})
				for _, s := range stores {
					s.down = true
				}
				r := requestOf("alice", 100)
				before.ChargeDetached([]*store.Request{new(r)})
				pass(time.Second)
				test.runs(before, after)
				gotCharges(t, stores, r, test.want, 1)
				before.Leave()
				after.Leave()
			})
		})
	}
}

// TestUndeliveredChargesAreReported when the last view leaves; later charges are
// delivered.
func TestUndeliveredChargesAreReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		registry := NewRegistry(nil)
		var lost atomic.Int64
		opts := Options{OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			if !errors.Is(err, store.ErrNotExecuted) {
				t.Errorf("%d charges were lost: %v", n, err)
			}
			lost.Add(n)
		}}
		l := New(registry, s, opts)
		r := requestOf("alice", 100)
		s.setDown(true, false)
		for range 3 {
			l.ChargeDetached([]*store.Request{new(r)})
			pass(100 * time.Millisecond)
		}
		// The charge is in flight when the view leaves.
		l.ChargeDetached([]*store.Request{new(requestOf("bob", 100))})
		l.Leave()
		pass(3 * time.Second)
		synctest.Wait()
		if f := registry.Figures(); lost.Load() != 4 || f.Unsent != 0 || registry.owing.Load() != 0 {
			t.Errorf("%d charges are reported as lost, want 4; %d buckets have pending charges, left: %+v", lost.Load(), registry.owing.Load(), f)
		}

		next := New(registry, s, opts)
		next.ChargeDetached([]*store.Request{new(r)})
		pass(time.Second)
		s.setDown(false, false)
		pass(3 * time.Second)
		synctest.Wait()
		if used := s.used(r); used != 1 || lost.Load() != 4 || next.Owes() {
			t.Errorf("%d are charged, want 1; %d are lost; owes: %t", used, lost.Load(), next.Owes())
		}
		next.Leave()
	})
}

// TestFlushIsTakenOver by a config that runs, and by no other.
func TestFlushIsTakenOver(t *testing.T) {
	for name, test := range map[string]struct {
		// comes is a config that joins the registry in the meantime.
		comes, runs, leaves bool
		// want is the store that is charged, and ends whether the flush ends
		// before the outage does.
		want int
		ends bool
	}{
		"no other config":               {false, false, false, 0, false},
		"one that does not run":         {true, false, false, 0, false},
		"one that is rejected":          {true, false, true, 0, false},
		"one that runs":                 {true, true, false, 1, true},
		"one that runs and soon leaves": {true, true, true, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stores := []*simulation{newSimulation(1), newSimulation(2)}
				registry := NewRegistry(nil)
				opts := Options{OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
					t.Errorf("%d charges were lost: %v", n, err)
				}}
				before := New(registry, stores[0], opts)
				before.Run()
				for _, s := range stores {
					s.setDown(true, false)
				}
				r := requestOf("alice", 100)
				for range 5 {
					before.ChargeDetached([]*store.Request{new(r)})
				}
				flushed := 0
				flush := func(l *Ledger) {
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					l.Flush(ctx)
					flushed++
					l.Leave()
				}
				go flush(before)
				pass(time.Second)
				if test.comes {
					after := New(registry, stores[1], opts)
					if test.runs {
						after.Run()
					}
					pass(time.Second)
					if test.leaves {
						go flush(after)
					}
				}
				pass(2 * time.Second)
				synctest.Wait()
				ended := flushed
				if test.leaves && !test.runs {
					ended-- // the flush of the rejected config
				}
				if (ended == 1) != test.ends || ended > 1 {
					t.Errorf("%d flushes ended before the outage did", ended)
				}
				gotCharges(t, stores, r, test.want, 5)
			})
		})
	}
}
