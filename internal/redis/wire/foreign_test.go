package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// mustFind searches until it finds servers.
func mustFind(t *testing.T, f finder) (found Found) {
	t.Helper()
	redistest.Eventually(t, "servers are found", func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), redistest.WaitTimeout)
		defer cancel()
		found, err = f.Find(ctx)
		return err
	})
	return found
}

// foreignIn returns the sources that lead elsewhere.
func foreignIn(all []Source) []Source {
	return slices.DeleteFunc(slices.Clone(all), func(s Source) bool { return !s.IsForeign })
}

func requireFound(t *testing.T, what string, f finder, primary string, foreign ...string) {
	t.Helper()
	redistest.Eventually(t, what, func() error {
		found := mustFind(t, f)
		if found.Replaced {
			t.Fatalf("%s: %+v replaces the servers before", what, found)
		}
		var sources []string
		for _, source := range foreignIn(found.Sources) {
			sources = append(sources, source.Addr)
		}
		if !slices.ContainsFunc(found.Roles, func(r Roles) bool { return r.Primary == primary }) || !slices.Equal(sources, foreign) {
			return fmt.Errorf("found %+v, want %s, and foreign %q", found, primary, foreign)
		}
		return nil
	})
}

// twoClusters starts a cluster of two nodes, and another one of a node with a later epoch.
func twoClusters(t *testing.T) (ours, other *redistest.Cluster) {
	t.Helper()
	ours, other = redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(redistest.WaitTimeout)), redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(2*redistest.WaitTimeout))
	for _, order := range [][]any{{"RESET", "HARD"}, {"SET-CONFIG-EPOCH", 99}, {"ADDSLOTSRANGE", 0, SlotCount - 1}} {
		redistest.Must(t, other.Nodes[0].Client().Do(t.Context(), append([]any{"CLUSTER"}, order...)...).Err())
	}
	redistest.Must(t, other.WaitUntilOK(t.Context()))
	return ours, other
}

// patientCluster returns a finder that asks these nodes, and waits for slow ones.
func patientCluster(t *testing.T, addrs ...string) (*Shard, *Cluster) {
	t.Helper()
	s := newShard(t, Options{Cluster: addrs})
	t.Cleanup(s.Use(redistest.WaitTimeout))
	f := NewCluster(&s.Options)
	t.Cleanup(f.Close)
	return s, f
}

// TestForeignNodeThatIsNear is not heard alone while the others are slow.
func TestForeignNodeThatIsNear(t *testing.T) {
	t.Parallel()
	ours, other := twoClusters(t)
	given := other.Addrs()
	for _, addr := range ours.Addrs() {
		proxy := redistest.StartProxy(t, addr)
		redistest.Must(t, proxy.Delay(3*findTimeout))
		given = append(given, proxy.Addr())
	}
	_, f := patientCluster(t, given...)
	if found := foreignIn(mustFind(t, f).Sources); len(found) != 1 || found[0].Addr != given[0] {
		t.Errorf("at the start: %+v", found)
	}
	// As if a search that most given nodes could not answer had followed it.
	f.belief = belief{}
	f.belief.follow(&answer{marks: []string{"id of a node"}}, &decision{})
	f.hope, f.census, f.nodes = 0, time.Time{}, nil
	redistest.Eventually(t, "slow nodes have their vote", func() error {
		if _, err := f.Find(t.Context()); !errors.Is(err, errElsewhere) || f.belief.rival.source <= 0 {
			return fmt.Errorf("rival %+v, %w", f.belief.rival, err)
		}
		return nil
	})
}

// TestVagueNode beside others does not make foreign ones be followed, and is one of these once its IDs say so.
func TestVagueNode(t *testing.T) {
	t.Parallel()
	ours, other := twoClusters(t)
	var shows atomic.Bool
	filter := redistest.StartFilter(t, other.Addrs()[0], func(command []string) string {
		switch words := strings.ToLower(strings.Join(command, " ")); {
		case shows.Load():
		case words == "cluster shards":
			return "*0"
		case words == "cluster slots":
			return "*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:1\r\n$0\r\n"
		}
		return ""
	})
	_, f := patientCluster(t, append([]string{filter.Addr()}, ours.Addrs()...)...)
	requireFound(t, "those with IDs are followed", f, ours.Addrs()[0], filter.Addr())
	if f.IsVague() || f.sources[0].Leads != "" || !strings.Contains(f.sources[0].Fault().Remedy, "give the address of a node in place of a proxy's") {
		t.Errorf("sources %+v", f.sources)
	}
	shows.Store(true)
	redistest.Eventually(t, "its IDs count", func() error {
		f.census = time.Time{}
		if found := foreignIn(mustFind(t, f).Sources); len(found) != 1 || found[0].Leads != other.Addrs()[0] {
			return fmt.Errorf("found %+v", found)
		}
		return nil
	})
}

// TestForeignNode is left out, whatever its epoch, also while others of its list are silent, and followed once it is most
// of the sources.
func TestForeignNode(t *testing.T) {
	t.Parallel()
	ours, other := twoClusters(t)
	foreign, mine := other.Addrs()[0], ours.Addrs()
	s, f := patientCluster(t, append([]string{foreign}, mine...)...)
	requireFound(t, "most are followed", f, mine[0], foreign)
	redistest.Must(t, other.Nodes[0].Pause())
	f.census = time.Time{}
	requireFound(t, "a foreign one that is silent is one still", f, mine[0], foreign)
	redistest.Must(t, other.Nodes[0].Resume())
	redistest.Must(t, ours.Nodes[0].Pause())
	requireFound(t, "one of two is followed", f, mine[1], foreign)
	redistest.Must(t, ours.Nodes[1].Pause())
	redistest.Eventually(t, "the foreign one is refused", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		found, err := f.Find(ctx)
		if err == nil {
			t.Fatalf("it is followed: %+v", found)
		}
		if !errors.Is(err, errElsewhere) {
			return err
		}
		return nil
	})
	redistest.Must(t, ours.Nodes[0].Resume())
	redistest.Must(t, ours.Nodes[1].Resume())
	// With the same list cut down to one, most name the other cluster.
	s.Options.Cluster = []string{foreign}
	f.nodes = nil
	f.belief = belief{followed: f.belief.followed, isSet: true}
	redistest.Eventually(t, "it is refused before its time", func() error {
		if found, err := f.Find(t.Context()); !errors.Is(err, errElsewhere) {
			return fmt.Errorf("found %+v, %w", found, err)
		}
		return nil
	})
	f.belief.since = f.belief.since.Add(-FollowAfter)
	if found := mustFind(t, f); !found.Replaced || len(found.Roles) != 1 || found.Roles[0].Primary != foreign {
		t.Errorf("after its time: %+v", found)
	}
}

// TestForeignSentinel is left out, although it knows of more failovers.
func TestForeignSentinel(t *testing.T) {
	t.Parallel()
	const name = "limits"
	mine, theirs := redistest.StartShard(t, 1), redistest.StartShard(t, 1)
	ours := redistest.StartSentinels(t, name, mine.Primary, 2, redistest.SentinelOptions{DownAfter: redistest.WaitTimeout})
	other := redistest.StartSentinels(t, name, theirs.Primary, 1, redistest.SentinelOptions{DownAfter: redistest.WaitTimeout})
	redistest.Must(t, other.Failover(t.Context()))
	leads, err := other.WaitForMaster(t.Context(), theirs.Primary.Addr())
	redistest.Must(t, err)
	s := newShard(t, Options{Sentinel: &SentinelOptions{Master: name, Addrs: append(other.Addrs(), ours.Addrs()...)}})
	t.Cleanup(s.Use(redistest.WaitTimeout))
	f := NewSentinel(&s.Options)
	t.Cleanup(f.Close)
	requireFound(t, "most are followed", f, mine.Primary.Addr(), other.Addrs()...)
	if found := foreignIn(mustFind(t, f).Sources); len(found) != 1 || found[0].Leads != leads {
		t.Errorf("the foreign one leads to %+v, want %s", found, leads)
	}
	given := other.Addrs()
	for _, addr := range ours.Addrs() {
		proxy := redistest.StartProxy(t, addr)
		redistest.Must(t, proxy.Delay(searchReplies*findTimeout))
		given = append(given, proxy.Addr())
	}
	slow := newShard(t, Options{Sentinel: &SentinelOptions{Master: name, Addrs: given}})
	t.Cleanup(slow.Use(redistest.WaitTimeout))
	waits := NewSentinel(&slow.Options)
	t.Cleanup(waits.Close)
	requireFound(t, "a near one is not heard alone", waits, mine.Primary.Addr(), other.Addrs()...)
	told := f.asked[leads].at
	mustFind(t, f)
	if now := f.asked[leads].at; told.IsZero() || !now.Equal(told) && now.Sub(told) < FollowAfter {
		t.Error("the foreign primary is asked at each search")
	}
	redistest.Must(t, other.Nodes[0].Pause())
	requireFound(t, "a foreign one that is silent is one still", f, mine.Primary.Addr(), other.Addrs()...)
	redistest.Must(t, other.Nodes[0].Resume())
	redistest.Must(t, ours.WaitForReplicas(t.Context(), 1))
	redistest.Must(t, ours.Failover(t.Context()))
	promoted, err := ours.WaitForMaster(t.Context(), mine.Primary.Addr())
	redistest.Must(t, err)
	requireFound(t, "a failover is followed at once", f, promoted, other.Addrs()...)
}

// TestClusterWithoutIdentity is followed at each search, as one whose IDs mean something, and has a fault.
func TestClusterWithoutIdentity(t *testing.T) {
	t.Parallel()
	node := redistest.StartCluster(t, 1, 0).Nodes[0]
	for name, id := range map[string]func(n int64) string{
		"no IDs":       func(int64) string { return "" },
		"changing IDs": func(n int64) string { return fmt.Sprint("id", n) },
	} {
		var asked atomic.Int64
		var port string
		filter := redistest.StartFilter(t, node.Addr(), func(command []string) string {
			switch strings.ToLower(strings.Join(command, " ")) {
			case "cluster shards":
				return "*0"
			case "cluster slots":
				text := id(asked.Add(1))
				return fmt.Sprintf("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%s\r\n$%d\r\n%s", port, len(text), text)
			}
			return ""
		})
		_, port, _ = net.SplitHostPort(filter.Addr())
		s := newShard(t, Options{Cluster: []string{filter.Addr()}})
		f := NewCluster(&s.Options)
		t.Cleanup(f.Close)
		mustFind(t, f)
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), redistest.WaitTimeout)
			if found, err := f.FindAll(ctx, f.opts.NodeTimeout()); err != nil || len(foreignIn(found.Sources)) > 0 || found.Replaced {
				t.Errorf("%s: %+v, %v", name, found, err)
			}
			cancel()
		}
		if s.finder = f; s.IdentityFault(filter.Addr(), "id") == nil {
			t.Errorf("%s: no fault", name)
		}
	}
}

// idAt returns the run ID of the server that a lane reaches.
func idAt(t *testing.T, l *Lane) string {
	t.Helper()
	text, err := l.Info(t.Context(), redistest.WaitTimeout)
	redistest.Must(t, err)
	return fieldOf(text, "run_id")
}

// hear reads INFO at a lane, as an examination does.
func hear(t *testing.T, l *Lane) {
	t.Helper()
	text, err := l.Info(t.Context(), redistest.WaitTimeout)
	redistest.Must(t, err)
	server := ServerIn(fieldsOf(text))
	l.Shard.Hear(l.Addr, &server)
}

// TestAddressAtAnotherServer is followed by all connections together, and told unless the other one has the data. A
// replica is followed once it is a primary.
func TestAddressAtAnotherServer(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	for name, c := range map[string]struct {
		to           *redistest.Server
		tells, isNew bool
	}{"a replica": {to: sh.Replicas[0]}, "a stranger": {to: redistest.Start(t), tells: true}, "one that may be its restart": {to: redistest.Start(t), isNew: true}} {
		proxy := redistest.StartProxy(t, sh.Primary.Addr())
		s := newShard(t, Options{Primary: proxy.Addr()})
		var told atomic.Int64
		s.Listen(func(e Event) {
			if e.Kind == Replaced && e.Addr == proxy.Addr() {
				told.Add(1)
			}
		})
		s.Await(t.Context())
		at := s.Owner(0)
		hear(t, at.Checks)
		before := idAt(t, at.Charges)
		redistest.Must(t, c.to.Client().Ping(t.Context()).Err())
		info, err := c.to.Info("server")
		redistest.Must(t, err)
		// Its uptime, in seconds, has to show that it ran beside the other one.
		redistest.Eventually(t, "the stranger is older", func() error {
			if info, err = c.to.Info("server"); err == nil && (info["uptime_in_seconds"] == "0" || info["uptime_in_seconds"] == "1") {
				err = errors.New("it is new")
			}
			return err
		})
		proxy.PointTo(c.to.Addr())
		hear(t, at.Checks)
		if id := idAt(t, at.Charges); id != before {
			t.Errorf("%s: the connections move by themselves", name)
		}
		since := s.Standing().Since
		if c.isNew {
			s.peerOf(proxy.Addr()).heard = time.Time{}
		}
		at.Checks.Revisit(t.Context())
		if c.to == sh.Replicas[0] {
			if id := idAt(t, at.Charges); id != before {
				t.Errorf("%s: the connections move before it is a primary", name)
			}
			redistest.Must(t, c.to.Client().ReplicaOf(t.Context(), "NO", "ONE").Err())
			p := s.peerOf(proxy.Addr())
			p.mu.Lock()
			p.visited = time.Time{}
			p.mu.Unlock()
			at.Checks.Revisit(t.Context())
		}
		for _, l := range []*Lane{at.Checks, at.Charges} {
			if id := idAt(t, l); id != info["run_id"] {
				t.Errorf("%s: the %s lane stays", name, l.purpose())
			}
		}
		if c.tells {
			redistest.Eventually(t, name+" is told", func() error {
				if told.Load() != 1 {
					return fmt.Errorf("told %d times", told.Load())
				}
				return nil
			})
		}
		if now := s.Standing(); now.Replaced.IsZero() == c.tells || now.Since.After(since) != c.tells {
			t.Errorf("%s: %+v", name, now)
		}
		// The remedy is that the address leads to the shard's again.
		proxy.PointTo(sh.Primary.Addr())
		redistest.Eventually(t, name+": the shard's server is back", func() error {
			at.Checks.Revisit(t.Context())
			if id := idAt(t, at.Charges); id != before {
				return errors.New("it is at " + id)
			}
			return nil
		})
	}
}

// TestAddressOfSeveralServers has a fault while new connections reach them in turn.
func TestAddressOfSeveralServers(t *testing.T) {
	t.Parallel()
	a, b := redistest.Start(t), redistest.Start(t)
	var dialled atomic.Int64
	var one atomic.Bool
	s := newShard(t, Options{Primary: "127.0.0.1:1", Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		to := a
		if dialled.Add(1)%2 == 0 && !one.Load() {
			to = b
		}
		return new(net.Dialer).DialContext(ctx, network, to.Addr())
	}})
	s.Await(t.Context())
	l := s.Owner(0).Checks
	hear(t, l)
	p := s.peerOf(l.Addr)
	look := func() {
		p.mu.Lock()
		p.visited, p.turned, p.moved = time.Time{}, time.Time{}, time.Time{}
		p.mu.Unlock()
		l.Revisit(t.Context())
	}
	redistest.Eventually(t, "it has a fault", func() error {
		look()
		if s.TurnFault(l.Addr) == nil {
			return errors.New("it has none")
		}
		return nil
	})
	if now := s.Standing(); !now.Replaced.IsZero() {
		t.Errorf("its servers are taken for replaced ones: %+v", now)
	}
	one.Store(true)
	look()
	if s.TurnFault(l.Addr) == nil {
		t.Error("one look ends it")
	}
	redistest.Eventually(t, "looks that agree end it", func() error {
		look()
		return s.TurnFault(l.Addr)
	})
}

// TestAddressWithoutIdentity has a fault, and no server there is taken for another one.
func TestAddressWithoutIdentity(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	filter := redistest.StartFilter(t, redistest.Start(t).Addr(), func(command []string) string {
		if command[0] != "info" {
			return ""
		}
		text := fmt.Sprintf("run_id:%d\r\nuptime_in_seconds:9", asked.Add(1))
		return fmt.Sprintf("$%d\r\n%s", len(text), text)
	})
	s := newShard(t, Options{Primary: filter.Addr()})
	s.Listen(func(e Event) { t.Errorf("event %+v", e) })
	s.Await(t.Context())
	l := s.Owner(0).Checks
	if err := s.IdentityFault(l.Addr, "id"); err != nil {
		t.Error(err)
	}
	if s.IdentityFault(l.Addr, "") == nil {
		t.Error("a server without an ID has no fault")
	}
	for range turnsMost + 1 {
		hear(t, l)
		l.Revisit(t.Context())
		idAt(t, l)
	}
	if s.IdentityFault(l.Addr, "id") == nil {
		t.Error("it has no fault")
	}
	if err := s.TurnFault(l.Addr); err != nil || !s.Standing().Replaced.IsZero() {
		t.Errorf("%v, %+v", err, s.Standing())
	}
}

// TestNodesWithoutHosts are on the host of the one that names them. Where several have one port no node is taken for another one.
func TestNodesWithoutHosts(t *testing.T) {
	t.Parallel()
	var slots atomic.Value
	filter := redistest.StartFilter(t, redistest.Start(t).Addr(), func(command []string) string {
		switch strings.ToLower(strings.Join(command, " ")) {
		case "cluster info":
			return "$16\r\ncluster_state:ok"
		case "cluster shards":
			return "*0"
		case "cluster slots":
			return slots.Load().(string)
		}
		return ""
	})
	// node returns a node with its host, "" for none, a port and its ID.
	node := func(host string, port int, id string) string {
		text := fmt.Sprintf("$%d\r\n%s", len(host), host)
		if host == "" {
			text = "$-1"
		}
		return fmt.Sprintf("*3\r\n%s\r\n:%d\r\n$1\r\n%s", text, port, id)
	}
	// shares returns two shares of the slots, each with a primary and a replica.
	shares := func(first, firstReplica, second, secondReplica string) string {
		return strings.Join([]string{"*2\r\n*4\r\n:0\r\n:8191", first, firstReplica, "*4\r\n:8192\r\n:16383", second, secondReplica}, "\r\n")
	}
	s := newShard(t, Options{Cluster: []string{filter.Addr()}})
	f := NewCluster(&s.Options)
	t.Cleanup(f.Close)
	for name, c := range map[string]struct {
		slots    string
		isShared bool
	}{
		"nodes of four ports":                 {shares(node("", 1, "a"), node("", 2, "b"), node("", 3, "c"), node("", 4, "d")), false},
		"nodes of two hosts":                  {shares(node("127.0.0.1", 1, "a"), node("127.0.0.1", 2, "b"), node("127.0.0.3", 1, "c"), node("127.0.0.3", 2, "d")), false},
		"primaries of one port":               {shares(node("", 1, "a"), node("", 2, "b"), node("", 1, "c"), node("", 4, "d")), true},
		"a primary without a host comes last": {shares(node("127.0.0.1", 1, "a"), node("", 2, "b"), node("", 1, "c"), node("", 4, "d")), true},
		"a primary without a host is first":   {shares(node("", 1, "a"), node("", 2, "b"), node("127.0.0.1", 1, "c"), node("", 4, "d")), true},
		"a replica at a primary's port":       {shares(node("127.0.0.1", 1, "a"), node("", 1, "b"), node("127.0.0.3", 1, "c"), node("127.0.0.4", 1, "d")), true},
		"replicas of one port":                {shares(node("127.0.0.1", 1, "a"), node("", 2, "b"), node("127.0.0.1", 3, "c"), node("", 2, "d")), true},
	} {
		slots.Store(c.slots)
		if !c.isShared {
			requireFound(t, name, f, "127.0.0.1:1")
			continue
		}
		redistest.Eventually(t, name, func() error {
			_, err := f.Find(t.Context())
			if text := fmt.Sprint(err); !strings.Contains(text, "several have the port of 127.0.0.1:") || !strings.Contains(text, "to hostname with cluster-announce-hostname") {
				return fmt.Errorf("the error is %s", text)
			}
			return nil
		})
	}
}

// TestINFOThatIsNone at connecting leaves no connection whose next replies are those to others.
func TestINFOThatIsNone(t *testing.T) {
	t.Parallel()
	var isArray atomic.Bool
	filter := redistest.StartFilter(t, redistest.Start(t).Addr(), func(command []string) string {
		if isArray.Load() && strings.EqualFold(command[0], "info") {
			return "*2\r\n$1\r\na\r\n$1\r\nb"
		}
		return ""
	})
	s := newShard(t, Options{Primary: filter.Addr()})
	s.Await(t.Context())
	l := s.Owner(0).Checks
	hear(t, l)
	l.Revisit(t.Context())
	isArray.Store(true)
	l.renew()
	if text, err := l.client.Load().Echo(t.Context(), "word").Result(); err == nil && text != "word" {
		t.Errorf("got %q", text)
	}
	if filter.Answered() == 0 {
		t.Error("a new connection asks for no INFO")
	}
}
