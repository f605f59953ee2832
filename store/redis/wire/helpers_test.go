package wire

import (
	"os"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// newConnections returns those to a shard, which are closed when the test ends.
func newConnections(t testing.TB, opts Options) *Connections {
	t.Helper()
	if opts.DialTimeout == 0 {
		opts.DialTimeout = redistest.WaitTimeout
	}
	s := NewConnections(opts, nil)
	redistest.CloseAtEnd(t, s)
	return s
}
