package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestConnectionsThatAreAllCutAreNotUsedAgain, with TLS too: nothing fails, and no outcome is unknown.
func TestConnectionsThatAreAllCutAreNotUsedAgain(t *testing.T) {
	ca := redistest.StartAuthority(t)
	certificate, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	server := redistest.Start(t, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no"))
	shard := newShard(t, ShardOptions{Primary: server.Addr(), PoolSize: 1, TLS: &tls.Config{RootCAs: ca.Pool()}})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	waitUntilUp(t, s)
	// While one connection is in use, the check opens the other.
	taken := clientOf(shard.Owner(0).Checks).Conn()
	must(t, taken.Ping(t.Context()).Err())
	must(t, store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
	must(t, taken.Close())
	for what, op := range map[string]func(context.Context, []*store.Ask){"check": s.Check, "take": s.Take, "charge": s.Charge} {
		killed := connections(t, server, "")
		must(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err())
		eventually(t, "the connections are cut", func() error {
			if left := connections(t, server, ""); slices.ContainsFunc(killed, func(id string) bool { return slices.Contains(left, id) }) {
				return fmt.Errorf("of %v there are %v", killed, left)
			}
			return nil
		})
		if err := store.Answers(t.Context(), op, oneOf("k"))[0].Err; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if n := stored(t, server, "k"); n != 2 {
		t.Errorf("%d are counted, want the take and the charge", n)
	}
	if down := j.all(wire.ServerDown, server.Addr()); len(down) > 0 {
		t.Errorf("the server was left out: %+v", down)
	}
}

// connections returns the IDs of other connections to a server than its client's, of which that was the last command,
// unless it is empty.
func connections(t *testing.T, server *redistest.Server, last string) (ids []string) {
	t.Helper()
	list, err := server.Client().ClientList(t.Context()).Result()
	must(t, err)
	for line := range strings.Lines(list) {
		if fields := strings.Fields(line); !slices.Contains(fields, "cmd=client|list") && (last == "" || slices.Contains(fields, "cmd="+last)) {
			ids = append(ids, fields[0])
		}
	}
	return ids
}

// TestInfoGoesRoundTheConnections for checks, so that none is closed for idleness.
func TestInfoGoesRoundTheConnections(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	s := newStore(t, shard, nil)
	waitUntilUp(t, s)
	one, other := clientOf(shard.Owner(0).Checks).Conn(), clientOf(shard.Owner(0).Checks).Conn()
	must(t, errors.Join(one.Ping(t.Context()).Err(), other.Ping(t.Context()).Err(), one.Close(), other.Close()))
	eventually(t, "INFO was the last on two connections", func() error {
		if n := len(connections(t, server, "info")); n < 2 {
			return fmt.Errorf("it was on %d", n)
		}
		return nil
	})
}

// TestChargesWithoutAPauseNeedNoPing.
func TestChargesWithoutAPauseNeedNoPing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	waitUntilUp(t, s)
	charge := func() { must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err) }
	pings := func() string {
		stats, err := server.Info("commandstats")
		must(t, err)
		return stats["cmdstat_ping"]
	}
	eventually(t, "charges follow each other without a PING", func() error {
		charge()
		before := pings()
		for range 3 {
			charge()
		}
		if after := pings(); after != before {
			return fmt.Errorf("there were %s, and are %s", before, after)
		}
		return nil
	})
}

// forgotten is a connection that leads nowhere once it is cut, of which neither side has a sign.
type forgotten struct {
	net.Conn
	isCut *atomic.Bool
}

func (c forgotten) Write(b []byte) (int, error) {
	if c.isCut.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// TestChargeAfterAPauseIsNotLost, although a firewall has forgotten the connection.
func TestChargeAfterAPauseIsNotLost(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var present atomic.Pointer[atomic.Bool]
	present.Store(new(atomic.Bool))
	s := newStore(t, newShard(t, ShardOptions{
		Primary: server.Addr(), DialTimeout: time.Second,
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			return forgotten{conn, present.Load()}, err
		},
	}), nil)
	waitUntilUp(t, s)
	used(t, "the first charge", store.Answers(t.Context(), s.Charge, oneOf("k"))[0], 1)
	time.Sleep(1100 * time.Millisecond) // a connection counts as quiet after a second
	present.Swap(new(atomic.Bool)).Store(true)
	used(t, "the charge after a pause", store.Answers(t.Context(), s.Charge, oneOf("k"))[0], 2)
}

// TestServerThatIsLeftOutIsNotCalled: calls fail with the cause.
func TestServerThatIsLeftOutIsNotCalled(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("nobody", "secret")}), nil)
	eventually(t, "the server is left out", func() error {
		err := store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err
		if !errors.Is(err, wire.ErrShardDown) {
			return errors.New("it is still called")
		}
		if !strings.Contains(err.Error(), "WRONGPASS") {
			t.Errorf("the error is %v", err)
		}
		return nil
	})
}

// TestReplicaWithoutConnectionsIsLeftOut until it has some: no check dials it in vain.
func TestReplicaWithoutConnectionsIsLeftOut(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	replica := sh.Replicas[0]
	// The connection of the test is the only one.
	must(t, replica.Client().ConfigSet(t.Context(), "maxclients", "1").Err())
	s := newStore(t, shardOf(t, sh), nil)
	eventually(t, "the replica is left out", func() error {
		must(t, store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
		if s.Shards()[0].Servers[1].State != store.ServerLeftOut {
			return errors.New("it is still called")
		}
		return nil
	})
	must(t, replica.Client().ConfigSet(t.Context(), "maxclients", "10000").Err())
	eventually(t, "the replica is called", func() error {
		if s.Shards()[0].Servers[1].State != store.ServerUp {
			return errors.New("it is left out")
		}
		return nil
	})
}

// TestContextBoundsCallsWithoutPipelining of a silent server.
func TestContextBoundsCallsWithoutPipelining(t *testing.T) {
	proxy := redistest.StartProxy(t, redistest.Start(t).Addr())
	s := newStore(t, newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: true, PoolSize: 1}), func(o *Options) { o.CheckTimeout = time.Hour })
	waitUntilUp(t, s)
	must(t, store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
	must(t, proxy.SwallowReplies())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	soon(t, "a check whose context ends", func() {
		if err := store.Answers(ctx, s.Check, oneOf("k"))[0].Err; err == nil {
			t.Error("a check without a reply has no error")
		}
	})
	cancel()
	if err := store.Answers(ctx, s.Take, oneOf("k"))[0].Err; !errors.Is(err, store.ErrNotExecuted) {
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
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	// A call that is left to a worker fails.
	replica := shard.Owner(0).Replicas[0]
	mu := hidden[sync.Mutex](replica, "queue", "mu")
	mu.Lock()
	*hidden[bool](replica, "queue", "closed") = true
	(*hidden[*sync.Cond](replica, "queue", "filled")).Broadcast()
	mu.Unlock()
	if st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]; st.Err != nil || !st.Replica {
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
	// Several buckets are a bundle with pipelining alone.
	bothWays(t, func(t *testing.T, plain bool) {
		buckets := 8
		if plain {
			buckets = 1
		}
		sh := redistest.StartShard(t, 1)
		name := redistest.StartProxy(t, sh.Primary.Addr())
		shard := newShard(t, ShardOptions{Primary: name.Addr(), NoPipelining: plain, PoolSize: 8})
		s := newStore(t, shard, nil)
		useAllConnections(t, s, plain)
		demote(t, sh, name)
		refused := 0
		for round := range 50 {
			if err := anyError(store.Answers(t.Context(), s.Take, takes(hourly, buckets))); err != nil {
				if store.KindOf(err) != store.KindReadOnly {
					t.Fatalf("take in round %d: %v", round, err)
				}
				refused++
			}
		}
		if refused > 1 {
			t.Errorf("%d of 50 calls reached the old primary, want at most the first", refused)
		}
	})
}

// TestChargesLeaveADemotedServerBehindAName before their deadline.
func TestChargesLeaveADemotedServerBehindAName(t *testing.T) {
	// Several buckets are a bundle with pipelining alone.
	bothWays(t, func(t *testing.T, plain bool) {
		buckets := 8
		if plain {
			buckets = 1
		}
		sh := redistest.StartShard(t, 1)
		name := redistest.StartProxy(t, sh.Primary.Addr())
		s := newStore(t, newShard(t, ShardOptions{Primary: name.Addr(), NoPipelining: plain, PoolSize: 4}), nil)
		must(t, anyError(store.Answers(t.Context(), s.Charge, takes(hourly, buckets))))
		demote(t, sh, name)
		reported := make(chan error, buckets)
		s.ChargeReported(storetest.Posts(takes(hourly, buckets)), func(_ int, st store.State) { reported <- st.Err })
		for range buckets {
			if err := <-reported; err != nil {
				t.Errorf("a charge is given up: %v", err)
			}
		}
		for i := range buckets {
			waitForCount(t, sh.Replicas[0], fmt.Sprint("client", i), 2)
		}
	})
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
	must(t, store.Answers(t.Context(), s.Take, oneOf("probe"))[0].Err)
	if !plain {
		return
	}
	eventually(t, "there are several connections", func() error {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() { store.Answers(t.Context(), s.Take, oneOf("probe")) })
		}
		wg.Wait()
		if n := s.opts.Members[0].Shard.Owner(0).Checks.Figures().Pool.Idle; n < 4 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
}

// TestRefundsThatWaitAreBounded, as charges are: beyond the bound they are given up at once, and
// reported.
func TestRefundsThatWaitAreBounded(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	lane := s.serversOf(&store.Request{ClientKey: "k"}).Charges
	mu := hidden[sync.Mutex](lane, "queue", "mu")
	mu.Lock()
	*hidden[int](lane, "queue", "limit") = 0
	mu.Unlock()
	var err error
	s.RefundReported(storetest.Posts(oneOf("k")), func(_ int, st store.State) { err = st.Err })
	if !errors.Is(err, wire.ErrOverload) || !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("error is %v, want that too many wait", err)
	}
}
