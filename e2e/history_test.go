package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// historyOf returns the history of a zone.
func historyOf(c *caddytest.Caddy, query string) (all adminapi.History, z adminapi.ZoneHistory) {
	c.T.Helper()
	status, text := c.AdminCall(http.MethodGet, "/rate_limit/history?"+query, "", "")
	must(c.T, text, want("status", status, http.StatusOK))
	must(c.T, text, json.Unmarshal([]byte(text), &all))
	for _, z := range all.Zones {
		if z.Zone == "api" {
			return all, z
		}
	}
	c.T.Fatalf("there is no zone api in %s", text)
	return all, z
}

// sumOf adds up what is known of a series.
func sumOf(s adminapi.Series) (sum float64) {
	for _, n := range s {
		if !math.IsNaN(n) {
			sum += n
		}
	}
	return sum
}

// TestHistory has what happened to the requests of a zone, across reloads, also of a zone that the config
// no longer has; and in an outage the problems say what becomes of requests.
func TestHistory(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 0)
	site := func(zones string) string {
		return zonesSite(servers.Store("charge_timeout 2s"), zones, "respond ok")
	}
	zone := zoneWith("api", "events 5", "window 10h", "on_error allow")
	watched, slow := pathZone("watched", "events 1", "enforce 0"), pathZone("slow", "algorithm gcra", "events 10", "window 1s", "burst 1", "max_wait 10s")
	c := caddytest.Start(t, site(zone+watched+slow))
	for range 7 {
		c.Probe("/", "X-Key: alice")
	}
	for range 4 {
		c.Probe("/watched", "X-Key: bob")
	}
	for range 3 {
		must(t, "a request that waits", want("status", c.Probe("/slow", "X-Key: carol").Status, http.StatusOK))
	}
	// A request waits if it comes within a tenth of a second of the one before.
	waited := c.Metric(`caddy_rate_limit_waited_requests_total{zone="slow"}`)
	var all adminapi.History
	eventually(t, "a step is over", func() error {
		var api adminapi.ZoneHistory
		all, api = historyOf(c, "")
		return errors.Join(want("zones", len(all.Zones), 3), want("refused", sumOf(api.Refused), 2.0), want("all others", sumOf(all.Zones[1].Allowed), 3.0))
	})
	now := time.Now().Unix()
	must(t, "the range", errors.Join(want("name", all.Range, "1h"), want("step", all.Step, 10), want("start", all.Start > now-3630 && all.Start <= now-3600, true)))
	// The requests of all paths count in zone api, in which bob and carol are below their limit.
	for i, sums := range []string{"12 0 2 0 0", "3 0 0 0 " + waited, "1 3 0 0 0"} {
		z := all.Zones[i]
		got := fmt.Sprint(sumOf(z.Allowed), sumOf(z.WouldRefuse), sumOf(z.Refused), sumOf(z.Unchecked), sumOf(z.Waited))
		must(t, z.Zone, errors.Join(want("counts", got, sums), want("steps", len(z.Allowed), 360), want("first step known", !math.IsNaN(z.Allowed[0]), false),
			want("calls", sumOf(z.StoreCalls) > 0, true), want("latency", sumOf(z.StoreLatency) > 0 && sumOf(z.StoreLatency) < 30, true)))
	}
	for query, steps := range map[string]int{"range=24h&zone=api": 288, "range=24h&zone=api&zone=nope": 288, "range=1w&zone=slow&zone=api&zone=api": 2016} {
		all, api := historyOf(c, query)
		must(t, query, errors.Join(want("steps", len(api.Allowed), steps), want("step", all.Step, 300), want("zones", len(all.Zones), strings.Count(query, "api")/2+1)))
	}
	for _, bad := range []struct {
		query  string
		status int
		words  string
	}{
		{"range=2h", http.StatusBadRequest, "write one of 1h, 24h, 1w"},
		{"range=1h&range=1h", http.StatusBadRequest, "range is given twice"},
		{"from=1", http.StatusBadRequest, "there is zone, range"},
		{"zone=nope&zone=none", http.StatusNotFound, "there is api, slow, watched"},
	} {
		adminRefuses(c, http.MethodGet, "/rate_limit/history?"+bad.query, "", bad.status, bad.words)
	}
	adminRefuses(c, http.MethodDelete, "/rate_limit/history", "", http.StatusMethodNotAllowed)

	c.MustLoad(site(zone))
	all, api := historyOf(c, "")
	must(t, "after a reload", errors.Join(want("refused", sumOf(api.Refused), 2.0), want("zones", len(all.Zones), 3), want("of the zone that is gone", sumOf(all.Zones[2].WouldRefuse), 3.0)))

	servers.Kill(t)
	consequence := regexp.MustCompile(`the primary ` + servers[0].Primary.Addr() + ` of shard a is left out of .*: .*; \d+\.\d/s pass unlimited: on_error allow \(zone api\)$`)
	eventually(t, "the problem says how many pass unlimited", func() error {
		c.Probe("/", "X-Key: dave")
		a, text := adminStatus(c)
		if len(a.Problems) == 0 || !consequence.MatchString(a.Problems[0].Text) {
			return errors.New(text)
		}
		return nil
	})
	eventually(t, "the outage", func() error {
		_, api = historyOf(c, "")
		return want("unchecked", sumOf(api.Unchecked) > 0, true)
	})
}

// TestClientsByPrefix finds, in all zones, the clients of which this Caddy knows that begin with a text.
func TestClientsByPrefix(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := caddytest.Start(t, zonesSite(store, zoneWith("api", "events 5")+pathZone("login", "events 7"), "respond ok"))
		c.Probe("/login", "X-Key: alice")
		c.Probe("/login", "X-Key: albert")
		c.Probe("/", "X-Key: bob-al")
		for i := range 25 {
			c.Probe("/", fmt.Sprintf("X-Key: many-%02d", i))
		}
		find := func(prefix string) (found adminapi.Matches) {
			c.AdminJSON(http.MethodGet, "/rate_limit/clients?prefix="+prefix, "", &found)
			return found
		}
		eventually(t, "the clients are found", func() error {
			names := ""
			for _, m := range find("al").Clients {
				names += fmt.Sprintf("%s/%s %d of %d, ", m.Zone, m.Values[0], m.Used, m.Limit)
			}
			return want("clients", names, "api/albert 1 of 5, login/albert 1 of 7, api/alice 1 of 5, login/alice 1 of 7, ")
		})
		eventually(t, "there are more than are listed", func() error {
			many := find("many-")
			return errors.Join(want("clients", len(many.Clients), 20), want("more", many.More, true))
		})
		none := find("nobody")
		must(t, "nobody", errors.Join(want("clients", len(none.Clients), 0), want("more", none.More, false)))
		adminRefuses(c, http.MethodGet, "/rate_limit/clients?prefix=", "", http.StatusBadRequest, "prefix is empty")
		adminRefuses(c, http.MethodGet, "/rate_limit/clients?prefix=a&name=b", "", http.StatusBadRequest, "not both")
	})
}
