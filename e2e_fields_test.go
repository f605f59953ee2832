package shardlimit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// fieldsSite has zones of every kind that a policy can describe.
const fieldsSite = `
{
	{{global}}
	%s
}
{{site}} {
	route {
		rate_limit {
			zone minute {
				key {header.X-Key}
				events 2
				window 1m
			}
			zone running {
				key {header.X-Key}
				events 7
				algorithm concurrency
			}
			zone smooth {
				key {header.X-Key}
				events 10
				window 1s
				algorithm gcra
				burst 25
			}
			zone short {
				key {header.X-Key}
				events 500
				window 500ms
			}
			headers %s
		}
		reverse_proxy %s
	}
}
`

// limits parses a RateLimit field into r and t of each zone, in order.
func limits(t *testing.T, field string) (zones []string, r, reset map[string]int64) {
	t.Helper()
	list, err := httpsfv.UnmarshalList([]string{field})
	must(t, field, err)
	r, reset = map[string]int64{}, map[string]int64{}
	for _, member := range list {
		item := member.(httpsfv.Item)
		zone := item.Value.(string)
		zones = append(zones, zone)
		left, _ := item.Params.Get("r")
		r[zone] = left.(int64)
		if seconds, ok := item.Params.Get("t"); ok {
			reset[zone] = seconds.(int64)
		}
	}
	return zones, r, reset
}

// TestFields: the policies and the limits of all zones, in their order, as the
// draft has them, in place of a backend's.
func TestFields(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("RateLimit", `"backend";r=1`)
		w.Header().Set("RateLimit-Policy", `"backend";q=1`)
	}))
	defer backend.Close()
	const policies = `"minute";q=2;w=60, "running";q=7;qu="concurrent-requests", "smooth";q=25;w=3, "short";q=500`
	forStores(t, func(t *testing.T, store string) {
		for _, headers := range []string{"ietf", "both"} {
			t.Run(headers, func(t *testing.T) {
				c := caddytest.Start(t, fmt.Sprintf(fieldsSite, store, headers, backend.Listener.Addr()))
				var opened time.Time
				for n := range 3 {
					a := c.Ask("/", "X-Key: "+headers)
					if n == 0 {
						opened = a.Sent
					}
					github := int64(-1)
					if headers == "both" {
						github = int64(max(1-n, 0))
					}
					must(t, fmt.Sprintf("request %d", n), errors.Join(
						want("policies", a.Header.Get("RateLimit-Policy"), policies),
						want("fields", len(a.Header.Values("RateLimit")), 1),
						want("X-RateLimit-Remaining", a.Remaining, github)))
					zones, left, reset := limits(t, a.Header.Get("RateLimit"))
					if n < 2 {
						must(t, a.Header.Get("RateLimit"), errors.Join(
							want("zones", fmt.Sprint(zones), "[minute running smooth short]"),
							want("minute's r", left["minute"], int64(1-n)),
							want("minute's t", reset["minute"] <= 60 && !a.Received.Add(time.Duration(reset["minute"])*time.Second).Before(opened.Add(time.Minute)), true),
							// The slot of the request before may be free a moment later.
							want("running's r", left["running"] == 6 || left["running"] == 5 && n > 0, true),
							want("running's t", reset["running"], 0),
							want("smooth's r", left["smooth"] >= 23, true)))
						continue
					}
					// What others have left is not changed by a refused request.
					must(t, a.Header.Get("RateLimit"), errors.Join(
						want("status", a.Status, http.StatusTooManyRequests),
						want("first zone", zones[0], "minute"),
						want("minute's r", left["minute"], 0),
						want("minute's t and Retry-After", strconv.FormatInt(reset["minute"], 10), a.Header.Get("Retry-After"))))
				}
			})
		}
	})
}

// TestProblem: refused requests get a problem as a body, unless an error route
// is for them.
func TestProblem(t *testing.T) {
	const site = `
{
	{{global}}
}
{{site}} {
	route {
		rate_limit {
			zone api {
				key {header.X-Key}
				events 4
				window 1h
				charge before
				reserve 50 {
					header X-Important yes
				}
			}
			zone burst {
				key {header.X-Key}
				events 1
				window 1s
				match {
					path /burst
				}
			}
			problem
		}
		respond ok
	}
	%s
}
`
	type problem struct {
		Type     string   `json:"type"`
		Title    string   `json:"title"`
		Status   int      `json:"status"`
		Violated []string `json:"violated-policies"`
	}
	ask := func(c *caddytest.Caddy, headers ...string) (a caddytest.Answer, p problem) {
		a = c.Ask("/", headers...)
		if a.Header.Get("Content-Type") == "application/problem+json" {
			must(t, a.Body, json.Unmarshal([]byte(a.Body), &p))
		}
		return a, p
	}
	const types = "https://iana.org/assignments/http-problem-types#"
	for routes, answers := range map[string]bool{
		"": true, "handle_errors 404 {\n\t\trespond other\n\t}": true,
		"handle_errors 429 {\n\t\trespond mine\n\t}": false, "handle_errors {\n\t\trespond mine\n\t}": false,
	} {
		t.Run(routes, func(t *testing.T) {
			c := caddytest.Start(t, fmt.Sprintf(site, routes))
			for range 2 {
				c.Get("/", "X-Key: alice")
			}
			a, p := ask(c, "X-Key: alice")
			must(t, "refusal", errors.Join(want("status", a.Status, http.StatusTooManyRequests),
				want("told the wait", a.RetryAfter > 3000, true), want("remaining", a.Remaining, 0)))
			if !answers {
				must(t, "body", want("of the error route", a.Body, "mine"))
				return
			}
			// What is left is reserved.
			must(t, a.Body, errors.Join(want("type", p.Type, types+"temporary-reduced-capacity"), want("status", p.Status, 429),
				want("zones", fmt.Sprint(p.Violated), "[api]"), want("a title", p.Title != "", true)))
			for range 2 {
				c.Get("/", "X-Key: alice", "X-Important: yes")
			}
			_, p = ask(c, "X-Key: alice", "X-Important: yes")
			must(t, "nothing left", want("type", p.Type, types+"quota-exceeded"))
			req, err := http.NewRequest(http.MethodHead, c.URL, nil)
			must(t, "request", err)
			req.Header.Set("X-Key", "alice")
			resp, err := caddytest.Client.Do(req)
			must(t, "HEAD", err)
			must(t, "HEAD", errors.Join(resp.Body.Close(), want("status", resp.StatusCode, http.StatusTooManyRequests),
				want("type", resp.Header.Get("Content-Type"), "application/problem+json")))
			must(t, "metric", want("refused", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="api"}`), "3"))
		})
	}
}

// TestProblemWithoutAStore: who is denied because the store cannot answer is
// told that it is not his fault.
func TestProblemWithoutAStore(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, fmt.Sprintf(`
{
	{{global}}
	%s
}
{{site}} {
	route {
		rate_limit {
			zone api {
				key static
				events 1
				window 1h
			}
			problem
		}
		respond ok
	}
}
`, servers.Store("on_error deny")))
	must(t, "kill", servers[0].Primary.Kill())
	a := c.Ask("/")
	must(t, "without a store", errors.Join(
		want("status", a.Status, http.StatusServiceUnavailable),
		want("type", a.Header.Get("Content-Type"), "application/problem+json"),
		want("problem", strings.Contains(a.Body, "#temporary-reduced-capacity"), true)))
}

// TestProblemKnowsErrorRoutesOfTheRequestAsItCame: Caddy takes back what routes
// made of the request before it looks for an error route.
func TestProblemKnowsErrorRoutesOfTheRequestAsItCame(t *testing.T) {
	for matcher, friendly := range map[string]bool{"path /api/*": true, "not path /api/*": false} {
		t.Run(matcher, func(t *testing.T) {
			c := caddytest.Start(t, fmt.Sprintf(`
{
	{{global}}
}
{{site}} {
	handle_path /api/* {
		rate_limit {
			zone api {
				key static
				events 1
				window 1h
			}
			problem
		}
		respond ok
	}
	handle_errors {
		@some %s
		respond @some friendly
	}
}
`, matcher))
			c.Get("/api/x")
			a := c.Ask("/api/x")
			must(t, a.Body, errors.Join(want("status", a.Status, http.StatusTooManyRequests),
				want("of the error route", a.Body == "friendly", friendly),
				want("problem", strings.Contains(a.Body, "quota-exceeded"), !friendly)))
		})
	}
}
