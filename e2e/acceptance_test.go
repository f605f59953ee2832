package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
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

// startClosedGate returns the URL of a gate. The channel reached gets a value when a config is at the gate, and reject
// makes the gate reject the config.
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
	reject = sync.OnceFunc(func() { close(ends) })
	// The server closes once its requests have ended.
	t.Cleanup(reject)
	return server.URL, there, reject
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
	config := adapted(c, strings.ReplaceAll(caddyfile, "{{site}}", "http://"+tried.addr))
	config["admin"].(map[string]any)["config"] = map[string]any{"persist": false, "load": map[string]any{"module": "gate", "url": url}}
	text, err := json.Marshal(config)
	must(t, "encode", err)
	go func() {
		status, answer, err := c.TryAdminCall(http.MethodPost, "/load", "application/json", string(text))
		if status == http.StatusBadRequest && strings.Contains(answer, "the gate is closed") {
			tried.loaded <- nil
			return
		}
		tried.loaded <- errors.Join(fmt.Errorf("load: status %d: %s", status, answer), err)
	}()
	select {
	case <-reached:
	case err := <-tried.loaded:
		t.Fatal(err)
	}
	return tried
}

// adapted returns the JSON of a Caddyfile.
func adapted(c *caddytest.Caddy, caddyfile string) map[string]any {
	c.T.Helper()
	var config struct {
		Result map[string]any `json:"result"`
	}
	_, text := c.AdminCall(http.MethodPost, "/adapt", "text/caddyfile", c.Expand(caddyfile))
	must(c.T, "adapt "+text, json.Unmarshal([]byte(text), &config))
	return config.Result
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
// stay in its shards. The other config charges its own requests at its own shards, and has no other effect.
func TestConfigTakesOverOnceItIsAccepted(t *testing.T) {
	t.Parallel()
	const each = 20
	const otherName, otherServer, otherWeights = "another shard", "another server", "other weights"
	for name, options := range map[string][]string{
		"charge after":                   {"events 1000"},
		"charge before":                  {"events 1000", "charge before"},
		"free, and refunded":             {"events 1000", "charge before", "count_status 500"},
		otherServer:                      {"events 1000"},
		otherServer + ", charge before":  {"events 1000", "charge before"},
		otherWeights:                     {"events 1000"},
		otherWeights + ", charge before": {"events 1000", "charge before"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 2, 0)
			own, other := servers[:1], servers[1:]
			site := func(store string) string {
				return caddytest.Site(store, "rate_limit {\n"+zoneWith("api", options...)+"}\nrespond ok")
			}
			running, foreign := own.Store(), other.Store()
			switch {
			case strings.HasPrefix(name, otherWeights):
				running, foreign = weighted(servers, 1000, 1), weighted(servers, 1, 1000)
			case !strings.HasPrefix(name, otherServer):
				foreign = strings.Replace(foreign, "shard a", "shard other", 1)
			}
			c := caddytest.Start(t, site(running))
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
				want("its buckets", len(other.Counts(t, "api")), 0),
				want("overrides in its shard", strings.Contains(fmt.Sprint(keysOf(t, other)), ":#"), strings.HasPrefix(name, otherWeights)),
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
			must(t, "afterwards", want("overrides in its shard", strings.Contains(fmt.Sprint(keysOf(t, other)), ":#"), strings.HasPrefix(name, otherWeights)))
		})
	}
}

// weighted returns the option for a Redis store on shards with these weights.
func weighted(s caddytest.Shards, weights ...int) string {
	var lines []string
	for i, weight := range weights {
		lines = append(lines, caddytest.ShardOf(caddytest.ShardName(i), s[i], fmt.Sprint("weight ", weight)))
	}
	return caddytest.RedisStore(lines...)
}

// TestPenaltyOfRejectedConfig stays in its shard, and one of the running config comes into no other one.
func TestPenaltyOfRejectedConfig(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	own, other := servers[:1], servers[1:]
	site := func(store string) string {
		return zonesSite(store, zoneWith("api", "events 1", "penalty 1h", "charge before"), "respond ok")
	}
	c := caddytest.Start(t, site(own.Store()))
	tried := try(c, site(other.Store()))
	for _, status := range []int{http.StatusOK, http.StatusTooManyRequests} {
		must(t, "requests", errors.Join(
			want("status of the running config", c.Probe("/", "X-Key: alice").Status, status),
			want("status of the other one", tried.get("bob"), status)))
	}
	tried.end()
	has := func(s caddytest.Shards, client string) error {
		return errors.Join(
			want("buckets of clients", len(s.Buckets(t, "api")), 1),
			want("penalty of "+client, s.Content(t, "api", client).Penalty > 0, true))
	}
	eventually(t, "each shard has a penalty", func() error { return errors.Join(has(own, "alice"), has(other, "bob")) })
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
			awaitHeld(t, c, 1)
			tried := try(c, site(stores[1], 50, 1))
			for n := range 5 {
				must(t, "a request of that", want("status", tried.get(fmt.Sprint("carol-", n)), http.StatusOK))
			}
			tried.end()
			// Bob's bucket is full.
			alsoWaits := c.Begin(t.Context(), "/", "X-Key: bob")
			awaitHeld(t, c, 2)
			// An accepted config wakes both. If the rejected one had, this would come after that.
			c.MustLoad(site(stores[0], 1, 999))
			awaitHeld(t, c, 2)
			must(t, "after an accepted config", want("requests that have ended", len(waiting.Answer)+len(waiting.Err)+len(alsoWaits.Answer)+len(alsoWaits.Err), 0))
			c.MustLoad(site(stores[0], 50, 1000))
			for _, r := range []caddytest.Running{waiting, alsoWaits} {
				must(t, "under the accepted limit", want("status", r.Ends(t).Status, http.StatusOK))
			}
		})
	}
}

// TestRejectedLoadsAmidTraffic: one after the other, once all apps have started, or whichever of them has.
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
				tried := try(c, site(foreign))
				admitted.AwaitGrowth(t, 5)
				tried.end()
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
	c.MustLoad(apiSite("", 5, "1h"))
	hasProblem(false)
	// A store of the handler's own may be lost as well.
	text, err := json.Marshal(adapted(c, apiSite("", 5, "1h")))
	must(t, "encode", err)
	own := fmt.Sprintf(`"handler":"rate_limit","store":{"module":"redis","shards":[{"name":"a","primary":%q}]}`, servers[0].Primary.Addr())
	status, answer := c.AdminCall(http.MethodPost, "/load", "application/json", strings.Replace(string(text), `"handler":"rate_limit"`, own, 1))
	must(t, "load: "+answer, want("status", status, http.StatusOK))
	hasProblem(false)
	c.MustLoad(apiSite("", 5, "1h"))
	hasProblem(true)
}
