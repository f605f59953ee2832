package redis

import (
	"context"
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

// movingSlot is a cluster in which the slot of a client key moves from one node to
// another.
type movingSlot struct {
	*redistest.Cluster
	from, to *redistest.Server
	// others are the other nodes.
	others []*redistest.Server
}

// beginMove opens the slot of "k" in a cluster of masters, each with replicas replicas, so
// that its node redirects commands to another one.
func beginMove(t *testing.T, masters, replicas int) *movingSlot {
	t.Helper()
	m := &movingSlot{Cluster: redistest.StartCluster(t, masters, replicas, redistest.NodeTimeout(waitTimeout))}
	m.from = masterOf(t, m.Cluster, "k")
	others := slices.DeleteFunc(slices.Clone(m.Nodes), func(s *redistest.Server) bool { return s == m.from })
	m.to, m.others = others[0], others[1:]
	moving, err := m.BeginMigration(t.Context(), int(wire.SlotOf([]byte("k"))), m.from, m.to)
	must(t, err)
	t.Cleanup(func() { must(t, moving.Finish(context.Background())) })
	return m
}

// silence stops a node until the test ends.
func silence(t *testing.T, node *redistest.Server) {
	t.Helper()
	must(t, node.Pause())
	t.Cleanup(func() { must(t, node.Resume()) })
}

// redirects returns the number of commands about buckets that a node has redirected. What the
// store asks in the background, whether the node knows other commands, is about none.
func redirects(t *testing.T, node *redistest.Server) (n int) {
	t.Helper()
	stats, err := node.Info("commandstats")
	must(t, err)
	for _, command := range []string{"evalsha", "evalsha_ro", "hincrby", "hmget", "hsetnx"} {
		count := 0
		_, rejected, _ := strings.Cut(stats["cmdstat_"+command], "rejected_calls=")
		_, _ = fmt.Sscanf(rejected, "%d", &count)
		n += count
	}
	return n
}

// TestOthersDoNotWaitForARedirect: the only worker of a node goes on while a charge
// that the node redirected waits for a silent node.
func TestOthersDoNotWaitForARedirect(t *testing.T) {
	t.Parallel()
	m := beginMove(t, 2, 0)
	s := newStore(t, newShard(t, ShardOptions{Cluster: m.Addrs()[:1], PoolSize: 1}), nil)
	waitUntilUp(t, s)
	var others []string
	for n := 0; len(others) < 32; n++ {
		key := fmt.Sprint("other-", n)
		if masterOf(t, m.Cluster, key) == m.from && wire.SlotOf([]byte(key)) != wire.SlotOf([]byte("k")) {
			others = append(others, key)
			must(t, store.Answers(t.Context(), s.Charge, oneOf(key))[0].Err)
		}
	}
	silence(t, m.to)
	silent := make(chan store.State, 1)
	go func() { silent <- store.Answers(t.Context(), s.Charge, oneOf("k"))[0] }()
	untilRedirected(t, m.from)
	answered := make(chan error, len(others))
	for _, key := range others {
		go func() { answered <- store.Answers(t.Context(), s.Charge, oneOf(key))[0].Err }()
	}
	for range others {
		select {
		case err := <-answered:
			must(t, err)
		case st := <-silent:
			t.Fatalf("the redirected charge ended with %v before the others", st.Err)
		}
	}
}

// TestRedirectNeedsNoThirdNode: a redirection between two nodes works while the node
// that named them is silent.
func TestRedirectNeedsNoThirdNode(t *testing.T) {
	t.Parallel()
	m := beginMove(t, 3, 0)
	third := m.others[0]
	s := newStore(t, newShard(t, ShardOptions{Cluster: []string{third.Addr()}}), nil)
	waitUntilUp(t, s)
	silence(t, third)
	used(t, "charge", store.Answers(t.Context(), s.Charge, oneOf("k"))[0], 1)
	used(t, "take", store.Answers(t.Context(), s.Take, oneOf("k"))[0], 2)
	reported := make(chan store.State, 1)
	s.ChargeReported(storetest.Posts(oneOf("k")), func(_ int, st store.State) { reported <- st })
	used(t, "detached charge", <-reported, 3)
	used(t, "check", store.Answers(t.Context(), s.Check, oneOf("k"))[0], 3)
	if got := tagged(t, m.to, "k"); got != 3 {
		t.Errorf("the count is %d", got)
	}
	resets(t, s, oneOf("k")[0])
	if got := tagged(t, m.to, "k"); got != 0 {
		t.Errorf("the count is %d after the reset", got)
	}
}

// TestSilentNodeIsBlamedForItself: the node that redirected to it is not left out because of it.
func TestSilentNodeIsBlamedForItself(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(s *Store) error{
		"Charge": func(s *Store) error { return store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err },
		"Take":   func(s *Store) error { return store.Answers(t.Context(), s.Take, oneOf("k"))[0].Err },
		"Reset":  func(s *Store) error { return s.Reset(t.Context(), oneOf("k")[0]) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			m := beginMove(t, 2, 0)
			// A node that answers at all answers in time, unless the machine stands still.
			shard := newShard(t, ShardOptions{Cluster: m.Addrs()[:1], PoolSize: 1, DialTimeout: patience})
			j := keepJournal(shard)
			s := newStore(t, shard, func(o *Options) { o.CheckTimeout, o.ChargeTimeout = patience, patience })
			waitUntilUp(t, s)
			slowest := keepPinging(t, m.from)
			silence(t, m.to)
			eventually(t, "the silent node is left out", func() error {
				var calls sync.WaitGroup
				for range 5 {
					calls.Go(func() {
						if call(s) == nil {
							t.Error("a silent node has answered")
						}
					})
				}
				calls.Wait()
				if len(j.all(wire.ServerDown, m.to.Addr())) == 0 {
					return fmt.Errorf("it is not, but the redirecting node was, %d times", len(j.all(wire.ServerDown, m.from.Addr())))
				}
				return nil
			})
			eventually(t, "the error names the silent node", func() error {
				if err := call(s); err == nil || !strings.Contains(err.Error(), m.to.Addr()) {
					return fmt.Errorf("the error is %w, the silent node is %s", err, m.to.Addr())
				}
				return nil
			})
			// A machine that stands still makes that node silent too.
			pause := slowest()
			for _, e := range j.all(wire.ServerDown, m.from.Addr()) {
				if e.Err == nil || strings.Contains(e.Err.Error(), m.to.Addr()) || pause < patience/8 {
					t.Errorf("the redirecting node, which answers within %v, was left out: %v", pause, e.Err)
				}
			}
		})
	}
}

// patience is how long the calls of TestSilentNodeIsBlamedForItself wait.
const patience = 2 * time.Second

// keepPinging pings a server repeatedly. The function that it returns ends that, and returns
// the time of the slowest.
func keepPinging(t *testing.T, server *redistest.Server) (slowest func() time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var pinging sync.WaitGroup
	var most time.Duration
	pinging.Go(func() {
		// The pause is much shorter than the bound on the slowest ping, and leaves the
		// processor to others.
		for last := time.Now(); ctx.Err() == nil; time.Sleep(patience / 100) {
			if err := server.Client().Ping(ctx).Err(); err != nil && ctx.Err() == nil {
				t.Errorf("ping: %v", err)
			}
			now := time.Now()
			most, last = max(most, now.Sub(last)), now
		}
	})
	return func() time.Duration {
		cancel()
		pinging.Wait()
		return most
	}
}

// emptyNode is a Redis Cluster of a master and a replica that can become a master
// without slots.
type emptyNode struct {
	*redistest.Cluster
	from, to *redistest.Server
}

func newEmptyNode(t *testing.T) *emptyNode {
	t.Helper()
	c := redistest.StartCluster(t, 1, 1, redistest.Args("--user", "limiter", "on", ">secret", "~*", "+@all", "-cluster"))
	return &emptyNode{Cluster: c, from: c.Nodes[0], to: c.Nodes[1]}
}

// leave makes the replica a master without slots and begins to move the slot of "k"
// there.
func (e *emptyNode) leave(t *testing.T) {
	t.Helper()
	must(t, e.to.Client().Do(t.Context(), "CLUSTER", "RESET").Err())
	bus, err := e.from.Client().ConfigGet(t.Context(), "cluster-port").Result()
	must(t, err)
	host, port, err := net.SplitHostPort(e.from.Addr())
	must(t, err)
	must(t, e.to.Client().Do(t.Context(), "CLUSTER", "MEET", host, port, bus["cluster-port"]).Err())
	for _, node := range e.Nodes {
		eventually(t, "the nodes agree that one of two masters has the slots", func() error {
			nodes, err := node.Client().ClusterNodes(t.Context()).Result()
			if err != nil || strings.Count(nodes, "master -") != 2 || strings.Count(nodes, " 0-16383") != 1 {
				return fmt.Errorf("%s knows %s, %w", node.Addr(), nodes, err)
			}
			return nil
		})
	}
	eventually(t, "the slot begins to move", func() error {
		_, err := e.BeginMigration(t.Context(), int(wire.SlotOf([]byte("k"))), e.from, e.to)
		return err
	})
}

// TestNodeWithoutSlotsKeepsItsLane while commands are redirected to it, through
// repeated discovery.
func TestNodeWithoutSlotsKeepsItsLane(t *testing.T) {
	t.Parallel()
	e := newEmptyNode(t)
	e.leave(t)
	shard := newShard(t, ShardOptions{Cluster: e.Addrs()[:1]})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	if n := redirects(t, e.from); n == 0 {
		t.Fatal("the charge was not redirected")
	}
	was := laneAt(shard, e.to.Addr())
	topology := hidden[atomic.Pointer[struct{}]](shard.Shard, "topology")
	// The topology that is being adopted may be older than the redirection.
	for range 3 {
		before := topology.Load()
		eventually(t, "the servers are found again", func() error {
			if topology.Load() == before {
				return errors.New("they are not")
			}
			return nil
		})
	}
	if laneAt(shard, e.to.Addr()) != was {
		t.Error("the node has another lane")
	}
	used(t, "charge", store.Answers(t.Context(), s.Charge, oneOf("k"))[0], 2)
	if at := shard.Owner(wire.SlotOf([]byte("k"))); at == nil || at.Primary != e.from.Addr() {
		t.Errorf("the owner is %+v, want %s", at, e.from.Addr())
	}
	if all := j.all(wire.PrimaryChanged, e.to.Addr()); len(all) > 0 {
		t.Errorf("a node without slots is listed as a primary: %+v", all)
	}
}

// TestRedirectedLaneComesBack after the node was left out, although discovery fails
// and no topology has the lane.
func TestRedirectedLaneComesBack(t *testing.T) {
	t.Parallel()
	e := newEmptyNode(t)
	allow := func(rule string) {
		for _, node := range e.Nodes {
			must(t, node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", rule).Err())
		}
	}
	allow("+cluster")
	shard := newShard(t, ShardOptions{Cluster: e.Addrs()[:1], PoolSize: 1, Credentials: login("limiter", "secret")})
	j := keepJournal(shard)
	s := newStore(t, shard, func(o *Options) { o.ChargeTimeout = 500 * time.Millisecond })
	waitUntilUp(t, s)
	allow("-cluster")
	j.await(t, wire.DiscoveryFailed, "")
	e.leave(t)
	must(t, e.to.Kill())
	var lane *wire.Lane
	eventually(t, "the node is left out", func() error {
		err := store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err
		if lane = laneAt(shard, e.to.Addr()); lane == nil || lane.IsUp() {
			return fmt.Errorf("it is not: %w", err)
		}
		return nil
	})
	must(t, e.to.Restart())
	eventually(t, "charges work", func() error { return store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err })
	if laneAt(shard, e.to.Addr()) != lane {
		t.Error("the node has another lane: the test shows nothing")
	}
}

// neighbour returns a client key of a node whose slot is not that of "k".
func neighbour(t *testing.T, m *movingSlot, at *redistest.Server) string {
	t.Helper()
	for n := 0; ; n++ {
		key := fmt.Sprint("other-", n)
		if masterOf(t, m.Cluster, key) == at && wire.SlotOf([]byte(key)) != wire.SlotOf([]byte("k")) {
			return key
		}
	}
}

// untilRedirected waits until a node has redirected a command.
func untilRedirected(t *testing.T, node *redistest.Server) {
	t.Helper()
	eventually(t, "the call is redirected", func() error {
		if n := redirects(t, node); n == 0 {
			return errors.New("it is not")
		}
		return nil
	})
}

// TestRedirectHoldsNoConnection: without pipelining, a take that waits for a silent
// node no longer holds a connection to the node that redirected it.
func TestRedirectHoldsNoConnection(t *testing.T) {
	t.Parallel()
	m := beginMove(t, 2, 0)
	s := newStore(t, newShard(t, ShardOptions{Cluster: m.Addrs()[:1], NoPipelining: true, PoolSize: 1}), nil)
	waitUntilUp(t, s)
	other := neighbour(t, m, m.from)
	must(t, store.Answers(t.Context(), s.Take, oneOf(other))[0].Err)
	silence(t, m.to)
	silent := make(chan store.State, 1)
	go func() { silent <- store.Answers(t.Context(), s.Take, oneOf("k"))[0] }()
	untilRedirected(t, m.from)
	answered := make(chan store.State, 1)
	go func() { answered <- store.Answers(t.Context(), s.Take, oneOf(other))[0] }()
	select {
	case st := <-answered:
		must(t, st.Err)
	case st := <-silent:
		t.Fatalf("the redirected take ended with %v before the other charge", st.Err)
	}
}

// TestRedirectedChargeDelaysNoOther of the same detached call.
func TestRedirectedChargeDelaysNoOther(t *testing.T) {
	t.Parallel()
	m := beginMove(t, 2, 0)
	s := newStore(t, newShard(t, ShardOptions{Cluster: m.Addrs()[:1], PoolSize: 1}), nil)
	waitUntilUp(t, s)
	other := neighbour(t, m, m.from)
	must(t, store.Answers(t.Context(), s.Charge, oneOf(other))[0].Err)
	silence(t, m.to)
	reported := [2]chan store.State{make(chan store.State, 1), make(chan store.State, 1)}
	s.ChargeReported(storetest.Posts(append(oneOf("k"), oneOf(other)...)), func(i int, st store.State) { reported[i] <- st })
	select {
	case st := <-reported[1]:
		used(t, "the other charge", st, 2)
	case st := <-reported[0]:
		t.Fatalf("the redirected charge ended with %v before the other charge", st.Err)
	}
	must(t, m.to.Resume())
	used(t, "the redirected charge", <-reported[0], 1)
}

// TestCloseDeliversRedirectedCharges: Close waits for charges that a node redirects.
func TestCloseDeliversRedirectedCharges(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const charges = 200
		m := beginMove(t, 2, 0)
		shard := NewShard(ShardOptions{Cluster: m.Addrs()[:1], DialTimeout: waitTimeout, NoPipelining: plain, PoolSize: 1})
		s := newStore(t, shard, nil)
		waitUntilUp(t, s)
		for range charges {
			s.ChargeReported(storetest.Posts(oneOf("k")), nil)
		}
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		shard.Close(ctx)
		if got := tagged(t, m.to, "k"); got != charges {
			t.Errorf("%d charges were delivered, want %d", got, charges)
		}
	})
}
