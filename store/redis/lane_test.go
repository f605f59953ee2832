package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestConnectionsThatAreAllCutLeaveNoServerOut: the pool has one connection more than
// workers. With TLS, go-redis notices a cut connection only when it is used.
func TestConnectionsThatAreAllCutLeaveNoServerOut(t *testing.T) {
	ca := redistest.StartAuthority(t)
	certificate, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	server := redistest.Start(t, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no"))
	shard := newShard(t, ShardOptions{Primary: server.Addr(), PoolSize: 1, TLS: &tls.Config{RootCAs: ca.Pool()}})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	waitUntilUp(t, s)
	// While one connection is in use, the check opens the other.
	taken := shard.owner(0).checks.client.Load().Conn()
	must(t, taken.Ping(t.Context()).Err())
	must(t, store.Answers(t.Context(), s.Check, ask("k"))[0].Err)
	must(t, taken.Close())
	must(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err())
	failures := 0
	eventually(t, "checks work", func() error {
		err := store.Answers(t.Context(), s.Check, ask("k"))[0].Err
		if err != nil {
			failures++
		}
		return err
	})
	// Health checks may use up some of the connections that were cut.
	if failures > 2 {
		t.Errorf("%d checks failed, want at most one for each connection", failures)
	}
	if down := j.all(ServerDown, server.Addr()); len(down) > 0 {
		t.Errorf("the server was left out: %+v", down)
	}
}

// TestServerThatIsLeftOutIsNotCalled: calls fail with the cause.
func TestServerThatIsLeftOutIsNotCalled(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("nobody", "secret")}), nil)
	eventually(t, "the server is left out", func() error {
		err := store.Answers(t.Context(), s.Check, ask("k"))[0].Err
		if !errors.Is(err, ErrShardDown) {
			return errors.New("it is still called")
		}
		if !strings.Contains(err.Error(), "WRONGPASS") {
			t.Errorf("the error is %v", err)
		}
		return nil
	})
}

// TestContextBoundsCallsWithoutPipelining of a silent server.
func TestContextBoundsCallsWithoutPipelining(t *testing.T) {
	proxy := redistest.StartProxy(t, redistest.Start(t).Addr())
	s := newStore(t, newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: true, PoolSize: 1}), func(o *Options) { o.CheckTimeout = time.Hour })
	waitUntilUp(t, s)
	must(t, store.Answers(t.Context(), s.Check, ask("k"))[0].Err)
	must(t, proxy.SwallowReplies())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	soon(t, "a check whose context ends", func() {
		if err := store.Answers(ctx, s.Check, ask("k"))[0].Err; err == nil {
			t.Error("a check without a reply has no error")
		}
	})
	cancel()
	if err := store.Answers(ctx, s.Take, ask("k"))[0].Err; !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("a take of a context that has ended has error %v", err)
	}
	// The connection is in use until check_timeout has passed.
	must(t, proxy.Cut())
}

// TestChecksAtReplicasWakeNoWorker: without pipelining the callers send these checks
// themselves, although a replica has only half of the timeout.
func TestChecksAtReplicasWakeNoWorker(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	shard := newShard(t, ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}, NoPipelining: true})
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Charge, ask("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	// A call that is left to a worker fails.
	shard.owner(0).replicas[0].queue.close()
	if st := store.Answers(t.Context(), s.Check, ask("k"))[0]; st.Err != nil || !st.Replica {
		t.Errorf("check: %+v, want the replica's answer", st)
	}
}

// demote promotes the replica of a shard and makes the primary's name lead to it.
// Existing connections still lead to the old primary, which is now a replica.
func demote(t *testing.T, sh *redistest.Shard, name *redistest.Proxy) {
	t.Helper()
	must(t, sh.WaitReplicated(t.Context()))
	was, next := sh.Primary, sh.Replicas[0]
	must(t, next.Client().Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
	name.PointTo(next.Addr())
	host, port, err := net.SplitHostPort(next.Addr())
	must(t, err)
	must(t, was.Client().Do(t.Context(), "REPLICAOF", host, port).Err())
}

// TestDemotedServerBehindANameIsLeft: after the first refusal all calls go to the
// server that the name leads to now, by new connections.
func TestDemotedServerBehindANameIsLeft(t *testing.T) {
	for _, buckets := range []int{1, 8} {
		t.Run(fmt.Sprint(buckets, " buckets"), func(t *testing.T) {
			bothWays(t, func(t *testing.T, plain bool) {
				sh := redistest.StartShard(t, 1)
				name := redistest.StartProxy(t, sh.Primary.Addr())
				shard := newShard(t, ShardOptions{Primary: name.Addr(), NoPipelining: plain, PoolSize: 8})
				s := newStore(t, shard, nil)
				useAllConnections(t, s, plain)
				demote(t, sh, name)
				refused := 0
				for round := range 50 {
					if err := anyError(store.Answers(t.Context(), s.Take, takes(hourly, buckets))); err != nil {
						if KindOf(err) != KindReadOnly {
							t.Fatalf("take in round %d: %v", round, err)
						}
						refused++
					}
				}
				if refused > 1 {
					t.Errorf("%d of 50 calls reached the old primary, want at most the first", refused)
				}
			})
		})
	}
}

// TestChargesLeaveADemotedServerBehindAName before their deadline.
func TestChargesLeaveADemotedServerBehindAName(t *testing.T) {
	for _, buckets := range []int{1, 8} {
		t.Run(fmt.Sprint(buckets, " buckets"), func(t *testing.T) {
			bothWays(t, func(t *testing.T, plain bool) {
				sh := redistest.StartShard(t, 1)
				name := redistest.StartProxy(t, sh.Primary.Addr())
				s := newStore(t, newShard(t, ShardOptions{Primary: name.Addr(), NoPipelining: plain, PoolSize: 4}), nil)
				must(t, anyError(store.Answers(t.Context(), s.Charge, takes(hourly, buckets))))
				demote(t, sh, name)
				reported := make(chan error, buckets)
				s.ChargeReported(takes(hourly, buckets), func(_ int, st store.State) { reported <- st.Err })
				for range buckets {
					if err := <-reported; err != nil {
						t.Errorf("a charge is given up: %v", err)
					}
				}
				for i := range buckets {
					waitForCount(t, sh.Replicas[0], fmt.Sprint("client", i), 2)
				}
			})
		})
	}
}

func anyError(states []store.State) error {
	for _, st := range states {
		if st.Err != nil {
			return st.Err
		}
	}
	return nil
}

// useAllConnections opens several connections for takes, if each call has its own.
func useAllConnections(t *testing.T, s *Store, plain bool) {
	t.Helper()
	must(t, store.Answers(t.Context(), s.Take, ask("probe"))[0].Err)
	if !plain {
		return
	}
	eventually(t, "there are several connections", func() error {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() { store.Answers(t.Context(), s.Take, ask("probe")) })
		}
		wg.Wait()
		if n := s.opts.Members[0].Shard.owner(0).checks.figures().Pool.Idle; n < 4 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
}

// TestClosedShardLeavesNothingBehind, for every kind, used or not, up or down.
func TestClosedShardLeavesNothingBehind(t *testing.T) {
	single := redistest.StartShard(t, 1)
	_, sentinels := sentinelShard(t, 1)
	nodes := redistest.StartCluster(t, 3, 0)
	gone := redistest.Start(t)
	must(t, gone.Kill())
	silent := redistest.Start(t)
	must(t, silent.Pause())
	t.Cleanup(func() { must(t, silent.Resume()) })
	for name, opts := range map[string]ShardOptions{
		"static":       {Primary: single.Primary.Addr(), Replicas: []string{single.Replicas[0].Addr()}},
		"plain":        {Primary: single.Primary.Addr(), NoPipelining: true},
		"sentinel":     sentinelOptions(sentinels),
		"cluster":      {Cluster: nodes.Addrs()},
		"gone":         {Primary: gone.Addr()},
		"silent":       {Primary: silent.Addr(), Replicas: []string{gone.Addr()}},
		"no sentinel":  {Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{gone.Addr(), silent.Addr()}}},
		"lost cluster": {Cluster: []string{gone.Addr(), silent.Addr()}},
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			for _, used := range []bool{false, true} {
				shard := NewShard(opts)
				s := New(Options{Members: []Member{{Name: "a", Shard: shard}}, CheckTimeout: 300 * time.Millisecond, ChargeTimeout: 300 * time.Millisecond})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				if used {
					s.Warm(ctx)
					store.Answers(t.Context(), s.Check, ask("k"))
					s.ChargeReported(ask("k"), nil)
				}
				shard.Close(ctx)
				cancel()
			}
			// go-redis checks once a second whether it may still dial.
			eventually(t, "no goroutine is left", func() error { return goleak.Find(before) })
		})
	}
}

// TestFullPipelineOfChargesLeavesAtOnce: otherwise a lane could send no more than a pipeline a
// pause, and its queue would overflow although the server has time.
func TestFullPipelineOfChargesLeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lane{queue: newQueue(queueLimit), batch: maxBatch, persistent: true, life: t.Context()}
		for _, step := range []struct {
			more, calls int
			after       time.Duration
		}{{maxBatch + 1, maxBatch, 0}, {maxBatch - 1, maxBatch, 0}, {maxBatch - 1, maxBatch - 1, linger}} {
			for range step.more {
				must(t, l.queue.put(new(call)))
			}
			start := time.Now()
			if batch, _ := l.gather(nil); len(batch) != step.calls || time.Since(start) != step.after {
				t.Errorf("%d calls after %v, want %d after %v", len(batch), time.Since(start), step.calls, step.after)
			}
		}
	})
}

// TestRefundsThatWaitAreBounded, as charges are: beyond the bound they are given up at once, and
// reported.
func TestRefundsThatWaitAreBounded(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	waiting := s.ownerOf("k").servers.charges.queue
	waiting.mu.Lock()
	waiting.limit = 0
	waiting.mu.Unlock()
	var err error
	s.RefundReported(ask("k"), func(_ int, st store.State) { err = st.Err })
	if !errors.Is(err, errOverload) || !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("error is %v, want that too many wait", err)
	}
}

// TestQuickestOutlastsABusyPeriod: what counts is the least time of this period and of the one
// before, not of an earlier one.
func TestQuickestOutlastsABusyPeriod(t *testing.T) {
	var q quickest
	at := time.Now()
	for i, step := range []struct {
		after, took, least time.Duration
	}{
		{0, 5 * time.Millisecond, 5 * time.Millisecond},
		{quickestPeriod / 2, time.Millisecond, time.Millisecond},
		{0, 9 * time.Millisecond, time.Millisecond},
		{quickestPeriod / 2, 8 * time.Millisecond, time.Millisecond},
		{quickestPeriod / 2, 7 * time.Millisecond, time.Millisecond},
		{quickestPeriod / 2, 9 * time.Millisecond, 7 * time.Millisecond},
		{2 * quickestPeriod, 20 * time.Millisecond, 20 * time.Millisecond},
	} {
		at = at.Add(step.after)
		q.note(step.took, at)
		if least := q.least(); least != step.least {
			t.Errorf("step %d: %v, want %v", i, least, step.least)
		}
	}
}
