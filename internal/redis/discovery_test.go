package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const masterName = "limits"

// sentinelShard starts a primary and replicas that sentinels watch.
func sentinelShard(t *testing.T, replicas int) (*redistest.Shard, *redistest.Sentinels) {
	t.Helper()
	sh := redistest.StartShard(t, replicas)
	return sh, redistest.StartSentinels(t, masterName, sh.Primary, 3, redistest.SentinelOptions{DownAfter: 2 * time.Second})
}

func sentinelOptions(sentinels *redistest.Sentinels) ShardOptions {
	return ShardOptions{Sentinel: &SentinelOptions{Master: masterName, Addrs: sentinels.Addrs()}}
}

// detour routes the connections to servers through proxies.
type detour struct {
	mu      sync.Mutex
	proxies map[string]*redistest.Proxy
}

func newDetour(t *testing.T, servers ...*redistest.Server) *detour {
	d := &detour{proxies: map[string]*redistest.Proxy{}}
	for _, s := range servers {
		d.proxies[s.Addr()] = redistest.StartProxy(t, s.Addr())
	}
	return d
}

func (d *detour) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	if proxy, ok := d.proxies[addr]; ok {
		addr = proxy.Addr()
	}
	d.mu.Unlock()
	return new(net.Dialer).DialContext(ctx, network, addr)
}

// TestSwallowedReplyCountsOnceInEachKind of shard.
func TestSwallowedReplyCountsOnceInEachKind(t *testing.T) {
	t.Parallel()
	t.Run("Sentinel", func(t *testing.T) {
		t.Parallel()
		sh, sentinels := sentinelShard(t, 0)
		swallow(t, sentinelOptions(sentinels), func() *redistest.Server { return sh.Primary }, sh.Primary)
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		c := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
		swallow(t, ShardOptions{Cluster: c.Addrs()[:1]}, func() *redistest.Server { return masterOf(t, c, "k") }, c.Nodes...)
	})
	t.Run("ClusterRedirect", func(t *testing.T) {
		t.Parallel()
		c := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
		slot := int(wire.SlotOf([]byte("k")))
		from := masterOf(t, c, "k")
		to := c.Nodes[0]
		if to == from {
			to = c.Nodes[1]
		}
		m, err := c.BeginMigration(t.Context(), slot, from, to)
		must(t, err)
		t.Cleanup(func() { must(t, m.Finish(context.Background())) })
		// The key is missing, so an ASK leads to the other node.
		swallow(t, ShardOptions{Cluster: c.Addrs()[:1]}, func() *redistest.Server { return to }, c.Nodes...)
	})
}

// swallow makes a charge and a detached charge while no reply arrives.
func swallow(t *testing.T, opts ShardOptions, owner func() *redistest.Server, servers ...*redistest.Server) {
	t.Helper()
	detour := newDetour(t, servers...)
	opts.Dial = detour.dial
	s := newStore(t, newShard(t, opts), func(o *Options) { o.ChargeTimeout = 2 * time.Second })
	waitUntilUp(t, s)
	eventually(t, "the bucket's own server is reached", func() error { return store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err })
	before := tagged(t, owner(), "k")
	proxy := detour.proxies[owner().Addr()]
	must(t, proxy.SwallowReplies())
	isUncertain(t, func() error { return store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err })
	reported := make(chan error, 1)
	s.ChargeReported(storetest.Posts(oneOf("k")), func(_ int, st store.State) { reported <- st.Err })
	if err := <-reported; err == nil {
		t.Error("detached charge without a reply has no error")
	}
	must(t, proxy.Pass())
	eventually(t, "charges work", func() error { return store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err })
	// The detached charge may be unsent, because the server was left out.
	if got := tagged(t, owner(), "k") - before; got < 2 || got > 3 {
		t.Errorf("of three charges %d were counted", got)
	}
}

// tagged returns the count of a bucket under either key, 0 if there is none.
func tagged(t testing.TB, server *redistest.Server, key string) int64 {
	t.Helper()
	for _, tagged := range []bool{true, false} {
		// A node that imports the slot answers only after ASKING.
		pipe := server.Client().Pipeline()
		pipe.Do(t.Context(), "ASKING")
		count := pipe.HGet(t.Context(), ask.Keys{Prefix: DefaultKeyPrefix, Tagged: tagged}.Key(hourly, key), "c")
		_, _ = pipe.Exec(t.Context())
		if n, err := count.Int64(); err == nil {
			return n
		}
	}
	return 0
}

func masterOf(t *testing.T, c *redistest.Cluster, client string) *redistest.Server {
	t.Helper()
	server, err := c.MasterOf(t.Context(), ask.Keys{Prefix: DefaultKeyPrefix, Tagged: true}.Key(hourly, client))
	must(t, err)
	return server
}

// traffic makes detached charges of several clients in turn until it is stopped.
type traffic struct {
	*testing.T
	store *Store
	// sent counts the charges of each client.
	sent []atomic.Int64
	// counted, uncertain and refused count the charges with a reply, those without
	// one, and those that did not run.
	counted, uncertain, refused atomic.Int64
	waiting                     sync.WaitGroup
	stopped                     atomic.Bool
	done                        sync.WaitGroup
}

func startTraffic(t *testing.T, s *Store, clients int) *traffic {
	tr := &traffic{T: t, store: s, sent: make([]atomic.Int64, clients)}
	tr.done.Go(tr.run)
	return tr
}

func (tr *traffic) run() {
	for n := 0; !tr.stopped.Load(); n++ {
		client := n % len(tr.sent)
		tr.waiting.Add(1)
		tr.store.ChargeReported(storetest.Posts(oneOf(fmt.Sprint("client-", client))), func(_ int, st store.State) {
			switch {
			case st.Err == nil:
				tr.counted.Add(1)
			case errors.Is(st.Err, store.ErrUncertain):
				tr.uncertain.Add(1)
			default:
				tr.refused.Add(1)
			}
			tr.waiting.Done()
		})
		tr.sent[client].Add(1)
		// Without a pause the charges would take what processors there are.
		time.Sleep(2 * time.Millisecond)
	}
}

// another waits for one more charge of a client.
func (tr *traffic) another(client int) {
	tr.Helper()
	was := tr.sent[client].Load()
	eventually(tr, "the client is charged", func() error {
		if tr.sent[client].Load() == was {
			return errors.New("it is not")
		}
		return nil
	})
}

// stop ends the traffic, waits for all outcomes, and returns the number of charges.
func (tr *traffic) stop() (sent int64) {
	tr.stopped.Store(true)
	tr.done.Wait()
	tr.waiting.Wait()
	for i := range tr.sent {
		sent += tr.sent[i].Load()
	}
	return sent
}

// TestSlotMigrationUnderLoad loses and doubles nothing, whatever has moved when a charge comes.
func TestSlotMigrationUnderLoad(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 2, 1, redistest.NodeTimeout(waitTimeout))
	s := newStore(t, newShard(t, ShardOptions{Cluster: c.Addrs()[:1]}), nil)
	waitUntilUp(t, s)
	const clients = 12
	tr := startTraffic(t, s, clients)
	moved := 0
	for n := range clients {
		client := fmt.Sprint("client-", n)
		from := masterOf(t, c, client)
		// One node imports all slots. Of two that import in turn, one that does not yet
		// know of the other's slot may claim it back.
		to := c.Nodes[0]
		if to == from {
			continue
		}
		tr.another(n)
		moving, err := c.BeginMigration(t.Context(), int(wire.SlotOf([]byte(client))), from, to)
		must(t, err)
		tr.another(n)
		_, err = moving.MoveKeys(t.Context(), 100)
		must(t, err)
		tr.another(n)
		must(t, moving.Finish(t.Context()))
		moved++
	}
	sent := tr.stop()
	var counted int64
	for n := range clients {
		client := fmt.Sprint("client-", n)
		counted += tagged(t, masterOf(t, c, client), client)
	}
	if counted+tr.refused.Load() > sent || counted+tr.refused.Load()+tr.uncertain.Load() < sent {
		t.Errorf("%d counted, %d refused, %d uncertain of %d", counted, tr.refused.Load(), tr.uncertain.Load(), sent)
	}
	if tr.refused.Load()+tr.uncertain.Load() > 0 {
		t.Errorf("%d refused, %d uncertain, although all nodes were up", tr.refused.Load(), tr.uncertain.Load())
	}
	for n := range clients {
		client := fmt.Sprint("client-", n)
		want := tagged(t, masterOf(t, c, client), client)
		eventually(t, "checks see the counts", func() error {
			if st := store.Answers(t.Context(), s.Check, oneOf(client))[0]; st.Err != nil || st.Used != want {
				return fmt.Errorf("%s: %+v, want %d", client, st, want)
			}
			return nil
		})
	}
	if t.Logf("%d charges, %d slots moved", sent, moved); moved == 0 {
		t.Error("no slot has moved")
	}
}

// TestPeekWhileASlotMoves finds a bucket that only the new node has, though a replica of the
// old one answers.
func TestPeekWhileASlotMoves(t *testing.T) {
	t.Parallel()
	m := beginMove(t, 2, 1)
	s := newStore(t, newShard(t, ShardOptions{Cluster: m.Addrs()[:1]}), nil)
	waitUntilUp(t, s)
	used(t, "charge", store.Answers(t.Context(), s.Charge, oneOf("k"))[0], 1)
	if n := tagged(t, m.to, "k"); n != 1 {
		t.Fatalf("the new node has counted %d, want 1", n)
	}
	used(t, "peek", store.Answers(t.Context(), s.Peek, oneOf("k"))[0], 1)
}

// TestPeekWhileANodeIsSilent returns the answer of the node's replica, although that may lack a
// bucket.
func TestPeekWhileANodeIsSilent(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 1, 1, redistest.NodeTimeout(waitTimeout))
	s := newStore(t, newShard(t, ShardOptions{Cluster: c.Addrs()[:1]}), func(o *Options) { o.CheckTimeout = time.Second })
	waitUntilUp(t, s)
	silence(t, masterOf(t, c, "k"))
	eventually(t, "the replica answers", func() error {
		if st := store.Answers(t.Context(), s.Peek, oneOf("k"))[0]; st.Err != nil || !st.Replica || st.Used != 0 {
			return fmt.Errorf("the state is %+v", st)
		}
		return nil
	})
}

// TestSilentNodeFailsOnlyItsKeys: the other nodes answer.
func TestSilentNodeFailsOnlyItsKeys(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
	shard := newShard(t, ShardOptions{Cluster: c.Addrs()})
	s, hasty := newStore(t, shard, nil), newStore(t, shard, func(o *Options) { o.CheckTimeout = 200 * time.Millisecond })
	waitUntilUp(t, s)
	owners := map[string]*redistest.Server{}
	for n := range 12 {
		client := fmt.Sprint("client-", n)
		owners[client] = masterOf(t, c, client)
		must(t, store.Answers(t.Context(), s.Charge, oneOf(client))[0].Err)
	}
	silent := c.Nodes[1]
	silence(t, silent)
	for range 5 {
		var wg sync.WaitGroup
		for client, owner := range owners {
			s := s
			if owner == silent {
				s = hasty
			}
			wg.Go(func() {
				st := store.Answers(t.Context(), s.Check, oneOf(client))[0]
				switch {
				case owner == silent && st.Err == nil:
					t.Errorf("%s was answered by the silent node", client)
				case owner != silent && st.Err != nil:
					t.Errorf("%s failed although its node answers: %v", client, st.Err)
				}
			})
		}
		wg.Wait()
	}
}

// TestSentinelFailover: charges and checks go on at the new primary, and the old one
// becomes a replica that answers checks.
func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	sh, sentinels := sentinelShard(t, 2)
	shard := newShard(t, sentinelOptions(sentinels))
	var changed atomic.Int64
	shard.Listen(func(e wire.Event) {
		if e.Kind == wire.PrimaryChanged {
			changed.Add(1)
		}
	})
	s := newStore(t, shard, func(o *Options) { o.ChargeTimeout = time.Second })
	waitUntilUp(t, s)
	tr := startTraffic(t, s, 10)
	eventually(t, "charges are counted", func() error {
		if n := tr.counted.Load(); n < 20 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
	must(t, sh.Primary.Kill())
	killed := time.Now()
	if _, err := sentinels.WaitForMaster(t.Context(), sh.Primary.Addr()); err != nil {
		for _, node := range sentinels.Nodes {
			t.Log(node.Client().Do(context.Background(), "SENTINEL", "MASTER", masterName).Result())
			t.Log(node.Client().Do(context.Background(), "INFO").Result())
		}
		t.Fatal(err)
	}
	waitUntilUp(t, s)
	t.Logf("charges work %v after the primary was killed", time.Since(killed).Round(time.Millisecond))
	must(t, sh.Primary.Restart())
	eventually(t, "the old primary answers checks as a replica", func() error {
		for _, l := range shard.Servers()[0].Replicas {
			if l.Addr == sh.Primary.Addr() && l.IsUp() {
				return nil
			}
		}
		return fmt.Errorf("replicas are %v", shard.Servers()[0].Replicas)
	})
	sent := tr.stop()
	if changed.Load() == 0 {
		t.Error("no event names the new primary")
	}
	t.Logf("%d charges, %d refused, %d uncertain", sent, tr.refused.Load(), tr.uncertain.Load())
}

// TestUnknownServers: calls wait for discovery until their timeout, and then fail.
func TestUnknownServers(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 0)
	dead := redistest.Start(t)
	must(t, dead.Kill())
	for name, opts := range map[string]ShardOptions{
		"sentinel": {Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{dead.Addr()}}},
		// This server is neither a cluster node nor a sentinel.
		"cluster":     {Cluster: []string{sh.Primary.Addr()}},
		"no sentinel": {Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{sh.Primary.Addr()}}},
	} {
		shard := newShard(t, opts)
		failed := make(chan error, 10)
		shard.Listen(func(e wire.Event) {
			if e.Kind == wire.DiscoveryFailed {
				failed <- e.Err
			}
		})
		s := newStore(t, shard, func(o *Options) { o.CheckTimeout, o.ChargeTimeout = 50*time.Millisecond, 50*time.Millisecond })
		for _, st := range []store.State{store.Answers(t.Context(), s.Check, oneOf("k"))[0], store.Answers(t.Context(), s.Take, oneOf("k"))[0], store.Answers(t.Context(), s.Charge, oneOf("k"))[0]} {
			if !errors.Is(st.Err, wire.ErrNoServers) || !errors.Is(st.Err, store.ErrNotExecuted) {
				t.Errorf("%s: error %v, want that no primary is known", name, st.Err)
			}
		}
		if err := <-failed; err == nil {
			t.Errorf("%s: the event does not name the fault", name)
		} else {
			t.Log(err)
		}
	}
}

// TestServersAreFoundOverASlowLink, if a store has the patience.
func TestServersAreFoundOverASlowLink(t *testing.T) {
	t.Parallel()
	sentinels := redistest.StartSentinels(t, masterName, redistest.Start(t), 1, redistest.SentinelOptions{})
	cluster := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(waitTimeout))
	link := newDetour(t, sentinels.Nodes[0], cluster.Nodes[0])
	for _, proxy := range link.proxies {
		must(t, proxy.Delay(300*time.Millisecond))
	}
	for kind, opts := range map[string]ShardOptions{"sentinel": sentinelOptions(sentinels), "cluster": {Cluster: cluster.Addrs()}} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			opts.Dial = link.dial
			shard := newShard(t, opts)
			t.Cleanup(shard.Use(5 * time.Second))
			ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
			defer cancel()
			if shard.Await(ctx); !shard.IsFound() {
				t.Errorf("the servers are not found: %v", shard.SearchFault())
			}
		})
	}
}

// TestFailoverIsFollowedWhileASentinelIsSilent, however patient a store is.
func TestFailoverIsFollowedWhileASentinelIsSilent(t *testing.T) {
	t.Parallel()
	sh, sentinels := sentinelShard(t, 1)
	link := newDetour(t, sentinels.Nodes[0])
	opts := sentinelOptions(sentinels)
	opts.Dial = link.dial
	shard := newShard(t, opts)
	t.Cleanup(shard.Use(time.Hour))
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	shard.Await(ctx)
	must(t, link.proxies[sentinels.Nodes[0].Addr()].SwallowReplies())
	must(t, sh.Primary.Kill())
	addr, err := sentinels.WaitForMaster(t.Context(), sh.Primary.Addr())
	must(t, err)
	began := time.Now()
	eventually(t, "the new primary is followed", func() error {
		if servers := shard.Servers(); len(servers) == 0 || servers[0].Primary != addr {
			return fmt.Errorf("it is %s, and the servers are %+v", addr, servers)
		}
		return nil
	})
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it is followed after %v", took)
	}
}

// TestSilentNodesDoNotHideTheOthers: nodes that do not answer are asked at the same time, and last the
// next time.
func TestSilentNodesDoNotHideTheOthers(t *testing.T) {
	t.Parallel()
	const silent, timeout = 12, 500 * time.Millisecond
	var addrs []string
	for range silent {
		// Connections are accepted, and not read.
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		t.Cleanup(func() { _ = ln.Close() })
		addrs = append(addrs, ln.Addr().String())
	}
	cluster := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(waitTimeout))
	shard := newShard(t, ShardOptions{Cluster: append(addrs, cluster.Addrs()[0])})
	t.Cleanup(shard.Use(timeout))
	finder := wire.NewCluster(&shard.Options)
	t.Cleanup(finder.Close)
	find := func() ([]wire.Roles, error) {
		ctx, cancel := context.WithTimeout(t.Context(), silent*timeout)
		defer cancel()
		found, err := finder.Find(ctx)
		return found.Roles, err
	}
	var found []wire.Roles
	// On a busy machine the node may answer too late as well.
	eventually(t, "the node is found", func() (err error) {
		found, err = find()
		return err
	})
	if len(found) != 1 || found[0].Primary != cluster.Addrs()[0] {
		t.Errorf("found %+v", found)
	}
}

// TestUnknownServersAreAwaitedOnce for all requests of a call.
func TestUnknownServersAreAwaitedOnce(t *testing.T) {
	t.Parallel()
	dead := redistest.Start(t)
	must(t, dead.Kill())
	shard := newShard(t, ShardOptions{Cluster: []string{dead.Addr()}})
	s := newStore(t, shard, func(o *Options) { o.CheckTimeout = time.Second })
	var reqs []store.Request
	// In sequence the requests would wait longer than waitTimeout.
	for n := range 2 * int(waitTimeout/time.Second) {
		reqs = append(reqs, oneOf(fmt.Sprint("client-", n))...)
	}
	soon(t, "a check of many", func() {
		for _, st := range store.Answers(t.Context(), s.Check, reqs) {
			if !errors.Is(st.Err, wire.ErrNoServers) {
				t.Errorf("error %v, want that no primary is known", st.Err)
			}
		}
	})
}

// watched is a context that signals when a caller waits for its end.
type watched struct {
	context.Context
	once   sync.Once
	waited chan struct{}
}

func (w *watched) Done() <-chan struct{} {
	w.once.Do(func() { close(w.waited) })
	return w.Context.Done()
}

// lateSentinel is a sentinel that knows no primary until it is told.
type lateSentinel struct {
	*redistest.Filter
	knows atomic.Bool
}

func startLateSentinel(t *testing.T, primary *redistest.Server) *lateSentinel {
	t.Helper()
	host, port, err := net.SplitHostPort(primary.Addr())
	must(t, err)
	s := new(lateSentinel)
	s.Filter = redistest.StartFilter(t, primary.Addr(), func(command []string) string {
		switch {
		case command[0] != "sentinel":
			return ""
		case !s.knows.Load():
			return "-ERR No such master with that name"
		case command[1] == "replicas":
			return "*0"
		case command[1] == "get-master-addr-by-name":
			return texts(host, port)
		}
		return texts("ip", host, "port", port, "config-epoch", "1")
	})
	return s
}

// texts is an array of them as a filter writes it.
func texts(all ...string) string {
	reply := fmt.Sprintf("*%d", len(all))
	for _, text := range all {
		reply += fmt.Sprintf("\r\n$%d\r\n%s", len(text), text)
	}
	return reply
}

// TestDiscoveryIsPartOfTheDeadline: the wait for discovery does not extend a timeout.
func TestDiscoveryIsPartOfTheDeadline(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for name, call := range map[string]func(ctx context.Context, s *Store) []store.State{
		"Check":    func(ctx context.Context, s *Store) []store.State { return store.Answers(ctx, s.Check, oneOf("k")) },
		"Peek":     func(ctx context.Context, s *Store) []store.State { return store.Answers(ctx, s.Peek, oneOf("k")) },
		"Take":     func(ctx context.Context, s *Store) []store.State { return store.Answers(ctx, s.Take, oneOf("k")) },
		"Charge":   func(ctx context.Context, s *Store) []store.State { return store.Answers(ctx, s.Charge, oneOf("k")) },
		"Refund":   func(ctx context.Context, s *Store) []store.State { return store.Answers(ctx, s.Refund, oneOf("k")) },
		"Penalize": func(ctx context.Context, s *Store) []store.State { return store.Answers(ctx, s.Penalize, oneOf("k")) },
	} {
		t.Run(name, func(t *testing.T) {
			// Without workers queued calls stay queued.
			sentinel := startLateSentinel(t, server)
			shard := newShard(t, ShardOptions{Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{sentinel.Addr()}}, PoolSize: -1})
			s := newStore(t, shard, func(o *Options) { o.CheckTimeout, o.ChargeTimeout = time.Hour, time.Hour })
			ctx, cancel := context.WithCancel(t.Context())
			waits := &watched{Context: ctx, waited: make(chan struct{})}
			done := make(chan struct{})
			go func() {
				defer close(done)
				call(waits, s)
			}()
			<-waits.waited
			found := time.Now()
			sentinel.knows.Store(true)
			var deadline time.Time
			eventually(t, "the call is queued", func() error {
				for _, at := range shard.Servers() {
					for _, l := range []*wire.Lane{at.Checks, at.Charges} {
						mu := hidden[sync.Mutex](l, "queue", "mu")
						mu.Lock()
						if calls := *hidden[[]*wire.Call](l, "queue", "calls"); len(calls) > 0 {
							deadline = *hidden[time.Time](calls[0], "deadline")
						}
						mu.Unlock()
					}
				}
				if deadline.IsZero() {
					return errors.New("it is not")
				}
				return nil
			})
			if end := found.Add(time.Hour); deadline.After(end) {
				t.Errorf("the deadline is %v beyond an hour after discovery", deadline.Sub(end))
			}
			cancel()
			<-done
		})
	}
}
