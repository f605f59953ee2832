package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestBlockedClients are refused by every Caddy, also after a restart, until the block is ended.
func TestBlockedClients(t *testing.T) {
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
				want("having Retry-After", a.Header.Get("Retry-After") == "3600" || a.Header.Get("Retry-After") == "3599", true)))
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
			// A zone that only observes blocks nevertheless, with its own status.
			code, text = fresh.AdminCall(http.MethodPost, "/rate_limit/blocks/watched?key=alice&for=1h", "", "")
			must(t, text, want("status", code, http.StatusOK))
			status(caddys[0], "alice", 403)
		})
	}
}

// TestGrantedEvents are admitted in the window in which they were granted.
func TestGrantedEvents(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 1)
	for algorithm, charge := range ways {
		t.Run(charge+"/"+algorithm, func(t *testing.T) {
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

// TestOverridesThatAreRefused say what is wrong.
func TestOverridesThatAreRefused(t *testing.T) {
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
