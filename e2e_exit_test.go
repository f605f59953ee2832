package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func TestDisconnectedClientIsCharged(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	backend := caddytest.StartSlowBackend(t)
	c := caddytest.Start(t, proxySite(servers.Store(), 5, backend.Server.Listener.Addr().String()))
	wanted := map[string]int64{}
	for _, path := range []string{"/", "/stream"} {
		for i := range 3 {
			key := fmt.Sprintf("%s-%d", strings.TrimPrefix(path, "/"), i)
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := c.AskContext(ctx, path, "X-Key: "+key)
				failed <- err
			}()
			backend.Await(t)
			cancel()
			if err := <-failed; !errors.Is(err, context.Canceled) {
				t.Fatalf("client that left got %v", err)
			}
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
		for i := range 40 {
			key := fmt.Sprintf("client-%d", (i+worker)%10)
			a, err := c.TryAsk("/", "X-Key: "+key)
			if err != nil || a.Status != http.StatusOK || !a.IsLimited() {
				return errors.Join(err, fmt.Errorf("status %d, headers %v", a.Status, a.Header))
			}
			admitted.Add(key)
		}
		return nil
	})
	c.Stop()
	got := servers.Counts(t, "api")
	for key, n := range admitted.N {
		must(t, "after the end of caddy", want("count of "+key, got[key], n))
	}
}

// hang opens windows for n clients, then stops the primaries and makes a
// request for each of them, which replicas admit: their charges have to wait.
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

func TestChargesThatWaitAreDeliveredAtExit(t *testing.T) {
	t.Parallel()
	// Caddy unloads the modules of a config in random order.
	for name, test := range map[string]struct{ before, after func(*caddytest.Caddy) }{
		"store of the app":         {},
		"store of a handler":       {before: moveStoreInline},
		"store of an older config": {after: func(c *caddytest.Caddy) { c.MustLoad(unlimitedSite) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 2, 1)
			c := caddytest.Start(t, apiSite(servers.Store(), 5, "1h"))
			if test.before != nil {
				test.before(c)
			}
			wanted := hang(t, servers, c, 20)
			if test.after != nil {
				test.after(c)
			}
			c.Terminate()
			select {
			case <-c.Ended:
				t.Fatal("caddy ended and left charges behind")
			case <-time.After(700 * time.Millisecond):
			}
			resume(t, servers)
			c.AwaitEnd()
			servers.AwaitCounts(t, "api", wanted)
			must(t, "log", want("telling of losses", strings.Contains(c.Logs.String(), "charges were lost"), false))
		})
	}
}

// moveStoreInline makes the store of the app that of the handler, which only
// a config in JSON can do.
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
	const clients = 20
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		t.Run(pipelining, func(t *testing.T) {
			// They spend their time waiting.
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			// A charge is worth trying for longer than the end is awaited.
			c := caddytest.Start(t, apiSite(servers.Store(pipelining, "charge_timeout 1h"), 5, "1h"))
			hang(t, servers, c, clients)
			c.Terminate()
			c.AwaitEnd()
			must(t, "log", want("number of lost charges being told", strings.Contains(c.Logs.String(),
				fmt.Sprintf(`"msg":"charges were lost at exit","charges":%d`, clients)), true))
		})
	}
}
