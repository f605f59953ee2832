//go:build check

package e2e

import (
	"flag"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

var deadDuration = flag.Duration("dead.duration", time.Duration(sweep.Size(1500, 6000))*time.Millisecond, "how long TestDeadShardCostsNoMemory sends requests to a dead shard")

// TestDeadShardCostsNoMemory checks that neither memory nor goroutines grow with the requests while
// a shard refuses connections, or accepts them and never answers.
func TestDeadShardCostsNoMemory(t *testing.T) {
	t.Parallel()
	for name, kill := range map[string]func(*redistest.Server) error{
		"silent": (*redistest.Server).Pause,
		"gone":   (*redistest.Server).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			shard := redistest.StartShard(t, 0)
			c := caddytest.Start(t, zonesSite(caddytest.RedisStore(caddytest.ShardOf("a", shard), "check_timeout 50ms", "charge_timeout 250ms"),
				zoneWith("api", "events 1000000", "on_error allow"), "respond ok"))
			must(t, "a request", want("status", c.Ask("/", "X-Key: client-0").Status, http.StatusOK))
			must(t, "end the shard", kill(shard.Primary))
			t.Cleanup(func() { _ = shard.Primary.Resume() })
			load := func(d time.Duration) int64 {
				result, err := loadgen.Run(t.Context(), loadgen.Options{
					Addr: c.Addr, Header: "X-Key", Connections: 64, Rate: 2000, Duration: d,
					Key: func(n int64) string { return "client-" + strconv.FormatInt(n%500, 10) },
				})
				must(t, "load", err)
				if ok := result.Status[http.StatusOK]; ok != result.Requests {
					t.Errorf("statuses are %v", result.Status)
				}
				return result.Requests
			}
			load(*deadDuration / 2)
			goroutines, heap := footprint(c)
			n := load(*deadDuration)
			goroutinesAfter, heapAfter := footprint(c)
			t.Logf("%d requests: heap %d to %d bytes, goroutines %d to %d", n, heap, heapAfter, goroutines, goroutinesAfter)
			if heapAfter > heap+heap/2+8<<20 {
				t.Errorf("the heap grew from %d to %d bytes", heap, heapAfter)
			}
			if goroutinesAfter > goroutines+goroutines/2+100 {
				t.Errorf("goroutines grew from %d to %d", goroutines, goroutinesAfter)
			}
		})
	}
}
