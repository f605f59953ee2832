package ledger

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestWaitingChargesGoToTheConfigThatRuns: not to one that may yet be rejected,
// nor to one of which only a long request is left.
func TestWaitingChargesGoToTheConfigThatRuns(t *testing.T) {
	for name, test := range map[string]struct {
		runs func(before, after *Ledger)
		want int
	}{
		"neither yet":     {func(_, _ *Ledger) {}, 0},
		"the one before":  {func(before, _ *Ledger) { before.Run() }, 0},
		"both, reloading": {func(before, after *Ledger) { before.Run(); after.Run() }, 1},
		"the rejected one has left": {func(before, after *Ledger) {
			before.Run()
			after.Run()
			after.Leave()
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// Two views on the same books, of configs that differ in their shards.
				stores := []*simulation{newSimulation(1), newSimulation(2)}
				books := NewBooks(nil)
				before, after := New(books, stores[0], Options{}), New(books, stores[1], Options{})
				for _, s := range stores {
					s.down = true
				}
				r := requestOf("alice", 100)
				before.ChargeDetached([]store.Request{r})
				time.Sleep(time.Second)
				test.runs(before, after)
				for _, s := range stores {
					s.mu.Lock()
					s.down = false
					s.mu.Unlock()
				}
				time.Sleep(3 * time.Second)
				synctest.Wait()
				for i, s := range stores {
					want := int64(0)
					if i == test.want {
						want = 1
					}
					if got := s.used(r); got != want {
						t.Errorf("store %d has %d, want %d", i, got, want)
					}
				}
				before.Leave()
				after.Leave()
			})
		})
	}
}

// TestChargesThatNobodyDelivers are reported when the last view leaves, and what
// comes later is delivered.
func TestChargesThatNobodyDelivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		books := NewBooks(nil)
		var lost atomic.Int64
		opts := Options{OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) {
			if !errors.Is(err, store.ErrNotExecuted) {
				t.Errorf("%d were lost: %v", n, err)
			}
			lost.Add(n)
		}}
		l := New(books, s, opts)
		r := requestOf("alice", 100)
		s.setDown(true, false)
		for range 3 {
			l.ChargeDetached([]store.Request{r})
			time.Sleep(100 * time.Millisecond)
		}
		// It is on its way when the view leaves.
		l.ChargeDetached([]store.Request{requestOf("bob", 100)})
		l.Leave()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if f := books.Figures(); lost.Load() != 4 || f.Unsent != 0 || books.owing.Load() != 0 {
			t.Errorf("%d are reported as lost, want 4; %d buckets are owed to, left: %+v", lost.Load(), books.owing.Load(), f)
		}

		next := New(books, s, opts)
		next.ChargeDetached([]store.Request{r})
		time.Sleep(time.Second)
		s.setDown(false, false)
		time.Sleep(3 * time.Second)
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
		// comes is a config that joins the books in the meantime.
		comes, runs, leaves bool
		// want is the store that is charged, and ends whether the flush ends
		// before the outage does.
		want int
		ends bool
	}{
		"nobody comes":                  {false, false, false, 0, false},
		"one that does not run":         {true, false, false, 0, false},
		"one that is rejected":          {true, false, true, 0, false},
		"one that runs":                 {true, true, false, 1, true},
		"one that runs and soon leaves": {true, true, true, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stores := []*simulation{newSimulation(1), newSimulation(2)}
				books := NewBooks(nil)
				opts := Options{OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) { t.Errorf("%d were lost: %v", n, err) }}
				before := New(books, stores[0], opts)
				before.Run()
				for _, s := range stores {
					s.setDown(true, false)
				}
				r := requestOf("alice", 100)
				for range 5 {
					before.ChargeDetached([]store.Request{r})
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
				time.Sleep(time.Second)
				if test.comes {
					after := New(books, stores[1], opts)
					if test.runs {
						after.Run()
					}
					time.Sleep(time.Second)
					if test.leaves {
						go flush(after)
					}
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				ended := flushed
				if test.leaves && !test.runs {
					ended-- // that of the rejected one
				}
				if (ended == 1) != test.ends || ended > 1 {
					t.Errorf("%d flushes have ended before the store is back", ended)
				}
				for _, s := range stores {
					s.setDown(false, false)
				}
				time.Sleep(3 * time.Second)
				synctest.Wait()
				for i, s := range stores {
					want := int64(0)
					if i == test.want {
						want = 5
					}
					if got := s.used(r); got != want {
						t.Errorf("store %d has %d, want %d", i, got, want)
					}
				}
			})
		})
	}
}
