package fleet

import (
	"encoding/json"
	"math"
	"net/url"
	"reflect"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// parts are the answers of Caddys a, b, ….
func parts[T any](answers ...T) (all []part[T]) {
	for i, answer := range answers {
		all = append(all, part[T]{string(rune('a' + i)), answer})
	}
	return all
}

// known is a fleet with a zone in a shared store and one in memory.
var known = &adminapi.Status{
	Zones:  []adminapi.Zone{{Name: "api", Store: "redis"}, {Name: "login", Store: "memory"}, {Name: "moved", Store: "redis", Rollout: &adminapi.Rollout{Store: "memory"}}},
	Stores: []adminapi.Store{shared("redis", "r:1"), {Name: "memory"}},
}

// shared is a store in Redis, with a server in shard a.
func shared(name, server string) adminapi.Store {
	return adminapi.Store{Name: name, Shared: true, Shards: []adminapi.Shard{{Name: "a", Found: true, Servers: []adminapi.Server{{Address: server}}}}}
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		g, _ := json.Marshal(got)
		w, _ := json.Marshal(want)
		t.Errorf("%s:\n%s\nwant\n%s", what, g, w)
	}
}

// TestStatusIsAddedUp: counts are sums with each one's share, servers are as the one sees them that sees
// the worst, and who has not answered is named.
func TestStatusIsAddedUp(t *testing.T) {
	lag := func(s float64) *float64 { return &s }
	buckets := func(n int) *int { return &n }
	of := func(allowed int64, last float64, state store.ServerState, breaker string, problems ...adminapi.Problem) adminapi.Status {
		return adminapi.Status{
			Instances: []adminapi.Instance{{Name: "host", Version: "v1", Uptime: 5}}, Problems: problems,
			Zones: []adminapi.Zone{{Name: "api", Store: "redis", Events: "5", Decisions: map[string]int64{"allowed": allowed, "refused": 1}, LastRefused: last}},
			Stores: []adminapi.Store{
				{Name: "redis", Shared: true, Ledger: &adminapi.Ledger{Buckets: 2, Unsent: 3}, Shards: []adminapi.Shard{{Name: "a", Found: true, Servers: []adminapi.Server{{
					Address: "r:1", State: state, Breakers: map[string]string{"checks": breaker}, Lag: lag(last), Latency: map[string]float64{"checks": last}, Queued: 1,
					Pools: map[string]adminapi.Pool{"checks": {Connections: 2}},
				}}}}},
				{Name: "memory", Buckets: buckets(7)},
			},
		}
	}
	away := adminapi.Problem{Kind: adminapi.ProblemNoPrimary, Store: "redis", Text: "away", Since: 9}
	earlier, key := away, adminapi.Problem{Kind: adminapi.ProblemDoubtfulKey, Text: "key"}
	earlier.Since = 4
	got := mergeStatus(parts(of(10, 1, store.ServerUp, "closed", away, key), of(30, 3, store.ServerLeftOut, "open", earlier)), asked{failed: []failure{{"c", "no route"}}})
	equal(t, "instances", got.Instances, []adminapi.Instance{
		{Name: "host", Address: "a", Version: "v1", Uptime: 5}, {Name: "host", Address: "b", Version: "v1", Uptime: 5}, {Address: "c", Error: "no route"},
	})
	away.Since, away.Addresses, key.Addresses = 4, []string{"a", "b"}, []string{"a"}
	equal(t, "problems", got.Problems, []adminapi.Problem{away, key})
	equal(t, "zones", got.Zones, []adminapi.Zone{{
		Name: "api", Store: "redis", Events: "5", Decisions: map[string]int64{"allowed": 40, "refused": 2}, LastRefused: 3,
		Shares: []adminapi.ZoneShare{{Address: "a", Decisions: map[string]int64{"allowed": 10, "refused": 1}}, {Address: "b", Decisions: map[string]int64{"allowed": 30, "refused": 1}}},
	}})
	equal(t, "stores", got.Stores, []adminapi.Store{
		{Name: "redis", Shared: true, Ledger: &adminapi.Ledger{Buckets: 4, Unsent: 6}, Shards: []adminapi.Shard{{Name: "a", Found: true, Servers: []adminapi.Server{{
			Address: "r:1", State: store.ServerLeftOut, Breakers: map[string]string{"checks": "open"}, Lag: lag(3), Latency: map[string]float64{"checks": 3}, Queued: 2,
			Pools: map[string]adminapi.Pool{"checks": {Connections: 4}},
		}}}}},
		{Name: "memory", Buckets: buckets(14)},
	})
}

// TestZonesThatDiffer in memory are a problem; those in shards are one of the Caddys themselves.
func TestZonesThatDiffer(t *testing.T) {
	for want, in := range []adminapi.Store{shared("s", "r:1"), {Name: "s"}} {
		of := func(definition string) adminapi.Status {
			return adminapi.Status{Zones: []adminapi.Zone{{Name: "api", Store: "s", Definition: definition}}, Stores: []adminapi.Store{in}}
		}
		got := mergeStatus(parts(of("5"), of("5"), of("6")), asked{}).Problems
		if len(got) != want || want == 1 && (got[0].Kind != adminapi.ProblemDisagreement || got[0].Addresses[0] != "c") {
			t.Errorf("store %+v: problems %+v", in, got)
		}
	}
}

// TestServerOfTwoRoles is a primary, because a Caddy charges it.
func TestServerOfTwoRoles(t *testing.T) {
	for _, roles := range [][]store.Role{{store.RolePrimary, store.RoleReplica}, {store.RoleReplica, store.RolePrimary}} {
		var answers []adminapi.Status
		for _, role := range roles {
			s := shared("s", "r:1")
			s.Shards[0].Servers[0].Role = role
			answers = append(answers, adminapi.Status{Stores: []adminapi.Store{s}})
		}
		if got := mergeStatus(parts(answers...), asked{}).Stores[0].Shards[0].Servers[0].Role; got != store.RolePrimary {
			t.Errorf("%v: the role is %s", roles, got)
		}
	}
}

// TestStoresOfOneName are the same one only if each Caddy has it in the same servers.
func TestStoresOfOneName(t *testing.T) {
	two := func(a, b string) adminapi.Store {
		s := shared("s", a)
		s.Shards = append(s.Shards, adminapi.Shard{Name: "b", Servers: []adminapi.Server{{Address: b}}})
		return s
	}
	unfound := adminapi.Store{Name: "s", Shared: true, Shards: []adminapi.Shard{{Name: "a"}}}
	by := func(role store.Role, s adminapi.Store) adminapi.Store {
		s.Shards[0].Servers = append(s.Shards[0].Servers, adminapi.Server{Address: "source:1", Role: role})
		return s
	}
	for _, c := range []struct {
		stores []adminapi.Store
		want   bool
	}{
		{[]adminapi.Store{shared("s", "r:1"), shared("s", "r:1")}, true},
		{[]adminapi.Store{two("r:1", "r:2"), two("r:1", "r:2"), shared("s", "r:1")}, true},
		{[]adminapi.Store{shared("s", "r:1"), shared("s", "r:2")}, false},
		{[]adminapi.Store{two("r:1", "r:2"), two("r:1", "r:3")}, false},
		{[]adminapi.Store{shared("s", "r:1"), {Name: "s"}}, false},
		{[]adminapi.Store{{Name: "s"}, shared("s", "r:1"), shared("s", "r:1")}, false},
		{[]adminapi.Store{shared("s", "r:1"), unfound}, false},
		{[]adminapi.Store{shared("s", "r:1"), shared("t", "r:2")}, true},
		{[]adminapi.Store{by(store.RoleSentinel, shared("s", "r:1")), by(store.RoleSentinel, shared("s", "r:2"))}, false},
		{[]adminapi.Store{by(store.RoleNode, shared("s", "r:1")), by(store.RoleNode, shared("s", "r:2"))}, false},
	} {
		var answers []adminapi.Status
		for _, s := range c.stores {
			answers = append(answers, adminapi.Status{Stores: []adminapi.Store{s}})
		}
		if got := mergeStatus(parts(answers...), asked{}).Stores[0].Shared; got != c.want {
			t.Errorf("stores %+v: shared is %v", c.stores, got)
		}
	}
}

func client(key string) adminapi.Client { return adminapi.Client{ClientKey: key} }

// TestTopIsAddedUp and cut to as many as were asked for, in one zone or in all.
func TestTopIsAddedUp(t *testing.T) {
	refused := func(key string, n int64, last float64) adminapi.RefusedClient {
		return adminapi.RefusedClient{Client: client(key), Store: "redis", Count: n, LastRefused: last}
	}
	one := adminapi.Top{Zone: "api", Since: 10, Refused: []adminapi.RefusedClient{refused("x", 5, 1), refused("y", 4, 2)}}
	other := adminapi.Top{Zone: "api", Since: 20, Refused: []adminapi.RefusedClient{refused("y", 3, 1), refused("z", 1, 1)}}
	a := asked{query: url.Values{"n": {"2"}}, failed: []failure{{"c", "no route"}}}
	y, x := refused("y", 7, 2), refused("x", 5, 1)
	y.Shares = []adminapi.ClientShare{{Address: "a", Count: 4}, {Address: "b", Count: 3}}
	x.Shares = []adminapi.ClientShare{{Address: "a", Count: 5}}
	want := adminapi.Top{Zone: "api", Since: 20, Refused: []adminapi.RefusedClient{y, x}, Unanswered: []string{"c: no route"}}
	equal(t, "one zone", mergeTop(parts(one, other), a), want)
	want.Unanswered = nil
	elsewhere := adminapi.Top{Zone: "a", Refused: []adminapi.RefusedClient{}}
	equal(t, "all zones", mergeTops(parts(adminapi.Tops{Zones: []adminapi.Top{one}}, adminapi.Tops{Zones: []adminapi.Top{other, elsewhere}}), a),
		adminapi.Tops{Zones: []adminapi.Top{elsewhere, want}, Unanswered: []string{"c: no route"}})
}

// TestNearKnowsWhatIsShared: a client of a shared store is one, with what each Caddy has seen, and one in the
// memory of each Caddy several.
func TestNearKnowsWhatIsShared(t *testing.T) {
	near := func(zone, in string, used int64) adminapi.Near {
		return adminapi.Near{Zone: zone, Percent: 80, Full: used, Clients: []adminapi.NearClient{{Client: client("x"), Store: in, Limit: 10, Used: used}}}
	}
	got := mergeNear(parts(near("api", "redis", 8), near("api", "redis", 9)), asked{known: known})
	equal(t, "shared", got, adminapi.Near{Zone: "api", Percent: 80, Full: 9, Clients: []adminapi.NearClient{{
		Client: client("x"), Store: "redis", Limit: 10, Used: 9, Seen: []adminapi.Sighting{{Address: "a", Used: 8}, {Address: "b", Used: 9}},
	}}})
	got = mergeNear(parts(near("login", "memory", 8), near("login", "memory", 9)), asked{known: known})
	equal(t, "in memory", got, adminapi.Near{Zone: "login", Percent: 80, Full: 17, Clients: []adminapi.NearClient{
		{Client: client("x"), Store: "memory", Limit: 10, Used: 9, Address: "b"}, {Client: client("x"), Store: "memory", Limit: 10, Used: 8, Address: "a"},
	}})
	if all := mergeNears(parts(adminapi.Nears{Zones: []adminapi.Near{near("api", "redis", 8)}}, adminapi.Nears{}), asked{known: known}); len(all.Zones) != 1 {
		t.Errorf("all are %+v", all)
	}
}

// TestHistoryIsAddedUp step by step, up to the last that all have: what no Caddy knows is unknown, and latencies weigh what was called.
func TestHistoryIsAddedUp(t *testing.T) {
	no := math.NaN()
	of := func(start int64, allowed, calls, latency adminapi.Series) adminapi.History {
		return adminapi.History{Range: "1h", Step: 10, Start: start, Zones: []adminapi.ZoneHistory{{Zone: "api", Allowed: allowed, StoreCalls: calls, StoreLatency: latency}}}
	}
	got := mergeHistory(parts(
		of(100, adminapi.Series{1, 2, no, no}, adminapi.Series{1, 1, no, 0}, adminapi.Series{0.1, 0.1, no, no}),
		of(110, adminapi.Series{10, 20, no, 40}, adminapi.Series{3, 0, no, 2}, adminapi.Series{0.3, no, no, 0.5}),
	), asked{failed: []failure{{"c", "no route"}}})
	want, _ := json.Marshal(of(110, adminapi.Series{12, 20, no}, adminapi.Series{4, 0, 0}, adminapi.Series{0.25, no, no}).Zones[0])
	if text, err := json.Marshal(got.Zones[0]); err != nil || string(text) != string(want) || got.Start != 110 || got.Step != 10 || got.Partial != 0 || len(got.Unanswered) != 1 {
		t.Errorf("%+v: %s, want %s", got, text, want)
	}
	// A step that is not over is as long as for the Caddy that knows most of it; one that some lack is left out.
	last := func(steps int, partial int64) adminapi.History {
		h := of(100, make(adminapi.Series, steps), make(adminapi.Series, steps), make(adminapi.Series, steps))
		h.Partial = partial
		return h
	}
	for _, c := range []struct {
		a, b           adminapi.History
		steps, partial int
	}{
		{last(3, 4), last(3, 7), 3, 7}, {last(3, 4), last(3, 0), 3, 0}, {last(3, 4), last(2, 0), 2, 0}, {last(3, 4), last(2, 6), 2, 0},
		{last(3, 4), adminapi.History{Range: "1h", Step: 10}, 3, 4},
	} {
		if got := mergeHistory(parts(c.a, c.b), asked{}); len(got.Zones[0].StoreCalls) != c.steps || got.Partial != int64(c.partial) {
			t.Errorf("%d steps, the last of %d seconds, want %d and %d", len(got.Zones[0].StoreCalls), got.Partial, c.steps, c.partial)
		}
	}
}

// TestBucketsOfTheFleet have each server once, or the memory of each Caddy.
func TestBucketsOfTheFleet(t *testing.T) {
	of := func(address string, used int64) adminapi.Found {
		b := adminapi.Bucket{
			BucketName: adminapi.BucketName{Client: client("x")}, Copies: adminapi.Copies{Servers: []adminapi.Copy{{Address: address, Role: store.RolePrimary}}},
			Ledger: &adminapi.Account{Used: used, Unsent: used}, LastRefused: float64(used), Overrides: []adminapi.Override{{Kind: store.OverrideBlock}},
		}
		return adminapi.Found{Zones: []adminapi.Buckets{{Zone: "api", Store: "s", Buckets: []adminapi.Bucket{b}}}, Errors: []string{"slow"}}
	}
	for address, servers := range map[string][]string{"r:1": {"r:1"}, "": {"a", "b"}} {
		got := mergeFound(parts(of(address, 3), of(address, 5)), asked{failed: []failure{{"c", "no route"}}})
		b := got.Zones[0].Buckets[0]
		var names []string
		for _, c := range b.Servers {
			names = append(names, c.Address)
		}
		equal(t, "servers", names, servers)
		equal(t, "ledger", b.Ledger, &adminapi.Account{Used: 5, Unsent: 8})
		if b.LastRefused != 5 || len(b.Overrides) != 1 {
			t.Errorf("the bucket is %+v", b)
		}
		equal(t, "errors", [][]string{got.Unanswered, got.Errors}, [][]string{{"c: no route"}, {"a: slow", "b: slow"}})
	}
}

// TestCopiesThatSayMost are kept: a Caddy that has no answer, or does not know the limit, hides nothing.
func TestCopiesThatSayMost(t *testing.T) {
	limit, used := int64(10), int64(3)
	failed, vague := adminapi.Copy{Address: "r:1", Error: "timeout"}, adminapi.Copy{Address: "r:1", State: &adminapi.State{Used: &used}}
	whole := adminapi.Copy{Address: "r:1", State: &adminapi.State{Limit: &limit, Used: &used}}
	for _, c := range []struct {
		said []adminapi.Copy
		want adminapi.Copy
	}{
		{[]adminapi.Copy{failed, vague, whole}, whole}, {[]adminapi.Copy{whole, vague, failed}, whole}, {[]adminapi.Copy{failed, vague}, vague}, {[]adminapi.Copy{failed, failed}, failed},
	} {
		var answers []adminapi.Buckets
		for _, said := range c.said {
			copies := adminapi.Copies{Shard: "a", Servers: []adminapi.Copy{said}}
			answers = append(answers, adminapi.Buckets{Buckets: []adminapi.Bucket{{BucketName: adminapi.BucketName{Client: client("x")}, Copies: copies, Previous: &copies}}})
		}
		want := adminapi.Copies{Shard: "a", Servers: []adminapi.Copy{c.want}}
		b := mergeBuckets(parts(answers...), asked{}).Buckets[0]
		equal(t, "copies", b.Copies, want)
		equal(t, "former copies", b.Previous, &want)
	}
}

// TestMatchesOfTheFleet are one list, in which each client is once.
func TestMatchesOfTheFleet(t *testing.T) {
	match := func(key string, used int64) adminapi.Match {
		return adminapi.Match{Zone: "api", NearClient: adminapi.NearClient{Client: client(key), Store: "redis", Limit: 10, Used: used}}
	}
	got := mergeMatches(parts(
		adminapi.Matches{Clients: []adminapi.Match{match("b", 3), match("c", 1)}, Unlisted: []string{"y", "x"}},
		adminapi.Matches{Clients: []adminapi.Match{match("a", 1), match("b", 4)}, Unlisted: []string{"x"}, More: true},
	), asked{failed: []failure{{"c", "no route"}}})
	equal(t, "matches", got, adminapi.Matches{
		Clients: []adminapi.Match{match("a", 1), match("b", 4), match("c", 1)}, More: true, Unlisted: []string{"x", "y"}, Unanswered: []string{"c: no route"},
	})
}

// TestOverridesOfTheFleet are listed once, and who lacks one that is in memory is seen.
func TestOverridesOfTheFleet(t *testing.T) {
	o := func(in, key string, since float64) adminapi.Override {
		return adminapi.Override{Kind: store.OverrideBlock, Zone: "z", Store: in, Client: client(key), Since: since}
	}
	got := mergeOverrides(parts(
		adminapi.Overrides{Overrides: []adminapi.Override{o("redis", "x", 1), o("memory", "x", 1), o("memory", "y", 1)}},
		adminapi.Overrides{Overrides: []adminapi.Override{o("memory", "x", 2)}},
	), asked{known: known})
	y := o("memory", "y", 1)
	y.Addresses = []string{"a"}
	equal(t, "overrides", got.Overrides, []adminapi.Override{o("redis", "x", 1), o("memory", "x", 2), y})
	c := func(at float64, key string) adminapi.AuditedChange {
		return adminapi.AuditedChange{At: at, Client: client(key)}
	}
	audit := mergeAudit(parts(adminapi.Audit{Changes: []adminapi.AuditedChange{c(3, "x"), c(1, "x")}}, adminapi.Audit{Changes: []adminapi.AuditedChange{c(3, "x"), c(2, "y")}}), asked{})
	equal(t, "audit", audit.Changes, []adminapi.AuditedChange{c(3, "x"), c(2, "y"), c(1, "x")})
}

// TestSettingsThatDiffer in the memory of each Caddy are listed with who has which, in all lists; of a shared
// store the latest is listed.
func TestSettingsThatDiffer(t *testing.T) {
	half := 50.0
	of := func(in string, since, until float64, events int64, enforce *float64) adminapi.Override {
		return adminapi.Override{Kind: store.OverrideZone, Zone: "z", Store: in, Since: since, Until: until, Events: events, Enforce: enforce}
	}
	at := func(o adminapi.Override, addresses ...string) adminapi.Override {
		o.Addresses = addresses
		return o
	}
	for name, c := range map[string]struct{ a, b, c, want []adminapi.Override }{
		"alike, for some time": {
			[]adminapi.Override{of("memory", 1, 101, 5, nil)}, []adminapi.Override{of("memory", 3, 103, 5, nil)}, []adminapi.Override{of("memory", 2, 102, 5, nil)},
			[]adminapi.Override{of("memory", 3, 103, 5, nil)},
		},
		"one differs": {
			[]adminapi.Override{of("memory", 1, 0, 5, nil)}, []adminapi.Override{of("memory", 2, 0, 5, &half)}, []adminapi.Override{of("memory", 3, 0, 5, nil)},
			[]adminapi.Override{at(of("memory", 3, 0, 5, nil), "a", "c"), at(of("memory", 2, 0, 5, &half), "b")},
		},
		"another end": {
			[]adminapi.Override{of("memory", 1, 0, 5, nil)}, []adminapi.Override{of("memory", 1, 100, 5, nil)}, []adminapi.Override{of("memory", 1, 1000, 5, nil)},
			[]adminapi.Override{at(of("memory", 1, 0, 5, nil), "a"), at(of("memory", 1, 100, 5, nil), "b"), at(of("memory", 1, 1000, 5, nil), "c")},
		},
		"one has it": {nil, []adminapi.Override{of("memory", 1, 0, 5, nil)}, nil, []adminapi.Override{at(of("memory", 1, 0, 5, nil), "b")}},
		"shared": {
			[]adminapi.Override{of("redis", 1, 0, 5, nil)}, []adminapi.Override{of("redis", 2, 0, 6, nil)}, []adminapi.Override{of("redis", 1, 0, 5, nil)},
			[]adminapi.Override{of("redis", 2, 0, 6, nil)},
		},
	} {
		lists := [][]adminapi.Override{c.a, c.b, c.c}
		var overrides []adminapi.Overrides
		var buckets []adminapi.Buckets
		var statuses []adminapi.Status
		for _, list := range lists {
			overrides = append(overrides, adminapi.Overrides{Overrides: list})
			buckets = append(buckets, adminapi.Buckets{Buckets: []adminapi.Bucket{{BucketName: adminapi.BucketName{Client: client("x")}, Overrides: list}}})
			zone := adminapi.Zone{Name: "z", Store: c.want[0].Store}
			if len(list) > 0 {
				zone.Rule = &list[0]
			}
			statuses = append(statuses, adminapi.Status{Zones: []adminapi.Zone{zone}, Stores: known.Stores})
		}
		equal(t, name, mergeOverrides(parts(overrides...), asked{known: known}).Overrides, c.want)
		equal(t, name+", of a client", mergeBuckets(parts(buckets...), asked{known: known}).Buckets[0].Overrides, c.want)
		zone, isOne := mergeStatus(parts(statuses...), asked{}).Zones[0], len(c.want[0].Addresses) == 0
		if (zone.Rule != nil) != isOne {
			t.Errorf("%s: the rule of all is %+v", name, zone.Rule)
		}
		for i, share := range zone.Shares {
			if isTold := share.Rule != nil; isTold != (!isOne && len(lists[i]) > 0) || isTold && share.Rule != &lists[i][0] {
				t.Errorf("%s: the rule of share %d is %+v", name, i, share.Rule)
			}
		}
	}
}

// TestNothingIsAList and not null: the page and scripts go through it.
func TestNothingIsAList(t *testing.T) {
	for _, empty := range []any{
		mergeStatus(parts(adminapi.Status{}), asked{}), mergeTop(parts(adminapi.Top{}), asked{}), mergeTops(parts(adminapi.Tops{}), asked{}),
		mergeNear(parts(adminapi.Near{}), asked{}), mergeNears(parts(adminapi.Nears{}), asked{}), mergeHistory(parts(adminapi.History{}), asked{}),
		mergeFound(parts(adminapi.Found{}), asked{}), mergeMatches(parts(adminapi.Matches{}), asked{}), mergeBuckets(parts(adminapi.Buckets{}), asked{}), mergeResets(parts(adminapi.Resets{}), asked{}),
		mergeOverrides(parts(adminapi.Overrides{}), asked{}), mergeAudit(parts(adminapi.Audit{}), asked{}),
	} {
		if text, err := json.Marshal(empty); err != nil || json.Valid(text) && containsNull(text) {
			t.Errorf("%T is %s, %v", empty, text, err)
		}
	}
}

func containsNull(text []byte) bool {
	var fields map[string]any
	_ = json.Unmarshal(text, &fields) // it is valid
	for _, v := range fields {
		if v == nil {
			return true
		}
	}
	return false
}

// TestSourceAtTheAddressOfAServer stays apart: it has no part in the state of the server.
func TestSourceAtTheAddressOfAServer(t *testing.T) {
	server := adminapi.Server{Address: "r:1", Role: store.RolePrimary, State: store.ServerUp}
	source := adminapi.Server{Address: "r:1", Role: store.RoleNode, State: store.ServerForeign}
	if got := addServers([]adminapi.Server{server}, []adminapi.Server{source}); len(got) != 2 || got[0].State != store.ServerUp {
		t.Errorf("got %+v", got)
	}
}
