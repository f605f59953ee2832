package wire

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestServerIsLeftOutUntilAPing answers. Where pings are answered and calls are not, it is left out for longer.
func TestServerIsLeftOutUntilAPing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l := newLane(newShard(t, Options{Primary: server.Addr()}), server.Addr(), false)
	defer l.close(t.Context())
	leaveOut := func() time.Duration {
		for l.IsUp() {
			reported, err := l.breaker.Allow()
			if err != nil {
				t.Fatal(err)
			}
			reported(errNoReply)
		}
		since := time.Now()
		redistest.Eventually(t, "it is called", func() error {
			if l.ping(t.Context()); !l.IsUp() {
				return l.Down()
			}
			return nil
		})
		return time.Since(since)
	}
	if leaveOut(); l.rests.Load() != 0 {
		t.Error("it is not pinged the first time")
	}
	if took := leaveOut(); took < relapsePause {
		t.Errorf("it is called again after %v", took)
	}
	l.opened.Add(-relapseTime.Nanoseconds())
	rests := l.rests.Load()
	if leaveOut(); l.rests.Load() != rests {
		t.Error("it is not pinged although it was well for long")
	}
}
