package redis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestBundlesAgreeWithAlgorithm: a bundle has the effect of single calls.
func TestBundlesAgreeWithAlgorithm(t *testing.T) {
	t.Parallel()
	const buckets, all = 2*maxBundle + 17, 60
	shard := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	for n, limit := range storetest.Limits {
		limit.Zone = fmt.Sprint("bundles", n)
		t.Run(fmt.Sprint(limit.Algorithm, limit.Align), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(n), 1))
			now := time.UnixMicro(1_795_258_977_534_988)
			s := newStore(t, shard, func(o *Options) {
				o.clock = func() time.Time { return now }
			})
			want := make([]algorithm.Bucket, buckets)
			receipts := make([]store.Receipt, buckets)
			for i := range want {
				want[i] = algorithm.New(&limit)
			}
			for step := range sweep.Size(15, all) {
				now = now.Add(time.Duration(rng.Int64N(int64(limit.Window / 8))).Truncate(time.Microsecond))
				op := []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take, algorithm.Take, algorithm.Refund, algorithm.Penalize}[rng.IntN(6)]
				reqs := make([]store.Request, buckets)
				for i := range reqs {
					reqs[i] = store.Request{
						Limit: &limit, ClientKey: fmt.Sprint("client", i), Events: 10, Cost: rng.Int64N(4), ID: fmt.Sprint(step),
						Receipt: receipts[i], Until: now.Add(time.Duration(rng.Int64N(int64(limit.Window)))).UnixMicro(),
					}
					if step%2 == 0 {
						// Numbers that are the same for all are sent once.
						reqs[i].Cost, reqs[i].Until = reqs[0].Cost, reqs[0].Until
					}
				}
				do := map[algorithm.Operation]func(context.Context, []*store.Ask){
					algorithm.Check: s.Check, algorithm.Charge: s.Charge, algorithm.Take: s.Take,
					algorithm.Refund: s.Refund, algorithm.Penalize: s.Penalize,
				}[op]
				for i, got := range store.Answers(t.Context(), do, reqs) {
					state := op.Run(want[i], &reqs[i], now.UnixMicro())
					if got != state {
						t.Fatalf("step %d, %v of bucket %d:\ngot  %+v\nwant %+v", step, op, i, got, state)
					}
					receipts[i] = got.Receipt
				}
			}
		})
	}
}

// takes returns requests of different clients for the same limit.
func takes(limit *store.Limit, n int) []store.Request {
	reqs := make([]store.Request, n)
	for i := range reqs {
		reqs[i] = store.Request{Limit: limit, ClientKey: fmt.Sprint("client", i), Events: 10, Cost: 1}
	}
	return reqs
}

func TestBundlesAreFewCalls(t *testing.T) {
	server := redistest.Start(t)
	for name, c := range map[string]struct {
		opts ShardOptions
		want int64
	}{
		"pipelining":     {ShardOptions{Primary: server.Addr()}, 3},
		"pipelining off": {ShardOptions{Primary: server.Addr(), NoPipelining: true}, 2*maxBundle + 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, newShard(t, c.opts), nil)
			s.Warm(t.Context())
			before := calls(t, server, "evalsha")
			asked, err := server.Asked()
			must(t, err)
			took := store.Answers(t.Context(), s.Take, takes(hourly, 2*maxBundle+1))
			for i, st := range took {
				if st.Err != nil {
					t.Fatalf("take %d: %v", i, st.Err)
				}
				// The clock is read once for a bundle.
				if first := took[i-i%maxBundle]; name == "pipelining" && st.Now != first.Now {
					t.Fatalf("take %d is at %d, the first of its bundle at %d", i, st.Now, first.Now)
				}
			}
			if _, _, known := s.opts.Members[0].Shard.Owner(0).Clock.Estimate(time.Now()); !known {
				t.Error("the primary's clock is not known")
			}
			if n := calls(t, server, "evalsha") - before; n != c.want {
				t.Errorf("%d calls for %d takes, want %d", n, 2*maxBundle+1, c.want)
			}
			if n, err := server.Asked(); err != nil || n-asked != 2*maxBundle+1 {
				t.Errorf("the server was asked %d times for %d takes, error %v", n-asked, 2*maxBundle+1, err)
			}
		})
	}
}

// TestBundlesOutlastACutConnection: a connection that breaks while scripts are loaded shows no proxy
// that refuses that.
func TestBundlesOutlastACutConnection(t *testing.T) {
	server := redistest.Start(t)
	var loads atomic.Int64
	filter := redistest.StartFilter(t, server.Addr(), func(command []string) string {
		if strings.EqualFold(command[0], "script") && loads.Add(1) == 1 {
			return redistest.Cut
		}
		return ""
	})
	s := newStore(t, newShard(t, ShardOptions{Primary: filter.Addr()}), nil)
	take := func(n int) {
		t.Helper()
		for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, n)) {
			if st.Err != nil {
				t.Fatalf("take %d: %v", i, st.Err)
			}
		}
	}
	take(1) // by its source
	take(maxBundle)
	before := calls(t, server, "evalsha")
	take(maxBundle)
	if n := calls(t, server, "evalsha") - before; n != 1 || loads.Load() < 2 {
		t.Errorf("%d calls for %d takes after %d loads, want 1", n, maxBundle, loads.Load())
	}
}

// TestSpoiltBucketSpoilsNoOtherOfItsBundle, whether the key holds another type or the
// script repairs its content.
func TestSpoiltBucketSpoilsNoOtherOfItsBundle(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	key := func(i int) string { return s.asker.Keys.Key(hourly, fmt.Sprint("client", i)) }
	must(t, server.Client().Set(t.Context(), key(3), "foreign", 0).Err())
	must(t, server.Client().HSet(t.Context(), key(5), "c", "0x1", "r", time.Now().Add(time.Minute).UnixMicro()).Err())
	for round := range int64(5) {
		for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, 8)) {
			switch {
			case i == 3:
				if !errors.Is(st.Err, store.ErrNotExecuted) || store.KindOf(st.Err) != store.KindForeignData {
					t.Errorf("foreign bucket: %+v", st)
				}
			case st.Err != nil || st.Used != round+1:
				t.Errorf("bucket %d in round %d: %+v", i, round, st)
			}
		}
	}
}

// TestRefusalOfABundleConcernsEachMember: none of them is executed.
func TestRefusalOfABundleConcernsEachMember(t *testing.T) {
	for name, c := range serverRefusals {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
			s.Warm(t.Context())
			must(t, server.Client().Do(t.Context(), c.refuse...).Err())
			for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, 8)) {
				if !errors.Is(st.Err, store.ErrNotExecuted) || !strings.Contains(st.Err.Error(), name) {
					t.Errorf("take %d: %+v", i, st)
				}
				if name == "READONLY" && store.KindOf(st.Err) != store.KindReadOnly {
					t.Errorf("take %d: no discovery after %v", i, st.Err)
				}
			}
			must(t, server.Client().Do(t.Context(), c.mend...).Err())
			for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, 8)) {
				if st.Err != nil || st.Used != 1 {
					t.Errorf("take %d after the repair: %+v", i, st)
				}
			}
		})
	}
}

// TestErrorsInABundleLeaveTheConnectionInOrder: the next reply is that of the next
// command.
func TestErrorsInABundleLeaveTheConnectionInOrder(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	gcra := &store.Limit{Zone: "gcra", Algorithm: store.GCRA, Window: time.Hour}
	log := &store.Limit{Zone: "log", Algorithm: store.SlidingLog, Window: time.Hour}
	must(t, server.Client().Do(t.Context(), serverRefusals["READONLY"].refuse...).Err())
	reqs := slices.Concat(takes(hourly, 3), takes(gcra, 3), takes(log, 3))
	for i, st := range store.Answers(t.Context(), s.Take, reqs) {
		if store.KindOf(st.Err) != store.KindReadOnly || !errors.Is(st.Err, store.ErrNotExecuted) {
			t.Errorf("take %d: %+v", i, st)
		}
	}
}

func TestScriptFlushIsNotNoticedByABundle(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for round := range int64(3) {
		must(t, server.Client().ScriptFlush(t.Context()).Err())
		for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, 8)) {
			if st.Err != nil || st.Used != round+1 {
				t.Errorf("take %d in round %d: %+v", i, round, st)
			}
		}
	}
}

// TestLostReplyOfABundleIsUncertainForEach member, and none counts twice.
func TestLostReplyOfABundleIsUncertainForEach(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	shard := newShard(t, ShardOptions{Primary: proxy.Addr()})
	for _, st := range store.Answers(t.Context(), newStore(t, shard, nil).Take, takes(hourly, 8)) {
		must(t, st.Err)
	}
	must(t, proxy.SwallowReplies())
	answers := make(chan []store.State, 1)
	go func() { answers <- store.Answers(context.Background(), newStore(t, shard, nil).Take, takes(hourly, 8)) }()
	for i := range 8 {
		waitForCount(t, server, fmt.Sprint("client", i), 2)
	}
	must(t, proxy.Cut())
	for i, st := range <-answers {
		if !errors.Is(st.Err, store.ErrUncertain) {
			t.Errorf("take %d: %+v, want an outcome that is not known", i, st)
		}
	}
	for i := range 8 {
		waitForCount(t, server, fmt.Sprint("client", i), 2)
	}
}

// TestServerThatSplitsItsKeysIsSentNoBundles after it has refused the first one.
// Callers do not notice.
func TestServerThatSplitsItsKeysIsSentNoBundles(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Args("--cluster-enabled", "yes"))
	must(t, server.Client().ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	eventually(t, "the cluster is up", func() error {
		if info := server.Client().ClusterInfo(t.Context()).Val(); !strings.Contains(info, "cluster_state:ok") {
			return fmt.Errorf("it says %s", info)
		}
		return nil
	})
	// Without INFO it is not known for a node of a cluster, as which it gets no calls.
	filter := redistest.StartFilter(t, server.Addr(), redistest.Refusing("-ERR unknown command", "info"))
	s := newStore(t, newShard(t, ShardOptions{Primary: filter.Addr()}), nil)
	for round := range int64(3) {
		for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, 8)) {
			if st.Err != nil || st.Used != 2*round+1 {
				t.Errorf("take %d in round %d: %+v", i, round, st)
			}
		}
		s.ChargeReported(storetest.Posts(takes(hourly, 8)), nil)
		for i := range 8 {
			waitForCount(t, server, fmt.Sprint("client", i), 2*(round+1))
		}
	}
}

// TestRequestsAreNotKept: once requests are over, nothing of a shard leads to their limits, and so to their config.
func TestRequestsAreNotKept(t *testing.T) {
	t.Parallel()
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	ask := func(n int) weak.Pointer[store.Limit] {
		limit := &store.Limit{Zone: fmt.Sprint("kept", n), Algorithm: store.FixedWindow, Window: time.Hour}
		for _, do := range []func(context.Context, []*store.Ask){s.Check, s.Charge, s.Take, s.Peek} {
			for _, st := range store.Answers(t.Context(), do, takes(limit, 3)) {
				redistest.Must(t, st.Err)
			}
		}
		charges := takes(limit, 3)
		reported := make(chan store.State, len(charges))
		s.ChargeReported([]*store.Request{&charges[0], &charges[1], &charges[2]}, func(_ int, st store.State) { reported <- st })
		for range charges {
			redistest.Must(t, (<-reported).Err)
		}
		return weak.Make(limit)
	}
	var limits []weak.Pointer[store.Limit]
	for n := range 20 {
		limits = append(limits, ask(n))
	}
	redistest.Eventually(t, "the limits are collected", func() error {
		runtime.GC()
		kept := slices.DeleteFunc(slices.Clone(limits), func(p weak.Pointer[store.Limit]) bool { return p.Value() == nil })
		if len(kept) > 0 {
			return fmt.Errorf("%d of %d limits are kept", len(kept), len(limits))
		}
		return nil
	})
}
