package shardlimit_test

import (
	"flag"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var floodKeys = flag.Int64("flood.keys", 20_000, "how many made-up client keys TestFloodOfNewClients sends")

// TestFloodOfNewClients: made-up client keys fill no Redis, clients that have a
// bucket keep their limit, and nobody is let pass for want of memory.
func TestFloodOfNewClients(t *testing.T) {
	const (
		most   = 100
		events = 50
	)
	made := *floodKeys
	for _, charge := range []string{"after", "before"} {
		t.Run(charge, func(t *testing.T) {
			// Room for many fewer buckets than are asked for.
			room := fmt.Sprint(max(4, made/50_000), "mb")
			server := redistest.Start(t, "--maxmemory", room, "--maxmemory-policy", "noeviction")
			c := caddytest.Start(t, fmt.Sprintf(`{
	{{global}}
	rate_limit {
		store redis {
			shard a {
				primary %s
			}
			check_timeout 10s
			max_new_buckets %d
		}
	}
}
{{site}} {
	rate_limit {
		zone api {
			key {header.X-Key}
			events %d
			window 1h
			charge %s
		}
	}
	respond ok
}`, server.Addr(), most, events, charge))
			ask := func() caddytest.Answer {
				t.Helper()
				a, err := c.TryAsk("/", "X-Key: alice")
				must(t, "ask as alice", err)
				return a
			}
			for range events / 2 {
				if a := ask(); a.Status != http.StatusOK {
					t.Fatalf("alice got %d", a.Status)
				}
			}
			start := time.Now()
			result, err := loadgen.Run(t.Context(), loadgen.Options{
				Addr: c.Addr, Header: "X-Key", Connections: 32, Requests: made, Duration: 20 * time.Minute,
				Key: func(n int64) string { return "made-up-" + strconv.FormatInt(n, 10) },
			})
			must(t, "flood", err)
			t.Logf("%d requests in %v", result.Requests, time.Since(start))
			seconds := time.Since(start).Seconds() + 1
			if result.Requests != made || result.Status[http.StatusOK]+result.Status[http.StatusTooManyRequests] != made {
				t.Errorf("answers are %v", result.Status)
			}
			keys, err := server.Client().DBSize(t.Context()).Result()
			must(t, "count the keys", err)
			// A bucketful at first, then so many a second; alice, and what they share.
			if bound := int64(most*(1+seconds)) + 2; keys > bound {
				t.Errorf("%d buckets after %.1f s, want at most %d", keys, seconds, bound)
			}
			if passed := result.Status[http.StatusOK]; passed > keys+events {
				t.Errorf("%d requests passed with %d buckets", passed, keys)
			}
			for n := range events {
				a := ask()
				if want := http.StatusOK; n < events/2 && a.Status != want {
					t.Errorf("request %d of alice got %d", events/2+n, a.Status)
				}
				if want := http.StatusTooManyRequests; n >= events/2 && a.Status != want {
					t.Errorf("request %d of alice got %d", events/2+n, a.Status)
				}
			}
			if info, err := server.Info("errorstats"); err != nil || info["errorstat_OOM"] != "" {
				t.Errorf("redis was out of memory: %v, %v", info, err)
			}
			if n := strings.Count(c.Logs.String(), "too many new clients"); n < 1 || n > 1+int(seconds)/60 {
				t.Errorf("the log says so %d times", n)
			}
			overflowed, err := strconv.Atoi(c.Metric(`caddy_rate_limit_overflowed_requests_total{zone="api"}`))
			// All of them but those that got a bucket of their own.
			if err != nil || int64(overflowed) < made-keys || int64(overflowed) > made {
				t.Errorf("the metric counts %d of %d with %d buckets, %v", overflowed, made, keys, err)
			}
		})
	}
}

// TestNewClientsInTwoHandlersAreChargedOnce, also those whose bucket is shared,
// and also where the bound lets a client in between the two handlers.
func TestNewClientsInTwoHandlersAreChargedOnce(t *testing.T) {
	const clients = 200
	servers := caddytest.StartShards(t, 2, 1)
	for _, charge := range []string{"after", "before"} {
		t.Run(charge, func(t *testing.T) {
			prefix := "once-" + charge
			zone := zoneWith("api", "charge "+charge, "events 1000")
			c := caddytest.Start(t, twoHandlersSite(servers.Store("max_new_buckets 1", "key_prefix "+prefix), zone, zone))
			caddytest.Together(t, clients, func(i int) error {
				a, err := c.TryProbe(t.Context(), "/", "X-Key: "+strconv.Itoa(i))
				if err != nil {
					return err
				}
				return want("status", a.Status, http.StatusOK)
			})
			if c.Metric(`caddy_rate_limit_overflowed_requests_total{zone="api"}`) == "" {
				t.Error("nobody shares a bucket")
			}
			// It delivers what is on its way.
			c.Stop()
			servers.AwaitSum(t, prefix+":", clients)
		})
	}
}
