package shardlimit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// bucketsAnswer is what GET /rate_limit/buckets/<zone> answers.
type bucketsAnswer struct {
	Zone, Store string
	Buckets     []struct {
		ClientKey string `json:"client_key"`
		Text      string
		Shard     string
		Servers   []struct {
			Address, Role, Error string
			State                *bucketState
		}
		Former *struct{ Shard string }
		Local  *bucketState
		Ledger *struct {
			Used, Unsent, Reserved int64
			InFlight               int64 `json:"in_flight"`
			Full                   bool
		}
		Deleted bool
	}
}

type bucketState struct {
	Limit, Used, Remaining int64
	Reset, Penalty         float64
}

// bucketsOf asks the admin API about a client's buckets, or resets them.
func bucketsOf(c *caddytest.Caddy, method, zoneAndQuery string) (a bucketsAnswer) {
	c.T.Helper()
	status, text := c.AdminCall(method, "/rate_limit/buckets/"+zoneAndQuery, "", "")
	must(c.T, method+" "+zoneAndQuery+": "+text, want("status", status, http.StatusOK))
	must(c.T, text, json.Unmarshal([]byte(text), &a))
	return a
}

// primaryUsed is what the primary says to be used of a client's only bucket, -1
// if it has none.
func (a bucketsAnswer) primaryUsed() int64 {
	if len(a.Buckets) != 1 || len(a.Buckets[0].Servers) == 0 || a.Buckets[0].Servers[0].State == nil {
		return -1
	}
	return a.Buckets[0].Servers[0].State.Used
}

// countingZones are one zone for each way of counting and charging, at a path of
// its own.
func countingZones(options ...string) (names []string, zones string) {
	for _, algorithm := range []string{"fixed_window", "sliding_window", "sliding_log", "gcra"} {
		for _, charge := range []string{"after", "before"} {
			name := algorithm + "-" + charge
			names = append(names, name)
			zones += pathZone(name, append([]string{"events 5", "window 1h", "algorithm " + algorithm, "charge " + charge}, options...)...)
		}
	}
	return names, zones
}

// seesReset returns an error if a request is refused although no word of the
// primary from before a reset is trusted any more.
func seesReset(a caddytest.Answer, known time.Time) error {
	return want("a refusal of a request sent after the time of trust", a.Status == http.StatusTooManyRequests && a.Sent.After(known), false)
}

// TestResetIsSeenByAllCaddys, by the one that is asked at once and by others
// within ledger_trust, and concerns one client alone.
func TestResetIsSeenByAllCaddys(t *testing.T) {
	t.Parallel()
	const trust = 1500 * time.Millisecond
	servers := caddytest.StartShards(t, 2, 1)
	names, zones := countingZones()
	for kind, global := range bothStores(servers, "ledger_trust 1500ms") {
		t.Run(kind, func(t *testing.T) {
			n := map[string]int{"memory": 1, "redis": 2}[kind]
			caddys := caddytest.StartMany(t, n, zonesSite(global, zones, "respond ok"))
			for _, zone := range names {
				for range 2 {
					must(t, zone+", bob", want("status", caddys[0].Probe("/"+zone, "X-Key: bob").Status, http.StatusOK))
				}
				for i := range 5 {
					must(t, fmt.Sprint(zone, ", request ", i), want("status", caddys[0].Probe("/"+zone, "X-Key: alice").Status, http.StatusOK))
				}
			}
			for _, zone := range names {
				for i, c := range caddys {
					eventually(t, fmt.Sprintf("Caddy %d refuses, zone %s", i, zone), func() error {
						return want("status", c.Probe("/"+zone, "X-Key: alice").Status, http.StatusTooManyRequests)
					})
					eventually(t, "all is charged", func() error { return want("used", bucketsOf(c, "GET", zone+"?key=alice").primaryUsed(), 5) })
				}
				found := bucketsOf(caddys[0], "GET", zone+"?key=alice")
				b := found.Buckets[0]
				must(t, fmt.Sprintf("%+v", found), errors.Join(want("zone", found.Zone, zone), want("store", found.Store, "default"),
					want("text", b.Text, "{http.request.header.X-Key}"), want("having the client key", strings.HasSuffix(b.ClientKey, ":alice"), true),
					want("limit", b.Servers[0].State.Limit, 5), want("remaining", b.Servers[0].State.Remaining, 0),
					want("having a reset", b.Servers[0].State.Reset > float64(time.Now().Unix()), true)))
				if kind == "redis" {
					must(t, fmt.Sprintf("%+v", found), errors.Join(want("servers", len(b.Servers), 2), want("role", b.Servers[1].Role, "replica"),
						want("server of the shard", b.Servers[0].Address, servers[b.Shard[0]-'a'].Primary.Addr()), want("known to be used", b.Ledger.Used, 5)))
				}

				reset := bucketsOf(caddys[0], "DELETE", zone+"?key=alice")
				must(t, "reset", errors.Join(want("deleted", reset.Buckets[0].Deleted, true), want("shard", reset.Buckets[0].Shard, b.Shard)))
				known := time.Now().Add(trust)
				must(t, zone+" at once", want("status", caddys[0].Probe("/"+zone, "X-Key: alice").Status, http.StatusOK))
				for _, c := range caddys[1:] {
					eventually(t, zone+": the other Caddy admits", func() error {
						a := c.Probe("/"+zone, "X-Key: alice")
						must(t, zone, seesReset(a, known))
						return want("status", a.Status, http.StatusOK)
					})
				}
				must(t, "what bob has used", want("used", bucketsOf(caddys[0], "GET", zone+"?key=bob").primaryUsed(), 2))
			}
		})
	}
}

// TestResetOfLeases frees the slots of requests that go on.
func TestResetOfLeases(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 1)
	for kind, global := range bothStores(servers) {
		t.Run(kind, func(t *testing.T) {
			backend := caddytest.StartSlowBackend(t)
			c := caddytest.Start(t, zonesSite(global, zoneWith("slots", "algorithm concurrency", "events 3", "window 1m"),
				"reverse_proxy /held "+backend.Server.Listener.Addr().String()+"\nrespond ok"))
			var held []caddytest.Running
			for range 3 {
				held = append(held, backend.Hold(t, c, "/held", "X-Key: alice"))
			}
			must(t, "while three run", errors.Join(want("status", c.Probe("/", "X-Key: alice").Status, http.StatusTooManyRequests),
				want("used", bucketsOf(c, "GET", "slots?key=alice").primaryUsed(), 3)))
			bucketsOf(c, "DELETE", "slots?key=alice")
			must(t, "after the reset", errors.Join(want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK)))
			backend.Finish(t, held...)
			eventually(t, "all are over", func() error { return want("used", bucketsOf(c, "GET", "slots?key=alice").primaryUsed(), -1) })
		})
	}
}

// TestResetOfLocalCounts: those of on_error local are shown and reset as well,
// but nothing is where the shard cannot be reset.
func TestResetOfLocalCounts(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 0)
	c := caddytest.Start(t, zonesSite(servers.Store("charge_timeout 2s"),
		zoneWith("api", "events 5", "window 1h", "charge before", "on_error local"), "respond ok"))
	serve := func(when string) {
		t.Helper()
		for range 5 {
			must(t, when, want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
		}
		must(t, when, want("status", c.Probe("/", "X-Key: alice").Status, http.StatusTooManyRequests))
	}
	servers.Kill(t)
	serve("in the first outage")
	found := bucketsOf(c, "GET", "api?key=alice")
	if b := found.Buckets[0]; b.Local == nil || b.Local.Used != 5 || b.Servers[0].Error == "" || b.Servers[0].State != nil {
		t.Errorf("in the outage: %+v", b)
	}
	status, text := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=alice", "", "")
	must(t, text, errors.Join(want("status", status, http.StatusBadGateway), want("naming the shard", strings.Contains(text, "shard a"), true),
		want("naming the client", strings.Contains(text, "alice"), false)))
	must(t, "after a reset in vain", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusTooManyRequests))
	servers.Restart(t)
	eventually(t, "the reset succeeds", func() error {
		status, _ := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=alice", "", "")
		return want("status", status, http.StatusOK)
	})
	servers.Kill(t)
	serve("in the second outage")
}

// TestBucketsOfEveryText of a zone's key that has as many placeholders as there
// are values.
func TestBucketsOfEveryText(t *testing.T) {
	c := caddytest.Start(t, zonesSite("", zoneWith("api", "key {header.X-Key} {header.X-User}|{header.X-Device} {client_ip}"), "respond ok"))
	texts := func(query string) (texts []string) {
		for _, b := range bucketsOf(c, "GET", "api?"+query).Buckets {
			texts = append(texts, b.Text)
		}
		return texts
	}
	for query, wanted := range map[string][]string{
		"key=1.2.3.4":        {"{http.request.header.X-Key}", "{http.vars.client_ip}"},
		"key=alice&key=left": {"{http.request.header.X-User}|{http.request.header.X-Device}"},
	} {
		must(t, query, want("texts", fmt.Sprint(texts(query)), fmt.Sprint(wanted)))
	}
	must(t, "a request", want("status", c.Probe("/", "X-User: alice", "X-Device: left").Status, http.StatusOK))
	found := bucketsOf(c, "GET", "api?key=alice&key=left")
	must(t, "two placeholders", want("used", found.primaryUsed(), 1))
	must(t, "by the client key", want("used", bucketsOf(c, "GET", "api?client_key="+found.Buckets[0].ClientKey).primaryUsed(), 1))
	reset := func(query string) bool {
		b := bucketsOf(c, "DELETE", "api?"+query).Buckets
		return len(b) == 1 && b[0].Deleted
	}
	must(t, "reset of nobody", want("deleted", reset("key=nobody&key=left"), false))
	must(t, "reset", want("deleted", reset("key=alice&key=left"), true))
	must(t, "reset again", want("deleted", reset("key=alice&key=left"), false))
	must(t, "in another order", want("used", bucketsOf(c, "GET", "api?key=left&key=alice").primaryUsed(), -1))
}

// TestBadBucketRequests are refused with a reason.
func TestBadBucketRequests(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	global := strings.TrimSuffix(servers.Store(), "\n\t}") + "\nstore other memory\n}"
	c := caddytest.Start(t, "{\n\t{{global}}\n\t"+global+"\n}\n{{site}} {\nroute {\nrate_limit {\nrollout other 50\n"+
		zoneWith("moving")+"}\nrate_limit {\n"+zoneWith("api")+zoneWith("all", "key everybody")+"}\nrespond ok\n}\n}\n")
	for _, bad := range []struct {
		method, request string
		status          int
		reason          string
	}{
		{"GET", "nobody?key=alice", 404, `zone \"nobody\" is unknown; there is all, api, moving`},
		{"GET", "api", 400, "0 placeholders"},
		{"GET", "api?key=", 400, "key is empty"},
		{"GET", "api?key=alice&key=bob", 400, "2 placeholders"},
		{"GET", "all?key=alice", 400, "1 placeholders"},
		{"GET", "api?keys=alice", 400, `parameter \"keys\" is unknown`},
		{"GET", "api?client_key=a&client_key=b", 400, "twice"},
		{"GET", "api?client_key=a&key=b", 400, "not both"},
		{"GET", "api?client_key=", 400, "none of zone api"},
		{"DELETE", "api?client_key=nobody", 400, "none of zone api"},
		{"GET", "api?key=%zz", 400, "query"},
		{"GET", "api?key=alice&store=other", 404, "default"},
		{"GET", "moving?key=alice", 400, "several stores: add store= with one of default, other"},
		{"DELETE", "moving?key=alice", 400, "several stores"},
		{"DELETE", "api", 400, "0 placeholders"},
		{"POST", "api?key=alice", 405, "POST"},
	} {
		status, text := c.AdminCall(bad.method, "/rate_limit/buckets/"+bad.request, "", "")
		if status != bad.status || !strings.Contains(text, bad.reason) {
			t.Errorf("%s %s: status %d: %s, want %d: %s", bad.method, bad.request, status, text, bad.status, bad.reason)
		}
	}
	for _, good := range []string{"moving?key=alice&store=other", "moving?key=alice&store=default", "all", "api?key=alice&store=default"} {
		bucketsOf(c, "GET", good)
		bucketsOf(c, "DELETE", good)
	}
}
