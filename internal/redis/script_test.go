package redis

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestScriptsAgreeWithAlgorithm compares the Lua scripts, and reads without them, with
// the arithmetic in Go, in every field of every answer.
func TestScriptsAgreeWithAlgorithm(t *testing.T) {
	shard := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	for _, limit := range append(slices.Clone(storetest.Limits), storetest.Days) {
		name := limit.Algorithm.String()
		if limit.Align {
			name += "/align" + string(limit.Calendar.Unit)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.History{Limit: limit, Operations: 50_000}.Run(t, func(_ *testing.T, clock *storetest.Clock) store.Store {
				return New(Options{
					clock: clock.Now, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout,
					Members: []Member{{Name: "a", Shard: shard}},
				})
			})
		})
	}
}

// TestCalendarWindowOfAnUnknownClock makes the first call to a primary, whose clock no reply
// has told yet.
func TestCalendarWindowOfAnUnknownClock(t *testing.T) {
	server := redistest.Start(t)
	for _, zone := range []string{"", "Europe/Berlin", "America/New_York"} {
		for _, unit := range []store.CalendarUnit{store.Day, store.Week, store.Month, store.Year} {
			for op, run := range map[algorithm.Operation]func(*Store, context.Context, []*store.Ask){
				algorithm.Take: (*Store).Take, algorithm.Charge: (*Store).Charge, algorithm.Check: (*Store).Check,
			} {
				c := store.Calendar{Unit: unit, TimeZone: zone}
				limit := store.Limit{Zone: "first", Algorithm: store.FixedWindow, Window: c.Window(), Align: true, Calendar: c}
				s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
				reqs := []store.Request{{Limit: &limit, ClientKey: op.String(), Events: 10, Cost: 1}}
				for _, what := range []string{"first", "second"} {
					asks := store.Asks(reqs)
					run(s, t.Context(), asks)
					if st := asks[0].State; st.Err != nil || st.Reset != c.End(st.Now) {
						t.Errorf("%s %v of a %v: %+v, want a reset at %d", what, op, c, st, c.End(st.Now))
					}
				}
			}
		}
	}
}

// TestRemaindersAddUpExactly where a double cannot hold their sum.
func TestRemaindersAddUpExactly(t *testing.T) {
	const events = store.MaxInteger
	now := time.UnixMicro(1_795_258_977_534_988)
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), func(o *Options) {
		o.clock = func() time.Time { return now }
	})
	limit := &store.Limit{Zone: "rests", Algorithm: store.GCRA, Window: time.Minute + time.Microsecond}
	for i := range 300 {
		bucket := algorithm.New(limit)
		for n := range 4 {
			r := store.Request{Limit: limit, ClientKey: fmt.Sprint(i), Events: events, Cost: 2_398_311_873_043 + int64(i*n), ID: "id"}
			want := algorithm.Take.Run(bucket, &r, now.UnixMicro())
			got := store.Answers(t.Context(), s.Take, []store.Request{r})[0]
			if got.Err != nil || got.Content != want.Content || got.Used != want.Used {
				t.Fatalf("take %d of %d: got %+v, want %+v", n, i, got, want)
			}
		}
	}
}

func TestContract(t *testing.T) {
	server := redistest.Start(t)
	other := redistest.Start(t)
	for name, build := range map[string]func(t *testing.T, o *Options){
		"Pipelining": func(t *testing.T, o *Options) {
			o.Members = []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}}
		},
		"Plain": func(t *testing.T, o *Options) {
			o.Members = []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: true})}}
		},
		"TwoShardsAndSecret": func(t *testing.T, o *Options) {
			o.KeySecret = []byte("secret")
			o.Members = []Member{
				{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})},
				{Name: "b", Shard: newShard(t, ShardOptions{Primary: other.Addr()})},
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T, clock *storetest.Clock) store.Store {
				opts := Options{clock: clock.Now, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout}
				build(t, &opts)
				return New(opts)
			})
		})
	}
}

func TestBucketExpiresAfterItsReset(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for name, use := range map[string]func(key string) []store.State{
		"opened":  func(key string) []store.State { return store.Answers(t.Context(), s.Check, oneOf(key)) },
		"charged": func(key string) []store.State { return store.Answers(t.Context(), s.Charge, oneOf(key)) },
	} {
		t.Run(name, func(t *testing.T) {
			st := use(name)[0]
			if st.Err != nil {
				t.Fatal(st.Err)
			}
			at, err := server.Client().PExpireTime(t.Context(), s.asker.Keys.Key(hourly, name)).Result()
			must(t, err)
			late := at.Microseconds() - st.Reset
			if late < 1e6 || late > 2e6 {
				t.Fatalf("key expires %d µs after the reset, want 1 to 2 seconds", late)
			}
		})
	}
}

func TestMemoryPerBucket(t *testing.T) {
	// Redis doubles its hash tables when they are full, and has both while it fills the new ones.
	// With this number they almost are, so that a key of another origin changes nothing.
	const buckets, limit = 30_000, 190
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), PoolSize: 1}), nil)
	store.Answers(t.Context(), s.Charge, oneOf("first"))
	before := usedMemory(t, server)
	reqs := make([]store.Request, buckets)
	for i := range reqs {
		// "rl:3:hourly:fw3600s:" and 13 more bytes are 33.
		reqs[i] = store.Request{Limit: hourly, ClientKey: fmt.Sprintf("abc:%09d", i), Events: 5000, Cost: 1}
	}
	if n := len(s.asker.Keys.Key(hourly, reqs[0].ClientKey)); n != 33 {
		t.Fatalf("keys have %d bytes, want 33", n)
	}
	for some := range slices.Chunk(reqs, 100) {
		for _, st := range store.Answers(t.Context(), s.Charge, some) {
			if st.Err != nil {
				t.Fatal(st.Err)
			}
		}
	}
	// A server frees the buffers of its clients and its old hash tables in the background.
	eventually(t, "buckets take no more memory", func() error {
		perBucket := float64(usedMemory(t, server)-before) / buckets
		if perBucket > limit {
			return fmt.Errorf("a bucket takes %.1f bytes of used_memory, want at most %d", perBucket, limit)
		}
		t.Logf("%.1f bytes of used_memory per bucket", perBucket)
		return nil
	})
}

// usedMemory returns the memory that a server uses, without that of its clients, which grows on a busy machine.
func usedMemory(t *testing.T, server *redistest.Server) int64 {
	t.Helper()
	info, err := server.Info("memory")
	must(t, err)
	var all, clients int64
	if _, err := fmt.Sscan(info["used_memory"]+" "+info["mem_clients_normal"], &all, &clients); err != nil {
		t.Fatal(err)
	}
	return all - clients
}

func TestScriptFlushIsNotNoticed(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	for i := range 20 {
		if i%5 == 4 {
			for _, server := range append(sh.Replicas, sh.Primary) {
				must(t, server.Client().ScriptFlush(t.Context()).Err())
			}
		}
		if st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]; st.Err != nil {
			t.Fatalf("check %d: %v", i, st.Err)
		}
		used(t, fmt.Sprint("charge ", i), store.Answers(t.Context(), s.Charge, oneOf("k"))[0], int64(i+1))
	}
}

// TestCallReadsTheClockOnce: however long the window is, and however many buckets are in
// the call.
func TestCallReadsTheClockOnce(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for _, window := range []time.Duration{10 * time.Second, time.Hour} {
		for _, buckets := range []int{1, 50} {
			limit := store.Limit{Zone: fmt.Sprint(window), Algorithm: store.FixedWindow, Window: window}
			reqs := takes(&limit, buckets)
			store.Answers(t.Context(), s.Charge, reqs)
			before := calls(t, server, "time")
			must(t, anyError(store.Answers(t.Context(), s.Take, reqs)))
			if n := calls(t, server, "time") - before; n != 1 {
				t.Errorf("takes of %d buckets with a window of %v read the clock %d times, want once", buckets, window, n)
			}
		}
	}
}

// TestLateChargeCountsInTheWindowThatIsOpen pauses the primary across a reset while
// charges wait in it.
func TestLateChargeCountsInTheWindowThatIsOpen(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := oneOf("k")
	must(t, store.Answers(t.Context(), s.Charge, reqs)[0].Err)
	first := endsIn(t, s, server, reqs[0], time.Second)
	must(t, server.Pause())
	for range 5 {
		s.ChargeReported(storetest.Posts(slices.Clone(reqs)), nil)
	}
	eventually(t, "the window is over", func() error {
		if left := time.Until(time.UnixMicro(first)); left > -100*time.Millisecond {
			return fmt.Errorf("it lasts for another %v", left)
		}
		return nil
	})
	must(t, server.Resume())
	eventually(t, "the charges are counted", func() error {
		st := store.Answers(t.Context(), s.Check, reqs)[0]
		if st.Err != nil || st.Used != 5 || st.Reset < first+hourly.Window.Microseconds() {
			return fmt.Errorf("state is %+v", st)
		}
		return nil
	})
}

// endsIn makes the open window of a bucket end in d and returns the reset.
func endsIn(t *testing.T, s *Store, server *redistest.Server, r store.Request, d time.Duration) (reset int64) {
	t.Helper()
	now, err := server.Client().Time(t.Context()).Result()
	must(t, err)
	reset = now.Add(d).UnixMicro()
	must(t, server.Client().HSet(t.Context(), s.asker.Keys.Key(r.Limit, r.ClientKey), "r", reset).Err())
	return reset
}

func TestSpoiltBucketSpoilsNoOther(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("good"))[0].Err)
	must(t, sh.Primary.Client().HSet(t.Context(), s.asker.Keys.Key(hourly, "bad"), "c", "1.5", "r", "x").Err())
	must(t, sh.WaitReplicated(t.Context()))
	for range 20 {
		used(t, "the other bucket", store.Answers(t.Context(), s.Check, []store.Request{oneOf("bad")[0], oneOf("good")[0]})[1], 1)
	}
}

// TestManyRefundsInOneBusyTime: the sums of a bucket that is never empty stay
// readable, however many refunds it gets.
func TestManyRefundsInOneBusyTime(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	limit := &store.Limit{Zone: "busy", Algorithm: store.GCRA, Window: 720 * time.Hour}
	must(t, store.Answers(t.Context(), s.Charge, []store.Request{{Limit: limit, ClientKey: "k", Events: 100, Cost: 1}})[0].Err)
	reqs := []store.Request{{Limit: limit, ClientKey: "k", Events: 100, Burst: 100_000, Cost: 90_000}}
	for range 20 {
		st := store.Answers(t.Context(), s.Take, reqs)[0]
		must(t, st.Err)
		reqs[0].Receipt = st.Receipt
		must(t, store.Answers(t.Context(), s.Refund, reqs)[0].Err)
	}
	used(t, "after all refunds", store.Answers(t.Context(), s.Check, reqs)[0], 1)
}
