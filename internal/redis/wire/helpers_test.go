package wire

import (
	"os"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// newShard returns a shard that is closed when the test ends.
func newShard(t testing.TB, opts Options) *Shard {
	t.Helper()
	if opts.DialTimeout == 0 {
		opts.DialTimeout = redistest.WaitTimeout
	}
	s := NewShard(opts, nil)
	redistest.CloseAtEnd(t, s)
	return s
}
