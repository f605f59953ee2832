package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// observing is a site with a zone that is enforced for a share of the clients
// and, in the path /both, one that is enforced for all.
const observing = `
{
	{{global}}
	%s
}
{{site}} {
	log
	route {
		header >X-Decision "{http.rate_limit.api.outcome} {http.rate_limit.api.reason} {http.rate_limit.api.wait} {http.rate_limit.outcome}"
		rate_limit {
			zone api {
				key {header.X-Key}
				events 2
				window 1h
				enforce %v
				%s
			}
			zone enforced {
				match {
					path /both
				}
				key {header.X-Key}
				events 3
				window 1h
				%[3]s
			}
		}
		respond ok
	}
}
`

// forStores runs a test on each kind of store, with what is to stand in the
// global options.
func forStores(t *testing.T, test func(t *testing.T, store string)) {
	for name, store := range bothStores(caddytest.StartShards(t, 2, 1)) {
		t.Run(name, func(t *testing.T) { test(t, store) })
	}
}

// TestObservedClientsPass: a zone that is not enforced refuses nobody, does not
// keep another zone from refusing, and tells what it would have done.
func TestObservedClientsPass(t *testing.T) {
	forStores(t, func(t *testing.T, store string) {
		for _, charge := range []string{"charge after", "charge before"} {
			t.Run(charge, func(t *testing.T) {
				c := caddytest.Start(t, fmt.Sprintf(observing, store, 0, charge))
				for n, decision := range []string{
					"allowed   allowed", "allowed   allowed",
					"would_refuse over_limit 3600 would_refuse", "would_refuse over_limit 3600 would_refuse",
				} {
					a := c.Ask("/", "X-Key: alice "+charge)
					// What would have been refused is not charged.
					must(t, fmt.Sprintf("request %d", n), errors.Join(
						want("status", a.Status, http.StatusOK),
						want("remaining", a.Remaining, int64(max(1-n, 0))),
						want("used", a.Used, int64(min(n+1, 2))),
						want("retry-after", a.RetryAfter, -1),
						want("decision", strings.Join(strings.Split(a.Header.Get("X-Decision"), "359"), "360"), decision)))
				}
				must(t, "metrics", errors.Join(
					want("allowed", c.Metric(`caddy_rate_limit_decisions_total{outcome="allowed",zone="api"}`), "2"),
					want("would_refuse", c.Metric(`caddy_rate_limit_decisions_total{outcome="would_refuse",zone="api"}`), "2"),
					want("refused", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="api"}`), "0"),
					want("declined", c.Metric(`caddy_rate_limit_declined_requests_total{zone="api"}`), "0")))
				for n := range 4 {
					a := c.Ask("/both", "X-Key: bob "+charge)
					status, resource := http.StatusOK, "api"
					if n == 3 {
						status, resource = http.StatusTooManyRequests, "enforced"
					}
					must(t, fmt.Sprintf("request %d of both", n), errors.Join(
						want("status", a.Status, status), want("resource", a.Resource, resource)))
				}
				must(t, "metric", want("refused by the other", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="enforced"}`), "1"))
				eventually(t, "the log tells", func() error {
					return errors.Join(
						want("lines of what would have been", len(entriesOf(c, "rate limit would have been exceeded")), 2),
						want("lines of refusals", len(entriesOf(c, "rate limit exceeded")), 1))
				})
			})
		}
	})
}

// TestEnforceIsRaisedLive raises the share by PATCH: those who are refused stay
// refused, others come to them, at last all.
func TestEnforceIsRaisedLive(t *testing.T) {
	c := caddytest.Start(t, fmt.Sprintf(observing, "", 0, ""))
	const clients = 100
	for client := range clients {
		for range 2 {
			c.Get("/", fmt.Sprint("X-Key: ", client))
		}
	}
	refused := map[int]bool{}
	for _, percent := range []float64{0, 12.5, 50, 100} {
		status, body := patch(c, "enforce", percent)
		must(t, body, want("status", status, http.StatusOK))
		c.AwaitServers()
		now := map[int]bool{}
		for client := range clients {
			if c.Get("/", fmt.Sprint("X-Key: ", client)).StatusCode == http.StatusTooManyRequests {
				now[client] = true
			}
		}
		for client := range refused {
			must(t, fmt.Sprintf("client %d at %v percent", client, percent), want("refused", now[client], true))
		}
		if share := float64(len(now)); share < percent-15 || share > percent+15 {
			t.Errorf("at %v percent %v of 100 clients are refused", percent, share)
		}
		refused = now
	}
	must(t, "at 100 percent", want("refused clients", len(refused), clients))
	for _, bad := range []float64{-1, 100.5} {
		status, body := patch(c, "enforce", bad)
		must(t, body, errors.Join(want("accepted", status == http.StatusOK, false),
			want("names the option", strings.Contains(body, fmt.Sprintf("enforce %v: it must be from 0 to 100 percent", bad)), true)))
	}
}

// TestObservedClientsOutliveTheStore: nobody is denied for the sake of a zone
// that only observes.
func TestObservedClientsOutliveTheStore(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, fmt.Sprintf(observing, servers.Store("on_error deny"), 0, "charge before"))
	must(t, "before", want("status", c.Get("/", "X-Key: alice").StatusCode, http.StatusOK))
	must(t, "kill", servers[0].Primary.Kill())
	a := c.Ask("/", "X-Key: alice")
	must(t, "without a store", errors.Join(
		want("status", a.Status, http.StatusOK),
		want("decision", a.Header.Get("X-Decision"), "error_allowed store_error  error_allowed"),
		want("status in the other zone", c.Get("/both", "X-Key: alice").StatusCode, http.StatusServiceUnavailable)))
}
