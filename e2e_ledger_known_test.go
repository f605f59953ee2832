package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// callsTo is how often the servers were asked about buckets, or to change them, as
// they tell it themselves: primaries by scripts, replicas by reading commands or
// scripts that only read. What a script does on a primary is not counted again.
func callsTo(t *testing.T, s caddytest.Shards) (total int64) {
	t.Helper()
	for _, shard := range s {
		stats, err := shard.Primary.Info("commandstats")
		must(t, "statistics", err)
		total += ran(t, stats, "evalsha", "evalsha_ro")
	}
	for _, replica := range s.Replicas() {
		stats, err := replica.Info("commandstats")
		must(t, "statistics", err)
		total += ran(t, stats, "hmget", "mget", "evalsha_ro")
	}
	return total
}

// ran is how often commands ran, but for scripts that the server did not know
// yet.
func ran(t *testing.T, stats map[string]string, commands ...string) (total int64) {
	t.Helper()
	for _, command := range commands {
		for field := range strings.SplitSeq(stats["cmdstat_"+command], ",") {
			name, value, _ := strings.Cut(field, "=")
			sign := map[string]int64{"calls": 1, "failed_calls": -1}[name]
			if sign == 0 {
				continue
			}
			n, err := strconv.ParseInt(value, 10, 64)
			must(t, "statistics", err)
			total += sign * n
		}
	}
	return total
}

// TestKnownFullBucketCostsOneCallASecond, from each process, however often its
// client comes back.
func TestKnownFullBucketCostsOneCallASecond(t *testing.T) {
	const lasts = 2500 * time.Millisecond
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			zones := ""
			for _, algorithm := range counting {
				zones += pathZone(algorithm, "algorithm "+algorithm, "charge "+mode, "events 5")
			}
			caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store(), zones, "respond ok"))
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					used := askForAlice(t, caddys, algorithm, len(caddys), 0, 0).Total()
					if algorithm == "sliding_log" {
						used = min(used, 6) // more than too many are not kept
					}
					servers.AwaitUsed(t, algorithm, "alice", used)
					before, start, refused := callsTo(t, servers), time.Now(), new(caddytest.Tally)
					caddytest.Together(t, len(caddys), func(i int) error {
						result, err := loadgen.Run(t.Context(), loadgen.Options{
							Addr: caddys[i].Addr, Path: "/" + algorithm, Header: "X-Key", Key: func(int64) string { return "alice" },
							Connections: 8, Duration: lasts,
						})
						for range result.Status[http.StatusTooManyRequests] {
							refused.Add(algorithm)
						}
						return errors.Join(err, want("number of requests that were not refused", result.Requests-result.Status[http.StatusTooManyRequests], 0))
					})
					most := int64(len(caddys)) * (int64(time.Since(start)/time.Second) + 1)
					made := callsTo(t, servers) - before
					must(t, "servers", want(fmt.Sprintf("having got %d calls, which is more than %d,", made, most), made > most, false))
					// A client that is known for ever would not see a reset.
					eventually(t, "every Caddy has asked", func() error {
						for _, c := range caddys {
							must(t, "request too many", c.Probe("/"+algorithm, "X-Key: alice").Refuses(algorithm))
						}
						return want("too few calls", callsTo(t, servers)-before < int64(len(caddys)), false)
					})
					must(t, "Redis", want("count", servers.Content(t, algorithm, "alice").Used, used))
					t.Logf("%d requests refused by %d Caddys in %v cost %d calls", refused.Total(), len(caddys), time.Since(start).Round(time.Millisecond), made)
				})
			}
		})
	}
}

// TestOperatorsResetIsSeen: somebody deletes the bucket of a client, who is
// admitted again once what the primary said is no longer relied upon.
func TestOperatorsResetIsSeen(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 1, 1)
			zones := ""
			for _, algorithm := range counting {
				zones += pathZone(algorithm, "algorithm "+algorithm, "charge "+mode, "events 3")
			}
			c := startWith(t, servers.Store(), zones, "respond ok")
			primary := servers[0].Primary.Client()
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					usesUp(t, c, servers, algorithm, 3)
					for round := range 2 {
						// What is known is confirmed from time to time.
						for range 13 * round {
							must(t, "request too many", c.Probe("/"+algorithm, "X-Key: alice").Refuses(algorithm))
							time.Sleep(100 * time.Millisecond)
						}
						keys, err := primary.Keys(t.Context(), "rl:1:"+algorithm+":*:alice").Result()
						must(t, "find the bucket", errors.Join(err, want("number of buckets", len(keys), 1)))
						must(t, "delete the bucket", primary.Del(context.Background(), keys...).Err())
						known := time.Now().Add(ledger.DefaultTrust)
						eventually(t, "the client is admitted", func() error {
							a := c.Probe("/"+algorithm, "X-Key: alice")
							must(t, "reset", seesReset(a, known))
							return a.Shows(http.StatusOK, 3, 1)
						})
						usesUp(t, c, servers, algorithm, 2)
					}
				})
			}
		})
	}
}

// usesUp makes alice's last n requests of three, and one too many.
func usesUp(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, zone string, n int) {
	t.Helper()
	for range n {
		must(t, zone, want("status", c.Probe("/"+zone, "X-Key: alice").Status, http.StatusOK))
	}
	servers.AwaitUsed(t, zone, "alice", 3)
	must(t, zone, c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
}
