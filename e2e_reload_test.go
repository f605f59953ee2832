package shardlimit_test

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// memoryStore is the global option for a store in memory.
func memoryStore(maxKeys int) string {
	return fmt.Sprintf("rate_limit {\n\t\tstore memory {\n\t\t\tmax_keys %d\n\t\t}\n\t}", maxKeys)
}

func TestReloadTakesEffectAndKeepsCounts(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	steps := map[string][]struct {
		store  string
		events int
	}{
		"memory": {
			{"", 5}, {"", 9}, {memoryStore(1000), 9}, {memoryStore(2), 7},
		},
		"redis": {
			{servers.Store(), 5},
			{servers.Store(), 9},
			{servers.Store("check_timeout 9s"), 9},
			{servers.Store("charge_timeout 20s", "dial_timeout 5s"), 9},
			{servers.Store("pool_size 2"), 7},
			{servers.Store("pipelining off"), 7},
			{servers.Store("read_from primary"), 8},
			{servers.Store("clock local"), 8},
		},
	}
	for _, kind := range []string{"memory", "redis"} {
		t.Run(kind, func(t *testing.T) {
			var c *caddytest.Caddy
			for i, step := range steps[kind] {
				if config := apiSite(step.store, step.events, "1h"); i == 0 {
					c = caddytest.Start(t, config)
				} else {
					c.MustLoad(config)
				}
				used := int64(i + 1)
				a := c.Ask("/", "X-Key: alice")
				must(t, fmt.Sprintf("after %d reloads", i), errors.Join(
					a.Is(http.StatusOK, used), want("limit", a.Limit, int64(step.events)),
					want("metric", c.Metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(used, 10))))
				if kind == "redis" {
					servers.AwaitCount(t, "api", "alice", used)
					servers.AwaitReplicas(t)
				}
			}
		})
	}
}

func TestReloadAppliesMaxKeys(t *testing.T) {
	c := caddytest.Start(t, apiSite(memoryStore(10), 5, "1h"))
	for _, step := range []struct {
		key  string
		used int64
	}{{"alice", 1}, {"bob", 1}, {"alice", 2}, {"bob", 2}} {
		must(t, step.key, c.Ask("/", "X-Key: "+step.key).Is(http.StatusOK, step.used))
	}
	c.MustLoad(apiSite(memoryStore(1), 5, "1h"))
	// A new client leaves no room for the others.
	for _, key := range []string{"carol", "alice", "bob"} {
		must(t, key+" with room for one", c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 1))
	}
}

func TestReloadAddingAShardMovesOnlyItsClients(t *testing.T) {
	const clients = 60
	servers := caddytest.StartShards(t, 3, 1)
	c := caddytest.Start(t, apiSite(servers[:2].Store(), 5, "1h"))
	charged := map[string]int64{}
	for i := range clients {
		key := fmt.Sprintf("client-%d", i)
		charged[key] = 1
		must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 1))
	}
	servers.AwaitCounts(t, "api", charged)
	servers.AwaitReplicas(t)

	c.MustLoad(apiSite(servers.Store(), 5, "1h"))
	moved, kept := map[string]int64{}, map[string]int64{}
	for key := range charged {
		switch a := c.Ask("/", "X-Key: "+key); {
		case a.Status != http.StatusOK:
			t.Fatalf("%s: status %d", key, a.Status)
		case a.Used == 1:
			moved[key] = 1
		default:
			must(t, key, want("used", a.Used, 2))
			kept[key] = 2
		}
	}
	servers[2:].AwaitCounts(t, "api", moved)
	eventually(t, "the old shards are charged", func() error {
		counts := map[string]int64{}
		for i := range 2 {
			for key, b := range caddytest.Find(t, servers[i].Primary, "api") {
				if b.Count != 1 || moved[key] == 0 {
					counts[key] = b.Count
				}
			}
		}
		if !maps.Equal(counts, kept) {
			return fmt.Errorf("counts are %v, want %v", counts, kept)
		}
		return nil
	})
	if len(moved) < clients/6 || len(moved) > clients/2 {
		t.Errorf("%d of %d clients moved to the third shard, want about a third", len(moved), clients)
	}
	t.Logf("%d of %d clients moved", len(moved), clients)
}

func TestReloadsAmidTrafficLoseNothing(t *testing.T) {
	t.Parallel()
	const events, workers, reloads = 1_000_000, 4, 8
	servers := caddytest.StartShards(t, 2, 1)
	configs := []string{
		apiSite(servers.Store(), events, "1h"),
		apiSite(servers.Store("pool_size 1"), events, "1h"),
		apiSite(servers.Store("check_timeout 9s", "pipelining off"), events, "1h"),
	}
	c := caddytest.Start(t, configs[0])
	var admitted caddytest.Tally
	var resets atomic.Int64
	stop := caddytest.StartTraffic(t, workers, func(worker, i int) error {
		key := fmt.Sprintf("client-%d", (i+worker)%10)
		a, err := c.TryAsk("/", "X-Key: "+key)
		var failed *url.Error
		switch {
		case errors.As(err, &failed):
			// The system resets connections that wait to be accepted when
			// Caddy closes the old config's listener. If a request had gone
			// through all the same, the counts would show it.
			resets.Add(1)
		case err != nil:
			return err
		case a.Status != http.StatusOK || !a.IsLimited():
			return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
		default:
			admitted.Add(key)
		}
		return nil
	})
	for i := range reloads {
		c.MustLoad(configs[(i+1)%len(configs)])
		admitted.AwaitGrowth(t, 50)
	}
	stop()
	servers.AwaitCounts(t, "api", admitted.N)
	must(t, "metric", want("requests", c.Metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(admitted.Total(), 10)))
	t.Logf("%d requests during %d reloads, %d connections reset", admitted.Total(), reloads, resets.Load())
}
