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
)

// memoryStore is the global option for a store in memory.
func memoryStore(maxKeys int) string {
	return fmt.Sprintf("rate_limit {\n\t\tstore memory {\n\t\t\tmax_keys %d\n\t\t}\n\t}", maxKeys)
}

func TestReloadTakesEffectAndKeepsCounts(t *testing.T) {
	servers := startShards(t, 1, 1)
	steps := map[string][]struct {
		store  string
		events int
	}{
		"memory": {
			{"", 5}, {"", 9}, {memoryStore(1000), 9}, {memoryStore(2), 7},
		},
		"redis": {
			{servers.store(), 5},
			{servers.store(), 9},
			{servers.store("check_timeout 9s"), 9},
			{servers.store("charge_timeout 20s", "dial_timeout 5s"), 9},
			{servers.store("pool_size 2"), 7},
			{servers.store("pipelining off"), 7},
			{servers.store("read_from primary"), 8},
			{servers.store("clock local"), 8},
		},
	}
	for _, kind := range []string{"memory", "redis"} {
		t.Run(kind, func(t *testing.T) {
			var c *caddyProcess
			for i, step := range steps[kind] {
				if config := apiSite(step.store, step.events, "1h"); i == 0 {
					c = startCaddy(t, config)
				} else {
					c.mustLoad(config)
				}
				used := int64(i + 1)
				a := c.ask("/", "X-Key: alice")
				must(t, fmt.Sprintf("after %d reloads", i), errors.Join(
					a.is(http.StatusOK, used), want("limit", a.limit, int64(step.events)),
					want("metric", c.metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(used, 10))))
				if kind == "redis" {
					servers.awaitCount(t, "api", "alice", used)
					servers.awaitReplicas(t)
				}
			}
		})
	}
}

func TestReloadAppliesMaxKeys(t *testing.T) {
	c := startCaddy(t, apiSite(memoryStore(10), 5, "1h"))
	for _, step := range []struct {
		key  string
		used int64
	}{{"alice", 1}, {"bob", 1}, {"alice", 2}, {"bob", 2}} {
		must(t, step.key, c.ask("/", "X-Key: "+step.key).is(http.StatusOK, step.used))
	}
	c.mustLoad(apiSite(memoryStore(1), 5, "1h"))
	// A new client leaves no room for the others.
	for _, key := range []string{"carol", "alice", "bob"} {
		must(t, key+" with room for one", c.ask("/", "X-Key: "+key).is(http.StatusOK, 1))
	}
}

func TestReloadAddingAShardMovesOnlyItsClients(t *testing.T) {
	const clients = 60
	servers := startShards(t, 3, 1)
	c := startCaddy(t, apiSite(servers[:2].store(), 5, "1h"))
	charged := map[string]int64{}
	for i := range clients {
		key := fmt.Sprintf("client-%d", i)
		charged[key] = 1
		must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, 1))
	}
	servers.awaitCounts(t, "api", charged)
	servers.awaitReplicas(t)

	c.mustLoad(apiSite(servers.store(), 5, "1h"))
	moved, kept := map[string]int64{}, map[string]int64{}
	for key := range charged {
		switch a := c.ask("/", "X-Key: "+key); {
		case a.status != http.StatusOK:
			t.Fatalf("%s: status %d", key, a.status)
		case a.used == 1:
			moved[key] = 1
		default:
			must(t, key, want("used", a.used, 2))
			kept[key] = 2
		}
	}
	servers[2:].awaitCounts(t, "api", moved)
	eventually(t, "the old shards are charged", func() error {
		counts := map[string]int64{}
		for i := range 2 {
			for key, b := range find(t, servers[i].Primary, "api") {
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
	servers := startShards(t, 2, 1)
	configs := []string{
		apiSite(servers.store(), events, "1h"),
		apiSite(servers.store("pool_size 1"), events, "1h"),
		apiSite(servers.store("check_timeout 9s", "pipelining off"), events, "1h"),
	}
	c := startCaddy(t, configs[0])
	var admitted tally
	var resets atomic.Int64
	stop := startTraffic(t, workers, func(worker, i int) error {
		key := fmt.Sprintf("client-%d", (i+worker)%10)
		a, err := c.tryAsk("/", "X-Key: "+key)
		var failed *url.Error
		switch {
		case errors.As(err, &failed):
			// The system resets connections that wait to be accepted when
			// Caddy closes the old config's listener. If a request had gone
			// through all the same, the counts would show it.
			resets.Add(1)
		case err != nil:
			return err
		case a.status != http.StatusOK || !a.isLimited():
			return fmt.Errorf("status %d, headers %v", a.status, a.header)
		default:
			admitted.add(key)
		}
		return nil
	})
	for i := range reloads {
		c.mustLoad(configs[(i+1)%len(configs)])
		admitted.awaitGrowth(t, 50)
	}
	stop()
	servers.awaitCounts(t, "api", admitted.n)
	must(t, "metric", want("requests", c.metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(admitted.total(), 10)))
	t.Logf("%d requests during %d reloads, %d connections reset", admitted.total(), reloads, resets.Load())
}
