package wire

import (
	"context"
	"errors"
	"net"
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
		dial := func(_ context.Context, _, addr string) (net.Conn, error) {
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
		want("it does not answer", b)
		want("the other one is followed", b)
	})
}
