package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// terminate ends Caddy as an operator would, and does not wait.
func (c *caddyProcess) terminate() {
	c.t.Helper()
	must(c.t, "terminate", c.cmd.Process.Signal(syscall.SIGTERM))
}

// awaitLog waits until Caddy has logged a text.
func (c *caddyProcess) awaitLog(text string) {
	c.t.Helper()
	eventually(c.t, "caddy logs "+text, func() error {
		return want("the text being in the log", strings.Contains(c.logs.String(), text), true)
	})
}

// awaitEnd waits until Caddy has ended.
func (c *caddyProcess) awaitEnd() {
	c.t.Helper()
	select {
	case <-c.done:
	case <-time.After(waitLimit):
		c.t.Fatal("caddy does not end")
	}
}

func TestDisconnectedClientIsCharged(t *testing.T) {
	t.Parallel()
	servers := startShards(t, 1, 1)
	backend := startSlowBackend(t)
	c := startCaddy(t, proxySite(servers.store(), 5, backend.server.Listener.Addr().String()))
	wanted := map[string]int64{}
	for _, path := range []string{"/", "/stream"} {
		for i := range 3 {
			key := fmt.Sprintf("%s-%d", strings.TrimPrefix(path, "/"), i)
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := c.askContext(ctx, path, "X-Key: "+key)
				failed <- err
			}()
			backend.await(t)
			cancel()
			if err := <-failed; !errors.Is(err, context.Canceled) {
				t.Fatalf("client that left got %v", err)
			}
			wanted[key] = 1
		}
	}
	servers.awaitCounts(t, "api", wanted)
	c.stop()
	servers.awaitCounts(t, "api", wanted)
}

func TestLastChargesAreDeliveredAtExit(t *testing.T) {
	t.Parallel()
	servers := startShards(t, 2, 1)
	c := startCaddy(t, apiSite(servers.store(), 1000, "1h"))
	var admitted tally
	together(t, 8, func(worker int) error {
		for i := range 40 {
			key := fmt.Sprintf("client-%d", (i+worker)%10)
			a, err := c.tryAsk("/", "X-Key: "+key)
			if err != nil || a.status != http.StatusOK || !a.isLimited() {
				return errors.Join(err, fmt.Errorf("status %d, headers %v", a.status, a.header))
			}
			admitted.add(key)
		}
		return nil
	})
	c.stop()
	got := servers.counts(t, "api")
	for key, n := range admitted.n {
		must(t, "after the end of caddy", want("count of "+key, got[key], n))
	}
}

// hang opens windows for n clients, then stops the primaries and makes a
// request for each of them, which replicas admit: their charges have to wait.
func hang(t *testing.T, servers shards, c *caddyProcess, n int) map[string]int64 {
	t.Helper()
	wanted := map[string]int64{}
	for i := range n {
		key := fmt.Sprintf("client-%d", i)
		c.ask("/", "X-Key: "+key)
		wanted[key] = 1
	}
	servers.awaitCounts(t, "api", wanted)
	servers.awaitReplicas(t)
	for _, shard := range servers {
		must(t, "stop the primary", shard.Primary.Pause())
	}
	for key := range wanted {
		must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, 2))
		wanted[key] = 2
	}
	return wanted
}

func (s shards) resume(t *testing.T) {
	t.Helper()
	for _, shard := range s {
		must(t, "resume the primary", shard.Primary.Resume())
	}
}

func TestChargesThatWaitAreDeliveredAtExit(t *testing.T) {
	t.Parallel()
	// Caddy unloads the modules of a config in random order.
	for name, test := range map[string]struct{ before, after func(*caddyProcess) }{
		"store of the app":         {},
		"store of a handler":       {before: (*caddyProcess).moveStoreInline},
		"store of an older config": {after: func(c *caddyProcess) { c.mustLoad(unlimitedSite) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := startShards(t, 2, 1)
			c := startCaddy(t, apiSite(servers.store(), 5, "1h"))
			if test.before != nil {
				test.before(c)
			}
			wanted := hang(t, servers, c, 20)
			if test.after != nil {
				test.after(c)
			}
			c.terminate()
			select {
			case <-c.done:
				t.Fatal("caddy ended and left charges behind")
			case <-time.After(700 * time.Millisecond):
			}
			servers.resume(t)
			c.awaitEnd()
			servers.awaitCounts(t, "api", wanted)
			must(t, "log", want("telling of losses", strings.Contains(c.logs.String(), "charges were lost"), false))
		})
	}
}

// moveStoreInline makes the store of the app that of the handler, which only
// a config in JSON can do.
func (c *caddyProcess) moveStoreInline() {
	c.t.Helper()
	_, text := c.adminCall(http.MethodGet, "/config/", "", "")
	_, store := c.adminCall(http.MethodGet, "/config/apps/rate_limit/stores/default", "", "")
	config := strings.Replace(text, `"handler":"rate_limit"`, `"handler":"rate_limit","store":`+strings.TrimSpace(store), 1)
	config = strings.Replace(config, `"rate_limit":{"stores":{"default":`+strings.TrimSpace(store)+`}}`, `"rate_limit":{}`, 1)
	if status, body := c.adminCall(http.MethodPost, "/load", "application/json", config); status != http.StatusOK {
		c.t.Fatalf("load: status %d: %s", status, body)
	}
	c.awaitServers()
	if _, now := c.adminCall(http.MethodGet, "/config/apps/rate_limit", "", ""); strings.TrimSpace(now) != "{}" {
		c.t.Fatalf("the app still has %s", now)
	}
}

// TestExitTellsWhatIsLostThoughARequestHangs, of an older config: it may not end, so
// what waits is not kept for it.
func TestExitTellsWhatIsLostThoughARequestHangs(t *testing.T) {
	t.Parallel() // it spends its time waiting
	backend := startSlowBackend(t)
	site := func(servers shards, options ...string) string {
		return zonesSite("grace_period 200ms\n"+servers.store(append(options, "charge_timeout 2s")...), zoneWith("api", "events 1000000", "on_error allow"),
			"reverse_proxy /hang "+backend.server.Listener.Addr().String()+"\nrespond ok")
	}
	for name, isUsed := range map[string]bool{"the store is in use": true, "no config uses the store": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := startLastingShards(t, 1, 1)
			c := startCaddy(t, site(servers))
			backend.start(t, c, "/hang", "X-Key: patient")
			served := outOfReach(t, servers, c)
			if isUsed {
				c.mustLoad(site(servers, "ledger_trust 500ms"))
				for i := range 20 {
					key := fmt.Sprintf("client-%d", i)
					must(t, key, want("status", c.ask("/", "X-Key: "+key).status, http.StatusOK))
					served[key]++
				}
			} else {
				c.mustLoad(unlimitedSite)
			}
			uncertain := c.undelivered("a", "uncertain")
			c.terminate()
			c.awaitEnd()
			must(t, "log", want("number of lost charges", c.lostAtExit(t), sum(served)-beforeOutage-uncertain))
		})
	}
}

func TestExitDoesNotWaitForAHungRedis(t *testing.T) {
	const clients = 20
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			// They spend their time waiting.
			t.Parallel()
			servers := startShards(t, 1, 1)
			// A charge is worth trying for longer than the end is awaited.
			c := startCaddy(t, apiSite(servers.store(pipelining, "charge_timeout 1h"), 5, "1h"))
			hang(t, servers, c, clients)
			c.terminate()
			c.awaitEnd()
			must(t, "log", want("number of lost charges being told", strings.Contains(c.logs.String(),
				fmt.Sprintf(`"msg":"charges were lost at exit","charges":%d`, clients)), true))
		})
	}
}
