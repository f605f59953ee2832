package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// memoryStore is the global option for a store in memory.
func memoryStore(maxBuckets int) string {
	return fmt.Sprintf("rate_limit {\n\t\tstore memory {\n\t\t\tmax_buckets %d\n\t\t}\n\t}", maxBuckets)
}

func TestReloadTakesEffectAndKeepsCounts(t *testing.T) {
	t.Parallel()
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
			{servers.Store("charge_timeout 20s"), 9},
			{servers.Store("pool_size 2"), 7},
			{servers.Store("pipelining off"), 7},
			{servers.Store("read_from primary"), 8},
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

func TestReloadAppliesMaxBuckets(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
	const clients = 30
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
			for key, b := range caddytest.BucketsOf(t, servers[i].Primary, "api") {
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

// TestReloadThatLosesCountsSaysSo, in the log and as a problem, whose remedy finds them again.
func TestReloadThatLosesCountsSaysSo(t *testing.T) {
	t.Parallel()
	const clients = 12
	servers := caddytest.StartShards(t, 3, 0)
	a, b := caddytest.ShardOf("a", servers[0]), caddytest.ShardOf("b", servers[1])
	stores := 0
	for name, step := range map[string]struct {
		loses, remedy []string
		// after is the problem by the remedy: clients that counted under another name begin anew once more.
		after string
		text  string
	}{
		"lacks shard c":                     {[]string{a, b, caddytest.ShardOf("c", servers[2])}, []string{a, b, caddytest.ShardOf("c", servers[2], "weight 1 was 0")}, "", "write weight 1 was 0 in shard c"},
		"also has shard b":                  {[]string{a}, []string{a, caddytest.ShardOf("b", servers[1], "weight 0 was 1")}, "", "keep shard b with weight 0 was 1"},
		"has the weight 1 for shard a, not": {[]string{caddytest.ShardOf("a", servers[0], "weight 9"), b}, []string{caddytest.ShardOf("a", servers[0], "weight 9 was 1"), b}, "", "write weight 9 was 1 in shard a"},
		"calls shard bb by the name b,":     {[]string{a, caddytest.ShardOf("bb", servers[1])}, []string{a, b}, "this Caddy's config before the last reload calls shard b by the name bb,", "keep the names of shards"},
		"has shard b at another server,":    {[]string{a, caddytest.ShardOf("b", servers[2])}, []string{a, caddytest.ShardOf("b", servers[1], "weight 0 was 1"), caddytest.ShardOf("c", servers[2], "weight 1 was 0")}, "this Caddy's config before the last reload calls shard c by the name b,", "keep the server of shard b (weight 0 was 1) and add the new one as another shard (weight 1 was 0)"},
	} {
		stores++
		prefix := fmt.Sprint("key_prefix rl", stores)
		site := func(shards []string) string {
			return zonesSite(caddytest.RedisStore(append(slices.Clone(shards), prefix)...), zoneWith("api", "events 1", "window 1h", "charge before"), "respond ok")
		}
		c := caddytest.Start(t, site([]string{a, b}))
		passed := func() (n int) {
			for i := range clients {
				if c.Ask("/", fmt.Sprintf("X-Key: %d", i)).Status == http.StatusOK {
					n++
				}
			}
			return n
		}
		must(t, name, errors.Join(want("passed at first", passed(), clients), want("passed again", passed(), 0)))
		eventually(t, name+": shard b is met", func() error {
			return want("servers", c.Metric(`caddy_rate_limit_servers{role="primary",shard="b",state="up",store="default"}`), "1")
		})
		c.MustLoad(site(step.loses))
		awaitProblem(c, "disagreement", "this Caddy's config before the last reload "+name)
		awaitProblem(c, "disagreement", step.text)
		for _, line := range regexp.MustCompile(`weight \d+ was \d+`).FindAllString(fmt.Sprint(problemsOf(c)), -1) {
			must(t, name, want("remedy having "+line, strings.Contains(fmt.Sprint(step.remedy), line), true))
		}
		c.AwaitLines(t, 1, "a problem began", "of the clients begin anew", `"level":"warn"`)
		c.MustLoad(site(step.remedy))
		awaitProblem(c, "disagreement", step.after)
		must(t, name, want("passed by the remedy", passed(), 0))
		c.MustLoad(site(step.loses))
		if n := passed(); n == 0 || n == clients {
			t.Errorf("%s: %d of %d clients had a fresh limit", name, n, clients)
		}
	}
}

// admits requests that a zone with this limit admits a client, and counts the request. resets
// counts the connections that are reset, unless it is nil: the system resets those that wait to be
// accepted when Caddy closes the old config's listener. A request that had gone through would show
// in the counts.
func admits(c *caddytest.Caddy, key string, limit int64, admitted *caddytest.Tally, resets *atomic.Int64) error {
	a, err := c.TryAsk("/", "X-Key: "+key)
	_, isReset := errors.AsType[*url.Error](err)
	switch {
	case isReset && resets != nil:
		resets.Add(1)
	case err != nil:
		return err
	case a.Status != http.StatusOK || a.Limit != limit:
		return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
	default:
		admitted.Add(key)
	}
	return nil
}

func TestReloadsAmidTrafficLoseNothing(t *testing.T) {
	t.Parallel()
	const events, workers, reloads = 1_000_000, 4, 6
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
		return admits(c, fmt.Sprintf("client-%d", (i+worker)%10), events, &admitted, &resets)
	})
	for i := range reloads {
		c.MustLoad(configs[(i+1)%len(configs)])
		admitted.AwaitGrowth(t, 25)
	}
	stop()
	servers.AwaitCounts(t, "api", admitted.N)
	must(t, "metric", want("requests", c.Metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(admitted.Total(), 10)))
	t.Logf("%d requests during %d reloads, %d connections reset", admitted.Total(), reloads, resets.Load())
}

// TestRejectedReloadChangesNothing posts configs that Caddy refuses at various
// stages, and would change everything if they were accepted.
func TestRejectedReloadChangesNothing(t *testing.T) {
	t.Parallel()
	const events = 50
	cannotListen := occupiedSite(t)
	servers := caddytest.StartShards(t, 2, 1)
	stores := map[string]struct{ running, other string }{
		"memory": {"", memoryStore(1)},
		"redis":  {servers[:1].Store(), servers.Store("pool_size 1", "check_timeout 1s")},
	}
	for kind, store := range stores {
		t.Run(kind, func(t *testing.T) {
			c := caddytest.Start(t, apiSite(store.running, events, "1h"))
			var used int64
			goesOn := func(after string) {
				t.Helper()
				used++
				a := c.Ask("/", "X-Key: alice")
				must(t, "after "+after, errors.Join(
					a.Is(http.StatusOK, used), want("limit", a.Limit, events),
					want("metric", c.Metric(`caddy_rate_limit_requests_total{zone="api"}`), strconv.FormatInt(used, 10)),
					want("metric of refusals", c.Metric(`caddy_rate_limit_declined_requests_total{zone="api"}`), "0")))
				if kind == "redis" {
					servers.AwaitCount(t, "api", "alice", used)
					servers.AwaitReplicas(t)
				}
			}
			goesOn("the start")
			for _, rejected := range []struct{ name, config string }{
				{"a config that cannot be parsed", strings.Replace(apiSite(store.other, 1, "1h"), "zone", "zonk", 1)},
				{"a config with a bad option", apiSite(store.other, 0, "1h")},
				{"a config that cannot listen", apiSite(store.other, 1, "1h") + cannotListen},
				{"a config without a limiter that cannot listen", "{\n\t{{global}}\n}\n{{site}} {\n\trespond ok\n}\n" + cannotListen},
			} {
				if status, body := c.Load(rejected.config); status == http.StatusOK {
					t.Fatalf("%s was accepted: %s", rejected.name, body)
				}
				c.AwaitServers()
				goesOn(rejected.name)
				goesOn(rejected.name + ", again")
			}

			// In JSON the rules apply when Caddy provisions the modules.
			_, running := c.AdminCall(http.MethodGet, "/config/", "", "")
			bad := strings.Replace(running, `"window":3600000000000`, `"window":1`, 1)
			if bad == running {
				t.Fatalf("no window in %s", running)
			}
			if status, body := c.AdminCall(http.MethodPost, "/load", "application/json", bad); status == http.StatusOK || !strings.Contains(body, "window") {
				t.Fatalf("load: status %d: %s", status, body)
			}
			goesOn("a config that cannot be provisioned")

			// A valid config is still accepted, and keeps the counts.
			c.MustLoad(apiSite(store.running, int(used), "1h"))
			a := c.Ask("/", "X-Key: alice")
			must(t, "after a valid config", errors.Join(
				a.Is(http.StatusTooManyRequests, used), want("limit", a.Limit, used),
				want("metric of refusals", c.Metric(`caddy_rate_limit_declined_requests_total{zone="api"}`), "1")))
			if kind == "redis" {
				if n := len(caddytest.ReadBuckets(t, servers[1].Primary.Client())); n > 0 {
					t.Fatalf("a shard of rejected configs has %d buckets", n)
				}
			}
			t.Logf("%d requests", used)
		})
	}
}

func TestDisconnectedClientIsCharged(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	backend := caddytest.StartSlowBackend(t)
	c := caddytest.Start(t, proxySite(servers.Store(), 5, backend.Server.Listener.Addr().String()))
	wanted := map[string]int64{}
	for _, path := range []string{"/", "/stream"} {
		for i := range 3 {
			key := fmt.Sprintf("%s-%d", strings.TrimPrefix(path, "/"), i)
			ctx, leave := context.WithCancel(t.Context())
			gone := c.Begin(ctx, path, "X-Key: "+key)
			backend.Await(t)
			leave()
			gone.Leaves(t)
			wanted[key] = 1
		}
	}
	servers.AwaitCounts(t, "api", wanted)
	c.Stop()
	servers.AwaitCounts(t, "api", wanted)
}

func TestLastChargesAreDeliveredAtExit(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	c := caddytest.Start(t, apiSite(servers.Store(), 1000, "1h"))
	var admitted caddytest.Tally
	caddytest.Together(t, 8, func(worker int) error {
		for i := range 15 {
			if err := admits(c, fmt.Sprintf("client-%d", (i+worker)%10), 1000, &admitted, nil); err != nil {
				return err
			}
		}
		return nil
	})
	c.Stop()
	got := servers.Counts(t, "api")
	for key, n := range admitted.N {
		must(t, "after Caddy has ended", want("count of "+key, got[key], n))
	}
}

// hang opens windows for n clients, pauses the primaries and sends a request of each client.
// Replicas admit it, and its charge is pending.
func hang(t *testing.T, servers caddytest.Shards, c *caddytest.Caddy, n int) map[string]int64 {
	t.Helper()
	wanted := map[string]int64{}
	for i := range n {
		key := fmt.Sprintf("client-%d", i)
		c.Ask("/", "X-Key: "+key)
		wanted[key] = 1
	}
	servers.AwaitCounts(t, "api", wanted)
	servers.AwaitReplicas(t)
	for _, shard := range servers {
		must(t, "stop the primary", shard.Primary.Pause())
	}
	for key := range wanted {
		must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 2))
		wanted[key] = 2
	}
	return wanted
}

func resume(t *testing.T, s caddytest.Shards) {
	t.Helper()
	for _, shard := range s {
		must(t, "resume the primary", shard.Primary.Resume())
	}
}

func TestPendingChargesAreDeliveredAtExit(t *testing.T) {
	t.Parallel()
	// Caddy unloads the modules of a config in random order.
	for name, test := range map[string]struct{ before, after func(*caddytest.Caddy) }{
		"store of the app":         {},
		"store of a handler":       {before: moveStoreInline},
		"store of an older config": {after: func(c *caddytest.Caddy) { c.MustLoad(unlimitedSite) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			// Caddy waits for 5 s at most, which a machine that stands still may exceed, but not each time.
			isLost := true
			for attempt := 1; isLost; attempt++ {
				servers := caddytest.StartShards(t, 2, 1)
				c := caddytest.Start(t, apiSite(servers.Store(), 5, "1h"))
				if test.before != nil {
					test.before(c)
				}
				wanted := hang(t, servers, c, 20)
				if test.after != nil {
					test.after(c)
				}
				told := time.Now()
				c.Terminate()
				c.AwaitLog("shutting down apps")
				time.Sleep(200 * time.Millisecond) // a Caddy that leaves charges behind would end meanwhile
				var hasEnded bool
				select {
				case <-c.Ended:
					hasEnded = true
				default:
				}
				resume(t, servers)
				must(t, "exit", want("leaving charges behind", hasEnded && time.Since(told) < 3*time.Second, false))
				c.AwaitEnd()
				isLost = strings.Contains(c.Logs.String(), "charges were lost")
				isFinal := time.Since(told) < 4*time.Second || attempt == 5
				must(t, "log", want("reporting losses", isLost && isFinal, false))
				if !isLost {
					servers.AwaitCounts(t, "api", wanted)
				}
			}
		})
	}
}

// moveStoreInline moves the store from the app into the handler, which only JSON allows.
func moveStoreInline(c *caddytest.Caddy) {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/config/", "", "")
	_, store := c.AdminCall(http.MethodGet, "/config/apps/rate_limit/stores/default", "", "")
	config := strings.Replace(text, `"handler":"rate_limit"`, `"handler":"rate_limit","store":`+strings.TrimSpace(store), 1)
	config = strings.Replace(config, `"rate_limit":{"stores":{"default":`+strings.TrimSpace(store)+`}}`, `"rate_limit":{}`, 1)
	if status, body := c.AdminCall(http.MethodPost, "/load", "application/json", config); status != http.StatusOK {
		c.T.Fatalf("load: status %d: %s", status, body)
	}
	c.AwaitServers()
	if _, now := c.AdminCall(http.MethodGet, "/config/apps/rate_limit", "", ""); strings.TrimSpace(now) != "{}" {
		c.T.Fatalf("the app still has %s", now)
	}
}

func TestExitDoesNotWaitForAHungRedis(t *testing.T) {
	t.Parallel()
	const clients = 20
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			// They spend their time waiting.
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			// Caddy may retry a charge for longer than the exit waits.
			c := caddytest.Start(t, apiSite(servers.Store(pipelining, "charge_timeout 1h"), 5, "1h"))
			hang(t, servers, c, clients)
			c.Terminate()
			c.AwaitEnd()
			must(t, "log", want("number of lost charges logged", strings.Contains(c.Logs.String(),
				fmt.Sprintf(`"msg":"charges were lost at exit","charges":%d`, clients)), true))
		})
	}
}

// TestReloadsLeaveNothingBehind of zones that no config has any more.
func TestReloadsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	reloads := int64(sweep.Size(20, 80))
	cannotListen := occupiedSite(t)
	site := func(zone string) string {
		return zonesSite("", zoneWith(zone, "events 1", "max_wait 1ms"), "respond ok")
	}
	c := caddytest.Start(t, site("first"))
	n := 0
	reload := func(times int64) {
		for range times {
			n++
			if status, body := c.Load(site(fmt.Sprint("rejected-", n)) + cannotListen); status == http.StatusOK {
				t.Fatalf("a config that cannot listen was accepted: %s", body)
			}
			c.MustLoad(site(fmt.Sprint("zone-", n)))
			for _, status := range []int{http.StatusOK, http.StatusTooManyRequests} {
				must(t, "a request", want("status", c.Probe("/", "X-Key: alice").Status, status))
			}
		}
	}
	reload(8) // what Caddy itself keeps
	goroutines, heap := footprint(c)
	reload(reloads)
	const most = 16 << 10 // bytes per zone, less than a cache or a sketch takes
	var moreGoroutines, moreHeap int64
	eventually(t, "the caches of zones are gone", func() error {
		g, h := footprint(c)
		moreGoroutines, moreHeap = g-goroutines, h-heap
		if moreGoroutines > reloads/2 || moreHeap > reloads*most {
			return fmt.Errorf("%d goroutines and %d bytes more after %d reloads", moreGoroutines, moreHeap, reloads)
		}
		return nil
	})
	_, metrics := c.AdminCall(http.MethodGet, "/metrics", "", "")
	must(t, "metrics", want("series of zones", strings.Count(metrics, `requests_total{zone="`), 3))
	t.Logf("after %d reloads and as many rejected: %d goroutines and %d bytes more", reloads, moreGoroutines, moreHeap)
}

// footprint returns Caddy's goroutines and the bytes on its heap.
func footprint(c *caddytest.Caddy) (goroutines, heap int64) {
	c.T.Helper()
	c.ForgetHistory() // a zone of which it has a sample stays there, within its own bound
	number := func(text, before string) int64 {
		_, rest, _ := strings.Cut(text, before)
		digits, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseInt(digits, 10, 64)
		must(c.T, before, err)
		return n
	}
	_, text := c.AdminCall(http.MethodGet, "/debug/pprof/heap?gc=1&debug=1", "", "")
	heap = number(text, "# HeapAlloc = ")
	_, text = c.AdminCall(http.MethodGet, "/debug/pprof/goroutine?debug=1", "", "")
	return number(text, "goroutine profile: total "), heap
}

// TestChargesOutliveAChangeOfTheStoresKind checks that charges pending for Redis are delivered,
// although the store of that name is in memory for a while.
func TestChargesOutliveAChangeOfTheStoresKind(t *testing.T) {
	t.Parallel()
	const clients, before, during, after = 20, 20, 40, 20
	memory := zonesSite(memoryStore(1000), zoneWith("api", "events 1000000"), "respond ok")
	implicit := zonesSite("", zoneWith("api", "events 1000000"), "respond ok")
	cannotListen := occupiedSite(t)
	type change struct {
		name    string
		configs []string
	}
	for _, change := range sweep.Of(t, []change{
		{"memory", []string{memory}},
		{"no block", []string{implicit}},
		{"two other configs", []string{memory, implicit}},
		{"no limiter, then both", []string{unlimitedSite, memory, implicit}},
		{"back and forth", []string{memory, "redis", implicit, "redis", memory, "redis", unlimitedSite}},
		{"rejected configs", []string{memory, memory + cannotListen, "redis" + cannotListen, implicit, "redis" + cannotListen}},
	}, 2) {
		t.Run(change.name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartLastingShards(t, 1, 0)
			redis := outageSite(servers)
			c := caddytest.Start(t, redis)
			served := map[string]int64{}
			serve := func(n int) {
				t.Helper()
				for i := range n {
					key := fmt.Sprintf("client-%d", i%clients)
					must(t, key, want("status", c.Probe("/", "X-Key: "+key).Status, http.StatusOK))
					served[key]++
				}
			}
			serve(before)
			servers.AwaitCounts(t, "api", served)
			servers.Kill(t)
			serve(during)
			for _, config := range change.configs {
				config = strings.Replace(config, "redis", redis, 1)
				if !strings.HasSuffix(config, cannotListen) {
					c.MustLoad(config)
				} else if status, body := c.Load(config); status == http.StatusOK {
					t.Fatalf("a config that cannot listen was accepted: %s", body)
				}
				// Caddy retries pending charges once a second, whichever config runs.
				time.Sleep(1200 * time.Millisecond)
			}
			c.MustLoad(redis)
			awaitUnsent(c, during)
			servers.Restart(t)
			serve(after)
			servers.AwaitCounts(t, "api", served)
			must(t, "metric", want("number of lost charges", undelivered(c, "a", "lost"), 0))
		})
	}
}

// awaitUnsent waits until that many charges are unsent, which they are not during a retry.
func awaitUnsent(c *caddytest.Caddy, n int64) {
	c.T.Helper()
	eventually(c.T, "charges are pending", func() error {
		return want("number of them", c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`), fmt.Sprint(n))
	})
}

// awaitUnsentAtLeast waits until that many charges are unsent at the same time.
func awaitUnsentAtLeast(c *caddytest.Caddy, n float64) {
	c.T.Helper()
	eventually(c.T, "charges are pending", func() error {
		unsent := gaugeOf(c.T, c, `caddy_rate_limit_ledger_unsent{store="default"}`)
		return want(fmt.Sprintf("%v being at least %v", unsent, n), unsent >= n, true)
	})
}

// TestChargesAreDeliveredAfterTheStoreIsReplaced by one in memory.
func TestChargesAreDeliveredAfterTheStoreIsReplaced(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, outageSite(servers))
	served, _ := outOfReach(t, servers, c)
	c.MustLoad(zonesSite("", zoneWith("api", "events 1000000"), "respond ok"))
	servers.Restart(t)
	servers.AwaitCounts(t, "api", served)
}

// TestRequestOutlivesItsStoresKind checks that the store that admitted a request is charged, even
// if it is unreachable when the request ends.
func TestRequestOutlivesItsStoresKind(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartLastingShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	redis := proxySite(servers.Store("charge_timeout 5s"), 5, backend.Server.Listener.Addr().String())
	c := caddytest.Start(t, redis)
	running := backend.Start(t, c, "/", "X-Key: alice")
	servers.Kill(t)
	c.MustLoad(apiSite("", 5, "1h"))
	must(t, "the running request", want("status", backend.Finish(t, running)[0].Status, http.StatusOK))
	// Caddy retries the charge once a second, whichever config runs.
	time.Sleep(1200 * time.Millisecond)
	c.MustLoad(redis)
	awaitUnsent(c, 1)
	servers.Restart(t)
	servers.AwaitCounts(t, "api", map[string]int64{"alice": 1})
}

// unlimitedSite is a config that has nothing of this module.
var unlimitedSite = caddytest.Site("", `
respond unlimited
`)

func TestRequestRunningDuringAReloadIsCharged(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	backend := caddytest.StartSlowBackend(t)
	addr := backend.Server.Listener.Addr().String()
	redis, other := servers[:1].Store(), servers[1:].Store()

	t.Run("redis", func(t *testing.T) {
		for name, config := range map[string]string{
			"the same":                proxySite(redis, 5, addr),
			"other events":            proxySite(redis, 7, addr),
			"other connections":       proxySite(servers[:1].Store("pool_size 1", "check_timeout 5s"), 5, addr),
			"a shard more":            proxySite(servers.Store(), 5, addr),
			"another shard instead":   proxySite(other, 5, addr),
			"a memory store":          proxySite("", 5, addr),
			"no limiter and no redis": unlimitedSite,
		} {
			t.Run(name, func(t *testing.T) {
				flush(t, servers)
				c := caddytest.Start(t, proxySite(redis, 5, addr))
				whole := backend.Start(t, c, "/", "X-Key: alice")
				streamed := backend.Start(t, c, "/stream", "X-Key: bob")
				servers.AwaitCounts(t, "api", map[string]int64{"bob": 1})

				c.MustLoad(config)
				if config == unlimitedSite {
					must(t, "request after the reload", want("body", c.Ask("/").Body, "unlimited"))
				}
				for i, a := range backend.Finish(t, whole, streamed) {
					must(t, fmt.Sprintf("running request %d", i), errors.Join(a.Is(http.StatusOK, 1), want("limit", a.Limit, 5)))
				}
				charged := func() { servers[:1].AwaitCounts(t, "api", map[string]int64{"alice": 1, "bob": 1}) }
				if name == "another shard instead" {
					// A running request counts where the new config looks for it.
					charged = func() {
						servers[1:].AwaitCounts(t, "api", map[string]int64{"alice": 1})
						servers[:1].AwaitCounts(t, "api", map[string]int64{"bob": 1})
					}
				}
				charged()
				if config == unlimitedSite {
					// Nothing uses the connections any more.
					eventually(t, "the connections are closed", func() error {
						return want("connections in use", len(c.Stacks("/internal/redis.")), 0)
					})
				}
				// After the limiter has ended, no charge is in flight.
				c.Unload()
				charged()
			})
		}
	})

	t.Run("memory, then no limiter", func(t *testing.T) {
		c := caddytest.Start(t, proxySite("", 5, addr))
		first := backend.Start(t, c, "/", "X-Key: alice")
		c.MustLoad(proxySite(memoryStore(1000), 7, addr))
		second := backend.Start(t, c, "/", "X-Key: alice")
		c.MustLoad(unlimitedSite)
		// Both were checked before either was charged, but the first was in flight during the
		// second check.
		for i, a := range backend.Finish(t, first, second) {
			must(t, fmt.Sprintf("running request %d", i), errors.Join(a.Is(http.StatusOK, int64(i+1)), want("limit", a.Limit, []int64{5, 7}[i])))
		}
	})

	t.Run("memory across a reload", func(t *testing.T) {
		c := caddytest.Start(t, proxySite("", 5, addr))
		first := backend.Start(t, c, "/", "X-Key: alice")
		c.MustLoad(proxySite(memoryStore(1000), 7, addr))
		must(t, "running request", backend.Finish(t, first)[0].Is(http.StatusOK, 1))
		second := backend.Start(t, c, "/", "X-Key: alice")
		must(t, "next request", backend.Finish(t, second)[0].Is(http.StatusOK, 2))
	})
}
