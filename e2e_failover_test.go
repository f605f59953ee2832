package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestFailoverUnderSteadyRequests: no response is a 5xx, and the new primary
// goes on counting, without a reload, also when no sentinel is left.
func TestFailoverUnderSteadyRequests(t *testing.T) {
	t.Parallel()
	const workers = 4
	shard := redistest.StartShard(t, 2)
	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 3, redistest.SentinelOptions{DownAfter: 2 * time.Second})
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardWith("a", sentinelLine(sentinels)), "check_timeout 100ms", "charge_timeout 250ms", "on_error allow",
	), 1_000_000, "1h"))
	var limited atomic.Int64
	stop := caddytest.StartTraffic(t, workers, func(worker, i int) error {
		time.Sleep(time.Millisecond)
		a, err := c.TryAsk("/", fmt.Sprintf("X-Key: client-%d", (worker+i)%20))
		switch {
		case err != nil:
			return err
		case a.Status != http.StatusOK:
			return fmt.Errorf("status %d", a.Status)
		case a.IsLimited():
			limited.Add(1)
		}
		return nil
	})
	growth := func() {
		t.Helper()
		before := limited.Load()
		eventually(t, "requests are limited", func() error { return want("more being limited", limited.Load() > before+100, true) })
	}
	growth()
	must(t, "kill the primary", shard.Primary.Kill())
	ctx, cancel := context.WithTimeout(t.Context(), caddytest.WaitLimit)
	defer cancel()
	var primary *redistest.Server
	// On a busy machine sentinels may fail over more than once.
	eventually(t, "the log says who is the new primary", func() error {
		addr, err := sentinels.WaitForMaster(ctx, shard.Primary.Addr())
		must(t, "fail over", err)
		for _, replica := range shard.Replicas {
			if replica.Addr() == addr {
				primary = replica
			}
		}
		lines := storeLines(c)
		for _, line := range lines {
			if line.Level == "info" && line.Msg == "shard has another primary" && line.Address == addr {
				return nil
			}
		}
		return fmt.Errorf("it is %s, and it says %+v", addr, lines)
	})
	growth()
	sum := func() (n int64) {
		for _, count := range countsOn(t, "api", primary) {
			n += count
		}
		return n
	}
	before := sum()
	eventually(t, "the new primary counts", func() error { return want("its counts having grown", sum() > before+100, true) })
	must(t, "log", want("lines about a loss of the sentinels", countLines(c, "servers cannot be found"), 0))

	for _, sentinel := range sentinels.Nodes {
		must(t, "kill a sentinel", sentinel.Kill())
	}
	awaitLine(c, "warn", "servers cannot be found", "ask the sentinels for "+masterName)
	growth()
	must(t, "restart a sentinel", sentinels.Nodes[0].Restart())
	awaitLine(c, "info", "servers are found again", "")
	stop()
}
