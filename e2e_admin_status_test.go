package shardlimit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// statusAnswer is what GET /rate_limit/ answers.
type statusAnswer struct {
	Zones []struct {
		Name, Store, Algorithm, Events, Charge string
		Key                                    []string
		Window, Enforce                        float64
		Decisions                              map[string]int64
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

// adminStatus asks the admin API for everything.
func adminStatus(c *caddytest.Caddy) (a statusAnswer, text string) {
	c.T.Helper()
	status, text := c.AdminCall(http.MethodGet, "/rate_limit/", "", "")
	must(c.T, text, want("status", status, http.StatusOK))
	must(c.T, text, json.Unmarshal([]byte(text), &a))
	return a, text
}

// TestStatus tells of zones, shards and servers, and goes on doing so after
// reloads, also of such configs as are rejected; and so do the metrics.
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
		names := ""
		for _, z := range a.Zones {
			names += z.Store + "/" + z.Name + " "
		}
		must(t, when+": "+text, errors.Join(want("zones", names, "default/api default/batched other/api "),
			want("algorithm", a.Zones[0].Algorithm, "fixed_window"), want("events", a.Zones[0].Events, "5"), want("charge", a.Zones[0].Charge, "before"),
			want("window", a.Zones[0].Window, 36e6), want("enforce", a.Zones[0].Enforce, 100), want("key", fmt.Sprint(a.Zones[0].Key), "[{http.request.header.X-Key}]"),
			want("refused", a.Zones[0].Decisions["refused"], 2), want("allowed", a.Zones[0].Decisions["allowed"] >= 5, true),
			want("stores", a.Stores[0].Name+" "+a.Stores[0].Module+" "+a.Stores[1].Name+" "+a.Stores[1].Module,
				"default rate_limit.stores.redis other rate_limit.stores.memory"),
			want("buckets in memory", *a.Stores[1].Buckets, 1), want("buckets in Redis being told", a.Stores[0].Buckets != nil, false),
			want("batches", a.Stores[0].Ledger.Batches.Fetched, 1), want("tokens", a.Stores[0].Ledger.Batches.Tokens, 10)))
		owner := a.Stores[0].Shards[servers.Owner(t, "api", "alice")]
		must(t, when, errors.Join(want("kind", owner.Kind, "static"), want("found", owner.Found, true), want("servers", len(owner.Servers), 2),
			want("role", owner.Servers[0].Role, "primary"), want("breakers", fmt.Sprint(owner.Servers[0].Breakers), "map[charges:closed checks:closed]"),
			want("having a latency", owner.Servers[0].Latency["checks"] > 0, true), want("having connections", owner.Servers[0].Pools["checks"].Connections > 0, true),
			want("lag of a primary being told", owner.Servers[0].Lag != nil, false)))
		for metric, wanted := range map[string]string{
			`servers{role="primary",shard="a",state="up",store="default"}`:             "1",
			`servers{role="replica",shard="b",state="left_out",store="default"}`:       "0",
			`breaker_open{purpose="charges",role="primary",shard="a",store="default"}`: "0",
			`batch_fetches_total{store="default"}`:                                     "1",
			`batch_tokens_total{kind="fetched",store="default"}`:                       "10",
			`ledger_buckets{store="other"}`:                                            "0",
			`ledger_unsent{store="default"}`:                                           "0",
		} {
			must(t, when, want(metric, c.Metric("caddy_rate_limit_"+metric), wanted))
		}
		must(t, when, want("lag being told", c.Metric(`caddy_rate_limit_replica_lag_seconds{shard="a",store="default"}`) != "", true))
		took := fmt.Sprintf(`caddy_rate_limit_store_duration_seconds_count{operation="take",role="primary",shard="%s",store="default"}`, owner.Name)
		must(t, when, want("takes being measured", c.Metric(took) != "" && c.Metric(took) != "0", true))
	}
	check("at first")
	c.MustLoad(strings.Replace(site, "check_timeout 30s", "check_timeout 31s", 1))
	check("after a reload")
	occupied, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	defer occupied.Close()
	for _, rejected := range []string{
		strings.Replace(site, "events 5", "events 6", 2) + "\nhttp://" + occupied.Addr().String() + " {\n\trespond never\n}\n",
		"{\n\t{{global}}\n}\n{{site}} {\n\trespond ok\n}\nhttp://" + occupied.Addr().String() + " {\n\trespond never\n}\n",
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

// TestStatusOfOutage: a server that is away is told, by the admin API and by
// metrics, and errors are counted by their kind.
func TestStatusOfOutage(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 1)
	c := caddytest.Start(t, apiSite(servers.Store("charge_timeout 2s"), 100, "1h"))
	must(t, "before", c.Ask("/", "X-Key: alice").Is(http.StatusOK, 1))
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
	// It is tried until charge_timeout.
	eventually(t, "a charge waits", func() error {
		return want("charges that wait", c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`) != "0", true)
	})
	c.Probe("/", "X-Key: alice")
	must(t, "in the outage", want("errors without a call", c.Metric(`caddy_rate_limit_store_errors_total{kind="breaker",store="default"}`) != "", true))
	servers.Restart(t)
	eventually(t, "all is well again", func() error {
		a, _ := adminStatus(c)
		got := a.Stores[0].Shards[0].Servers
		return errors.Join(want("state of the primary", got[0].State, "up"), want("state of the replica", got[1].State, "up"),
			want("charges that wait", c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`), "0"))
	})
}

// TestStatusTellsNoSecrets, whatever the servers say about them.
func TestStatusTellsNoSecrets(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	const password, secret = "correct-horse-battery", "staple-of-keys"
	c := caddytest.Start(t, apiSite(servers.Store("username nobody", "password "+password, "key_secret "+secret, "check_timeout 300ms"), 5, "1h"))
	c.Probe("/", "X-Key: alice")
	_, status := adminStatus(c)
	_, found := c.AdminCall(http.MethodGet, "/rate_limit/buckets/api?key=alice", "", "")
	code, reset := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=alice", "", "")
	must(t, reset, want("status", code, http.StatusBadGateway))
	must(t, found, want("telling of the password", strings.Contains(found, "WRONGPASS"), true))
	for _, text := range []string{status, found, reset} {
		if regexp.MustCompile(password + "|" + secret).MatchString(text) {
			t.Errorf("a secret is in %s", text)
		}
	}
}
