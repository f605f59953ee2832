package redis

import (
	"crypto/tls"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestConnectionsThatAreAllCutLeaveNoServerOut: there is one more than workers.
// With TLS nobody notices that a connection is cut before he uses it.
func TestConnectionsThatAreAllCutLeaveNoServerOut(t *testing.T) {
	ca := redistest.StartAuthority(t)
	certificate, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	server := redistest.Start(t, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no"))
	shard := newShard(t, ShardOptions{Primary: server.Addr(), PoolSize: 1, TLS: &tls.Config{RootCAs: ca.Pool()}})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	waitUntilUp(t, s)
	// While one connection is taken, the check makes the other.
	taken := shard.owner(0).checks.client.Load().Conn()
	must(t, taken.Ping(t.Context()).Err())
	must(t, s.Check(t.Context(), ask("k"))[0].Err)
	must(t, taken.Close())
	must(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err())
	failures := 0
	eventually(t, "checks work", func() error {
		err := s.Check(t.Context(), ask("k"))[0].Err
		if err != nil {
			failures++
		}
		return err
	})
	if failures != 2 {
		t.Errorf("%d checks failed, want one for each connection", failures)
	}
	if down := j.all(ServerDown, server.Addr()); len(down) > 0 {
		t.Errorf("it was left out: %+v", down)
	}
}

// TestServerThatIsLeftOutIsNotCalled, and the error says why it is.
func TestServerThatIsLeftOutIsNotCalled(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("nobody", "secret")}), nil)
	eventually(t, "the server is left out", func() error {
		err := s.Check(t.Context(), ask("k"))[0].Err
		if !errors.Is(err, ErrShardDown) {
			return errors.New("it is asked still")
		}
		if !strings.Contains(err.Error(), "WRONGPASS") {
			t.Errorf("the error is %v", err)
		}
		return nil
	})
}
