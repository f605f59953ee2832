package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestSlowShardAdmitsNoMoreThanTheLimit in one Caddy, which decides alone whenever a check or take
// is not answered in time: what was admitted either way counts together, but for takes whose reply was lost. A take
// without an answer counts for two seconds; only on a machine that takes longer for all of this can more pass before it
// turns out that some were never made.
func TestSlowShardAdmitsNoMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	const limit, workers, requests = 30, 8, 20
	for algorithm, charge := range ways {
		t.Run(charge+"/"+algorithm, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 1, 0)
			zone := zoneWith("api", fmt.Sprint("events ", limit), "window 24h", "algorithm "+algorithm, "charge "+charge)
			c := caddytest.Start(t, zonesSite(servers.Store("check_timeout 10ms"), zone, "respond ok"))
			stop := make(chan struct{})
			var pauses, all sync.WaitGroup
			pauses.Go(func() {
				for {
					paused := servers[0].Primary.Pause()
					time.Sleep(40 * time.Millisecond) // longer than check_timeout
					if err := errors.Join(paused, servers[0].Primary.Resume()); err != nil {
						t.Error(err)
						return
					}
					select {
					case <-stop:
						return
					case <-time.After(10 * time.Millisecond):
					}
				}
			})
			var served atomic.Int64
			began := time.Now()
			for range workers {
				all.Go(func() {
					for range requests {
						if a, err := c.TryProbe(t.Context(), "/", "X-Key: alice"); err == nil && a.Status == http.StatusOK {
							served.Add(1)
						}
					}
				})
			}
			all.Wait()
			took := time.Since(began)
			close(stop)
			pauses.Wait()
			most := int64(limit)
			unheard := `caddy_rate_limit_undelivered_total{operation="take",outcome="uncertain",shard="a",store="default"}`
			if took > 2*time.Second {
				unheard = `caddy_rate_limit_store_errors_total{kind="timeout",store="default"}`
			}
			n, err := strconv.Atoi(c.Metric(unheard))
			must(t, "the metric", err)
			most += int64(n)
			if n := served.Load(); n > most || n == 0 {
				t.Errorf("%d requests were served in %v, %v of which the shard did not answer in time: want at most %d",
					n, took, c.MetricSum("caddy_rate_limit_store_errors_total"), most)
			}
			t.Logf("%d of %d were served in %v", served.Load(), most, took)
		})
	}
}

// TestTakesThatNeverRanAreCharged: a shard hangs while Caddy connects, so it never gets some takes of requests that
// pass meanwhile.
func TestTakesThatNeverRanAreCharged(t *testing.T) {
	t.Parallel()
	const passed = 5
	for algorithm, charge := range ways {
		if charge != "before" || algorithm == "concurrency" {
			continue
		}
		t.Run(algorithm, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 0)
			c := caddytest.Start(t, zonesSite(servers.Store("check_timeout 50ms"), zoneWith("api", "events 10", "window 24h", "algorithm "+algorithm, "charge before"), "respond ok"))
			c.Probe("/", "X-Key: bob")
			must(t, "pause", servers[0].Primary.Pause())
			// The first one is written to the connection that is there.
			for _, client := range append([]string{"carol"}, slices.Repeat([]string{"alice"}, passed)...) {
				must(t, client, want("status", c.Probe("/", "X-Key: "+client).Status, http.StatusOK))
			}
			must(t, "resume", servers[0].Primary.Resume())
			servers.AwaitUsed(t, "api", "alice", passed)
		})
	}
}

// TestSlotsOfTheShardCountInAnOutage: a Caddy knows the slots that the shard has given it.
func TestSlotsOfTheShardCountInAnOutage(t *testing.T) {
	t.Parallel()
	const slots = 3
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	c := caddytest.Start(t, zonesSite(servers.Store(), zoneWith("slots", fmt.Sprint("events ", slots), "window 1m", "algorithm concurrency"),
		proxyTo(backend.Server.Listener.Addr().String())))
	var held []caddytest.Running
	for range slots - 1 {
		held = append(held, backend.Hold(t, c, "/held", "X-Key: alice"))
	}
	servers.Kill(t)
	held = append(held, backend.Hold(t, c, "/held", "X-Key: alice"))
	must(t, "one too many", c.Probe("/held", "X-Key: alice").Refuses("slots"))
	backend.Finish(t, held[0])
	held[0] = backend.Hold(t, c, "/held", "X-Key: alice")
	must(t, "one too many again", c.Probe("/held", "X-Key: alice").Refuses("slots"))
	backend.Finish(t, held...)
}
