// Where tests of this file sleep, the clock of a bubble moves on: see testing/synctest.

package limit_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/limit"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// waits waits for one event of client a, in any goroutine.
func waits(t *testing.T, l *limit.Limit) {
	t.Helper()
	if err := l.Wait(t.Context(), "a", 1); err != nil {
		t.Errorf("wait: %v", err)
	}
}

// faulty is a store whose takes and penalties take a while, and fail where there is an error.
type faulty struct {
	store.Store
	mu      sync.Mutex
	latency time.Duration
	err     error
}

func (f *faulty) set(latency time.Duration, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.latency, f.err = latency, err
}

func (f *faulty) Take(ctx context.Context, asks []*store.Ask) {
	f.do(ctx, f.Store.Take, asks)
}

func (f *faulty) Penalize(ctx context.Context, asks []*store.Ask) {
	f.do(ctx, f.Store.Penalize, asks)
}

func (f *faulty) do(ctx context.Context, op func(context.Context, []*store.Ask), asks []*store.Ask) {
	f.mu.Lock()
	latency, err := f.latency, f.err
	f.mu.Unlock()
	select {
	case <-time.After(latency):
	case <-ctx.Done():
	}
	if err != nil {
		asks[0].Err = err
		return
	}
	op(ctx, asks)
}

// memoryWith opens a store in memory behind a faulty one.
func memoryWith(f *faulty) *limit.Store {
	s := limit.OpenMemory(limit.Memory{})
	s.Wrap(func(next store.Store) store.Store {
		f.Store = next
		return f
	})
	return s
}

// TestWaitTakesTurns: those who wait are served in order of arrival, as soon as there is room.
func TestWaitTakesTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Events: 2, Window: time.Minute})
		began := time.Now()
		var mu sync.Mutex
		var served []int
		var all sync.WaitGroup
		for i := range 7 {
			all.Go(func() {
				waits(t, l)
				mu.Lock()
				defer mu.Unlock()
				served = append(served, i)
			})
			synctest.Wait()
		}
		// Another key does not wait.
		must(t, "another key", errors.Join(l.Wait(t.Context(), "b", 1), want("waited", time.Since(began), 0)))
		all.Wait()
		took := time.Since(began)
		must(t, "seven at two a minute", errors.Join(want("in order", slices.IsSorted(served), true), want("served", len(served), 7),
			want("took three minutes", took >= 3*time.Minute && took < 3*time.Minute+time.Second, true)))
	})
}

// TestWaitGivesUp: at once where it is known that waiting is in vain, also behind others.
func TestWaitGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Events: 2, Window: time.Minute})
		must(t, "spend", l.Wait(t.Context(), "a", 2))
		within := func(d time.Duration) error {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			began := time.Now()
			err := l.Wait(ctx, "a", 1)
			if time.Since(began) != 0 {
				t.Errorf("it took %v to know that there is no room within %v", time.Since(began), d)
			}
			return err
		}
		must(t, "alone", want("deadline", errors.Is(within(time.Second), limit.ErrDeadline), true))
		ctx, leave := context.WithCancel(t.Context())
		first := make(chan error)
		go func() { first <- l.Wait(ctx, "a", 1) }()
		synctest.Wait()
		err := within(time.Second)
		must(t, "behind another", errors.Join(want("deadline", errors.Is(err, limit.ErrDeadline), true), want("the context's", errors.Is(err, context.DeadlineExceeded), true)))
		second := make(chan error)
		go func() { second <- l.Wait(t.Context(), "a", 1) }()
		synctest.Wait()
		leave()
		must(t, "who leaves", want("canceled", errors.Is(<-first, context.Canceled), true))
		must(t, "the next", <-second)
		must(t, "too much", want("never", errors.Is(l.Wait(t.Context(), "a", 3), limit.ErrNever), true))
		must(t, "who has left", want("canceled", errors.Is(l.Wait(ctx, "b", 1), context.Canceled), true))
		must(t, "nothing was spent for it", errors.Join(l.Wait(t.Context(), "b", 2)))
	})
}

// TestWaitTurnsAway: a request loses its place behind one that has to wait longer than it may.
func TestWaitTurnsAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Algorithm: limit.GCRA, Events: 60, Burst: 10, Window: time.Minute})
		must(t, "spend", l.Wait(t.Context(), "a", 10))
		first := make(chan error)
		go func() { first <- l.Wait(t.Context(), "a", 1) }() // fits in a second
		synctest.Wait()
		second := make(chan error)
		go func() { second <- l.Wait(t.Context(), "a", 10) }() // fits in eleven
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		err := l.Wait(ctx, "a", 1)
		took := time.Since(began)
		must(t, "the third", errors.Join(want("deadline", errors.Is(err, limit.ErrDeadline), true), want("once the first has passed", took >= time.Second && took < 2*time.Second, true)))
		must(t, "the others", errors.Join(<-first, <-second))
	})
}

// TestWaitHearsOfRefunds: what a reservation of this process gives back is taken at once.
func TestWaitHearsOfRefunds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Events: 10, Window: time.Hour})
		held, err := l.Reserve(t.Context(), "a", 8)
		must(t, "reserve", err)
		began := time.Now()
		waits := make(chan error)
		go func() { waits <- l.Wait(t.Context(), "a", 5) }()
		synctest.Wait()
		must(t, "commit", held.Commit(t.Context(), 5))
		must(t, "wait", errors.Join(<-waits, want("took", time.Since(began), 0)))
	})
}

// TestWaitAsksSeldom: a full bucket costs one call for each wait, however many wait.
func TestWaitAsksSeldom(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l := limitOf(t, openRedis(t, server), limit.Config{Name: "api", Events: 10, Window: 3 * time.Second})
	var all sync.WaitGroup
	began := time.Now()
	for range 20 {
		all.Go(func() { waits(t, l) })
	}
	all.Wait()
	calls, err := server.Calls()
	must(t, "calls", err)
	asked := calls["evalsha"] + calls["eval"] + calls["fcall"]
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("20 events of a limit of 10 took %v", took)
	}
	if asked > 40 {
		t.Errorf("20 events took %d calls: %v", asked, calls)
	}
}

// TestWaitTogether: while there is room, no caller waits for another's call.
func TestWaitTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, memoryWith(&faulty{latency: time.Second}), limit.Config{Name: "api", Events: 10, Window: time.Hour})
		began := time.Now()
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() { waits(t, l) })
		}
		all.Wait()
		must(t, "ten calls", want("took", time.Since(began), time.Second))
	})
}

// TestWaitIsNotOvertaken: a later request stands behind those that wait, although its cost fits.
func TestWaitIsNotOvertaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Algorithm: limit.GCRA, Events: 60, Burst: 10, Window: time.Minute})
		must(t, "spend", l.Wait(t.Context(), "a", 10))
		large := make(chan error)
		go func() { large <- l.Wait(t.Context(), "a", 10) }()
		synctest.Wait()
		for range 5 {
			time.Sleep(1500 * time.Millisecond) // an event fits
			go waits(t, l)
		}
		began := time.Now()
		must(t, "the large one", errors.Join(<-large, want("in time", time.Since(began) <= 3*time.Second, true)))
		time.Sleep(time.Minute)
	})
}

// TestWaitFailsTogether: what the store says to the first, it would say to those behind; but only the first
// may have spent something.
func TestWaitFailsTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := new(faulty)
		l := limitOf(t, memoryWith(f), limit.Config{Name: "api", Events: 2, Window: time.Minute})
		must(t, "spend", l.Wait(t.Context(), "a", 2))
		errs := make(chan error, 5)
		for range 5 {
			go func() { errs <- l.Wait(t.Context(), "a", 1) }()
			synctest.Wait()
		}
		f.set(time.Second, store.ErrUncertain)
		began := time.Now()
		uncertain := 0
		for range 5 {
			err := <-errs
			must(t, "wait", want("unavailable", errors.Is(err, limit.ErrUnavailable), true))
			if errors.Is(err, limit.ErrUncertain) {
				uncertain++
			}
		}
		took := time.Since(began)
		must(t, "all", errors.Join(want("uncertain", uncertain, 1), want("in one call", took < 7*time.Second, true)))
		f.set(0, nil)
		must(t, "later", l.Wait(t.Context(), "a", 1))
	})
}

// TestWaitForWhatIsHeld: when a reservation of another process ends is not known, whatever was known before.
func TestWaitForWhatIsHeld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, config := limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Events: 100, Window: time.Hour}
		l, other := limitOf(t, s, config), limitOf(t, s, config)
		reserved, err := other.Reserve(t.Context(), "a", 40) // leaves so much that it is not held
		must(t, "reserve", errors.Join(err, other.Wait(t.Context(), "a", 60)))
		first := make(chan error)
		go func() { first <- l.Wait(t.Context(), "a", 1) }()
		synctest.Wait()
		must(t, "release", reserved.Release(t.Context()))
		held, err := other.Reserve(t.Context(), "a", 40)
		must(t, "reserve again", err)
		time.Sleep(6 * time.Second) // the first has asked again
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		second := make(chan error)
		go func() { second <- l.Wait(ctx, "a", 1) }()
		synctest.Wait()
		must(t, "release again", held.Release(t.Context()))
		must(t, "wait", errors.Join(<-first, <-second))
	})
}

// TestWaitForWhatMayComeBack: the guess of a second turns no caller away that waits for less.
func TestWaitForWhatMayComeBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limitOf(t, limit.OpenMemory(limit.Memory{}), limit.Config{Name: "api", Events: 10, Window: time.Hour})
		held, err := l.Reserve(t.Context(), "a", 10)
		must(t, "reserve", err)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		first := make(chan error)
		go func() { first <- l.Wait(ctx, "a", 1) }()
		synctest.Wait()
		must(t, "release", held.Release(t.Context()))
		must(t, "wait", <-first)
	})
}

// TestWaitAsksAgain: another process gives something back, which nobody here is told of.
func TestWaitAsksAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.OpenMemory(limit.Memory{})
		config := limit.Config{Name: "api", Events: 10, Window: time.Hour}
		here, there := limitOf(t, s, config), limitOf(t, s, config)
		held, err := there.Reserve(t.Context(), "a", 8)
		must(t, "reserve", err)
		waits := make(chan error)
		go func() { waits <- here.Wait(t.Context(), "a", 5) }()
		time.Sleep(time.Minute)
		began := time.Now()
		must(t, "release", held.Release(t.Context()))
		must(t, "wait", errors.Join(<-waits, want("took seconds", time.Since(began) < 6*time.Second, true)))
	})
}

// TestCloseEndsWaits, also of those behind others, and of requests.
func TestCloseEndsWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.OpenMemory(limit.Memory{})
		l := limitOf(t, s, limit.Config{Name: "api", Events: 2, Window: time.Hour})
		must(t, "spend", l.Wait(t.Context(), "a", 2))
		errs := make(chan error, 3)
		for range 3 {
			go func() { errs <- l.Wait(t.Context(), "a", 1) }()
		}
		synctest.Wait()
		s.Close()
		for range 3 {
			must(t, "wait", want("closed", errors.Is(<-errs, limit.ErrClosed), true))
		}
	})
}
