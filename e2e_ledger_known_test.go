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

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// calls is how often the servers were asked about buckets, or to change them, as
// they tell it themselves: primaries by scripts, replicas by reading commands or
// scripts that only read. What a script does on a primary is not counted again.
func (s shards) calls(t *testing.T) (total int64) {
	t.Helper()
	for _, shard := range s {
		stats, err := shard.Primary.Info("commandstats")
		must(t, "statistics", err)
		total += ran(t, stats, "evalsha", "evalsha_ro")
	}
	for _, replica := range s.replicas() {
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
			servers := startShards(t, 1, 1)
			zones := ""
			for _, algorithm := range counting {
				zones += pathZone(algorithm, "algorithm "+algorithm, "charge "+mode, "events 5")
			}
			caddys := startCaddys(t, 2, zonesSite(servers.store(), zones, "respond ok"))
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					used := askForAlice(t, caddys, algorithm, len(caddys), 0, 0).total()
					if algorithm == "sliding_log" {
						used = min(used, 6) // more than too many are not kept
					}
					servers.awaitUsed(t, algorithm, "alice", used)
					before, start, refused := servers.calls(t), time.Now(), new(tally)
					together(t, len(caddys), func(i int) error {
						result, err := loadgen.Run(t.Context(), loadgen.Options{
							Addr: caddys[i].site, Path: "/" + algorithm, Header: "X-Key", Key: func(int64) string { return "alice" },
							Connections: 8, Duration: lasts,
						})
						for range result.Status[http.StatusTooManyRequests] {
							refused.add(algorithm)
						}
						return errors.Join(err, want("number of requests that were not refused", result.Requests-result.Status[http.StatusTooManyRequests], 0))
					})
					most := int64(len(caddys)) * (int64(time.Since(start)/time.Second) + 1)
					made := servers.calls(t) - before
					must(t, "servers", want(fmt.Sprintf("having got %d calls, which is more than %d,", made, most), made > most, false))
					// A client that is known for ever would not see a reset.
					eventually(t, "every Caddy has asked", func() error {
						for _, c := range caddys {
							must(t, "request too many", c.probe("/"+algorithm, "X-Key: alice").refuses(algorithm))
						}
						return want("too few calls", servers.calls(t)-before < int64(len(caddys)), false)
					})
					must(t, "Redis", want("count", servers.content(t, algorithm, "alice").used, used))
					t.Logf("%d requests refused by %d Caddys in %v cost %d calls", refused.total(), len(caddys), time.Since(start).Round(time.Millisecond), made)
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
			servers := startShards(t, 1, 1)
			zones := ""
			for _, algorithm := range counting {
				zones += pathZone(algorithm, "algorithm "+algorithm, "charge "+mode, "events 3")
			}
			c := startWith(t, servers.store(), zones, "respond ok")
			primary := servers[0].Primary.Client()
			for _, algorithm := range counting {
				t.Run(algorithm, func(t *testing.T) {
					c.usesUp(t, servers, algorithm, 3)
					for round := range 2 {
						// What is known is confirmed from time to time.
						for range 13 * round {
							must(t, "request too many", c.probe("/"+algorithm, "X-Key: alice").refuses(algorithm))
							time.Sleep(100 * time.Millisecond)
						}
						keys, err := primary.Keys(t.Context(), "rl:1:"+algorithm+":*:alice").Result()
						must(t, "find the bucket", errors.Join(err, want("number of buckets", len(keys), 1)))
						must(t, "delete the bucket", primary.Del(context.Background(), keys...).Err())
						known := time.Now().Add(ledger.DefaultTrust)
						eventually(t, "the client is admitted", func() error {
							a := c.probe("/"+algorithm, "X-Key: alice")
							must(t, "reset", a.seesReset(known))
							return a.shows(http.StatusOK, 3, 1)
						})
						c.usesUp(t, servers, algorithm, 2)
					}
				})
			}
		})
	}
}

// usesUp makes alice's last n requests of three, and one too many.
func (c *caddyProcess) usesUp(t *testing.T, servers shards, zone string, n int) {
	t.Helper()
	for range n {
		must(t, zone, want("status", c.probe("/"+zone, "X-Key: alice").status, http.StatusOK))
	}
	servers.awaitUsed(t, zone, "alice", 3)
	must(t, zone, c.probe("/"+zone, "X-Key: alice").refuses(zone))
}
