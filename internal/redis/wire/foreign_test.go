package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// mustFind searches until it finds servers.
func mustFind(t *testing.T, f finder) (found Found) {
	t.Helper()
	redistest.Eventually(t, "servers are found", func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		found, err = f.Find(ctx)
		return err
	})
	return found
}

func requireFound(t *testing.T, what string, f finder, primary string, foreign ...string) {
	t.Helper()
	redistest.Eventually(t, what, func() error {
		found := mustFind(t, f)
		var sources []string
		for _, source := range found.Foreign {
			sources = append(sources, source.Source)
		}
		if !slices.ContainsFunc(found.Roles, func(r Roles) bool { return r.Primary == primary }) || !slices.Equal(sources, foreign) {
			return fmt.Errorf("found %+v, want %s, and foreign %q", found, primary, foreign)
		}
		return nil
	})
}

// TestForeignNode is left out, whatever its epoch, also while others of its list are silent, and followed once it is most
// of the sources.
func TestForeignNode(t *testing.T) {
	t.Parallel()
	ours, other := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(redistest.WaitTimeout)), redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(2*redistest.WaitTimeout))
	for _, order := range [][]any{{"RESET", "HARD"}, {"SET-CONFIG-EPOCH", 99}, {"ADDSLOTSRANGE", 0, SlotCount - 1}} {
		redistest.Must(t, other.Nodes[0].Client().Do(t.Context(), append([]any{"CLUSTER"}, order...)...).Err())
	}
	redistest.Must(t, other.WaitUntilOK(t.Context()))
	foreign, mine := other.Addrs()[0], ours.Addrs()
	s := newShard(t, Options{Cluster: append([]string{foreign}, mine...)})
	f := NewCluster(&s.Options, time.Second/2)
	t.Cleanup(f.Close)
	requireFound(t, "most are followed", f, mine[0], foreign)
	redistest.Must(t, ours.Nodes[0].Pause())
	f.census = time.Time{}
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
	ctx, cancel := context.WithTimeout(t.Context(), redistest.WaitTimeout)
	defer cancel()
	if found, err := f.Find(ctx); !errors.Is(err, errElsewhere) {
		t.Errorf("found %+v, %v before its time", found, err)
	}
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
	f := NewSentinel(&s.Options)
	t.Cleanup(f.Close)
	requireFound(t, "most are followed", f, mine.Primary.Addr(), other.Addrs()...)
	if found := mustFind(t, f); len(found.Foreign) != 1 || found.Foreign[0].Leads != leads {
		t.Errorf("the foreign one leads to %+v, want %s", found.Foreign, leads)
	}
	redistest.Must(t, ours.WaitForReplicas(t.Context(), 1))
	redistest.Must(t, ours.Failover(t.Context()))
	promoted, err := ours.WaitForMaster(t.Context(), mine.Primary.Addr())
	redistest.Must(t, err)
	f.belief.since = time.Now()
	requireFound(t, "a failover is followed at once", f, promoted, other.Addrs()...)
}

// idAt returns the run ID of the server that a lane reaches.
func idAt(t *testing.T, l *Lane) string {
	t.Helper()
	text, err := l.Info(t.Context())
	redistest.Must(t, err)
	return fieldOf(text, "run_id")
}

// hear reads INFO at a lane, as an examination does.
func hear(t *testing.T, l *Lane) {
	t.Helper()
	text, err := l.Info(t.Context())
	redistest.Must(t, err)
	server := ServerIn(func(name string) string { return fieldOf(text, name) })
	l.Shard.Hear(l.Addr, &server)
}

// TestAddressAtAnotherServer is followed by all connections together, and told unless the other one has the data.
func TestAddressAtAnotherServer(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	for name, c := range map[string]struct {
		to    *redistest.Server
		tells bool
	}{"a replica": {sh.Replicas[0], false}, "a stranger": {redistest.Start(t), true}} {
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
		at.Checks.Revisit(t.Context())
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
	redistest.Eventually(t, "it has a fault", func() error {
		s.peerOf(l.Addr).visited = time.Time{}
		l.Revisit(t.Context())
		if s.TurnFault(l.Addr) == nil {
			return errors.New("it has none")
		}
		return nil
	})
	one.Store(true)
	p := s.peerOf(l.Addr)
	p.mu.Lock()
	for i := range p.changes {
		p.changes[i] = p.changes[i].Add(-turnsPeriod)
	}
	p.mu.Unlock()
	l.Revisit(t.Context())
	if err := s.TurnFault(l.Addr); err != nil {
		t.Errorf("it still has: %v", err)
	}
}

// TestAddressWithoutIdentity is told once, and no server there is taken for another one.
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
	var told atomic.Int64
	s.Listen(func(e Event) {
		if e.Kind == Misconfigured && errors.Is(e.Err, errVague) {
			told.Add(1)
		} else {
			t.Errorf("event %+v", e)
		}
	})
	s.Await(t.Context())
	l := s.Owner(0).Checks
	for range turnsMost + 1 {
		hear(t, l)
		l.Revisit(t.Context())
		idAt(t, l)
	}
	redistest.Eventually(t, "it is told", func() error {
		if told.Load() != 1 {
			return fmt.Errorf("told %d times", told.Load())
		}
		return nil
	})
	if err := s.TurnFault(l.Addr); err != nil || !s.Standing().Replaced.IsZero() {
		t.Errorf("%v, %+v", err, s.Standing())
	}
}
