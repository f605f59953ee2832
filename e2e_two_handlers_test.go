package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// zoneText is a zone by the header X-Key.
func zoneText(name string, events int) string {
	return fmt.Sprintf("zone %s {\nkey {header.X-Key}\nevents %d\nwindow 1h\n}\n", name, events)
}

// twoHandlersSite passes requests through two handlers, each with its own
// store and zones.
func twoHandlersSite(stores, outer, inner string) string {
	return "{\n\t{{global}}\n\t" + stores + "\n}\n{{site}} {\nroute {\n" +
		"rate_limit {\n" + outer + "}\n" + "rate_limit {\n" + inner + "}\n" + "respond ok\n}\n}\n"
}

func TestTwoHandlersChargeTogetherOrNotAtAll(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	// The options of two stores in one global option.
	both := strings.Replace(servers.Store(), "store redis {", "store local memory\n\t\tstore redis {", 1)
	for name, test := range map[string]struct {
		stores       string
		outer, inner string // the option store
	}{
		"one in memory": {},
		"one in redis":  {stores: servers.Store()},
		"redis around memory": {
			stores: both, inner: "store local\n",
		},
		"memory around redis": {
			stores: both, outer: "store local\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, "flush", servers[0].Primary.Client().FlushAll(t.Context()).Err())
			c := caddytest.Start(t, twoHandlersSite(test.stores, test.outer+zoneText("wide", 5), test.inner+zoneText("narrow", 2)))
			settled := func(key string, used int64) {
				t.Helper()
				if test.stores != "" && test.outer == "" {
					servers.AwaitCount(t, "wide", key, used)
				}
				if test.stores != "" && test.inner == "" {
					servers.AwaitCount(t, "narrow", key, used)
				}
			}
			// The inner handler refuses: its zone has the least left.
			for used := range int64(2) {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request that fits", errors.Join(a.Is(http.StatusOK, used+1), want("zone", a.Resource, "narrow"), want("limit", a.Limit, 2)))
				settled("alice", used+1)
			}
			for range 4 {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request too many", errors.Join(a.Is(http.StatusTooManyRequests, 2), want("zone", a.Resource, "narrow"), want("limit", a.Limit, 2)))
			}
			// The outer handler was not charged for what was refused.
			c.MustLoad(twoHandlersSite(test.stores, test.outer+zoneText("wide", 3), test.inner+zoneText("narrow", 50)))
			a := c.Ask("/", "X-Key: alice")
			must(t, "request that fits again", errors.Join(a.Is(http.StatusOK, 3), want("zone", a.Resource, "wide"), want("limit", a.Limit, 3)))
			settled("alice", 3)

			// The outer handler refuses, and the inner one is not even asked.
			asked := c.Metric(`caddy_rate_limit_requests_total{zone="narrow"}`)
			for range 4 {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request too many", errors.Join(a.Is(http.StatusTooManyRequests, 3), want("zone", a.Resource, "wide"), want("limit", a.Limit, 3)))
			}
			must(t, "metric", want("requests of the inner zone", c.Metric(`caddy_rate_limit_requests_total{zone="narrow"}`), asked))
			c.MustLoad(twoHandlersSite(test.stores, test.outer+zoneText("wide", 50), test.inner+zoneText("narrow", 4)))
			a = c.Ask("/", "X-Key: alice")
			must(t, "the inner zone's count", errors.Join(a.Is(http.StatusOK, 4), want("zone", a.Resource, "narrow")))
			settled("alice", 4)
		})
	}
}

func TestZoneInTwoHandlersIsChargedOnce(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			c := caddytest.Start(t, twoHandlersSite(store, zoneText("api", 3), zoneText("api", 3)+zoneText("other", 9)))
			for used := range int64(3) {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request that fits", errors.Join(a.Is(http.StatusOK, used+1), want("zone", a.Resource, "api")))
				if store != "" {
					servers.AwaitCounts(t, "api", map[string]int64{"alice": used + 1})
					servers.AwaitCounts(t, "other", map[string]int64{"alice": used + 1})
				}
			}
			must(t, "request too many", c.Ask("/", "X-Key: alice").Is(http.StatusTooManyRequests, 3))
		})
	}
}

func TestLimiterInErrorRoutes(t *testing.T) {
	c := caddytest.Start(t, "{\n\t{{global}}\n}\n{{site}} {\nroute {\n"+
		"rate_limit {\n"+zoneText("api", 3)+"}\n"+
		"error /missing 404\nrespond ok\n}\n"+
		"handle_errors {\nroute {\n"+
		"rate_limit {\n"+zoneText("api", 3)+zoneText("errors", 2)+"}\n"+
		"respond \"{http.error.status_code} of {http.rate_limit.errors.used}\"\n}\n}\n}\n")

	// A refusal passes the limiter of its error route untouched.
	for range 3 {
		c.Ask("/", "X-Key: alice")
	}
	for range 4 {
		a := c.Ask("/", "X-Key: alice")
		must(t, "refusal", errors.Join(a.Is(http.StatusTooManyRequests, 3), want("zone", a.Resource, "api"), want("body", a.Body, "429 of ")))
	}
	must(t, "metric", want("requests of the zone in the error route", c.Metric(`caddy_rate_limit_requests_total{zone="errors"}`), "0"))

	// Other errors count there, and once in a zone that counted them already.
	for used := range int64(2) {
		a := c.Ask("/missing", "X-Key: bob")
		must(t, "error", errors.Join(a.Is(http.StatusNotFound, used+1), want("zone", a.Resource, "errors"),
			want("body", a.Body, fmt.Sprintf("404 of %d", used))))
	}
	// What an error route refuses, Caddy answers with the error's own status.
	a := c.Ask("/missing", "X-Key: bob")
	must(t, "error too many", errors.Join(a.Is(http.StatusNotFound, 2), want("zone", a.Resource, "errors"),
		want("body", a.Body, ""), want("having Retry-After", a.RetryAfter >= 1, true)))
	must(t, "request after three errors", c.Ask("/", "X-Key: bob").Is(http.StatusTooManyRequests, 3))
}
