//go:build check

package ui_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/fleet"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// away is a Caddy that does not answer.
type away struct{}

func (away) Call(context.Context, string, string, []byte) (int, []byte, error) {
	return 0, nil, errors.New("no route")
}

// startFleet serves the page with the API of two Caddys, a and b.
func startFleet(t *testing.T) (a, b *scripted, page string) {
	t.Helper()
	a, b = newScripted(), newScripted()
	return a, b, servePage(t, fleet.New([]fleet.Member{{Address: "a", Caller: a}, {Address: "b", Caller: b}}))
}

// TestSearchInFleet finds the clients that any of several Caddys knows.
func TestSearchInFleet(t *testing.T) {
	t.Parallel()
	one, other, page := startFleet(t)
	nothing := scriptedBuckets("al")
	nothing.Buckets[0].Servers[0].State = nil
	for api, name := range map[*scripted]string{one: "alice", other: "albert"} {
		api.answer("GET clients?name=al", adminapi.Found{Zones: []adminapi.Buckets{nothing}})
		api.answer("GET clients?prefix=al", adminapi.Matches{Clients: []adminapi.Match{
			{Zone: "api", NearClient: adminapi.NearClient{Client: scriptedClient(name), Store: "default", Limit: 10, Used: 3}},
		}})
	}
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page), chromedp.SendKeys("#name", "al\r"))
	b.wantTexts("those of both", "#results tbody button", "{header.X-Key} albert\n{header.X-Key} alice\n{header.X-Key} al")
	other.answerWith("GET clients?prefix=al", errorAnswer("slow"))
	b.do(chromedp.SendKeys("#name", "\r"))
	b.wantTexts("who has not answered", "#results p", "b: slow")
	b.satisfied("search")
}

// TestPageOfFleet shows who does not answer, wherever its part is missing, and whose a problem is.
func TestPageOfFleet(t *testing.T) {
	t.Parallel()
	one, other := newScripted(), newScripted()
	answer := func(api *scripted, allowed, events int64) {
		zone := scriptedZone("default", map[string]int64{"allowed": allowed, "blocked": 2})
		zone.Enforce, zone.Rollout = 50, &adminapi.Rollout{Store: "next", Percent: 5}
		enforce, moved := 100.0, 25.0
		zone.Rule = &adminapi.Override{Kind: store.OverrideZone, Zone: "api", Events: events, Enforce: &enforce, Rollout: &moved}
		api.answer("GET ", adminapi.Status{
			Instances: []adminapi.Instance{{Name: "host", Uptime: 60}}, Stores: []adminapi.Store{}, Zones: []adminapi.Zone{zone},
			Problems: []adminapi.Problem{{Kind: adminapi.ProblemEmptyKey, Zone: "api", Text: "the key is empty"}},
		})
	}
	answer(one, 1200, 2000)
	answer(other, 300, 2000)
	page := servePage(t, fleet.New([]fleet.Member{{Address: "a", Caller: one}, {Address: "b", Caller: other}, {Address: "c", Caller: away{}}}))
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.wantTexts("the Caddys", "#instances li", "host (a), up 1 min\nhost (b), up 1 min\nc does not answer")
	b.wantTexts("the summary", "#summary.bad", "1 zone, trouble in api, Caddy c")
	b.wantTexts("the problems", "#problems li", "Caddy c is not part of this: no route.\nthe key is empty (a, b).")
	b.wantTexts("the trouble", ".trouble", "empty keys")
	b.wantTexts("what holds", "#zones details > p:first-of-type", "2,000 (set; config 10) per 1 min, sliding window, store default, 25% (set; config 5%) in next, enforced for 100% (set; config 50%)")
	b.wantTexts("the shares", ".shares li", "a: 1,200 allowed, 2 refused\nb: 300 allowed, 2 refused")
	for _, note := range []string{"charts-note", "top-note", "near-note"} {
		b.await(note, `document.getElementById("`+note+`").textContent.startsWith("Not part of this: c. ")`)
	}
	answer(other, 300, 3000)
	b.await("rules that differ", `document.querySelector("#zones details > p").textContent.startsWith("10 (2,000 at a) (3,000 at b) per 1 min, sliding window, store default, 5% (25% at a) (25% at b) in next, enforced for 50% (100% at a)")`)
	b.satisfied("fleet")
}

// TestListsOfFleet have each Caddy's part in the refusals of a client, what each has seen of one that is near
// its limit, and whose memory counts it.
func TestListsOfFleet(t *testing.T) {
	t.Parallel()
	one, other, page := startFleet(t)
	for api, n := range map[*scripted]int64{one: 3, other: 1} {
		shared := adminapi.Store{Name: "redis", Shared: true, Shards: []adminapi.Shard{{Name: "a", Found: true, Servers: []adminapi.Server{{Address: "r:1"}}}}}
		api.answer("GET ", adminapi.Status{
			Instances: []adminapi.Instance{{Name: "host", Uptime: 60}}, Stores: []adminapi.Store{shared, {Name: "memory"}}, Problems: []adminapi.Problem{},
			Zones: []adminapi.Zone{scriptedZone("redis", nil)},
		})
		api.answer("GET top?n=100", adminapi.Tops{Zones: []adminapi.Top{{Zone: "api", Since: 60, Refused: []adminapi.RefusedClient{{Client: scriptedClient("x"), Store: "redis", Count: n}}}}})
		api.answer("GET near?n=100", adminapi.Nears{Zones: []adminapi.Near{{Zone: "api", Percent: 80, Clients: []adminapi.NearClient{
			{Client: scriptedClient("y"), Store: "redis", Limit: 10, Used: 10 - n},
		}}, {Zone: "login", Percent: 80, Clients: []adminapi.NearClient{{Client: scriptedClient("z"), Store: "memory", Limit: 10, Used: 8}}}}})
	}
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.wantTexts("the refusals", "#top .each", "by a 75%, b 25%")
	b.await("what was seen", `[...document.querySelectorAll("#near .each")].map(e => e.textContent).sort().join("; ") === "at a; at b; seen by a 7, b 9"`)
	b.await("what is not known", `/how much each has admitted is not/.test(document.getElementById("near-note").textContent)`)
	b.satisfied("lists")
}

// TestRatesOfFleet are of the Caddys that are in both of the last two answers, and have not begun anew.
func TestRatesOfFleet(t *testing.T) {
	t.Parallel()
	_, page := startScripted(t)
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("the page", `document.querySelector('[data-zone=api]')`)
	got := run[[]string](b, `(() => {
		const share = (address, allowed, unchecked) => ({address, decisions: {allowed, error_allowed: unchecked, would_refuse: 0, refused: 0, error_refused: 0, blocked: 0}});
		const card = new Card({name: "x", store: "s"});
		return [
			[share("a", 100, 0), share("b", 5000, 9000)],
			[share("a", 110, 0)],
			[share("a", 120, 0), share("b", 6000, 9500)],
			[share("a", 130, 0), share("b", 6020, 9500)],
			[share("a", 0, 0), share("b", 6040, 9500)],
			[share("a", 30, 0), share("b", 6060, 9500)],
		].map((shares, i) => {
			card.note({shares}, 1000 * i);
			return card.rates.allowed + " " + card.rates.unchecked;
		});
	})()`)
	if want := []string{"0 0", "10 0", "10 0", "30 0", "20 0", "50 0"}; !slices.Equal(got, want) {
		t.Errorf("allowed and unchecked a second are %q, want %q", got, want)
	}
}

// TestTroubles have words of their own for kinds that there are, and those of a store say no more.
func TestTroubles(t *testing.T) {
	t.Parallel()
	_, page := startScripted(t)
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("the page", `document.querySelector('[data-zone=api]')`)
	for _, kind := range run[[]string](b, `Object.keys(troubles)`) {
		if !slices.Contains(adminapi.ProblemKinds, adminapi.ProblemKind(kind)) {
			t.Errorf("there is no kind %q", kind)
		}
	}
	got := run[[]string](b, `[{kind: "doubtful_key", zone: "api"}, {kind: "one_key", zone: "api"}, {kind: "new", zone: "api"}, {kind: "no_primary"}].map(troubleOf)`)
	if want := []string{"doubtful key", "one key for nearly all", "has a problem", "its store has problems"}; !slices.Equal(got, want) {
		t.Errorf("the words are %q, want %q", got, want)
	}
}
