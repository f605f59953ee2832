package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const masterName = "limits"

func sentinelLine(sentinels *redistest.Sentinels) string {
	return "sentinel " + masterName + " " + strings.Join(sentinels.Addrs(), " ")
}

// countsOn returns the counts of a zone by client on servers that share no bucket.
func countsOn(t *testing.T, zone string, servers ...*redistest.Server) map[string]int64 {
	t.Helper()
	counts := map[string]int64{}
	for _, server := range servers {
		for client, b := range caddytest.BucketsOf(t, server, zone) {
			counts[strings.TrimSuffix(client, "}")] += b.Count
		}
	}
	return counts
}

// TestShardsOfEveryKind checks that every kind of shard counts clients, and that limits hold.
func TestShardsOfEveryKind(t *testing.T) {
	t.Parallel()
	const (
		password, sentinelPassword = "data-secret", "sentinel-secret"
		events, clients            = 3, 30
	)
	static, watched, sentinels, cluster := startKinds(t, map[string]redistest.Option{
		"static": redistest.Args("--unixsocket", "redis.sock"), "watched": redistest.Args("--requirepass", password),
	}, redistest.SentinelOptions{Password: sentinelPassword})
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		"password {file."+writeFile(t, password)+"}",
		caddytest.ShardWith("static", "primary unix/"+static.Primary.SocketPath(), "replica "+static.Replicas[0].Addr()),
		caddytest.ShardWith("watched", sentinelLine(sentinels)),
		caddytest.ShardWith("cluster", "cluster "+strings.Join(cluster.Addrs()[:2], " ")),
		"sentinel_password {file."+writeFile(t, sentinelPassword+"\n")+"}",
	), events, "1h"))
	for i := range clients {
		key := fmt.Sprintf("client-%d", i)
		for used := int64(1); used <= events; used++ {
			must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, used))
		}
		must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, events))
	}
	eventually(t, "all clients are counted", func() error {
		seen := 0
		for name, servers := range map[string][]*redistest.Server{
			"static": {static.Primary}, "watched": {watched.Primary}, "cluster": cluster.Nodes,
		} {
			counts := countsOn(t, "api", servers...)
			if len(counts) < clients/10 {
				return fmt.Errorf("shard %s has %d of %d clients", name, len(counts), clients)
			}
			for client, n := range counts {
				if n != events {
					return fmt.Errorf("%s is counted %d times on shard %s", client, n, name)
				}
			}
			seen += len(counts)
		}
		return want("clients", seen, clients)
	})
	mustBeQuiet(c)
	mustHide(c, password, sentinelPassword)
}

// startKinds starts a shard with a replica, one that a sentinel watches, and a cluster of three
// masters, each with the option of that name. Nothing fails over, although a busy machine may delay
// a server's answers for seconds.
func startKinds(t *testing.T, opts map[string]redistest.Option, sentinel redistest.SentinelOptions) (
	static, watched *redistest.Shard, sentinels *redistest.Sentinels, cluster *redistest.Cluster,
) {
	t.Helper()
	sentinel.DownAfter = caddytest.WaitLimit
	patient := redistest.NodeTimeout(caddytest.WaitLimit)
	with := func(name string) redistest.Option {
		if opts[name] == nil {
			return redistest.Args()
		}
		return opts[name]
	}
	caddytest.Together(t, 3, func(i int) (err error) {
		switch i {
		case 0:
			static, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShard(1, with("static")))
		case 1:
			watched, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShard(1, with("watched")))
			if err == nil {
				sentinels, err = started(t, (*redistest.Sentinels).Stop)(redistest.LaunchSentinels(masterName, watched.Primary, 1, sentinel))
			}
		case 2:
			cluster, err = started(t, (*redistest.Cluster).Stop)(redistest.LaunchCluster(3, 0, with("cluster"), patient))
		}
		return err
	})
	return static, watched, sentinels, cluster
}

// started stops what was launched when the test ends.
func started[T any](t *testing.T, stop func(T) error) func(launched T, err error) (T, error) {
	return func(launched T, err error) (T, error) {
		if err == nil {
			t.Cleanup(func() {
				if err := stop(launched); err != nil {
					t.Error(err)
				}
			})
		}
		return launched, err
	}
}

// writeFile returns the path of a new file.
func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	must(t, "write a file", os.WriteFile(path, []byte(text), 0o600))
	return path
}

// TestFailoverUnderSteadyRequests checks that no response is a 5xx, and that the new primary counts
// without a reload, also when no sentinel is left.
func TestFailoverUnderSteadyRequests(t *testing.T) {
	t.Parallel()
	const workers = 2
	shard := redistest.StartShard(t, 2)
	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 3, redistest.SentinelOptions{DownAfter: 2 * time.Second})
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardWith("a", sentinelLine(sentinels)), "check_timeout 100ms", "charge_timeout 250ms", "on_error allow",
	), 1_000_000, "1h"))
	var limited atomic.Int64
	stop := caddytest.StartTraffic(t, workers, func(worker, i int) error {
		a, err := c.TryAsk("/", fmt.Sprintf("X-Key: client-%d", (worker+i)%20))
		time.Sleep(10 * time.Millisecond) // the failover takes its time, however many there are
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
		eventually(t, "requests are limited", func() error { return want("more being limited", limited.Load() > before+40, true) })
	}
	growth()
	must(t, "kill the primary", shard.Primary.Kill())
	ctx, cancel := context.WithTimeout(t.Context(), caddytest.WaitLimit)
	defer cancel()
	var primary *redistest.Server
	// On a busy machine sentinels may fail over more than once.
	eventually(t, "the log names the new primary", func() error {
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
	eventually(t, "the new primary counts", func() error { return want("its counts having grown", sum() > before+40, true) })
	// On a busy machine a search may time out, which a failover must not look like.
	for _, line := range storeLines(c) {
		if line.Msg == "servers cannot be found" && !strings.Contains(line.Error, "timeout") && !strings.Contains(line.Error, "deadline") {
			t.Errorf("a failover is reported as a loss of the sentinels: %+v", line)
		}
	}
	lost := func() int { return countLines(c, "servers cannot be found") - countLines(c, "servers are found again") }
	eventually(t, "the sentinels answer", func() error { return want("searches that fail", lost(), 0) })

	for _, sentinel := range sentinels.Nodes {
		must(t, "kill a sentinel", sentinel.Kill())
	}
	eventually(t, "the loss is reported", func() error { return want("searches that fail", lost(), 1) })
	awaitLine(c, "warn", "servers cannot be found", "ask the sentinels for "+masterName)
	growth()
	must(t, "restart a sentinel", sentinels.Nodes[0].Restart())
	eventually(t, "the return is reported", func() error { return want("searches that fail", lost(), 0) })
	stop()
}

// TestReshardingOneCaddyAtATime adds a shard, and then removes one, while one Caddy has the new
// config and the other the old one. No client exceeds its limit.
func TestReshardingOneCaddyAtATime(t *testing.T) {
	t.Parallel()
	const (
		clients = 20
		events  = 10
	)
	servers := caddytest.StartShards(t, 3, 0)
	lines := func(n int, options ...string) []string {
		var lines []string
		for i := range n {
			lines = append(lines, caddytest.ShardOf(caddytest.ShardName(i), servers[i]))
		}
		return append(lines, options...)
	}
	config := func(zone string, store ...string) string {
		return fmt.Sprintf("{\n{{global}}\n%s\n}\n{{site}} {\nrate_limit {\nzone %s {\nkey {header.X-Key}\nevents %d\nwindow 1h\ncharge before\n}\n}\nrespond ok\n}\n", caddytest.RedisStore(store...), zone, events)
	}
	two, three := lines(2), append(lines(2), caddytest.ShardOf("c", servers[2], "weight 1 was 0"))
	without := lines(3)
	without[0] = caddytest.ShardOf("a", servers[0], "weight 0 was 1")
	for _, c := range []struct {
		zone          string
		before, after []string
	}{
		{"added", two, three},
		{"removed", lines(3), without},
	} {
		caddys := []*caddytest.Caddy{caddytest.Start(t, config(c.zone, c.before...)), caddytest.Start(t, config(c.zone, c.before...))}
		served, resets := map[string]int64{}, map[string]int64{}
		ask := func(at int, client string) caddytest.Answer {
			t.Helper()
			a, err := caddys[at].TryAsk("/", "X-Key: "+client)
			must(t, "ask", err)
			if a.Status == http.StatusOK {
				served[client]++
			}
			switch was, ok := resets[client]; {
			case a.Status != http.StatusOK && a.RetryAfter == 1:
				// What the other Caddy's last take held is on its way to be held no more.
			case !ok:
				resets[client] = a.Reset
			// The clocks of two shards are not read at the same instant.
			case max(was-a.Reset, a.Reset-was) > 1:
				t.Errorf("%s: %s has reset %d, which was %d", c.zone, client, a.Reset, was)
			}
			return a
		}
		name := func(n int) string { return fmt.Sprint("client-", n) }
		for n := range clients {
			for i := range 4 {
				ask(i%2, name(n))
			}
		}
		eventually(t, "all is charged", func() error {
			total := int64(0)
			for _, server := range servers {
				for key, b := range caddytest.ReadBuckets(t, server.Primary.Client()) {
					if strings.Contains(key, ":"+c.zone+":") {
						total += b.Count
					}
				}
			}
			return want("charges", total, 4*clients)
		})
		caddys[0].MustLoad(config(c.zone, c.after...))
		for n := range clients {
			for i := range 3 {
				if a := ask(0, name(n)); a.Used != int64(5+i) {
					t.Errorf("%s: %s has used %d by the new config, want %d", c.zone, name(n), a.Used, 5+i)
				}
			}
		}
		for n := range clients {
			for i := range 2 {
				if a := ask(1, name(n)); a.Used != int64(8+i) {
					t.Errorf("%s: %s has used %d by the old config, want %d", c.zone, name(n), a.Used, 8+i)
				}
			}
		}
		caddys[1].MustLoad(config(c.zone, c.after...))
		for n := range clients {
			for i := range 2 * events {
				ask(i%2, name(n))
			}
		}
		for client, total := range served {
			if total != events {
				t.Errorf("%s: %s was served %d times, want %d", c.zone, client, total, events)
			}
		}
		must(t, "steps of a resharding", want(fmt.Sprint("problems ", problemsOf(caddys[0])), len(problemsOf(caddys[0])["disagreement"]), 0))
		several := 0
		for _, server := range servers {
			for key := range caddytest.ReadBuckets(t, server.Primary.Client()) {
				if strings.Contains(key, ":"+c.zone+":") {
					several++
				}
			}
		}
		if several -= clients; several == 0 || several == clients {
			t.Errorf("%s: %d of %d clients have two buckets", c.zone, several, clients)
		}
	}
}

// TestReshardingChargesRunningRequests adds a shard while requests run, and checks that they count, with those
// that come afterwards, at both shards; what they had taken before, at the former one.
func TestReshardingChargesRunningRequests(t *testing.T) {
	t.Parallel()
	const clients, before, events = 12, 4, 10
	servers := caddytest.StartShards(t, 3, 0)
	for _, charge := range modes {
		t.Run(charge, func(t *testing.T) {
			backend := caddytest.StartSlowBackend(t)
			site := func(store string) string {
				return zonesSite(store, zoneWith("api-"+charge, fmt.Sprint("events ", events), "charge "+charge),
					proxyTo(backend.Server.Listener.Addr().String()))
			}
			c := caddytest.Start(t, site(servers[:2].Store()))
			name := func(n int) string { return fmt.Sprint("client-", n) }
			var held []caddytest.Running
			for n := range clients {
				for range before {
					held = append(held, backend.Start(t, c, "/", "X-Key: "+name(n)))
				}
			}
			c.MustLoad(site(servers.StoreAfter(2)))
			for n := range clients {
				backend.Finish(t, backend.Start(t, c, "/", "X-Key: "+name(n)))
			}
			backend.Finish(t, held...)
			moved := 0
			for n := range clients {
				var a bucketsAnswer
				eventually(t, name(n)+" is charged", func() error {
					a = bucketsOf(c, http.MethodGet, "api-"+charge+"?key="+name(n))
					former, used := a.Buckets[0].Previous, int64(before+1)
					if former == nil {
						return want("its count", a.primaryUsed(), used)
					}
					if charge == "before" {
						used = 1
					}
					return errors.Join(want("its former count", former.primaryUsed(), before+1), want("its count", a.primaryUsed(), used))
				})
				if a.Buckets[0].Previous != nil {
					moved++
				}
			}
			must(t, "resharding", want("having moved clients", moved > 0, true))
		})
	}
}

// TestReshardingUndone keeps what clients have spent, also when it is begun again.
func TestReshardingUndone(t *testing.T) {
	t.Parallel()
	const clients = 20
	servers := caddytest.StartShards(t, 3, 0)
	// The third shard is new.
	config := func(n int, options ...string) string {
		return limitedSite(servers[:n].StoreAfter(2, options...), 10, "1h", "respond ok")
	}
	c := caddytest.Start(t, config(2))
	for used, site := range []string{config(2), config(3), config(3, "ledger_trust 2s"), config(2), config(3), config(2)} {
		c.MustLoad(site)
		for n := range clients {
			client := fmt.Sprint("client-", n)
			must(t, client, c.Ask("/", "X-Key: "+client).Is(http.StatusOK, int64(used+1)))
		}
	}
}
