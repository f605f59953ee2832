package memory_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestBoundIsReached: as many buckets as the bound allows fit in, however their keys
// spread over the stripes.
func TestBoundIsReached(t *testing.T) {
	for _, bound := range []int{1, 2, 10, 63, 64, 65, 200} {
		for range 20 { // each spreads keys differently
			f := newFixture(t, bound)
			hour := limit("hour", time.Hour)
			for round := range int64(3) {
				for i := range bound {
					if used := f.charge(hour, clientKey(i), 1); used != round+1 {
						t.Fatalf("bound %d, round %d, client %d: used %d", bound, round, i, used)
					}
				}
			}
			if n := f.buckets.Len(); n != bound {
				t.Fatalf("%d buckets, want %d", n, bound)
			}
		}
	}
}

func TestBoundOfOne(t *testing.T) {
	f := newFixture(t, 1)
	hour := limit("hour", time.Hour)
	for i := range 100 {
		for used := int64(1); used <= 3; used++ {
			if got := f.charge(hour, clientKey(i), 1); got != used {
				t.Fatalf("client %d: used %d, want %d", i, got, used)
			}
		}
		if n := f.buckets.Len(); n != 1 {
			t.Fatalf("%d buckets, want 1", n)
		}
	}
}

func TestBoundHoldsUnderConcurrency(t *testing.T) {
	for _, bound := range []int{1, 10, 1000} {
		t.Run(fmt.Sprint(bound), func(t *testing.T) {
			const goroutines, insertions = 16, 500
			f := newFixture(t, bound)
			windows := []time.Duration{time.Minute, time.Hour}
			var wg sync.WaitGroup
			for g := range goroutines {
				wg.Go(func() {
					own := limit("zone", windows[g%len(windows)])
					for i := range insertions {
						// Every other client is one that other goroutines
						// insert, too.
						key := clientKey(i)
						if i%2 == 0 {
							key += fmt.Sprint(" of ", g)
						}
						f.charge(own, key, int64(i%7))
						if n := f.buckets.Len(); n > bound {
							t.Errorf("%d buckets, want at most %d", n, bound)
							return
						}
						if i%100 == 0 {
							f.clock.Advance(time.Second)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestBoundIsLowered below the number of buckets: no single insertion pays for all
// evictions.
func TestBoundIsLowered(t *testing.T) {
	const before, after = 1000, 10
	f := newFixture(t, before)
	hour := limit("hour", time.Hour)
	for i := range before {
		f.charge(hour, clientKey(i), 1)
	}
	lowered := f.view(after)
	if used := charge(lowered, hour, clientKey(0), 1); used != 2 {
		t.Errorf("charge through the other view: used %d, want 2", used)
	}
	if n := f.buckets.Len(); n != before {
		t.Errorf("%d buckets after a charge that inserted none, want %d", n, before)
	}
	for i, want := 0, before; want > after; i++ {
		want = max(want-memory.TrimSize, after)
		charge(lowered, hour, fmt.Sprint("newcomer ", i), 1)
		if n := f.buckets.Len(); n != want {
			t.Fatalf("%d buckets after %d insertions, want %d", n, i+1, want)
		}
	}
	charge(lowered, hour, "another", 1)
	if n := f.buckets.Len(); n != after {
		t.Errorf("%d buckets, want %d", n, after)
	}

	// The other view keeps its bound.
	for i := range before {
		f.charge(hour, clientKey(i), 1)
	}
	if n := f.buckets.Len(); n != before {
		t.Errorf("%d buckets, want %d", n, before)
	}
}

// TestBoundOfTheViewThatRuns counts for all views, so that a config that may be rejected evicts nothing.
func TestBoundOfTheViewThatRuns(t *testing.T) {
	f := newFixture(t, 100)
	hour, trial := limit("hour", time.Hour), f.view(1)
	f.store.Run()
	for i := range 20 {
		charge(trial, hour, clientKey(i), 1)
	}
	if n := f.buckets.Len(); n != 20 {
		t.Errorf("%d buckets, want 20", n)
	}
	trial.Run()
	f.charge(hour, "another", 1)
	if n := f.buckets.Len(); n != 1 {
		t.Errorf("%d buckets once the other view runs, want 1", n)
	}
}

func TestExpiredBucketsGoFirst(t *testing.T) {
	const half = 1000
	f := newFixture(t, 2*half)
	minute, hour := limit("minute", time.Minute), limit("hour", time.Hour)
	for i := range half {
		// What expired buckets have spent does not keep them.
		f.charge(minute, clientKey(i), 100)
		f.charge(hour, clientKey(i), 1)
	}
	f.clock.Advance(time.Minute)

	// The places of expired buckets of any stripe are free.
	newcomers := limit("newcomers", time.Hour)
	for i := range half {
		f.charge(newcomers, clientKey(i), 5)
	}
	for i := range half {
		if f.buckets.Has(minute, clientKey(i)) {
			t.Fatalf("expired bucket %d is still there", i)
		}
		if used := f.charge(hour, clientKey(i), 1); used != 2 {
			t.Fatalf("live bucket %d: used %d after two charges", i, used)
		}
	}

	f.charge(newcomers, "one too many", 5)
	live := 0
	for i := range half {
		for _, l := range []bool{f.buckets.Has(hour, clientKey(i)), f.buckets.Has(newcomers, clientKey(i))} {
			if l {
				live++
			}
		}
	}
	if live != 2*half-1 {
		t.Errorf("%d of %d live buckets are left after one insertion too many", live, 2*half)
	}
}

func TestLeastSpentGoesFirst(t *testing.T) {
	f := newFixture(t, memory.SampleSize)
	hour := limit("hour", time.Hour)
	var clients []string
	for i := range memory.SampleSize {
		clients = append(clients, fmt.Sprint("client ", i))
		f.charge(hour, clients[i], int64(i))
		f.clock.Advance(time.Second)
	}
	// The latest charge counts, and so does cost past the limit.
	f.charge(hour, clients[0], 1000)

	for i := 1; i < len(clients); i++ {
		newcomer := fmt.Sprint("newcomer ", i)
		f.charge(hour, newcomer, 100)
		f.wantOnly(hour, clients, append(clients[i+1:], clients[0])...)
		f.wantOnly(hour, []string{newcomer}, newcomer)
	}
	f.charge(hour, "newcomer 0", 100)
	f.wantOnly(hour, clients, clients[0])
}

func TestNearestResetGoesFirstAmongEquals(t *testing.T) {
	f := newFixture(t, memory.SampleSize)
	hour := limit("hour", time.Hour)
	var clients []string
	for i := range memory.SampleSize {
		clients = append(clients, fmt.Sprint("client ", i))
		f.charge(hour, clients[i], 1)
		f.clock.Advance(time.Microsecond)
	}
	for i := range clients {
		f.charge(hour, fmt.Sprint("newcomer ", i), 1)
		f.wantOnly(hour, clients, clients[i+1:]...)
		f.clock.Advance(time.Microsecond)
	}
}

// TestFloodEvictsItself: a few clients that have spent something survive a flood of
// clients that never return.
func TestFloodEvictsItself(t *testing.T) {
	const bound, regulars, flood = 6400, 20, 20_000
	f := newFixture(t, bound)
	hour := limit("hour", time.Hour)
	for i := range regulars {
		f.charge(hour, fmt.Sprint("regular ", i), 5)
	}
	for i := range flood {
		f.charge(hour, clientKey(i), 1)
		f.clock.Advance(time.Microsecond)
	}
	for i := range regulars {
		if used := f.charge(hour, fmt.Sprint("regular ", i), 1); used != 6 {
			t.Errorf("regular %d: used %d, want 6", i, used)
		}
	}
	if n := f.buckets.Len(); n != bound {
		t.Errorf("%d buckets, want %d", n, bound)
	}
}

// TestShortWindowsSurviveLongOnes: eviction by reset alone would forget the client
// of a short window with every insertion of a long one.
func TestShortWindowsSurviveLongOnes(t *testing.T) {
	const bound = 6400
	f := newFixture(t, bound)
	minute, hour := limit("minute", time.Minute), limit("hour", time.Hour)
	for i := range bound {
		f.charge(hour, clientKey(i), 1)
	}
	f.charge(minute, "client", 3)
	for i := range bound / 10 {
		f.charge(hour, clientKey(-1-i), 1)
	}
	if used := f.charge(minute, "client", 1); used != 4 {
		t.Errorf("used %d, want 4", used)
	}
}

// TestFullBucketsSurviveOtherZones: made-up keys of a loose limit, each of which has spent
// more than the strict limit admits, push out no bucket of it that is full or penalized, nor
// one of a running request. What is pushed out is reported.
func TestFullBucketsSurviveOtherZones(t *testing.T) {
	for a := range store.Algorithms {
		t.Run(a.String(), func(t *testing.T) {
			const bound, flood = 300, 3000
			f := newFixture(t, bound)
			evicted := map[string]int{}
			s := memory.New(f.buckets, memory.Options{
				MaxBuckets: bound, Now: f.clock.Now, OnEvict: func(zone string) { evicted[zone]++ },
			})
			login := &store.Limit{Zone: "login", Algorithm: a, Window: time.Hour}
			ask := func(client string, events, cost int64) store.Request {
				return store.Request{Limit: login, ClientKey: client, Events: events, Cost: cost, ID: client, Until: f.clock.Now().Add(time.Hour).UnixMicro()}
			}
			// Limits of one zone may differ, as plans do.
			store.Answers(t.Context(), s.Take, []store.Request{ask("small", 5, 5), ask("large", 50, 50), ask("running", 50, 1)})
			if algorithm.Of(a).Penalties {
				store.Answers(t.Context(), s.Penalize, []store.Request{ask("penalized", 50, 0)})
			}
			loose := limit("api", time.Hour)
			for i := range flood {
				store.Answers(t.Context(), s.Charge, []store.Request{{Limit: loose, ClientKey: clientKey(i), Events: 100, Cost: 30}})
			}
			for client, kept := range map[string]bool{
				"small": true, "large": true, "running": algorithm.Of(a).Lease, "penalized": algorithm.Of(a).Penalties,
			} {
				if has := f.buckets.Has(login, client); has != kept {
					t.Errorf("bucket of %s exists: %t, want %t", client, has, kept)
				}
			}
			if evicted["login"] > 1 || evicted["api"] < flood-bound {
				t.Errorf("reported evictions: %v", evicted)
			}
		})
	}
}

// TestFullForOneIsFull: a bucket that is full for some of its requests goes last although others,
// which ask later, have room, until it has been empty.
func TestFullForOneIsFull(t *testing.T) {
	for a := range store.Algorithms {
		f := newFixture(t, memory.SampleSize)
		l := &store.Limit{Zone: "api", Algorithm: a, Window: time.Hour}
		ask := func(client string, events, cost int64) []store.Request {
			return []store.Request{{Limit: l, ClientKey: client, Events: events, Cost: cost, ID: fmt.Sprint(client, events, cost)}}
		}
		flood := func(round string) {
			for i := range 100 {
				store.Answers(t.Context(), f.store.Charge, []store.Request{{Limit: limit("flood", time.Hour), ClientKey: fmt.Sprint(round, i), Events: 100, Cost: 30}})
			}
		}
		for _, op := range []operation{f.store.Check, f.store.Take} {
			store.Answers(t.Context(), f.store.Take, ask("client", 10, 10))
			store.Answers(t.Context(), op, ask("client", 1000, 1))
			flood("full")
			if !f.buckets.Has(l, "client") {
				t.Errorf("%s: the bucket that was full is gone", a)
			}
			f.clock.Advance(200 * l.Window)
			store.Answers(t.Context(), f.store.Take, ask("client", 1000, 11))
		}
		flood("empty since")
		if has := f.buckets.Has(l, "client"); has != algorithm.Of(a).Lease {
			t.Errorf("%s: the bucket that has been empty is there: %t", a, has)
		}
	}
}

// TestFullBucketsGoLast, however many there are.
func TestFullBucketsGoLast(t *testing.T) {
	const bound = 64
	f := newFixture(t, bound)
	hour := limit("hour", time.Hour)
	for i := range bound - 1 {
		f.charge(hour, clientKey(i), 10)
	}
	for i := range 200 {
		f.charge(hour, fmt.Sprint("newcomer ", i), 1)
	}
	kept := 0
	for i := range bound - 1 {
		if f.buckets.Has(hour, clientKey(i)) {
			kept++
		}
	}
	// A sample may miss the only bucket that is not full.
	if kept < bound/4 {
		t.Errorf("%d of %d full buckets are left after a flood", kept, bound-1)
	}
}

// TestBucketsOfTheFutureGoFirst: those that a clock made that was ahead for a moment push out no
// other, are not reported, and are gone once used and over, although they were to last for longer.
func TestBucketsOfTheFutureGoFirst(t *testing.T) {
	for a := range store.Algorithms {
		t.Run(a.String(), func(t *testing.T) {
			// A sample has all buckets.
			const half, far = memory.SampleSize / 2, 30 * 24 * time.Hour
			f := newFixture(t, 2*half)
			evicted := 0
			s := memory.New(f.buckets, memory.Options{MaxBuckets: 2 * half, Now: f.clock.Now, OnEvict: func(string) { evicted++ }})
			l := &store.Limit{Zone: "api", Algorithm: a, Window: time.Hour}
			charge := func(who string, i int, cost int64) {
				client := fmt.Sprint(who, i)
				store.Answers(t.Context(), s.Charge, []store.Request{{Limit: l, ClientKey: client, Events: 10, Cost: cost, ID: client}})
			}
			f.clock.Advance(far)
			for i := range half {
				charge("future", i, 10)
			}
			f.clock.Advance(-far)
			for i := range half {
				charge("present", i, 1)
			}
			for i := range half / 2 {
				charge("newcomer", i, 1)
			}
			if kept := clientsOf(f, l, "present", half); kept != half || evicted > 0 {
				t.Errorf("%d of %d buckets are left, %d reported", kept, half, evicted)
			}
			// Used again, they end with the others.
			for i := range half {
				if f.buckets.Has(l, fmt.Sprint("future", i)) {
					charge("future", i, 1)
				}
			}
			f.clock.Advance(3 * l.Window)
			for i := range 2 * half {
				charge("later", i, 1)
			}
			if left := clientsOf(f, l, "future", half) + clientsOf(f, l, "present", half); left > 0 || evicted > 0 {
				t.Errorf("%d expired buckets are left, %d reported", left, evicted)
			}
		})
	}
}

// TestBucketUsedInTheFutureExpires: one that is used while the clock is ahead is over when the
// clock is right and it was due.
func TestBucketUsedInTheFutureExpires(t *testing.T) {
	for a := range store.Algorithms {
		f := newFixture(t, 1)
		l := &store.Limit{Zone: "api", Algorithm: a, Window: time.Hour}
		charge := func(client string) {
			store.Answers(t.Context(), f.store.Charge, []store.Request{{Limit: l, ClientKey: client, Events: 10, Cost: 10, ID: client}})
		}
		charge("first")
		f.clock.Advance(30 * time.Minute)
		f.clock.Advance(30 * 24 * time.Hour)
		charge("first")
		f.clock.Advance(-30 * 24 * time.Hour)
		evicted := 0
		f.clock.Advance(3 * time.Hour)
		s := memory.New(f.buckets, memory.Options{MaxBuckets: 1, Now: f.clock.Now, OnEvict: func(string) { evicted++ }})
		store.Answers(t.Context(), s.Charge, []store.Request{{Limit: l, ClientKey: "second", Events: 10, Cost: 1, ID: "second"}})
		if f.buckets.Has(l, "first") || evicted > 0 {
			t.Errorf("%s: the first bucket is there: %t; %d reported", a, f.buckets.Has(l, "first"), evicted)
		}
	}
}

// clientsOf returns how many of n clients have buckets.
func clientsOf(f *fixture, l *store.Limit, who string, n int) (kept int) {
	for i := range n {
		if f.buckets.Has(l, fmt.Sprint(who, i)) {
			kept++
		}
	}
	return kept
}
