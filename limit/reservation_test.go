// Where tests of this file sleep, the clock of a bubble moves on: see testing/synctest.

package limit_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/limit"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// usedOf returns how much of a bucket counts.
func usedOf(t *testing.T, l *limit.Limit, key string) int64 {
	t.Helper()
	got, err := l.Take(t.Context(), key, 0)
	must(t, "look", err)
	return got.Used
}

// TestReservation corrects an estimate, once.
func TestReservation(t *testing.T) {
	forStores(t, func(t *testing.T, s *limit.Store) {
		for _, c := range algorithms(1000) {
			c.Window *= 1000 // gcra gives back nearly nothing meanwhile
			l, ctx := limitOf(t, s, c), t.Context()
			for _, test := range []struct {
				name   string
				end    func(r *limit.Reservation) error
				actual int64
			}{
				{"less", func(r *limit.Reservation) error { return r.Commit(ctx, 40) }, 40},
				{"more", func(r *limit.Reservation) error { return r.Commit(ctx, 250) }, 250},
				{"more than there is", func(r *limit.Reservation) error { return r.Commit(ctx, 1500) }, 1500},
				{"the same", func(r *limit.Reservation) error { return r.Commit(ctx, 100) }, 100},
				{"nothing", func(r *limit.Reservation) error { return r.Commit(ctx, 0) }, 0},
				{"released", func(r *limit.Reservation) error { return r.Release(ctx) }, 0},
			} {
				what := c.Name + " " + test.name
				r, err := l.Reserve(ctx, test.name, 100)
				must(t, what, err)
				must(t, what, errors.Join(want("used", usedOf(t, l, test.name), 100), want("shown", r.Result().Used, 100),
					want("commits less than nothing", r.Commit(ctx, -1) != nil, true)))
				must(t, what, test.end(r))
				used := usedOf(t, l, test.name)
				if c.Algorithm == limit.GCRA {
					// Some of it drains meanwhile.
					must(t, what, want("used about", used >= test.actual-10 && used <= test.actual, true))
				} else {
					must(t, what, want("used", used, test.actual))
				}
				for _, again := range []error{r.Commit(ctx, 7), r.Release(ctx)} {
					must(t, what, want("has ended", errors.Is(again, limit.ErrEnded), true))
				}
			}
			_, err := l.Reserve(ctx, "b", 1001)
			must(t, "too much", want("never", errors.Is(err, limit.ErrNever), true))
			_, err = l.Reserve(ctx, "c", 1000)
			must(t, "all", err)
			_, err = l.Reserve(ctx, "c", 500)
			var refused *limit.RefusedError
			must(t, "a part more", want("refused", errors.As(err, &refused) && refused.Result.RetryAfter > 0, true))
		}
	})
}

// TestReservationEnds by itself, and its place is free again.
func TestReservationEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.OpenMemory(limit.Memory{})
		l := limitOf(t, s, limit.Config{Name: "api", Events: 10, Window: 10 * time.Hour, ReserveFor: time.Hour})
		r, err := l.Reserve(t.Context(), "a", 4)
		must(t, "reserve", errors.Join(err, want("deadline", r.Deadline().Equal(time.Now().Add(time.Hour)), true)))
		time.Sleep(time.Hour)
		synctest.Wait()
		isEnded := func(err error) error { return want("ended", errors.Is(err, limit.ErrEnded), true) }
		must(t, "later", errors.Join(want("used", usedOf(t, l, "a"), 0), isEnded(r.Renew()), isEnded(r.Release(t.Context()))))
		must(t, "commit late", errors.Join(r.Commit(t.Context(), 3), want("used", usedOf(t, l, "a"), 3), isEnded(r.Commit(t.Context(), 3))))
		kept, err := l.Reserve(t.Context(), "a", 4)
		must(t, "reserve again", err)
		s.Close()
		s.Close()
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		must(t, "a store that is closed", errors.Join(want("used", usedOf(t, l, "a"), 7), kept.Release(t.Context())))
	})
}

// TestCommitAtTheDeadline charges what was spent, whether or not the reservation has just been released.
func TestCommitAtTheDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.OpenMemory(limit.Memory{})
		t.Cleanup(s.Close)
		l := limitOf(t, s, limit.Config{Name: "api", Events: 10000, Window: 100 * time.Hour, ReserveFor: time.Hour})
		const reservations = 1000
		for range reservations {
			r, err := l.Reserve(t.Context(), "a", 4)
			must(t, "reserve", err)
			go func() {
				time.Sleep(time.Until(r.Deadline()))
				if err := r.Commit(t.Context(), 3); err != nil {
					t.Errorf("commit: %v", err)
				}
			}()
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		must(t, "in the end", want("used", usedOf(t, l, "a"), 3*reservations))
	})
}

// TestRenewedReservation stays open, up to a day, and ends once.
func TestRenewedReservation(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.OpenMemory(limit.Memory{})
		t.Cleanup(s.Close)
		l := limitOf(t, s, limit.Config{Name: "api", Events: 10, Window: 100 * time.Hour, ReserveFor: time.Hour})
		began := time.Now()
		r, err := l.Reserve(t.Context(), "a", 4)
		must(t, "reserve", err)
		for !r.Deadline().Equal(began.Add(24 * time.Hour)) {
			time.Sleep(50 * time.Minute)
			must(t, "renew", errors.Join(r.Renew(), want("used", usedOf(t, l, "a"), 4)))
			if time.Since(began) < 23*time.Hour {
				must(t, "deadline", want("in an hour", r.Deadline().Equal(time.Now().Add(time.Hour)), true))
			}
		}
		time.Sleep(time.Until(began.Add(24 * time.Hour)))
		synctest.Wait()
		must(t, "a day later", errors.Join(want("used", usedOf(t, l, "a"), 0), want("ended", errors.Is(r.Renew(), limit.ErrEnded), true)))
		r, err = l.Reserve(t.Context(), "a", 4)
		must(t, "reserve", errors.Join(err, r.Renew(), r.Commit(t.Context(), 6), want("used", usedOf(t, l, "a"), 6), want("ended", errors.Is(r.Renew(), limit.ErrEnded), true)))
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		must(t, "it ends once", want("used", usedOf(t, l, "a"), 6))
	})
}

// TestReservationsAreBounded: those that nobody ends do not fill memory.
func TestReservationsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.OpenMemory(limit.Memory{})
		l := limitOf(t, s, limit.Config{Name: "api", Events: 10, Window: 24 * time.Hour})
		s.Crowd(limit.MaxReservations - 2)
		first, err := l.Reserve(t.Context(), "a", 1)
		must(t, "reserve", err)
		_, err = l.Reserve(t.Context(), "a", 1)
		must(t, "reserve the last", err)
		reserve := func() error {
			_, err := l.Reserve(t.Context(), "a", 1)
			return err
		}
		must(t, "reserve one more", errors.Join(want("too many", errors.Is(reserve(), limit.ErrTooMany), true), want("used", usedOf(t, l, "a"), 2)))
		must(t, "reserve once one has ended", errors.Join(first.Release(t.Context()), reserve()))
		// A refused one is not open.
		_, err = l.Reserve(t.Context(), "b", 11)
		must(t, "reserve too much", want("too many", errors.Is(err, limit.ErrTooMany), true))
		time.Sleep(time.Hour)
		synctest.Wait()
		must(t, "all have ended by themselves", want("used", usedOf(t, l, "a"), 0))
		for range 3 {
			must(t, "refuse", want("never", func() bool { _, err := l.Reserve(t.Context(), "b", 11); return errors.Is(err, limit.ErrNever) }(), true))
		}
		must(t, "reserve again", errors.Join(reserve(), reserve(), want("too many", errors.Is(reserve(), limit.ErrTooMany), true)))
	})
}

// TestSlots hold places while something runs, in two processes' stores.
func TestSlots(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	config := limit.Config{Name: "jobs", Algorithm: limit.Concurrency, Events: 2}
	a, b := limitOf(t, openRedis(t, server), config), limitOf(t, openRedis(t, server), config)
	one, err := a.Reserve(t.Context(), "x", 1)
	must(t, "one", errors.Join(err, want("ends with its window", time.Until(one.Deadline()) <= time.Minute, true)))
	two, err := b.Reserve(t.Context(), "x", 1)
	must(t, "two", err)
	_, err = a.Reserve(t.Context(), "x", 1)
	must(t, "three", want("an error", err != nil, true))
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = a.WaitReserve(short, "x", 1)
	must(t, "three, for a moment", want("deadline", errors.Is(err, context.DeadlineExceeded), true))
	must(t, "end", errors.Join(one.Commit(t.Context(), 1), want("ended", errors.Is(one.Release(t.Context()), limit.ErrEnded), true)))
	three, err := b.WaitReserve(t.Context(), "x", 1)
	must(t, "three", err)
	must(t, "end all", errors.Join(two.Release(t.Context()), three.Release(t.Context())))
	slot, err := a.Reserve(t.Context(), "x", 1)
	must(t, "renew a slot", errors.Join(err, want("an error", slot.Renew() != nil, true), slot.Release(t.Context())))
	_, err = a.Allow(t.Context(), "x")
	must(t, "a slot is reserved, and not taken", want("an error", err != nil, true))
	must(t, "wait", want("an error", a.Wait(t.Context(), "x", 1) != nil, true))
	must(t, "penalize", want("an error", a.Penalize(t.Context(), "x", time.Minute) != nil, true))
}

// TestReservationEndsWithoutItsContext: the request it was for is over, and what it did not spend is given back.
func TestReservationEndsWithoutItsContext(t *testing.T) {
	t.Parallel()
	s := openRedis(t, redistest.Start(t))
	ended, end := context.WithCancel(t.Context())
	end()
	for _, c := range algorithms(1000) {
		c.Window = 1000 * time.Hour
		l := limitOf(t, s, c)
		for actual, finish := range map[int64]func(r *limit.Reservation) error{
			0:   func(r *limit.Reservation) error { return r.Release(ended) },
			40:  func(r *limit.Reservation) error { return r.Commit(ended, 40) },
			250: func(r *limit.Reservation) error { return r.Commit(ended, 250) },
		} {
			key := strconv.FormatInt(actual, 10)
			r, err := l.Reserve(t.Context(), key, 100)
			must(t, c.Name+" reserve", err)
			must(t, c.Name+" end", finish(r))
			must(t, c.Name, want("used", usedOf(t, l, key), actual))
		}
	}
}

// TestUncertainIsGivenBack where the store knows takes by their ID.
func TestUncertainIsGivenBack(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s, err := limit.OpenRedis(limit.Redis{CheckTimeout: 200 * time.Millisecond, ChargeTimeout: 10 * time.Second, Shards: []limit.Shard{{Primary: server.Addr()}}})
	must(t, "open", err)
	t.Cleanup(s.Close)
	log := limitOf(t, s, limit.Config{Name: "log", Algorithm: limit.SlidingLog, Events: 10, Window: time.Hour})
	slots := limitOf(t, s, limit.Config{Name: "slots", Algorithm: limit.Concurrency, Events: 10})
	var used []func() (limit.Result, error)
	for name, l := range map[string]*limit.Limit{"log": log, "slots": slots} {
		for _, key := range []string{"take", "wait", "reserve", "wait and reserve"} {
			used = append(used, func() (limit.Result, error) {
				r, err := l.Reserve(t.Context(), key, 0)
				if err != nil {
					return limit.Result{}, fmt.Errorf("%s: %w", name, err)
				}
				return r.Result(), r.Release(t.Context())
			})
		}
	}
	zero := func() error {
		for _, of := range used {
			got, err := of()
			if err := errors.Join(err, want("used", got.Used, 0)); err != nil {
				return err
			}
		}
		return nil
	}
	eventually(t, "the store answers", zero)
	must(t, "pause", server.Pause())
	var all sync.WaitGroup
	var uncertain atomic.Int64
	for key, take := range map[string]func(l *limit.Limit) error{
		"take":    func(l *limit.Limit) error { _, err := l.Take(t.Context(), "take", 2); return err },
		"wait":    func(l *limit.Limit) error { return l.Wait(t.Context(), "wait", 2) },
		"reserve": func(l *limit.Limit) error { _, err := l.Reserve(t.Context(), "reserve", 2); return err },
		"wait and reserve": func(l *limit.Limit) error {
			_, err := l.WaitReserve(t.Context(), "wait and reserve", 2)
			return err
		},
	} {
		for _, l := range []*limit.Limit{log, slots} {
			if l == slots && (key == "take" || key == "wait") {
				continue
			}
			all.Go(func() {
				// Those that wait for others' answers to be sent have certainly taken nothing.
				err := take(l)
				if errors.Is(err, limit.ErrUncertain) {
					uncertain.Add(1)
				} else if !errors.Is(err, limit.ErrUnavailable) {
					t.Errorf("%s: %v", key, err)
				}
			})
		}
	}
	all.Wait()
	must(t, "calls", want("some are uncertain", uncertain.Load() > 0, true))
	must(t, "resume", server.Resume())
	eventually(t, "all is given back", zero)
}

// TestCloseFromReport: who hears that a reservation was not given back may close the store.
func TestCloseFromReport(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var s *limit.Store
	closed := make(chan struct{})
	var once sync.Once
	s, err := limit.OpenRedis(limit.Redis{
		CheckTimeout: 10 * time.Second, ChargeTimeout: 10 * time.Millisecond, Shards: []limit.Shard{{Primary: server.Addr()}},
		OnUndelivered: func(error) {
			s.Close()
			once.Do(func() { close(closed) })
		},
	})
	must(t, "open", err)
	l := limitOf(t, s, limit.Config{Name: "api", Events: 10, Window: time.Hour, ReserveFor: 5 * time.Second})
	_, err = l.Reserve(t.Context(), "a", 1)
	must(t, "reserve", err)
	must(t, "stop", server.Stop())
	<-closed
}

// losing is a store whose replies to takes are lost, where late is how they end.
type losing struct {
	store.Store
	late *store.Late
}

func (s *losing) Take(ctx context.Context, asks []*store.Ask) {
	if s.Store.Take(ctx, asks); s.late != nil {
		asks[0].State = store.State{Err: s.late.Wrap(store.ErrUncertain)}
	}
}

// TestWhatHasEndedIsHeldNoMore: once an estimate counts for good, or its reply is lost, refused callers are told how long
// to wait in fact.
func TestWhatHasEndedIsHeldNoMore(t *testing.T) {
	for _, actual := range []int64{4, 5, -1} {
		s, lossy := limit.OpenMemory(limit.Memory{}), new(losing)
		s.Wrap(func(next store.Store) store.Store {
			lossy.Store = next
			return lossy
		})
		l := limitOf(t, s, limit.Config{Name: "api", Events: 4, Window: time.Hour})
		isHeld := func() bool {
			got, err := l.Take(t.Context(), "a", 1)
			must(t, "take", errors.Join(err, want("allowed", got.Allowed, false)))
			return got.RetryAfter <= time.Second
		}
		if actual < 0 {
			lossy.late = new(store.Late)
		}
		late := lossy.late
		r, err := l.Reserve(t.Context(), "a", 4)
		must(t, "reserve", want("uncertain", errors.Is(err, limit.ErrUncertain), actual < 0))
		lossy.late = nil
		must(t, "while it runs", want("held", isHeld(), true))
		if actual < 0 {
			late.End(nil)
		} else {
			must(t, "commit", r.Commit(t.Context(), actual))
		}
		must(t, fmt.Sprint("ended with ", actual), want("held", isHeld(), false))
	}
}
