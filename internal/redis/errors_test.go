package redis

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestRefusedChargeDelaysNoOther of its pipeline or of later ones: a full server
// refuses to open a window, but answers charges that write nothing.
func TestRefusedChargeDelaysNoOther(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const good = 50
		server := redistest.Start(t)
		shard := newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: plain, PoolSize: 1})
		s := newStore(t, shard, nil)
		must(t, store.Answers(t.Context(), s.Charge, oneOf("probe"))[0].Err)
		must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].refuse...).Err())

		reqs := []store.Request{{Limit: hourly, ClientKey: "refused", Events: 10, Cost: 1}}
		for i := range good {
			reqs = append(reqs, store.Request{Limit: freeOfCharge, ClientKey: fmt.Sprint("good", i), Events: 10, Cost: 0})
		}
		refused, answered := make(chan store.State, 1), make(chan store.State, 2*good)
		report := func(i int, st store.State) {
			if i == 0 {
				refused <- st
			} else {
				answered <- st
			}
		}
		s.ChargeReported(storetest.Posts(reqs), report)
		// These charges follow on the only connection.
		s.ChargeReported(storetest.Posts(reqs[1:]), func(i int, st store.State) { report(i+1, st) })
		for range 2 * good {
			select {
			case st := <-answered:
				must(t, st.Err)
			case st := <-refused:
				t.Fatalf("the refused charge ends before the others: %v", st.Err)
			}
		}
		must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].mend...).Err())
		must(t, (<-refused).Err)
		waitForCount(t, server, "refused", 1)
	})
}

// freeOfCharge is a limit under which a charge of cost 0 writes nothing.
var freeOfCharge = &store.Limit{Zone: "free", Algorithm: store.GCRA, Window: time.Hour}

func TestRefusedChargeIsGivenUpAtItsDeadline(t *testing.T) {
	server := undone(t, redistest.Start(t))
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	s := newStore(t, shard, func(o *Options) { o.ChargeTimeout = 200 * time.Millisecond })
	waitUntilUp(t, s)
	must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].refuse...).Err())
	reported := make(chan error, 1)
	s.opts.OnUndelivered = func(_ string, _ *store.Limit, _ algorithm.Operation, err error) { reported <- err }
	// On a machine that stands still, a reply may come after the charge was given up, or none was tried.
	eventually(t, "the refusal is told", func() error {
		s.ChargeReported(storetest.Posts(oneOf("k")), nil)
		err := <-reported
		if err == nil {
			t.Fatal("a full server has counted a charge")
		}
		if !errors.Is(err, store.ErrNotExecuted) || store.KindOf(err) != store.KindMemory {
			return err
		}
		return nil
	})
}

// TestFullServerRefusesWritesThatAdd under every algorithm except concurrency: leases are
// few and have to be renewed.
func TestFullServerRefusesWritesThatAdd(t *testing.T) {
	server := undone(t, redistest.Start(t))
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	s.Warm(t.Context())
	must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].refuse...).Err())
	for algorithm := range store.Algorithms {
		limit := &store.Limit{Zone: "full", Algorithm: algorithm, Window: time.Hour}
		err := store.Answers(t.Context(), s.Take, []store.Request{{Limit: limit, ClientKey: "k", Events: 10, Cost: 1, ID: "id"}})[0].Err
		if algorithm == store.Concurrency {
			must(t, err)
		} else if store.KindOf(err) != store.KindMemory || !errors.Is(err, store.ErrNotExecuted) {
			t.Errorf("take of %s: error %v, want ErrNotExecuted", algorithm, err)
		}
	}
}

// bothWays runs a test with pipelining on and off.
func bothWays(t *testing.T, test func(t *testing.T, plain bool)) {
	for name, plain := range map[string]bool{"Pipelining": false, "Plain": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, plain)
		})
	}
}

func TestSwallowedReplyCountsOnce(t *testing.T) {
	t.Parallel()
	for name, charge := range map[string]func(s *Store) error{
		"Waited": func(s *Store) error { return store.Answers(context.Background(), s.Charge, oneOf("k"))[0].Err },
		"Detached": func(s *Store) error {
			reported := make(chan error, 1)
			s.opts.OnUndelivered = func(_ string, _ *store.Limit, _ algorithm.Operation, err error) { reported <- err }
			s.ChargeReported(storetest.Posts(oneOf("k")), nil)
			return <-reported
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothWays(t, func(t *testing.T, plain bool) {
				server := redistest.Start(t)
				proxy := redistest.StartProxy(t, server.Addr())
				opts := ShardOptions{Primary: proxy.Addr(), NoPipelining: plain, PoolSize: 1}
				s := newStore(t, newShard(t, opts), func(o *Options) { o.ChargeTimeout = 2 * time.Second })
				// Loads the script and connects.
				waitUntilUp(t, s)
				must(t, proxy.SwallowReplies())
				isUncertain(t, func() error { return charge(s) })
				must(t, proxy.Pass())
				waitUntilUp(t, s)
				if got := stored(t, server, "k"); got != 1 {
					t.Errorf("the charge was counted %d times", got)
				}
			})
		})
	}
}

// isUncertain makes a call whose reply is swallowed until it is sent, and requires that its outcome
// is unknown then: on a machine that stands still, it may be given up before.
func isUncertain(t *testing.T, call func() error) {
	t.Helper()
	eventually(t, "the call is sent in time", func() error {
		err := call()
		if errors.Is(err, store.ErrNotExecuted) {
			return err
		}
		if !errors.Is(err, store.ErrUncertain) {
			t.Errorf("without a reply the error is %v, want an uncertain one", err)
		}
		return nil
	})
}

// waitUntilUp charges another bucket until that works.
func waitUntilUp(t *testing.T, s *Store) {
	t.Helper()
	eventually(t, "charges work", func() error { return store.Answers(t.Context(), s.Charge, oneOf("probe"))[0].Err })
}

func TestCutConnectionsCountNothingTwice(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const charges = 600
		server := redistest.Start(t)
		proxy := redistest.StartProxy(t, server.Addr())
		s := newStore(t, newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: plain}), nil)
		waitUntilUp(t, s)
		var lost, uncertain, done atomic.Int64
		s.opts.OnUndelivered = func(_ string, _ *store.Limit, _ algorithm.Operation, err error) {
			if errors.Is(err, store.ErrUncertain) {
				uncertain.Add(1)
			} else {
				lost.Add(1)
			}
		}
		for i := range charges {
			if i%100 == 50 {
				must(t, proxy.Cut())
			}
			s.ChargeReported([]*store.Request{{Limit: hourly, ClientKey: "cut", Events: 10, Cost: 1}}, nil)
			done.Add(1)
			if i%50 == 0 {
				waitUntilUp(t, s)
			}
		}
		eventually(t, "all charges have an outcome", func() error {
			got := stored(t, server, "cut") + lost.Load()
			if got > charges || got+uncertain.Load() < charges {
				return fmt.Errorf("%d counted, %d lost, %d uncertain of %d", got-lost.Load(), lost.Load(), uncertain.Load(), charges)
			}
			return nil
		})
		if lost.Load() > 0 {
			t.Errorf("%d charges were given up although the server was up", lost.Load())
		}
		t.Logf("%d counted, %d uncertain", stored(t, server, "cut"), uncertain.Load())
	})
}

func TestChargeWaitsForAServerThatIsAway(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	s := newStore(t, newShard(t, ShardOptions{Primary: proxy.Addr()}), nil)
	must(t, proxy.Down())
	for range 20 {
		s.ChargeReported(storetest.Posts(oneOf("later")), nil)
	}
	must(t, proxy.Up())
	waitForCount(t, server, "later", 20)
}

// serverRefusals are commands that make a server refuse writes, and commands that
// undo that.
var serverRefusals = map[string]struct{ refuse, mend []any }{
	"READONLY": {[]any{"REPLICAOF", "127.0.0.1", "1"}, []any{"REPLICAOF", "NO", "ONE"}},
	"OOM":      {[]any{"CONFIG", "SET", "maxmemory", "1"}, []any{"CONFIG", "SET", "maxmemory", "0"}},
	"NOREPLICAS": {
		[]any{"CONFIG", "SET", "min-replicas-to-write", "1"}, []any{"CONFIG", "SET", "min-replicas-to-write", "0"},
	},
}

// TestRefusedWritesAreRepeatedUntilTheyTake effect, for one bucket and for a bundle.
func TestRefusedWritesAreRepeatedUntilTheyTake(t *testing.T) {
	t.Parallel()
	for name, c := range serverRefusals {
		for _, buckets := range []int{1, 8} {
			t.Run(fmt.Sprint(name, " ", buckets), func(t *testing.T) {
				t.Parallel()
				server := redistest.Start(t)
				shard := newShard(t, ShardOptions{Primary: server.Addr()})
				s := newStore(t, shard, nil)
				reqs := takes(hourly, buckets)
				for i, st := range store.Answers(t.Context(), s.Charge, reqs) {
					must(t, st.Err)
					reqs[i].Receipt.Period = st.Reset
				}
				must(t, server.Client().Do(t.Context(), c.refuse...).Err())
				hasty := newStore(t, shard, func(o *Options) { o.ChargeTimeout = 200 * time.Millisecond })
				// The caller of a charge may stop waiting before its outcome.
				reported := make(chan error, buckets)
				// On a machine that stands still, a reply may come after the charge was given up.
				eventually(t, "the outcomes are certain", func() (uncertain error) {
					hasty.ChargeReported(storetest.Posts(reqs), func(_ int, st store.State) { reported <- st.Err })
					for range buckets {
						switch err := <-reported; {
						case errors.Is(err, store.ErrUncertain):
							uncertain = err
						case !errors.Is(err, store.ErrNotExecuted):
							t.Errorf("error is %v, want ErrNotExecuted", err)
						}
					}
					return uncertain
				})
				before := calls(t, server, "evalsha")
				s.ChargeReported(storetest.Posts(reqs), nil)
				s.ChargeReported(storetest.Posts(reqs), nil)
				s.RefundReported(storetest.Posts(reqs), nil)
				eventually(t, "all charges were refused", func() error {
					if n := calls(t, server, "evalsha") - before; n < int64(4*buckets) {
						return fmt.Errorf("%d calls", n)
					}
					return nil
				})
				must(t, server.Client().Do(t.Context(), c.mend...).Err())
				for i := range buckets {
					waitForCount(t, server, reqs[i].ClientKey, 2)
				}
			})
		}
	}
}

func TestMisconfIsARefusal(t *testing.T) {
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	must(t, store.Answers(t.Context(), newStore(t, shard, nil).Charge, oneOf("k"))[0].Err)
	s := newStore(t, shard, func(o *Options) { o.ChargeTimeout = 200 * time.Millisecond })
	ctx := t.Context()
	// After a snapshot into a missing directory has failed, Redis refuses writes. Snapshots begin
	// only then: one that runs writes into the directory while it is removed.
	dir, err := server.Client().ConfigGet(ctx, "dir").Result()
	must(t, err)
	must(t, os.RemoveAll(dir["dir"]))
	must(t, server.Client().ConfigSet(ctx, "save", "1 1").Err())
	_ = server.Client().BgSave(ctx).Err()
	eventually(t, "writes are refused", func() error {
		st := store.Answers(ctx, s.Charge, oneOf("k"))[0]
		if st.Err == nil || !strings.Contains(st.Err.Error(), "MISCONF") {
			return fmt.Errorf("error is %w", st.Err)
		}
		if !errors.Is(st.Err, store.ErrNotExecuted) {
			t.Fatalf("error is %v, want ErrNotExecuted", st.Err)
		}
		return nil
	})
}

func TestWrongPasswordIsReported(t *testing.T) {
	server := redistest.Start(t)
	must(t, server.Client().ConfigSet(t.Context(), "requirepass", "right").Err())
	for password, want := range map[string]string{"": "NOAUTH", "wrong": "WRONGPASS"} {
		s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("", password)}), func(o *Options) {
			o.ChargeTimeout = 200 * time.Millisecond
		})
		st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]
		if !errors.Is(st.Err, store.ErrNotExecuted) || !strings.Contains(st.Err.Error(), want) {
			t.Errorf("check with password %q: %v, want %s", password, st.Err, want)
		}
		// A charge is retried until its deadline, at which a try may be in flight.
		eventually(t, "a charge with password "+password+" did not run", func() error {
			if st := store.Answers(t.Context(), s.Charge, oneOf("k"))[0]; !errors.Is(st.Err, store.ErrNotExecuted) {
				return fmt.Errorf("the error is %w", st.Err)
			}
			return nil
		})
		for i, st := range store.Answers(t.Context(), s.Take, takes(hourly, 2*maxBundle)) {
			if !errors.Is(st.Err, store.ErrNotExecuted) || store.KindOf(st.Err) != store.KindAuth {
				t.Errorf("take %d with password %q: %v, want ErrNotExecuted", i, password, st.Err)
			}
		}
	}
}

func TestSilentServerCostsNoMoreThanTheTimeout(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, plain bool) {
		server := redistest.Start(t)
		shard := newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: plain})
		waitUntilUp(t, newStore(t, shard, nil))
		s := newStore(t, shard, func(o *Options) { o.CheckTimeout = 20 * time.Millisecond })
		must(t, server.Pause())
		var down bool
		for i := 0; i < 10_000 && !down; i++ {
			st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]
			if st.Err == nil {
				t.Fatal("a paused server answered")
			}
			down = down || errors.Is(st.Err, wire.ErrShardDown)
		}
		if !down {
			t.Error("the server is not left out after repeated failures")
		}
		must(t, server.Resume())
		eventually(t, "checks work again", func() error { return store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err })
	})
}

func TestClientLeavesWhileWaiting(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.CheckTimeout = time.Hour })
	waitUntilUp(t, s)
	must(t, server.Pause())
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	soon(t, "a check whose client has left", func() {
		if st := store.Answers(ctx, s.Check, oneOf("k"))[0]; !errors.Is(st.Err, context.Canceled) {
			t.Errorf("error is %v, want that of the context", st.Err)
		}
	})
	must(t, server.Resume())
}

func TestCloseDeliversQueuedCharges(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const charges = 1000
		server := redistest.Start(t)
		shard := NewShard(ShardOptions{Primary: server.Addr(), DialTimeout: waitTimeout, NoPipelining: plain, PoolSize: 1})
		s := newStore(t, shard, nil)
		for range charges {
			s.ChargeReported([]*store.Request{{Limit: hourly, ClientKey: "k", Events: 10, Cost: 1}}, nil)
		}
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		shard.Close(ctx)
		if got := stored(t, server, "k"); got != charges {
			t.Errorf("%d charges were delivered, want %d", got, charges)
		}
		var reported error
		s.opts.OnUndelivered = func(_ string, _ *store.Limit, _ algorithm.Operation, err error) { reported = err }
		s.ChargeReported(storetest.Posts(oneOf("k")), nil)
		if !errors.Is(reported, store.ErrNotExecuted) {
			t.Errorf("a charge after Close is reported as %v", reported)
		}
	})
}

func TestCloseGivesUpOnASilentServer(t *testing.T) {
	server := redistest.Start(t)
	shard := NewShard(ShardOptions{Primary: server.Addr()})
	var undelivered atomic.Int64
	s := newStore(t, shard, func(o *Options) {
		o.ChargeTimeout = time.Hour
		o.OnUndelivered = func(string, *store.Limit, algorithm.Operation, error) { undelivered.Add(1) }
	})
	waitUntilUp(t, s)
	must(t, server.Pause())
	const charges = 1000
	for range charges {
		s.ChargeReported(storetest.Posts(oneOf("k")), nil)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	shard.Close(ctx)
	if got := undelivered.Load(); got != charges {
		t.Errorf("%d charges are reported, want %d", got, charges)
	}
	must(t, server.Resume())
}

// TestCheckWithoutReplyIsNotExecuted: its request can still be charged.
func TestCheckWithoutReplyIsNotExecuted(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, plain bool) {
		server := redistest.Start(t)
		proxy := redistest.StartProxy(t, server.Addr())
		shard := newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: plain, PoolSize: 1})
		s := newStore(t, shard, nil)
		waitUntilUp(t, s)
		must(t, store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
		s = newStore(t, shard, func(o *Options) { o.CheckTimeout = 500 * time.Millisecond })
		must(t, proxy.SwallowReplies())
		cut := time.AfterFunc(100*time.Millisecond, func() { _ = proxy.Cut() })
		defer cut.Stop()
		if st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]; !errors.Is(st.Err, store.ErrNotExecuted) || errors.Is(st.Err, store.ErrUncertain) {
			t.Errorf("error %v, want ErrNotExecuted", st.Err)
		}
	})
}

// TestSenselessRepliesAreErrors: a server that says of plain commands that their script is missing gets
// no script for them.
func TestSenselessRepliesAreErrors(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	filter := redistest.StartFilter(t, server.Addr(), redistest.Refusing("-NOSCRIPT no matching script", "hmget", "hincrby", "hget"))
	s := newStore(t, newShard(t, ShardOptions{Primary: filter.Addr()}), func(o *Options) { o.ReadPrimary, o.ChargeTimeout = true, 50*time.Millisecond })
	r := plainRequest(1)
	r.Until = openWindow(t, s, r)
	for range 3 {
		for what, st := range inTime(t, func(int) map[string]store.State {
			hearTime(t, s, "heard")
			return map[string]store.State{
				"check": store.Answers(t.Context(), s.Check, []store.Request{r})[0], "charge": reported(t, s, r)[0],
			}
		}) {
			if st.Err == nil {
				t.Errorf("the %s got %+v, want an error", what, st)
			}
		}
	}
	if _, err := listed(t, s); err == nil {
		t.Error("the overrides are read")
	}
}

// panicking is a plain write whose script panics.
type panicking struct{}

func (panicking) Latest() int64 { return math.MaxInt64 }

func (panicking) CallScript(*wire.ScriptCall, string, *wire.Clock) { panic("broken on purpose") }

// TestPanicsAreErrors: a panic while a command is run fails that command, and later ones run on other
// connections.
func TestPanicsAreErrors(t *testing.T) {
	t.Parallel()
	filter := redistest.StartFilter(t, redistest.Start(t).Addr(), redistest.Refusing("-ERR unknown command", "hincrby"))
	shard := newShard(t, ShardOptions{Primary: filter.Addr()})
	s := newStore(t, shard, nil)
	hearTime(t, s, "before")
	lane := shard.Owner(0).Checks
	before := clientOf(lane)
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	cmd := wire.NewWrite(panicking{}, "key", [3]any{"hincrby", "c", 1}, [3]any{"hmget", "r", "p"}, 0, nil)
	if err := lane.DoAll(ctx, cmd); err == nil {
		t.Error("the command succeeds")
	}
	if clientOf(lane) == before {
		t.Error("its connections are used again")
	}
	hearTime(t, s, "after")
}

// panickingConn panics at each reply while panics is set.
type panickingConn struct {
	net.Conn
	panics *atomic.Bool
}

func (c panickingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.panics.Load() {
		panic("broken on purpose")
	}
	return n, err
}

// TestPanicsInTheBackground are told, end no loop, and replace the connections: searches, pings and
// examinations go on.
func TestPanicsInTheBackground(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for name, opts := range map[string]ShardOptions{
		"Primary":  {Primary: server.Addr()},
		"Sentinel": {Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{server.Addr()}}},
		"Cluster":  {Cluster: []string{server.Addr()}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var dials atomic.Int64
			var panics atomic.Bool
			panics.Store(true)
			opts.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				dials.Add(1)
				conn, err := new(net.Dialer).DialContext(ctx, network, addr)
				return panickingConn{conn, &panics}, err
			}
			shard := newShard(t, opts)
			told := make(chan error, 1)
			shard.Listen(func(e wire.Event) {
				if errors.Is(e.Err, contain.ErrPanic) {
					select {
					case told <- e.Err:
					default:
					}
				}
			})
			s := newStore(t, shard, nil)
			if shard.Finds() {
				go shard.Await(t.Context())
			} else {
				s.Warm(t.Context())
			}
			if err := <-told; !strings.Contains(err.Error(), "broken on purpose") {
				t.Errorf("told is %v", err)
			}
			before := dials.Load()
			eventually(t, "it goes on with new connections", func() error {
				if n := dials.Load(); n < before+3 {
					return fmt.Errorf("%d connections, and %d before", n, before)
				}
				return nil
			})
			if panics.Store(false); !shard.Finds() {
				eventually(t, "it answers", func() error { return store.Answers(t.Context(), s.Take, oneOf("after"))[0].Err })
			}
		})
	}
}
