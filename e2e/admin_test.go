package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// bucketsAnswer is what GET /rate_limit/buckets/<zone> answers.
type bucketsAnswer struct {
	Zone, Store string
	Buckets     []struct {
		bucketServers
		ClientKey   string `json:"client_key"`
		Text, Shard string
		Previous    *bucketServers `json:"former"`
		Local       *bucketState
		Ledger      *struct {
			Used, Unsent, Reserved int64
			InFlight               int64 `json:"in_flight"`
			Full                   bool
		}
		Deleted bool
	}
}

// bucketServers are the servers of a shard, with what they have of a bucket.
type bucketServers struct {
	Servers []struct {
		Address, Role, Error string
		State                *bucketState
	}
}

type bucketState struct {
	Limit, Used, Remaining int64
	Reset, Penalty         float64
}

// bucketsOf asks the admin API about a client's buckets, or resets them.
func bucketsOf(c *caddytest.Caddy, method, zoneAndQuery string) (a bucketsAnswer) {
	c.T.Helper()
	callInTime(c, method, "/rate_limit/buckets/"+zoneAndQuery, &a)
	return a
}

// callInTime calls the admin API and decodes its answer. It repeats a call whose answer reports a
// timeout.
func callInTime[T any](c *caddytest.Caddy, method, target string, answer *T) {
	c.T.Helper()
	eventually(c.T, "the servers answer in time", func() error {
		status, text := c.AdminCall(method, target, "", "")
		if status == http.StatusBadGateway && isTimeout(text) {
			return errors.New(text)
		}
		must(c.T, method+" "+target+": "+text, want("status", status, http.StatusOK))
		*answer = *new(T)
		must(c.T, text, json.Unmarshal([]byte(text), answer))
		if method == http.MethodGet && isTimeout(text) {
			return errors.New(text)
		}
		return nil
	})
}

// isTimeout reports whether a text mentions a timeout.
func isTimeout(text string) bool {
	return strings.Contains(text, "timeout") || strings.Contains(text, "deadline exceeded") || strings.Contains(text, "no answer in time")
}

// primaryUsed returns what the primary has counted in a client's only bucket, or -1 if it has none.
func (a bucketsAnswer) primaryUsed() int64 {
	if len(a.Buckets) != 1 {
		return -1
	}
	return a.Buckets[0].primaryUsed()
}

func (s *bucketServers) primaryUsed() int64 {
	if len(s.Servers) == 0 || s.Servers[0].State == nil {
		return -1
	}
	return s.Servers[0].State.Used
}

// seesReset returns an error if a request is refused after the primary's replies from before a
// reset are no longer trusted.
func seesReset(a caddytest.Answer, known time.Time) error {
	return want("refusal of a request sent after ledger_trust", a.Status == http.StatusTooManyRequests && a.Sent.After(known), false)
}

// TestResetIsSeenByAllCaddys resets one client: the Caddy that resets admits it at once, the others
// within ledger_trust, and other clients keep their counts.
func TestResetIsSeenByAllCaddys(t *testing.T) {
	t.Parallel()
	const trust = 1500 * time.Millisecond
	servers := caddytest.StartShards(t, 2, 1)
	names, zones := zonesPerWay("events 5", "window 1h")
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

// TestResetOfLeases frees the slots of requests that still run.
func TestResetOfLeases(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	forStores(t, bothStores(servers), func(t *testing.T, global string) {
		backend := caddytest.StartSlowBackend(t)
		c := caddytest.Start(t, zonesSite(global, zoneWith("slots", "algorithm concurrency", "events 3", "window 1m"),
			proxyTo("/held "+backend.Server.Listener.Addr().String())+"\nrespond ok"))
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

// TestResetOfLocalCounts shows and resets the counts of on_error local too, but keeps them if the
// shard cannot be reset.
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
	must(t, "after a failed reset", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusTooManyRequests))
	servers.Restart(t)
	eventually(t, "the reset succeeds", func() error {
		status, _ := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=alice", "", "")
		return want("status", status, http.StatusOK)
	})
	servers.Kill(t)
	serve("in the second outage")
}

// TestBucketsOfEveryText finds a bucket for each text of a zone's key that has as many placeholders
// as the query has values.
func TestBucketsOfEveryText(t *testing.T) {
	t.Parallel()
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
	must(t, "reset of a client without a bucket", want("deleted", reset("key=nobody&key=left"), false))
	must(t, "reset", want("deleted", reset("key=alice&key=left"), true))
	must(t, "reset again", want("deleted", reset("key=alice&key=left"), false))
	must(t, "in another order", want("used", bucketsOf(c, "GET", "api?key=left&key=alice").primaryUsed(), -1))
}

// TestBadBucketRequests are refused with a reason.
func TestBadBucketRequests(t *testing.T) {
	t.Parallel()
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
		{"GET", "api", 400, "as there are values, 0"},
		{"GET", "api?key=", 400, "key is empty"},
		{"GET", "api?key=alice&key=bob", 400, "as there are values, 2"},
		{"GET", "all?key=alice", 400, "as there are values, 1"},
		{"GET", "api?keys=alice", 400, `parameter \"keys\" is unknown`},
		{"GET", "api?client_key=a&client_key=b", 400, "twice"},
		{"GET", "api?client_key=a&key=b", 400, "not both"},
		{"GET", "api?client_key=", 400, "none of zone api"},
		{"DELETE", "api?client_key=nobody", 400, "none of zone api"},
		{"GET", "api?key=%zz", 400, "query"},
		{"GET", "api?key=alice&store=other", 404, "default"},
		{"GET", "moving?key=alice", 400, "several stores: name one of default, other (--store, in a URL store=)"},
		{"DELETE", "moving?key=alice", 400, "several stores"},
		{"DELETE", "api", 400, "as there are values, 0"},
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

// statusAnswer is what GET /rate_limit/ answers.
type statusAnswer struct {
	Problems []struct{ Store, Shard, Server, Text string }
	Zones    []struct {
		Name, Store, Algorithm, Events, Charge string
		Key                                    []string
		Window, Enforce                        float64
		Decisions                              map[string]int64
		LastRefused                            float64 `json:"last_refused"`
		Rollout                                *struct{ Store string }
	}
	Stores []struct {
		Name, Module string
		Buckets      *int
		Shards       []struct {
			Name, Kind     string
			Retired, Found bool
			Servers        []struct {
				Address, Role, State string
				Breakers             map[string]string
				Lag                  *float64           `json:"lag_seconds"`
				Latency              map[string]float64 `json:"latency_seconds"`
				Pools                map[string]struct{ Connections, Hits int64 }
				Queued               int
			}
		}
		Ledger *struct {
			Buckets, Unsent, Uncertain int64
			InFlight                   int64 `json:"in_flight"`
			LocalRefusals              int64 `json:"local_refusals"`
			UnaskedAdmissions          int64 `json:"unasked_admissions"`
			Batches                    struct{ Fetched, Tokens, Returned, Expired int64 }
		}
	}
}

// adminStatus returns the status that the admin API reports.
func adminStatus(c *caddytest.Caddy) (a statusAnswer, text string) {
	c.T.Helper()
	status, text := c.AdminCall(http.MethodGet, "/rate_limit/", "", "")
	must(c.T, text, want("status", status, http.StatusOK))
	must(c.T, text, json.Unmarshal([]byte(text), &a))
	return a, text
}

// TestStatus checks the status and the metrics of zones, shards and servers at first, after a
// reload, and after rejected ones.
func TestStatus(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	store := strings.TrimSuffix(servers.Store("check_timeout 30s", "max_replica_lag 1h"), "\n\t}") + "\nstore other memory\n}"
	zones := zoneWith("api", "events 5", "enforce 100", "charge before")
	site := "{\n\t{{global}}\n" + store + "\n}\n{{site}} {\nroute {\nrate_limit {\n" + zones + zoneWith("batched", "batch 10", "charge before") +
		"}\nrate_limit {\n" + zones + "}\nrate_limit {\nstore other\n" + zones + "}\nrespond ok\n}\n}\n"
	c := caddytest.Start(t, site)
	for range 7 {
		c.Probe("/", "X-Key: alice")
	}
	check := func(when string) {
		t.Helper()
		eventually(t, "all servers are met "+when, func() error {
			a, _ := adminStatus(c)
			if len(a.Stores) != 2 || len(a.Stores[0].Shards) != 2 {
				return fmt.Errorf("%+v", a.Stores)
			}
			for _, shard := range a.Stores[0].Shards {
				for _, server := range shard.Servers {
					if server.State != "up" || server.Role == "replica" && server.Lag == nil {
						return fmt.Errorf("%+v", server)
					}
				}
			}
			return nil
		})
		a, text := adminStatus(c)
		// On a busy machine a batch may end before the seventh request.
		fetched := a.Stores[0].Ledger.Batches.Fetched
		names := ""
		for _, z := range a.Zones {
			names += z.Store + "/" + z.Name + " "
		}
		must(t, when+": "+text, errors.Join(want("zones", names, "default/api default/batched other/api "),
			want("algorithm", a.Zones[0].Algorithm, "fixed_window"), want("events", a.Zones[0].Events, "5"), want("charge", a.Zones[0].Charge, "before"),
			want("window", a.Zones[0].Window, 36e6), want("enforce", a.Zones[0].Enforce, 100), want("key", fmt.Sprint(a.Zones[0].Key), "[{http.request.header.X-Key}]"),
			want("refused", a.Zones[0].Decisions["refused"], 2), want("having a last refusal", a.Zones[0].LastRefused > 1.7e9, true), want("allowed", a.Zones[0].Decisions["allowed"] >= 5, true),
			want("stores", a.Stores[0].Name+" "+a.Stores[0].Module+" "+a.Stores[1].Name+" "+a.Stores[1].Module,
				"default rate_limit.stores.redis other rate_limit.stores.memory"),
			want("buckets in memory", *a.Stores[1].Buckets, 1), want("buckets reported for Redis", a.Stores[0].Buckets != nil, false),
			want("batches", fetched > 0, true), want("tokens", a.Stores[0].Ledger.Batches.Tokens, 10*fetched)))
		owner := a.Stores[0].Shards[servers.Owner(t, "api", "alice")]
		must(t, when, errors.Join(want("kind", owner.Kind, "static"), want("found", owner.Found, true), want("servers", len(owner.Servers), 2),
			want("role", owner.Servers[0].Role, "primary"), want("breakers", fmt.Sprint(owner.Servers[0].Breakers), "map[charges:closed checks:closed]"),
			want("having a latency", owner.Servers[0].Latency["checks"] > 0, true), want("having connections", owner.Servers[0].Pools["checks"].Connections > 0, true),
			want("lag reported for a primary", owner.Servers[0].Lag != nil, false)))
		for metric, wanted := range map[string]string{
			`servers{role="primary",shard="a",state="up",store="default"}`:             "1",
			`servers{role="replica",shard="b",state="left_out",store="default"}`:       "0",
			`breaker_open{purpose="charges",role="primary",shard="a",store="default"}`: "0",
			`batch_fetches_total{store="default"}`:                                     fmt.Sprint(fetched),
			`batch_tokens_total{kind="fetched",store="default"}`:                       fmt.Sprint(10 * fetched),
			`ledger_buckets{store="other"}`:                                            "0",
			`ledger_unsent{store="default"}`:                                           "0",
		} {
			must(t, when, want(metric, c.Metric("caddy_rate_limit_"+metric), wanted))
		}
		must(t, when, want("lag exported", c.Metric(`caddy_rate_limit_replica_lag_seconds{shard="a",store="default"}`) != "", true))
		took := fmt.Sprintf(`caddy_rate_limit_store_duration_seconds_count{operation="take",role="primary",shard="%s",store="default"}`, owner.Name)
		must(t, when, want("takes measured", c.Metric(took) != "" && c.Metric(took) != "0", true))
	}
	check("at first")
	c.MustLoad(strings.Replace(site, "check_timeout 30s", "check_timeout 31s", 1))
	check("after a reload")
	cannotListen := occupiedSite(t)
	for _, rejected := range []string{
		strings.Replace(site, "events 5", "events 6", 2) + cannotListen,
		"{\n\t{{global}}\n}\n{{site}} {\n\trespond ok\n}\n" + cannotListen,
	} {
		if status, _ := c.Load(rejected); status == http.StatusOK {
			t.Fatal("the config was accepted")
		}
		c.AwaitServers()
		check("after a rejected reload")
	}
	status, text := c.AdminCall(http.MethodGet, "/rate_limit/?zone=api", "", "")
	must(t, text, want("status of a bad query", status, http.StatusBadRequest))
	c.MustLoad("{\n\t{{global}}\n}\n{{site}} {\n\trespond ok\n}\n")
	status, text = c.AdminCall(http.MethodGet, "/rate_limit/", "", "")
	must(t, text, errors.Join(want("status without a limiter", status, http.StatusNotFound),
		want("metric without a limiter", c.Metric(`caddy_rate_limit_ledger_buckets{store="default"}`), "")))
}

// TestStatusOfOutage checks that the admin API and the metrics report unreachable servers, and that
// errors are counted by kind.
func TestStatusOfOutage(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, apiSite(servers.Store("charge_timeout 2s"), 100, "1h"))
	must(t, "before", c.Ask("/", "X-Key: alice").Is(http.StatusOK, 1))
	a, text := adminStatus(c)
	must(t, text, errors.Join(want("problems", len(a.Problems), 0), want("listing none", strings.Contains(text, `"problems":[]`), true),
		want("last refusal", a.Zones[0].LastRefused, 0)))
	servers.Kill(t)
	eventually(t, "both are left out", func() error {
		c.Probe("/", "X-Key: alice")
		a, _ := adminStatus(c)
		got := a.Stores[0].Shards[0].Servers
		return errors.Join(want("state of the primary", got[0].State, "left_out"), want("state of the replica", got[1].State, "left_out"))
	})
	for metric, wanted := range map[string]string{
		`servers{role="primary",shard="a",state="left_out",store="default"}`:      "1",
		`servers{role="primary",shard="a",state="up",store="default"}`:            "0",
		`breaker_open{purpose="checks",role="replica",shard="a",store="default"}`: "1",
	} {
		must(t, "in the outage", want(metric, c.Metric("caddy_rate_limit_"+metric), wanted))
	}
	must(t, "in the outage", want("errors of connections", c.Metric(`caddy_rate_limit_store_errors_total{kind="connection",store="default"}`) != "", true))
	// The worst comes first.
	eventually(t, "the problems are listed", func() error {
		c.Probe("/", "X-Key: alice")
		a, text := adminStatus(c)
		var texts []string
		for _, p := range a.Problems {
			texts = append(texts, p.Text)
		}
		all := strings.Join(texts, "; ")
		for _, word := range []string{"; charges wait for shard a: ", "the replica " + servers[0].Replicas[0].Addr() + " of shard a is left out of checks, because calls of it fail: "} {
			if !strings.Contains(all, word) {
				return fmt.Errorf("%s lacks %s", text, word)
			}
		}
		return errors.Join(want("store", a.Problems[0].Store, "default"), want("shard", a.Problems[0].Shard, "a"),
			want("server", a.Problems[0].Server, servers[0].Primary.Addr()))
	})
	prints(t, 0, []string{"problem of store default: the primary " + servers[0].Primary.Addr() + " of shard a is left out of "}, "status", "--address", c.Admin)
	// A charge is retried until charge_timeout.
	eventually(t, "a charge is pending", func() error {
		return want("pending charges", c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`) != "0", true)
	})
	c.Probe("/", "X-Key: alice")
	must(t, "in the outage", want("errors without a call", c.Metric(`caddy_rate_limit_store_errors_total{kind="breaker",store="default"}`) != "", true))
	servers.Restart(t)
	eventually(t, "the outage is over", func() error {
		a, _ := adminStatus(c)
		got := a.Stores[0].Shards[0].Servers
		return errors.Join(want("state of the primary", got[0].State, "up"), want("state of the replica", got[1].State, "up"),
			want("pending charges", c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`), "0"), want("problems", len(a.Problems), 0))
	})
}

// TestStatusRevealsNoSecrets also covers answers that quote the servers' errors.
func TestStatusRevealsNoSecrets(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	const password, secret = "correct-horse-battery", "staple-of-keys"
	c := caddytest.Start(t, apiSite(servers.Store("username nobody", "password "+password, "key_secret "+secret), 5, "1h"))
	c.Probe("/", "X-Key: alice")
	_, status := adminStatus(c)
	var found string
	eventually(t, "the wrong password is reported", func() error {
		_, found = c.AdminCall(http.MethodGet, "/rate_limit/buckets/api?key=alice", "", "")
		return want(found+" having WRONGPASS", strings.Contains(found, "WRONGPASS"), true)
	})
	code, reset := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=alice", "", "")
	must(t, reset, want("status", code, http.StatusBadGateway))
	for _, text := range []string{status, found, reset} {
		if regexp.MustCompile(password + "|" + secret).MatchString(text) {
			t.Errorf("a secret is in %s", text)
		}
	}
}

// topAnswer is what GET /rate_limit/top reports of a zone.
type topAnswer struct {
	Zone    string
	Since   float64
	Refused []struct {
		ClientKey string `json:"client_key"`
		Store     string
		Count     int64
	}
}

// adminRefuses requires that the admin API refuses a call with an error that has these words.
func adminRefuses(c *caddytest.Caddy, method, path, body string, status int, words ...string) {
	c.T.Helper()
	got, text := c.AdminCall(method, path, "application/json", body)
	var answer struct{ Error string }
	err := json.Unmarshal([]byte(text), &answer)
	if err != nil || got != status {
		c.T.Errorf("%s %s %s: %d: %s, %v; want %d", method, path, body, got, text, err, status)
	}
	for _, word := range words {
		if !strings.Contains(answer.Error, word) {
			c.T.Errorf("%s %s %s: the error %q lacks %q", method, path, body, answer.Error, word)
		}
	}
}

// TestTop lists each zone's most refused clients, across reloads.
func TestTop(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		config := zonesSite(store, pathZone("api", "events 1")+pathZone("login", "events 1"), "respond ok")
		c := caddytest.Start(t, config)
		var all struct{ Zones []topAnswer }
		c.AdminJSON(http.MethodGet, "/rate_limit/top", "", &all)
		if len(all.Zones) != 2 || all.Zones[0].Zone != "api" || all.Zones[1].Zone != "login" || len(all.Zones[0].Refused) != 0 {
			t.Errorf("at first: %v", all)
		}
		refused := map[string]int64{"alice": 5, "bob": 3, "carol": 1}
		for client, n := range refused {
			for range n + 1 {
				c.Get("/api", "X-Key: "+client)
			}
		}
		c.MustLoad(strings.Replace(config, "respond ok", "respond yes", 1))
		c.Get("/api", "X-Key: alice")
		refused["alice"]++
		var top topAnswer
		c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api&n=2", "", &top)
		if len(top.Refused) != 2 || top.Since <= 0 {
			t.Fatalf("top is %v", top)
		}
		for i, client := range []string{"alice", "bob"} {
			got := top.Refused[i]
			if !strings.HasSuffix(got.ClientKey, ":"+client) || got.Count != refused[client] || got.Store != "default" {
				t.Errorf("place %d is %v, want %s with %d", i, got, client, refused[client])
			}
		}
		c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=login", "", &top)
		if top.Zone != "login" || len(top.Refused) != 0 {
			t.Errorf("login: %v", top)
		}
		for _, bad := range []struct {
			query  string
			status int
			word   string
		}{
			{"zone=nope", http.StatusNotFound, "there is api, login"},
			{"n=0", http.StatusBadRequest, "from 1 to 100"},
			{"n=101", http.StatusBadRequest, "from 1 to 100"},
			{"n=x", http.StatusBadRequest, "from 1 to 100"},
			{"zone=api&zone=login", http.StatusBadRequest, "twice"},
			{"name=api", http.StatusBadRequest, `"name" is unknown`},
			{"zone=%zz", http.StatusBadRequest, "query"},
		} {
			adminRefuses(c, http.MethodGet, "/rate_limit/top?"+bad.query, "", bad.status, bad.word)
		}
		adminRefuses(c, http.MethodDelete, "/rate_limit/top", "", http.StatusMethodNotAllowed)
	})
}

// TestTopOfRollout shows a zone's clients of both stores.
func TestTopOfRollout(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	c := caddytest.Start(t, strings.Replace(zonesSite(twoStores(servers), zoneWith("api", "events 1"), "respond ok"),
		"rate_limit {\nzone", "rate_limit {\nrollout other 50\nzone", 1))
	for i := range 20 {
		for range 2 {
			c.Get("/", fmt.Sprintf("X-Key: client-%d", i))
		}
	}
	var top topAnswer
	c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
	stores := map[string]int{}
	for _, client := range top.Refused {
		stores[client.Store]++
	}
	if len(top.Refused) != 20 || stores["default"] == 0 || stores["other"] == 0 {
		t.Errorf("top is %v", top)
	}
}
