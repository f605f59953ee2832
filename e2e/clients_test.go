package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// shownClient is a client as answers explain it.
func shownClient(c adminapi.Client) string {
	text := c.Template + " " + fmt.Sprintf("%q", c.Values)
	if c.Note != "" {
		text += " (" + c.Note + ")"
	}
	return text
}

// TestClientsAreExplained by the texts of the zone's key, wherever there are client keys.
func TestClientsAreExplained(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	site := func(store, key string) string {
		return zonesSite(store, zoneWith("api", "events 1", "key "+key), "respond ok")
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		const template = "{header.X-User}|{header.X-Device}"
		c := caddytest.Start(t, site(store, "{header.X-Key} "+template))
		for _, headers := range [][]string{{"X-Key: it's me"}, {"X-User: alice", "X-Device: left"}} {
			for range 3 {
				c.Get("/", headers...)
			}
		}
		code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&key="+url.QueryEscape(template)+"&key=alice&key=left", "", "")
		must(t, text, want("status", code, http.StatusOK))
		listed := func() (refused, overrides []adminapi.Client) {
			t.Helper()
			var top adminapi.Top
			c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
			for _, client := range top.Refused {
				refused = append(refused, client.Client)
				if age := time.Since(time.Unix(int64(client.LastRefused), 0)); age < 0 || age > 2*caddytest.WaitLimit {
					t.Errorf("%v was refused last before %v", client, age)
				}
			}
			var all adminapi.Overrides
			c.AdminJSON(http.MethodGet, "/rate_limit/overrides", "", &all)
			for _, o := range all.Overrides {
				overrides = append(overrides, o.Client)
			}
			slices.SortFunc(refused, func(a, b adminapi.Client) int { return strings.Compare(shownClient(a), shownClient(b)) })
			return refused, overrides
		}
		refused, overrides := listed()
		if len(refused) != 2 || len(overrides) != 1 || shownClient(refused[0]) != `{header.X-Key} ["it's me"]` ||
			shownClient(refused[1]) != template+` ["alice" "left"]` || refused[1].ClientKey != overrides[0].ClientKey || shownClient(overrides[0]) != shownClient(refused[1]) {
			t.Errorf("refused are %v, overrides %v", refused, overrides)
		}
		// The commands take them as they show them, and quote what a shell would not take.
		prints(t, 0, []string{"'" + template + "' alice left", `{header.X-Key} 'it'\''s me'`}, "top", "--count", "1", "--address", c.Admin)
		prints(t, 0, []string{"'" + template + "' alice left in zone api", "block, ends in ", "last refused "}, "get", "api", template, "alice", "left", "--address", c.Admin)
		prints(t, 0, []string{"{header.X-Key} 'it'\\''s me' in zone api"}, "get", "api", "{header.X-Key}", "it's me", "--address", c.Admin)
		out := prints(t, 0, []string{"block"}, "get", "api", "--json", "--client-key", refused[1].ClientKey, "--address", c.Admin)
		var buckets adminapi.Buckets
		must(t, out, json.Unmarshal([]byte(out), &buckets))
		if b := buckets.Buckets[0]; b.ClientKey != refused[1].ClientKey || shownClient(b.Client) != shownClient(refused[1]) || len(b.Overrides) != 1 {
			t.Errorf("by its client key: %+v", b)
		}
		s := simulate(c, "/", "X-Key: carol")
		must(t, "simulated", want("client", s.Zones[0].Template+fmt.Sprint(s.Zones[0].Values), "{header.X-Key}[carol]"))
		// Another key explains what it still has.
		c.MustLoad(site(store, "{header.X-Key} {header.X-Account}"))
		refused, overrides = listed()
		const unknown = ` [] (of no text of the zone's key in the running config)`
		if len(refused) != 2 || len(overrides) != 1 || shownClient(refused[0]) != unknown || shownClient(overrides[0]) != unknown ||
			shownClient(refused[1]) != `{header.X-Key} ["it's me"]` {
			t.Errorf("after a reload refused are %v, overrides %v", refused, overrides)
		}
		prints(t, 0, []string{overrides[0].ClientKey, "(of no text of the zone's key in the running config)"}, "blocks", "--address", c.Admin)
		c.MustLoad(strings.ReplaceAll(site(store, "{header.X-Key}"), "zone api", "zone other"))
		if _, overrides = listedOverrides(c); len(overrides) != 1 || shownClient(overrides[0]) != ` [] (of a zone that the running config lacks)` {
			t.Errorf("without the zone overrides are %v", overrides)
		}
		// What is listed can be ended, whatever has become of its zone and the zone's key.
		prints(t, 3, nil, "unblock", "api", "--client-key", overrides[0].ClientKey, "--address", c.Admin)
		unblocks := func(args ...string) {
			t.Helper()
			prints(t, 0, []string{"no block any more: "}, append([]string{"unblock", "api", "--client-key", overrides[0].ClientKey, "--address", c.Admin}, args...)...)
			if _, left := listedOverrides(c); len(left) != 0 {
				t.Errorf("after unblock %v there are %v", args, left)
			}
		}
		unblocks("--store", "default")
		c.MustLoad(site(store, "{header.X-Key} "+template))
		code, text = c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&key="+url.QueryEscape(template)+"&key=alice&key=left", "", "")
		must(t, text, want("status", code, http.StatusOK))
		prints(t, 0, []string{"ZONE  STORE    KIND ", "api   default  block"}, "blocks", "--address", c.Admin)
		must(t, "blocked", want("status", c.Get("/", "X-User: alice", "X-Device: left").StatusCode, http.StatusTooManyRequests))
		var status adminapi.Status
		c.AdminJSON(http.MethodGet, "/rate_limit/", "", &status)
		d := status.Zones[0].Decisions
		must(t, "decisions", want("having blocked ones", d["blocked"] > 0, true))
		prints(t, 0, []string{fmt.Sprintf("  %-7d  0             0       ", d["refused"]+d["blocked"])}, "status", "--address", c.Admin)
		c.MustLoad(site(store, "{header.X-Key}"))
		unblocks()
		// Nothing is ended where the client key cannot be one of the zone.
		prints(t, 3, nil, "unblock", "api", "--client-key", "198.51.100.9", "--address", c.Admin)
		prints(t, 3, nil, "unblock", "apo", "--store", "default", "--client-key", refused[1].ClientKey, "--address", c.Admin)
		prints(t, 3, nil, "unblock", "api", "--client-key", refused[1].ClientKey, "--address", c.Admin)
	})
	// A store with a secret lists digests.
	c := caddytest.Start(t, site(servers.Store("key_prefix hidden", "key_secret correct-horse"), "{header.X-Key}"))
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&key=alice", "", "")
	must(t, text, want("status", code, http.StatusOK))
	if text, overrides := listedOverrides(c); len(overrides) != 1 || shownClient(overrides[0]) != " [] (a digest, by key_secret)" || !strings.HasPrefix(overrides[0].ClientKey, "$") {
		t.Errorf("with a secret: %s", text)
	}
}

// listedOverrides returns the clients for which something was changed.
func listedOverrides(c *caddytest.Caddy) (text string, clients []adminapi.Client) {
	c.T.Helper()
	_, text = c.AdminCall(http.MethodGet, "/rate_limit/overrides", "", "")
	var all adminapi.Overrides
	must(c.T, text, json.Unmarshal([]byte(text), &all))
	for _, o := range all.Overrides {
		clients = append(clients, o.Client)
	}
	return text, clients
}

// TestClientsWhoseKeyIsNoText are never taken for a client whose key is: one that JSON would
// make of it.
func TestClientsWhoseKeyIsNoText(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := caddytest.Start(t, zonesSite(store, zoneWith("api", "events 2", "key {query.k}", "warn 50"), "respond ok"))
		const binary, text = "/?k=m%ff", "/?k=m%ef%bf%bd"
		c.Ask(binary)
		var client adminapi.Client
		isShown := func(where string, clients ...adminapi.Client) error {
			if len(clients) != 1 {
				return fmt.Errorf("%s has %v, want one client", where, clients)
			}
			client = clients[0]
			return errors.Join(want(where, shownClient(client), " [] (a key that is no text, in base64)"), want("beginning", strings.HasPrefix(client.ClientKey, "base64:"), true))
		}
		var near adminapi.Near
		eventually(t, "near", func() error {
			c.AdminJSON(http.MethodGet, "/rate_limit/near?zone=api", "", &near)
			return want("clients", len(near.Clients), 1)
		})
		must(t, "near", isShown("near", near.Clients[0].Client))
		simulated := simulate(c, binary).Zones[0]
		must(t, "simulate", want("client key", simulated.ClientKey, client.ClientKey))
		c.Ask(binary)
		c.Ask(binary)
		var top adminapi.Top
		c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
		must(t, "top", want("clients", len(top.Refused), 1))
		must(t, "top", isShown("top", top.Refused[0].Client))
		// What is shown names the client, in the page's search too.
		exact := "client_key=" + url.QueryEscape(client.ClientKey)
		var found adminapi.Found
		c.AdminJSON(http.MethodGet, "/rate_limit/clients?name="+url.QueryEscape(client.ClientKey), "", &found)
		if len(found.Zones) != 1 || found.Zones[0].Buckets[0].LastRefused == 0 {
			t.Errorf("found are %+v", found)
		}
		for _, query := range []string{exact, "key=m%ff"} {
			code, answer := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&"+query, "", "")
			must(t, answer, want("status", code, http.StatusOK))
			var reset adminapi.Resets
			c.AdminJSON(http.MethodDelete, "/rate_limit/buckets/api?"+query, "", &reset)
			must(t, query, errors.Join(want("status of the blocked client", c.Get(binary).StatusCode, http.StatusTooManyRequests),
				want("of the other one", c.Get(text).StatusCode, http.StatusOK), want("client key", reset.Buckets[0].ClientKey, client.ClientKey)))
			_, listed := listedOverrides(c)
			code, answer = c.AdminCall(http.MethodDelete, "/rate_limit/blocks/api?client_key="+url.QueryEscape(listed[0].ClientKey), "", "")
			must(t, answer, errors.Join(want("status", code, http.StatusOK), want("overrides", len(listed), 1), want("status of the client", c.Get(binary).StatusCode, http.StatusOK)))
			c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=m%ef%bf%bd", "", "")
		}
	})
}

// TestZoneInSeveralStores explains the clients of each store by the zone that counts there.
func TestZoneInSeveralStores(t *testing.T) {
	t.Parallel()
	const stores = "rate_limit {\nstore default memory\nstore other memory\n}"
	handler := func(path, store, zone string) string {
		return "handle " + path + " {\nrate_limit {\nstore " + store + "\n" + zone + "}\nrespond ok\n}\n"
	}
	c := caddytest.Start(t, caddytest.Site(stores,
		handler("/a", "default", zoneWith("api", "events 10", "key {header.X-Key}"))+
			handler("/b", "other", zoneWith("api", "events 10", "key {header.X-User}", "warn 50"))))
	ask := func(path string, n int) {
		for range n {
			c.Get(path, "X-Key: alice", "X-User: bob")
		}
	}
	near := func() string {
		var near adminapi.Near
		c.AdminJSON(http.MethodGet, "/rate_limit/near?zone=api", "", &near)
		text := fmt.Sprintf("from %d%%", near.Percent)
		for _, client := range near.Clients {
			text += ", " + client.Store + " " + shownClient(client.Client)
		}
		return text
	}
	ask("/a", 6)
	ask("/b", 6)
	must(t, "6 of 10", want("near", near(), `from 50%, other {header.X-User} ["bob"]`))
	ask("/a", 3)
	must(t, "9 of 10", want("near", near(), `from 50%, default {header.X-Key} ["alice"], other {header.X-User} ["bob"]`))
	ask("/a", 3)
	ask("/b", 5)
	explains := func(what, store string, client adminapi.Client) {
		t.Helper()
		must(t, what+" in "+store, want("client", shownClient(client), map[string]string{"default": `{header.X-Key} ["alice"]`, "other": `{header.X-User} ["bob"]`}[store]))
	}
	var top adminapi.Top
	c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
	must(t, "top", want("clients", len(top.Refused), 2))
	for _, client := range top.Refused {
		explains("top", client.Store, client.Client)
	}
	for store, key := range map[string]string{"default": "alice", "other": "bob"} {
		code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&store="+store+"&key="+key, "", "")
		must(t, text, want("status", code, http.StatusOK))
	}
	var all adminapi.Overrides
	c.AdminJSON(http.MethodGet, "/rate_limit/overrides", "", &all)
	must(t, "overrides", want("number", len(all.Overrides), 2))
	for _, o := range all.Overrides {
		explains("block", o.Store, o.Client)
	}
}

// TestLastRefusalOfAZone is the last in any of its stores.
func TestLastRefusalOfAZone(t *testing.T) {
	t.Parallel()
	const stores = "rate_limit {\nstore default memory\nstore other memory\n}"
	c := caddytest.Start(t, zonesSite(stores, "rollout other 100\n"+zoneWith("api", "events 1"), "respond ok"))
	c.Get("/", "X-Key: alice")
	must(t, "refused", want("status", c.Get("/", "X-Key: alice").StatusCode, http.StatusTooManyRequests))
	var status adminapi.Status
	c.AdminJSON(http.MethodGet, "/rate_limit/", "", &status)
	must(t, "zones", want("number", len(status.Zones), 1))
	must(t, "status", want("having the last refusal", status.Zones[0].LastRefused > 0, true))
}

// TestNearOfStoresThatCannotTell says so, and lists equals in the same order each time.
func TestNearOfStoresThatCannotTell(t *testing.T) {
	t.Parallel()
	const stores = "rate_limit {\nstore default memory\nstore other memory\nstore third guest {\n}\n}"
	handlers := ""
	for _, store := range []string{"default", "other", "third"} {
		handlers += "handle /" + store + " {\nrate_limit {\nstore " + store + "\n" + zoneWith("api", "events 10") + "}\nrespond ok\n}\n"
	}
	c := caddytest.Start(t, caddytest.Site(stores, handlers))
	_, config := c.AdminCall(http.MethodGet, "/config/", "", "")
	status, text := c.AdminCall(http.MethodPost, "/load", "application/json", strings.Replace(config, `"module":"guest"`, `"module":"guest","plain":true`, 1))
	must(t, text, want("status", status, http.StatusOK))
	c.AwaitServers()
	for _, store := range []string{"default", "other", "third"} {
		for range 9 {
			c.Get("/"+store, "X-Key: alice")
		}
	}
	for range 20 {
		var near adminapi.Near
		c.AdminJSON(http.MethodGet, "/rate_limit/near?zone=api", "", &near)
		must(t, "near", errors.Join(want("clients", len(near.Clients), 2), want("unlisted", fmt.Sprint(near.Unlisted), "[third]")))
		must(t, "order", want("stores", near.Clients[0].Store+" "+near.Clients[1].Store, "default other"))
	}
}

// TestFindClient shows the buckets of a client in all zones.
func TestFindClient(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 2, 0)
	zones := pathZone("api", "events 2") + pathZone("login", "events 5", "key {header.X-Account} {client_ip}") +
		pathZone("pair", "events 5", "key {header.X-User}|{header.X-Device}") + pathZone("all", "events 5", "key everybody")
	c := caddytest.Start(t, zonesSite(servers.Store(), zones, "respond ok"))
	find := func(name string) (answer adminapi.Found) {
		t.Helper()
		callInTime(c, http.MethodGet, "/rate_limit/clients?name="+url.QueryEscape(name), &answer)
		return answer
	}
	shown := func(answer adminapi.Found) (all []string) {
		for _, zone := range answer.Zones {
			for _, b := range zone.Buckets {
				all = append(all, zone.Zone+": "+shownClient(b.Client))
			}
		}
		return all
	}
	for range 4 {
		c.Get("/api", "X-Key: alice")
	}
	servers.AwaitCounts(t, "api", map[string]int64{"alice": 2})
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/grants/api?key=alice&events=3", "", "")
	must(t, text, want("status", code, http.StatusOK))
	answer := find("alice")
	must(t, "alice", want("buckets", fmt.Sprint(shown(answer)), `[api: {header.X-Key} ["alice"] login: {header.X-Account} ["alice"]]`))
	api, login := answer.Zones[0].Buckets[0], answer.Zones[1].Buckets[0]
	if st := api.Servers[0].State; st == nil || *st.Used != 2 || *st.Limit != 5 || st.Reset == 0 || len(api.Overrides) != 1 || api.Overrides[0].Events != 3 || api.LastRefused == 0 {
		t.Errorf("in zone api: %+v", api)
	}
	if login.Servers[0].State != nil || login.Overrides != nil || login.LastRefused != 0 {
		t.Errorf("in zone login, where the client never was: %+v", login)
	}
	for name, found := range map[string]string{
		"{header.X-Account} alice": `login: {header.X-Account} ["alice"]`,
		"203.0.113.7":              `api: {header.X-Key} ["203.0.113.7"] api: {client_ip} ["203.0.113.7"] login: {header.X-Account} ["203.0.113.7"] login: {client_ip} ["203.0.113.7"]`,
		"a b":                      `api: {header.X-Key} ["a b"] login: {header.X-Account} ["a b"] pair: {header.X-User}|{header.X-Device} ["a" "b"]`,
	} {
		if got := strings.Join(shown(find(name)), " "); !strings.Contains(got, found) {
			t.Errorf("%s finds %s, want %s", name, got, found)
		}
	}
	if got := shown(find("everybody")); !slices.Contains(got, "all: everybody []") {
		t.Errorf("everybody finds %s", got)
	}
	adminRefuses(c, http.MethodGet, "/rate_limit/clients", "", http.StatusBadRequest, "name is empty")
	adminRefuses(c, http.MethodGet, "/rate_limit/clients?zone=api", "", http.StatusBadRequest, `"zone" is unknown`)
	servers.Kill(t)
	if b := find("alice").Zones[0].Buckets[0]; b.Servers[0].Error == "" || b.Ledger == nil {
		t.Errorf("while the shards are down: %+v", b)
	}
	for word, args := range map[string][]string{"not all are known: default": nil, `"errors":["default: shard `: {"--json"}} {
		out, _, code := command(t, append([]string{"blocks", "--address", c.Admin}, args...)...)
		must(t, out, errors.Join(want("exit code", code, 4), want(word, strings.Contains(out, word), true)))
	}
}

// TestNear lists the clients that have used most of their limit, and not all of it.
func TestNear(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		config := zonesSite(store, pathZone("api", "events 10")+pathZone("login", "events 10", "warn 50"), "respond ok")
		c := caddytest.Start(t, config)
		long := longKey(1)
		for client, n := range map[string]int{"alice": 9, "bob": 10, "carol": 7, "dave": 8, long: 8} {
			for range n {
				c.Get("/api", "X-Key: "+client)
				c.Get("/login", "X-Key: "+client)
			}
		}
		c.MustLoad(strings.Replace(config, "respond ok", "respond yes", 1))
		near := func(query string) (zones map[string]string, err error) {
			var all adminapi.Nears
			c.AdminJSON(http.MethodGet, "/rate_limit/near?"+query, "", &all)
			zones = map[string]string{}
			for _, zone := range all.Zones {
				text := fmt.Sprintf("from %d%%, %d full", zone.Percent, zone.Full)
				for _, client := range zone.Clients {
					if beginning, _, _ := strings.Cut(client.Values[0], "..."); strings.HasPrefix(long, beginning) {
						err = errors.Join(err, want("saying that it is long", client.Note != "" && strings.HasSuffix(client.ClientKey, client.Values[0]), true))
						client.Values[0] = "long"
					}
					text += fmt.Sprintf(", %s%v %d of %d", client.Template, client.Values, client.Used, client.Limit)
					err = errors.Join(err, want("store", client.Store, "default"), want("having a reset", client.Reset > 0, true))
				}
				zones[zone.Zone] = text
			}
			return zones, err
		}
		// On a busy machine a charge may be late.
		eventually(t, "all are counted", func() error {
			all, err := near("")
			return errors.Join(err, want("zones", len(all), 2),
				want("api", all["api"], "from 80%, 1 full, {header.X-Key}[alice] 9 of 10, {header.X-Key}[dave] 8 of 10, {header.X-Key}[long] 8 of 10"),
				want("login", all["login"], "from 50%, 1 full, {header.X-Key}[alice] 9 of 10, {header.X-Key}[dave] 8 of 10, {header.X-Key}[long] 8 of 10, {header.X-Key}[carol] 7 of 10"))
		})
		all, err := near("n=1")
		must(t, "one of each", errors.Join(err, want("api", all["api"], "from 80%, 1 full, {header.X-Key}[alice] 9 of 10")))
		var one adminapi.Near
		c.AdminJSON(http.MethodGet, "/rate_limit/near?zone=login", "", &one)
		must(t, "one zone", errors.Join(want("zone", one.Zone, "login"), want("clients", len(one.Clients), 4)))
		adminRefuses(c, http.MethodGet, "/rate_limit/near?zone=nope", "", http.StatusNotFound, "there is api, login")
		adminRefuses(c, http.MethodGet, "/rate_limit/near?n=101", "", http.StatusBadRequest, "from 1 to 100")
	})
}

// TestViewsShowTheLimitThatDecided: where the limit depends on the request, lists and buckets show that of
// the client's last request, refused ones too, and a Caddy that has had none says that it does not know. What
// an operator sets shows at once.
func TestViewsShowTheLimitThatDecided(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	_, zones := zonesPerWay("events {header.X-Plan} 10")
	site := func(store string) string { return zonesSite(store, zones, "respond ok") }
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := caddytest.Start(t, site(store))
		for algorithm, mode := range ways {
			zone := algorithm + "." + mode
			for range 12 {
				must(t, zone, want("status", c.Get("/"+zone, "X-Key: alice", "X-Plan: 15").StatusCode, http.StatusOK))
				must(t, zone, want("status", c.Get("/"+zone, "X-Key: bob", "X-Plan: 1000").StatusCode, http.StatusOK))
			}
			eventually(t, zone, func() error {
				var near adminapi.Near
				c.AdminJSON(http.MethodGet, "/rate_limit/near?zone="+zone, "", &near)
				if err := errors.Join(want("full", near.Full, 0), want("near", len(near.Clients), 1)); err != nil {
					return err
				}
				return errors.Join(want("client", shownClient(near.Clients[0].Client), `{header.X-Key} ["alice"]`),
					want("limit", near.Clients[0].Limit, 15), want("used", near.Clients[0].Used, 12))
			})
			eventually(t, zone, func() error {
				answer, err := bucketOf(c, zone, "alice")
				if err != nil || len(answer.Servers) == 0 || answer.Servers[0].State == nil {
					return fmt.Errorf("%+v: %w", answer, err)
				}
				st := answer.Servers[0].State
				return errors.Join(want("limit", *st.Limit, 15), want("used", *st.Used, 12), want("remaining", *st.Remaining, 3))
			})
			shows := func(limit int64, near string) {
				t.Helper()
				answer, err := bucketOf(c, zone, "alice")
				if must(t, zone, err); len(answer.Servers) == 0 || answer.Servers[0].State == nil {
					t.Fatalf("%s: %+v", zone, answer)
				}
				var all adminapi.Near
				c.AdminJSON(http.MethodGet, "/rate_limit/near?zone="+zone, "", &all)
				shown := fmt.Sprint(all.Full, " full")
				for _, client := range all.Clients {
					shown += fmt.Sprintf(", %d of %d", client.Used, client.Limit)
				}
				st, isFull := answer.Servers[0].State, answer.Ledger != nil && answer.Ledger.Full
				must(t, zone, errors.Join(want("limit", *st.Limit, limit), want("remaining", *st.Remaining, max(limit-12, 0)),
					want("known to be full, above it", isFull && limit > 12, false), want("near", shown, near)))
			}
			must(t, zone, want("status", c.Get("/"+zone, "X-Key: alice", "X-Plan: 3").StatusCode, http.StatusTooManyRequests))
			shows(3, "1 full")
			for limit, near := range map[int64]string{13: "0 full, 12 of 13", 5: "1 full", 60: "0 full"} {
				code, text := c.AdminCall(http.MethodPost, fmt.Sprintf("/rate_limit/limits/%s?key=alice&events=%d", zone, limit), "", "")
				must(t, text, want("status", code, http.StatusOK))
				shows(limit, near)
			}
			code, text := c.AdminCall(http.MethodDelete, "/rate_limit/limits/"+zone+"?key=alice", "", "")
			must(t, text, want("status", code, http.StatusOK))
			shows(3, "1 full")
		}
	})
	other := caddytest.Start(t, site(servers.Store()))
	for algorithm, mode := range ways {
		zone := algorithm + "." + mode
		eventually(t, zone, func() error {
			answer, err := bucketOf(other, zone, "alice")
			if err != nil || len(answer.Servers) == 0 || answer.Servers[0].State == nil {
				return fmt.Errorf("%+v: %w", answer, err)
			}
			st := answer.Servers[0].State
			// How much of a gcra bucket is used depends on its limit.
			return errors.Join(want("limit is unknown", st.Limit == nil && st.Remaining == nil, true), want("used is unknown", st.Used == nil, algorithm == "gcra"))
		})
	}
}

// bucketOf returns the bucket of a client in a zone.
func bucketOf(c *caddytest.Caddy, zone, client string) (b adminapi.Bucket, err error) {
	var answer adminapi.Buckets
	c.AdminJSON(http.MethodGet, "/rate_limit/buckets/"+zone+"?key="+client, "", &answer)
	if len(answer.Buckets) != 1 {
		return b, fmt.Errorf("there are %d buckets", len(answer.Buckets))
	}
	return answer.Buckets[0], nil
}

// TestViewsShowWhatHasComeBack: after refunds, batches that were returned, a response that forgives and an
// operator's reset, lists and the ledger show what the shard has counted.
func TestViewsShowWhatHasComeBack(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	options := []string{"events 20", "charge before", "count_status not 5xx", "warn 1"}
	names, zones := []string{"batch"}, pathZone("batch", append(options, "batch 5")...)
	for _, algorithm := range counting {
		names = append(names, algorithm)
		zones += pathZone(algorithm, append(options, "reset_status 204", "algorithm "+algorithm)...)
	}
	c := startWith(t, servers.Store(), zones, byStatus)
	for _, zone := range names {
		send := func(statuses ...int) {
			var requests sync.WaitGroup
			for _, status := range statuses {
				requests.Go(func() { c.Get("/"+zone, "X-Key: alice", fmt.Sprint("X-Status: ", status)) })
			}
			requests.Wait()
		}
		show := func(when string, used int64) {
			t.Helper()
			eventually(t, zone+": "+when, func() error {
				b, err := bucketOf(c, zone, "alice")
				if err != nil || len(b.Servers) == 0 || b.Ledger == nil {
					return fmt.Errorf("%+v: %w", b, err)
				}
				counted, listed := int64(0), int64(0)
				if st := b.Servers[0].State; st != nil {
					counted = *st.Used
				}
				var near adminapi.Near
				c.AdminJSON(http.MethodGet, "/rate_limit/near?zone="+zone, "", &near)
				for _, client := range near.Clients {
					listed = client.Used
				}
				return errors.Join(want("full", near.Full, 0), want("counted", counted, used), want("known to the ledger", b.Ledger.Used, used), want("listed", listed, used))
			})
		}
		send(200, 200)
		show("two requests", 2)
		send(500)
		show("one that failed", 2)
		send(200, 500, 500, 200, 500, 500, 200)
		show("some at the same time", 5)
		send(500, 500, 500, 500, 500, 500, 500)
		show("an outage", 5)
		if zone != "batch" {
			send(204)
			show("one that forgives", 0)
			send(200)
			show("another one", 1)
		}
		code, text := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/"+zone+"?key=alice", "", "")
		must(t, text, want("status", code, http.StatusOK))
		show("reset", 0)
	}
}
