package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

func init() { caddy.RegisterModule(new(closedGate)) }

// closedGate is a loader of configs. Caddy asks it when all apps of a config have started, and rejects the config
// because it fails, once the server at its URL has answered.
type closedGate struct {
	URL string `json:"url"`
}

// CaddyModule implements [caddy.Module].
func (*closedGate) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.config_loaders.gate", New: func() caddy.Module { return new(closedGate) }}
}

// LoadConfig implements [caddy.ConfigLoader].
func (g *closedGate) LoadConfig(caddy.Context) ([]byte, error) {
	resp, err := http.Get(g.URL)
	if err == nil {
		err = resp.Body.Close()
	}
	return nil, errors.Join(errors.New("the gate is closed"), err)
}

// startClosedGate returns the URL of a gate, which tells when a config has come to it, and rejects that when it is told to.
func startClosedGate(t *testing.T) (url string, reached <-chan struct{}, reject func()) {
	t.Helper()
	there, ends := make(chan struct{}), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		select {
		case there <- struct{}{}:
			<-ends
		case <-ends:
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, there, func() { close(ends) }
}

// trial is a config that all apps have started, and Caddy has not accepted.
type trial struct {
	c *caddytest.Caddy
	// addr is where its site listens.
	addr   string
	reject func()
	loaded chan error
}

// try loads a Caddyfile, whose site listens at an address of its own, until all its apps have started.
func try(c *caddytest.Caddy, caddyfile string) *trial {
	t := c.T
	t.Helper()
	url, reached, reject := startClosedGate(t)
	tried := &trial{c: c, addr: caddytest.FreeAddr(t), reject: reject, loaded: make(chan error, 1)}
	_, adapted := c.AdminCall(http.MethodPost, "/adapt", "text/caddyfile", c.Expand(strings.ReplaceAll(caddyfile, "{{site}}", "http://"+tried.addr)))
	var config struct {
		Result map[string]any `json:"result"`
	}
	must(t, "adapt "+adapted, json.Unmarshal([]byte(adapted), &config))
	config.Result["admin"].(map[string]any)["config"] = map[string]any{"persist": false, "load": map[string]any{"module": "gate", "url": url}}
	text, err := json.Marshal(config.Result)
	must(t, "encode", err)
	go func() {
		status, answer := c.AdminCall(http.MethodPost, "/load", "application/json", string(text))
		if status == http.StatusBadRequest && strings.Contains(answer, "the gate is closed") {
			tried.loaded <- nil
			return
		}
		tried.loaded <- fmt.Errorf("load: status %d: %s", status, answer)
	}()
	select {
	case <-reached:
	case err := <-tried.loaded:
		t.Fatal(err)
	}
	return tried
}

// end lets Caddy reject the config.
func (r *trial) end() {
	r.c.T.Helper()
	r.reject()
	must(r.c.T, "the rejection", <-r.loaded)
}

// get sends a request to the config's site, and returns the status.
func (r *trial) get(key string) int {
	r.c.T.Helper()
	req, err := http.NewRequestWithContext(r.c.T.Context(), http.MethodGet, "http://"+r.addr+"/", http.NoBody)
	must(r.c.T, "make a request", err)
	req.Header.Set("X-Key", key)
	resp, err := r.c.Client.Do(req)
	must(r.c.T, "send it", err)
	_, err = io.Copy(io.Discard, resp.Body)
	must(r.c.T, "read the response", errors.Join(err, resp.Body.Close()))
	return resp.StatusCode
}

// TestConfigTakesOverOnceItIsAccepted: until then, and if it is rejected, charges and refunds of the running config
// stay in its shards, and those of requests that the other one serves in the other one's; nothing else of it is
// seen.
func TestConfigTakesOverOnceItIsAccepted(t *testing.T) {
	t.Parallel()
	const each = 20
	for name, options := range map[string][]string{
		"charge after":       {"events 1000"},
		"charge before":      {"events 1000", "charge before"},
		"free, and refunded": {"events 1000", "charge before", "count_status 500"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 2, 0)
			own, other := servers[:1], servers[1:]
			site := func(store string) string {
				return caddytest.Site(store, "rate_limit {\n"+zoneWith("api", options...)+"}\nrespond ok")
			}
			foreign := strings.Replace(other.Store(), "shard a", "shard other", 1)
			c := caddytest.Start(t, site(own.Store()))
			used, theirs := int64(0), int64(0)
			ask := func() {
				t.Helper()
				for range each {
					must(t, "a request", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
				}
				if used += each; name == "free, and refunded" {
					used = 0
				}
			}
			ask()
			status, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&key=mallory", "", "")
			must(t, "block: "+text, want("status", status, http.StatusOK))
			tried := try(c, site(foreign))
			must(t, "before a request", errors.Join(
				want("keys in its shard", len(keysOf(t, other)), 0),
				want("its metric", c.Metric(`caddy_rate_limit_undelivered_total{operation="charge",outcome="lost",shard="other",store="default"}`), "")))
			for range 2 {
				ask()
				for range each {
					must(t, "a request of the other config", want("status", tried.get("alice"), http.StatusOK))
				}
				theirs += each
				must(t, "a blocked client at both", errors.Join(
					want("status", c.Probe("/", "X-Key: mallory").Status, http.StatusTooManyRequests),
					want("status", tried.get("mallory"), http.StatusTooManyRequests)))
			}
			tried.end()
			ask()
			if used == 0 {
				theirs = 0
			}
			own.AwaitCount(t, "api", "alice", used)
			other.AwaitCount(t, "api", "alice", theirs)
			must(t, "afterwards", want("other keys in its shard", strings.Contains(fmt.Sprint(keysOf(t, other)), ":#"), false))
		})
	}
}

// keysOf returns the keys in the shards.
func keysOf(t *testing.T, s caddytest.Shards) (keys []string) {
	t.Helper()
	for _, shard := range s {
		all, err := shard.Primary.Client().Keys(t.Context(), "*").Result()
		must(t, "keys", err)
		keys = append(keys, all...)
	}
	return keys
}

// TestRejectedLimitReachesNoLine: requests that wait stay there until a config is accepted, and buckets in memory
// until one with a lower bound is.
func TestRejectedLimitReachesNoLine(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for kind, stores := range map[string][2]string{"memory": {memoryStore(1000), memoryStore(1)}, "redis": {servers.Store(), servers.Store("max_buckets 1")}} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			site := func(store string, events, places int) string {
				return zonesSite(store, zoneWith("api", fmt.Sprint("events ", events), "charge before", fmt.Sprint("max_wait 100000h ", places)), "respond ok")
			}
			c := caddytest.Start(t, site(stores[0], 1, 1000))
			for _, key := range []string{"alice", "bob"} {
				must(t, key, want("status", c.Probe("/", "X-Key: "+key).Status, http.StatusOK))
			}
			waiting := c.Begin(t.Context(), "/", "X-Key: alice")
			isHeld := func(after string) {
				t.Helper()
				must(t, after, want("requests that wait", heldBy(c), 1))
			}
			eventually(t, "it waits", func() error { return want("requests that wait", heldBy(c), 1) })
			tried := try(c, site(stores[1], 50, 1))
			for n := range 5 {
				isHeld("while the config is tried")
				must(t, "a request of that", want("status", tried.get(fmt.Sprint("carol-", n)), http.StatusOK))
			}
			tried.end()
			isHeld("after its rejection")
			alsoWaits := c.Begin(t.Context(), "/", "X-Key: bob")
			eventually(t, "bob, whose bucket is full, waits", func() error { return want("requests that wait", heldBy(c), 2) })
			c.MustLoad(site(stores[0], 50, 1000))
			for _, r := range []caddytest.Running{waiting, alsoWaits} {
				must(t, "under the accepted limit", want("status", r.Ends(t).Status, http.StatusOK))
			}
		})
	}
}

// TestRejectedLoadsAmidTraffic: one after the other, whichever of the apps has started first.
func TestRejectedLoadsAmidTraffic(t *testing.T) {
	t.Parallel()
	const events, workers = 1_000_000, 2
	cannotListen := occupiedSite(t)
	servers := caddytest.StartShards(t, 2, 0)
	foreign := strings.Replace(servers[1:].Store(), "shard a", "shard other", 1)
	for _, charge := range []string{"after", "before"} {
		t.Run(charge, func(t *testing.T) {
			site := func(store string) string {
				return zonesSite(store, zoneWith("api-"+charge, fmt.Sprint("events ", events), "charge "+charge), "respond ok")
			}
			c := caddytest.Start(t, site(servers[:1].Store()))
			var admitted caddytest.Tally
			stop := caddytest.StartTraffic(t, workers, func(worker, _ int) error {
				return admits(c, fmt.Sprint("client-", worker), events, &admitted, nil)
			})
			rejected := strings.Replace(site(foreign), "{{site}}", "http://"+caddytest.FreeAddr(t), 1) + cannotListen
			for range sweep.Size(5, 30) {
				if status, text := c.Load(rejected); status == http.StatusOK {
					t.Fatalf("a config that cannot listen was accepted: %s", text)
				}
				admitted.AwaitGrowth(t, 5)
			}
			stop()
			servers[:1].AwaitCounts(t, "api-"+charge, admitted.N)
			must(t, "afterwards", want("keys in the shard of rejected configs", fmt.Sprint(keysOf(t, servers[1:])), "[]"))
		})
	}
}

// TestLostStoreIsAProblem: zones that counted in Redis count in memory if the store is deleted.
func TestLostStoreIsAProblem(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, apiSite(servers.Store(), 5, "1h"))
	const found = "count in its memory, because no store is configured"
	hasProblem := func(want bool) {
		t.Helper()
		eventually(t, "the problem is there or not", func() error {
			_, text := c.AdminCall(http.MethodGet, "/rate_limit/", "", "")
			return caddytest.Want("the problem being there", strings.Contains(text, found), want)
		})
	}
	hasProblem(false)
	for _, path := range []string{"/config/apps/rate_limit/stores/default", "/config/apps/rate_limit"} {
		status, text := c.AdminCall(http.MethodDelete, path, "", "")
		must(t, "delete: "+text, want("status", status, http.StatusOK))
		hasProblem(true)
	}
	c.AwaitLog(found)
	c.MustLoad(apiSite(memoryStore(1000), 5, "1h"))
	hasProblem(false)
}
