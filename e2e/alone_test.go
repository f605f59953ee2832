package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
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

// TestOutageThroughReloads: one count goes on while zones get other limits and clients move to another shard, with
// several zones, in batches and without. Once the shards are back, each request has been charged exactly once.
func TestOutageThroughReloads(t *testing.T) {
	t.Parallel()
	const clients, most = 6, 8
	for _, w := range sweep.Of(t, allWays(), 2) {
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			algorithm, charge := w.algorithm, w.mode
			servers := caddytest.StartLastingShards(t, 2, 0)
			site := func(shards caddytest.Shards, events int) string {
				options := []string{"algorithm " + algorithm, "charge " + charge}
				if algorithm == "gcra" {
					events = most // other limits drain otherwise
				}
				wide := zoneWith("wide", append(options, "events 20")...)
				if charge == "before" && strings.HasSuffix(algorithm, "_window") {
					options = append(options, "batch 2")
				}
				return zonesSite(shards.StoreAfter(1, "ledger_trust 0"), zoneWith("narrow", append(options, fmt.Sprint("events ", events))...)+wide, "respond ok")
			}
			c := caddytest.Start(t, site(servers[:1], 6))
			var served [clients]int
			ask := func(times, want int) {
				t.Helper()
				for i := range served {
					for range times {
						switch a := c.Probe("/", fmt.Sprint("X-Key: client-", i)); a.Status {
						case http.StatusOK:
							served[i]++
						case http.StatusTooManyRequests:
							must(t, "a refusal", a.Refuses("narrow"))
						default:
							t.Errorf("status %d", a.Status)
						}
					}
					if served[i] != want {
						t.Errorf("client %d was served %d times, want %d", i, served[i], want)
					}
				}
			}
			ask(2, 2)
			for i := range served {
				servers[:1].AwaitUsed(t, "wide", fmt.Sprint("client-", i), 2)
				servers[:1].AwaitUsed(t, "narrow", fmt.Sprint("client-", i), 2)
			}
			servers.Kill(t)
			ask(2, 4)
			c.MustLoad(site(servers, most))
			ask(6, most)
			c.MustLoad(site(servers, 5))
			ask(1, most)
			c.MustLoad(site(servers, most))
			servers.Restart(t)
			awaitUnsent(c, 0)
			for i, n := range served {
				client := fmt.Sprint("client-", i)
				for _, zone := range []string{"narrow", "wide"} {
					servers[:1].AwaitUsed(t, zone, client, int64(n))
					// The shard to which some clients moved counts them since; gcra goes on from the other one.
					since := n - 4
					if algorithm == "gcra" {
						since = n - 2
					}
					if moved := servers[1:].Content(t, zone, client).Used; moved != 0 && moved != int64(since) {
						t.Errorf("zone %s of client %d has %d at the new shard, want %d", zone, i, moved, since)
					}
				}
			}
			ask(1, most)
		})
	}
}

// TestPenaltyInAnOutage outlasts the window in this process, and the shard does not hear of it.
func TestPenaltyInAnOutage(t *testing.T) {
	t.Parallel()
	for _, charge := range modes {
		t.Run(charge, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartLastingShards(t, 1, 0)
			c := caddytest.Start(t, zonesSite(servers.Store(), zoneWith("api", "events 1", "window 1s", "penalty 1h", "charge "+charge), "respond ok"))
			must(t, "another client", want("status", c.Probe("/", "X-Key: bob").Status, http.StatusOK))
			servers.Kill(t)
			eventually(t, "the client is over its limit", func() error {
				return want("status", c.Probe("/", "X-Key: alice").Status, http.StatusTooManyRequests)
			})
			time.Sleep(1500 * time.Millisecond) // a window is over
			must(t, "in the next window", c.Probe("/", "X-Key: alice").Refuses("api"))
			servers.Restart(t)
			eventually(t, "the shard decides", func() error {
				return want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK)
			})
		})
	}
}

// TestRunningTakesInAnOutage: a refusal beside a running request earns a penalty, unless the cost of that request may
// come back.
func TestRunningTakesInAnOutage(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	servers.Kill(t)
	for counted, isFinal := range map[string]bool{"not 304": false, "all": true} {
		c := caddytest.Start(t, zonesSite(servers.Store(),
			zoneWith("api", "events 1", "window 1m", "penalty 1h", "charge before", "count_status "+counted), proxyTo(backend.Server.Listener.Addr().String())))
		running := backend.Hold(t, c, "/", "X-Key: alice")
		refused := c.Probe("/", "X-Key: alice")
		must(t, counted, errors.Join(refused.Refuses("api"), want("a penalty", refused.RetryAfter > 60, isFinal)))
		backend.Finish(t, running)
		after := c.Probe("/", "X-Key: alice")
		must(t, counted, errors.Join(after.Refuses("api"), want("a penalty once the request has ended", after.RetryAfter > 60, true)))
	}
}
