package wire

import (
	"context"
	"errors"
	"net"
	"slices"
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
		turn := 0
		dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
			if end, _ := ctx.Deadline(); time.Until(end) != time.Second {
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
		n.forget("redis:6379")
		want("it was forgotten", a)
		records = []string{b}
		for look, moved := range []bool{false, false, true, false} {
			if n.hasMoved(t.Context(), "redis:6379") != moved {
				t.Errorf("look %d: has moved is %t", look, !moved)
			}
			time.Sleep(revisitPeriod)
		}
		want("it has moved", b)
	})
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
	redistest.Eventually(t, "what is unfit is left", func() error {
		at.Checks.SetUnfit(ErrTurns)
		if idAt(t, at.Checks) != first {
			return errors.New("it is not")
		}
		return nil
	})
}
