package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// TestBlockedClients are refused by every Caddy, also after a restart, until the block is ended.
func TestBlockedClients(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	zones := zoneWith("api", "events 1000000") + zoneWith("other", "events 1000000") +
		zoneWith("watched", "events 1000000", "enforce 0", "block_status 403")
	for _, secret := range []string{"", "key_secret correct-horse"} {
		t.Run(secret, func(t *testing.T) {
			site := zonesSite(servers.Store("key_prefix rl"+fmt.Sprint(len(secret)), secret), zones, "respond ok")
			caddys := caddytest.StartMany(t, 2, site)
			status := func(c *caddytest.Caddy, key string, want int) {
				t.Helper()
				eventually(t, fmt.Sprintf("%s has status %d", key, want), func() error {
					return caddytest.Want("status", c.Get("/", "X-Key: "+key).StatusCode, want)
				})
			}
			for _, c := range caddys {
				status(c, "alice", 200)
			}
			code, text := caddys[0].AdminCall(http.MethodPost, "/rate_limit/blocks/api?key=alice&for=1h&reason=scraper", "", "")
			must(t, text, want("status", code, http.StatusOK))
			a := caddys[0].Probe("/", "X-Key: alice")
			must(t, "at once", errors.Join(want("status", a.Status, 429), want("zone", a.Resource, "api"),
				want("Retry-After being an hour, less what has passed", a.RetryAfter > 3600-60 && a.RetryAfter <= 3600, true)))
			status(caddys[1], "alice", 429)
			status(caddys[1], "bob", 200)
			must(t, "outcome", want("blocked", caddys[0].Metric(`caddy_rate_limit_decisions_total{outcome="blocked",zone="api"}`) != "", true))
			caddys[0].AwaitLines(t, 1, "operator's block of a client began", `"reason":"scraper"`, `"by":"127.0.0.1:`)

			_, list := caddys[1].AdminCall(http.MethodGet, "/rate_limit/overrides", "", "")
			must(t, list, errors.Join(want("having the reason", strings.Contains(list, `"reason":"scraper"`), true),
				want("having the client", strings.Contains(list, "alice"), secret == "")))
			fresh := caddytest.Start(t, site)
			status(fresh, "alice", 429)
			code, text = fresh.AdminCall(http.MethodDelete, "/rate_limit/blocks/api?key=alice", "", "")
			must(t, text, want("status", code, http.StatusOK))
			for _, c := range append(caddys, fresh) {
				status(c, "alice", 200)
			}
			// The listed form of a client key ends a block as well, which is a digest with a secret.
			code, text = caddys[0].AdminCall(http.MethodPost, "/rate_limit/blocks/api?key=bob&for=1h", "", "")
			must(t, text, want("status", code, http.StatusOK))
			status(caddys[1], "bob", 429)
			var listed struct {
				Overrides []struct {
					ClientKey string `json:"client_key"`
				}
			}
			caddys[0].AdminJSON(http.MethodGet, "/rate_limit/overrides", "", &listed)
			must(t, "list", want("overrides", len(listed.Overrides), 1))
			code, text = caddys[0].AdminCall(http.MethodDelete, "/rate_limit/blocks/api?client_key="+url.QueryEscape(listed.Overrides[0].ClientKey), "", "")
			must(t, text, want("status", code, http.StatusOK))
			status(caddys[1], "bob", 200)
			// A zone that only observes blocks nevertheless, with its own status.
			code, text = fresh.AdminCall(http.MethodPost, "/rate_limit/blocks/watched?key=alice&for=1h", "", "")
			must(t, text, want("status", code, http.StatusOK))
			status(caddys[0], "alice", 403)
		})
	}
}

// TestBlocksOutliveARollout, which moves the client to a store that knows nothing of it.
func TestBlocksOutliveARollout(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	site := func(percent int) string {
		return zonesSite(twoStores(servers), fmt.Sprintf("rollout other %d\n", percent)+zoneWith("api", "events 1000000"), "respond ok")
	}
	c := caddytest.Start(t, site(0))
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?key=alice&for=1h&store=default", "", "")
	must(t, text, want("status", code, http.StatusOK))
	for _, percent := range []int{0, 100, 0} {
		c.MustLoad(site(percent))
		must(t, fmt.Sprint(percent, " percent"), errors.Join(
			want("status of a blocked client", c.Get("/", "X-Key: alice").StatusCode, http.StatusTooManyRequests),
			want("status of another", c.Get("/", "X-Key: bob").StatusCode, http.StatusOK)))
	}
}

// TestBlocksOutliveARestart while no Caddy runs. That the first requests wait for the blocks,
// for a time that a busy machine may exceed, is tested in internal/stores.
func TestBlocksOutliveARestart(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	site := zonesSite(servers.Store(), zoneWith("api", "events 1000000"), "respond ok")
	c := caddytest.Start(t, site)
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?key=alice&for=1h", "", "")
	must(t, text, want("status", code, http.StatusOK))
	c.Stop()
	c = caddytest.Start(t, site)
	eventually(t, "the client is refused", func() error {
		return caddytest.Want("status", c.Get("/", "X-Key: alice").StatusCode, http.StatusTooManyRequests)
	})
}

// TestOverrideCommands block, list, grant and unblock on the command line.
func TestOverrideCommands(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("", zoneWith("api", "events 3"), "respond ok"))
	status := func() int { return c.Get("/", "X-Key: alice").StatusCode }
	for _, step := range []struct {
		args   []string
		prints string
		status int
	}{
		{[]string{"block", "api", "alice", "1h", "--reason", "too fast"}, "block, ends in ", http.StatusTooManyRequests},
		{[]string{"block", "api", "alice", "2h", "--reason", "too fast"}, ", in place of one that would end in ", http.StatusTooManyRequests},
		{[]string{"blocks"}, "too fast", http.StatusTooManyRequests},
		{[]string{"unblock", "api", "alice"}, "no block any more: ", http.StatusOK},
		{[]string{"grant", "api", "alice", "1"}, "grant of 1, ends in ", http.StatusOK},
		{[]string{"blocks"}, "+1", http.StatusOK},
		{[]string{"blocks", "--json"}, `"kind":"grant"`, http.StatusOK},
		{[]string{"blocks"}, "grant", http.StatusTooManyRequests},
	} {
		text, errOut, code := command(t, append(step.args, "--address", c.Admin)...)
		must(t, fmt.Sprint(step.args, ": ", text, errOut), errors.Join(want("exit code", code, 0), want("printing "+step.prints, strings.Contains(text, step.prints), true),
			want("status", status(), step.status)))
	}
}

// TestGrantedEvents are admitted in the window in which they were granted.
func TestGrantedEvents(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	for _, w := range sweep.Of(t, allWays(), 4) {
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			algorithm, charge := w.algorithm, w.mode
			forStores(t, bothStores(servers, "key_prefix "+charge+strings.ReplaceAll(algorithm, "_", "")), func(t *testing.T, store string) {
				c := startWith(t, store, zoneWith("api", "events 3", "algorithm "+algorithm, "charge "+charge), "respond ok")
				served := func(n int) {
					t.Helper()
					for i := range n + 1 {
						status := http.StatusOK
						if i == n {
							status = http.StatusTooManyRequests
						}
						must(t, fmt.Sprint("request ", i), want("status", c.Get("/", "X-Key: alice").StatusCode, status))
					}
				}
				served(3)
				code, text := c.AdminCall(http.MethodPost, "/rate_limit/grants/api?key=alice&events=4", "", "")
				must(t, text, want("status", code, http.StatusOK))
				served(4)
				code, text = c.AdminCall(http.MethodDelete, "/rate_limit/grants/api?key=alice", "", "")
				must(t, text, want("status", code, http.StatusOK))
				served(0)
			})
		})
	}
}

// TestGrantEndsWithTheClientsWindow: where a key has several texts, the client's buckets are in windows
// of their own.
func TestGrantEndsWithTheClientsWindow(t *testing.T) {
	t.Parallel()
	zone := "zone api {\nkey {header.X-Key} {header.X-User}\nevents 3\nwindow 1h\n}\n"
	c := caddytest.Start(t, zonesSite("", zone, "respond ok"))
	c.Ask("/", "X-Key: alice")
	var grants struct {
		Overrides []struct {
			Template string
			Until    float64
		}
	}
	c.AdminJSON(http.MethodPost, "/rate_limit/grants/api?key=alice&events=1", "", &grants)
	ends := map[string]float64{}
	for _, o := range grants.Overrides {
		ends[o.Template] = o.Until
	}
	reset := bucketsOf(c, http.MethodGet, "api?key=alice").Buckets[0].Servers[0].State.Reset
	must(t, "grants", errors.Join(want("number", len(ends), 2), want("end of the window that is open", ends["{header.X-Key}"], reset),
		want("the other ends later", ends["{header.X-User}"] > reset, true)))
}

// TestOverridesThatAreRefused say what is wrong.
func TestOverridesThatAreRefused(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, apiSite("", 3, "1h"))
	for query, text := range map[string]string{
		"blocks/api?key=alice":          `for=\"\": it must be a time span from 1s to 100 years`,
		"blocks/api?key=alice&for=soon": `for=\"soon\"`,
		"blocks/api?for=1h":             "no text of its key",
		"blocks/none?key=alice&for=1h":  `zone \"none\" is unknown`,
		"blocks/api?key=alice&for=1h&reason=" + strings.Repeat("x", 201): "reason has 201 bytes",
		"grants/api?key=alice&events=0":                                  `events=\"0\"`,
		"grants/api?key=alice&events=5&for=1h":                           `parameter \"for\" is unknown`,
	} {
		code, answer := c.AdminCall(http.MethodPost, "/rate_limit/"+query, "", "")
		must(t, query+": "+answer, errors.Join(want("being refused", code >= 400 && code < 500, true), want("saying why", strings.Contains(answer, text), true)))
	}
}
