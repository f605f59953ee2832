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
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// reached is a connection to an address.
type reached struct {
	net.Conn
	addr string
}

func (c reached) RemoteAddr() net.Addr {
	addr, _ := net.ResolveTCPAddr("tcp", c.addr)
	return addr
}

// TestNameOfSeveralServers leads to one of them, until that is missing for two look-ups or does not answer.
func TestNameOfSeveralServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const a, b = "10.0.0.1", "10.0.0.2"
		records, dead := []string{a, b}, map[string]bool{}
		n := &names{peers: map[string]named{}, lookup: func(context.Context, string) ([]string, error) { return records, nil }}
		turn, left := 0, time.Second
		dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
			if end, _ := ctx.Deadline(); time.Until(end) != left {
				t.Errorf("%s has %v", addr, time.Until(end))
			}
			if addr == "redis:6379" {
				turn++
				addr = net.JoinHostPort(records[turn%len(records)], "6379")
			}
			if dead[addr] {
				return nil, errors.New("it is dead")
			}
			return reached{addr: addr}, nil
		}
		want := func(what, host string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			conn, err := n.dial(ctx, "tcp", "redis:6379", dial)
			redistest.Must(t, err)
			if got := conn.RemoteAddr().String(); got != host+":6379" {
				t.Errorf("%s: it leads to %s", what, got)
			}
		}
		for range 4 {
			want("both are among the records", b)
		}
		records = []string{a}
		want("it is missing once", b)
		records = []string{a, b}
		time.Sleep(revisitPeriod)
		want("it is back", b)
		records = []string{a}
		want("it is missing", b)
		time.Sleep(revisitPeriod)
		want("it is missing twice", a)
		records = []string{a, b}
		dead[a+":6379"], turn = true, 0
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := n.dial(ctx, "tcp", "redis:6379", dial); err == nil {
			t.Error("one that does not answer is reached")
		}
		want("it did not answer", b)
		dead[a+":6379"], turn = false, 1
		want("it is back, and another one was reached meanwhile", b)
		n.forget("redis:6379", "")
		want("it was forgotten", a)
		records = []string{b}
		for look, moved := range []bool{false, false, true, false} {
			if n.hasMoved(t.Context(), "redis:6379") != moved {
				t.Errorf("look %d: has moved is %t", look, !moved)
			}
			time.Sleep(revisitPeriod)
		}
		want("it has moved", b)
		left = time.Second / 2
		n.lookup = func(ctx context.Context, _ string) ([]string, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		want("the look-up takes too long", b)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := n.dial(ended, "tcp", "redis:6379", dial); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		want("none was dialled", b)
	})
}

// TestFirstConnectionsToAName lead to one server, although they are made at the same time.
func TestFirstConnectionsToAName(t *testing.T) {
	t.Parallel()
	const a, b = "10.0.0.1:6379", "10.0.0.2:6379"
	n := &names{peers: map[string]named{}, lookup: func(context.Context, string) ([]string, error) { return []string{"10.0.0.1", "10.0.0.2"}, nil }}
	at := func(addr string) func(context.Context, string, string) (net.Conn, error) {
		return func(_ context.Context, _, dialled string) (net.Conn, error) {
			here, _ := net.Pipe()
			if dialled == "redis:6379" {
				dialled = addr
			}
			return reached{here, dialled}, nil
		}
	}
	conn, err := n.dial(t.Context(), "tcp", "redis:6379", func(ctx context.Context, network, addr string) (net.Conn, error) {
		if first, err := n.dial(ctx, network, "redis:6379", at(a)); err != nil || first.RemoteAddr().String() != a {
			t.Errorf("the first one: %v, %v", first, err)
		}
		return at(b)(ctx, network, addr)
	})
	redistest.Must(t, err)
	if got := conn.RemoteAddr().String(); got != a {
		t.Errorf("the second one leads to %s", got)
	}
}

// TestNamesOfAClusterThatWasMadeAnew: calls follow where the finder does, although the nodes before live on.
func TestNamesOfAClusterThatWasMadeAnew(t *testing.T) {
	t.Parallel()
	const given, other = "redis1.test:6379", "redis2.test:6379"
	var at []string
	for n := range 2 {
		id := strings.Repeat(fmt.Sprint(n), 40)
		node := func(place int) string {
			return fmt.Sprintf("\r\n*3\r\n$11\r\nredis%d.test\r\n:6379\r\n$41\r\n%s%d", place, id, place)
		}
		filter := redistest.StartFilter(t, redistest.StartCluster(t, 1, 0).Addrs()[0], func(command []string) string {
			switch strings.ToLower(strings.Join(command, " ")) {
			case "cluster shards":
				return "*0"
			case "cluster slots":
				return "*2\r\n*3\r\n:0\r\n:8191" + node(1) + "\r\n*3\r\n:8192\r\n:16383" + node(2)
			}
			return ""
		})
		at = append(at, filter.Addr())
	}
	records := []string{"10.0.0.1", "10.0.0.2"}
	var moved atomic.Int64
	s := newShard(t, Options{Cluster: []string{given}, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, port, _ := net.SplitHostPort(addr)
		if strings.HasSuffix(host, ".test") {
			host = records[moved.Load()]
		}
		conn, err := new(net.Dialer).DialContext(ctx, network, at[slices.Index(records, host)])
		return reached{conn, net.JoinHostPort(host, port)}, err
	}})
	t.Cleanup(s.Use(redistest.WaitTimeout))
	n := s.Options.names
	n.lookup = func(context.Context, string) ([]string, error) { return records[moved.Load():][:1], nil }
	redistest.Eventually(t, "the cluster is found", s.find)
	// Owner would begin to search in the background.
	first, second := s.Servers()[0], s.Servers()[1]
	if first.Primary != given || second.Primary != other {
		t.Fatalf("found %+v, %+v", first, second)
	}
	f, before := s.finder.(*Cluster), idAt(t, first.Charges)
	if id := idAt(t, second.Charges); id != before {
		t.Fatalf("the names lead to %s and %s", before, id)
	}
	moved.Store(1)
	redistest.Eventually(t, "the lanes of the name that was looked up follow", func() error {
		n.mu.Lock()
		if was := n.peers[given]; was.peer != "" {
			was.looked = was.looked.Add(-revisitPeriod)
			if !was.missing.IsZero() {
				was.missing = was.missing.Add(-revisitPeriod)
			}
			n.peers[given] = was
		}
		n.mu.Unlock()
		// The other cluster is not followed before these have moved.
		f.belief.since = time.Now()
		_ = s.find()
		if idAt(t, first.Charges) == before {
			return errors.New("they stay")
		}
		return nil
	})
	redistest.Eventually(t, "all follow once the servers are replaced", func() error {
		f.belief.since = f.belief.since.Add(-FollowAfter)
		err := s.find()
		if idAt(t, second.Charges) == before {
			return fmt.Errorf("they stay: %w", err)
		}
		return err
	})
	if s.Standing().Replaced.IsZero() {
		t.Error("no word of it")
	}
}

// TestNameOfADemotedServer leads the calls that it refuses, and those after an examination that finds it unfit, to another
// server of the name, although the one before is still among its records.
func TestNameOfADemotedServer(t *testing.T) {
	t.Parallel()
	const name = "redis.test:6379"
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	records := []string{"10.0.0.1", "10.0.0.2"}
	var turn atomic.Int64
	s := newShard(t, Options{Primary: name, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == name {
			addr = net.JoinHostPort(records[turn.Add(1)%2], "6379")
		}
		host, _, _ := net.SplitHostPort(addr)
		conn, err := new(net.Dialer).DialContext(ctx, network, servers[slices.Index(records, host)].Addr())
		return reached{conn, addr}, err
	}})
	s.Options.names.lookup = func(context.Context, string) ([]string, error) { return records, nil }
	s.Await(t.Context())
	at := s.Owner(0)
	isAt := func(id string) bool { return idAt(t, at.Charges) == id && idAt(t, at.Checks) == id }
	first := idAt(t, at.Checks)
	if !isAt(first) {
		t.Error("the lanes lead to two servers")
	}
	demoted := servers[0]
	if info, err := demoted.Info("server"); err != nil || info["run_id"] != first {
		demoted = servers[1]
	}
	other := servers[1-slices.Index(servers, demoted)]
	redistest.Must(t, demoted.Client().Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err())
	for _, l := range []*Lane{at.Checks, at.Charges} {
		redistest.Eventually(t, "a write is taken", func() error {
			ctx, cancel := context.WithTimeout(t.Context(), redistest.WaitTimeout)
			defer cancel()
			return l.DoAll(ctx, NewCommand("incr", "n"))
		})
	}
	redistest.Must(t, demoted.Client().Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
	info, err := other.Info("server")
	redistest.Must(t, err)
	if !isAt(info["run_id"]) {
		t.Error("the lanes do not lead to the other server")
	}
	at.Checks.replacement.mu.Lock()
	at.Checks.replacement.last = time.Time{}
	at.Checks.replacement.mu.Unlock()
	at.Checks.SetUnfit(ErrTurns)
	if s.Options.names.peer(t.Context(), name, revisitPeriod) == "" || !isAt(info["run_id"]) {
		t.Error("a name that took turns is not kept at one server")
	}
	redistest.Eventually(t, "what is unfit is left", func() error {
		at.Checks.SetUnfit(ErrUnfit)
		if idAt(t, at.Checks) != first {
			return errors.New("it is not")
		}
		return nil
	})
}

// TestNameOfASourceThatMoved leads its client to the server at which the name is at two looks, although its connection to
// the one before lasts.
func TestNameOfASourceThatMoved(t *testing.T) {
	t.Parallel()
	const name = "redis.test:6379"
	before, after := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(redistest.WaitTimeout)), redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(2*redistest.WaitTimeout))
	watching := []*redistest.Sentinels{redistest.StartSentinels(t, "limits", redistest.Start(t), 1, redistest.SentinelOptions{}), redistest.StartSentinels(t, "limits", redistest.Start(t), 1, redistest.SentinelOptions{})}
	for kind, c := range map[string]struct {
		at   []string
		opts Options
		// ask returns what differs between the answers of the two servers.
		ask func(s *Shard) (answer func() (string, error), closed func())
	}{
		"node": {[]string{before.Addrs()[0], after.Addrs()[0]}, Options{Cluster: []string{name}}, func(s *Shard) (func() (string, error), func()) {
			f := NewCluster(&s.Options)
			return func() (string, error) {
				v := &f.askAll(t.Context(), []string{name}, redistest.WaitTimeout, redistest.WaitTimeout)[0]
				return strings.Join(v.marks, " "), v.err
			}, f.Close
		}},
		"sentinel": {
			[]string{watching[0].Addrs()[0], watching[1].Addrs()[0]}, Options{Sentinel: &SentinelOptions{Master: "limits", Addrs: []string{name}}},
			func(s *Shard) (func() (string, error), func()) {
				f := NewSentinel(&s.Options)
				return func() (string, error) {
					a := &f.AskAll(t.Context())[0]
					return a.Primary, a.Err
				}, f.Close
			},
		},
	} {
		records := []string{"10.0.0.1", "10.0.0.2"}
		var moved atomic.Int64
		c.opts.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == name {
				addr = net.JoinHostPort(records[moved.Load()], "6379")
			}
			host, _, _ := net.SplitHostPort(addr)
			place := slices.Index(records, host)
			if place < 0 {
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
			conn, err := new(net.Dialer).DialContext(ctx, network, c.at[place])
			return reached{conn, addr}, err
		}
		s := newShard(t, c.opts)
		n := s.Options.names
		n.lookup = func(context.Context, string) ([]string, error) { return records[moved.Load():][:1], nil }
		ask, closed := c.ask(s)
		t.Cleanup(closed)
		look := func() (answer string) {
			t.Helper()
			// A look is due.
			n.mu.Lock()
			was := n.peers[name]
			was.looked = was.looked.Add(-revisitPeriod)
			if !was.missing.IsZero() {
				was.missing = was.missing.Add(-revisitPeriod)
			}
			if was.peer != "" {
				n.peers[name] = was
			}
			n.mu.Unlock()
			redistest.Eventually(t, "the "+kind+" answers", func() (err error) {
				answer, err = ask()
				return err
			})
			return answer
		}
		first := look()
		moved.Store(1)
		if got := look(); got != first {
			t.Errorf("%s: one look moves it", kind)
		}
		redistest.Eventually(t, "the "+kind+" of the other server answers", func() error {
			if got := look(); got == first {
				return fmt.Errorf("it answers %s", got)
			}
			return nil
		})
	}
}
