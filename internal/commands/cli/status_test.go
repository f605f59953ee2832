package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestPagesFitTheTerminal in both directions, from the first line on.
func TestPagesFitTheTerminal(t *testing.T) {
	const page = "first\nsecond line\nthird\nfourth\n"
	for of, want := range map[size]string{
		{}:                      page,
		{80, 24}:                page,
		{80, 5}:                 page,
		{80, 4}:                 "first\nsecond line\nand 2 more lines\n",
		{80, 3}:                 "first\nand 3 more lines\n",
		{80, 1}:                 "first\nand 3 more lines\n",
		{11, 0}:                 page,
		{10, 0}:                 "first\nsecond li…\nthird\nfourth\n",
		{width: 7, height: 4}:   "first\nsecond…\nand 2 …\n",
		{width: 1, height: 100}: "…\n…\n…\n…\n",
	} {
		if got := fit(page, of); got != want {
			t.Errorf("in %+v it is %q, want %q", of, got, want)
		}
	}
	if got := fit("ααα\n", size{width: 2}); got != "α…\n" {
		t.Errorf("cut inside a character: %q", got)
	}
}

// fixed answers each call with the same.
type fixed struct{ answer any }

func (f fixed) Call(context.Context, string, string, []byte) (int, []byte, error) {
	text, err := json.Marshal(f.answer)
	return http.StatusOK, text, err
}

func shownOf(t *testing.T, answer any, show func(s *session) error) string {
	t.Helper()
	out := new(bytes.Buffer)
	if err := show(&session{api: fixed{answer}, ctx: t.Context(), out: out}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestTopOfAFleet has the client that was refused most first, whatever its zone, with the share of each
// Caddy; without a terminal all are shown.
func TestTopOfAFleet(t *testing.T) {
	var all []adminapi.RefusedClient
	for i := range 60 {
		all = append(all, adminapi.RefusedClient{Client: adminapi.Client{ClientKey: fmt.Sprint("k", i)}, Count: int64(100 - i)})
	}
	most := adminapi.RefusedClient{Client: adminapi.Client{ClientKey: "most"}, Count: 400, Shares: []adminapi.ClientShare{{Address: "a:1", Count: 300}, {Address: "b:1", Count: 100}}}
	answer := adminapi.Tops{Zones: []adminapi.Top{{Zone: "api", Since: 60, Refused: all}, {Zone: "login", Refused: []adminapi.RefusedClient{most}}}, Unanswered: []string{"c:1: no route"}}
	lines := strings.Split(shownOf(t, answer, func(s *session) error { return showTop(s, url.Values{}) }), "\n")
	if len(lines) != 65 || lines[0] != "refused most in the last 1m0s" || lines[1] != "no answer of c:1: no route" ||
		!strings.HasPrefix(lines[3], "login  400") || !strings.HasSuffix(lines[3], "a:1 75%, b:1 25%") || !strings.Contains(lines[63], "k59") {
		t.Errorf("%d lines: %s", len(lines), strings.Join(lines, "\n"))
	}
}

// TestNearOfAFleet has the Caddys that have seen a client of a shared store near its limit, says what is not
// known, and names the Caddy whose memory has a client. Of one Caddy it says none of that.
func TestNearOfAFleet(t *testing.T) {
	shared := adminapi.NearClient{Client: adminapi.Client{ClientKey: "x"}, Store: "redis", Limit: 10, Used: 9, Seen: []adminapi.Sighting{{Address: "a:1", Used: 8}, {Address: "b:1", Used: 9}}}
	own := adminapi.NearClient{Client: adminapi.Client{ClientKey: "y"}, Store: "memory", Limit: 10, Used: 8, Address: "a:1"}
	show := func(clients ...adminapi.NearClient) string {
		text := shownOf(t, nil, func(s *session) error {
			s.showNear([]adminapi.Near{{Zone: "api", Clients: clients}})
			return nil
		})
		return strings.Join(strings.Fields(text), " ")
	}
	text := show(shared, own)
	for _, part := range []string{"CLIENT SEEN BY", "9 10 - redis x a:1 8, b:1 9", "8 10 - memory at a:1 y -", "how much each has admitted is not known"} {
		if !strings.Contains(text, part) {
			t.Errorf("it lacks %q: %s", part, text)
		}
	}
	if text := show(own); strings.Contains(text, "SEEN") {
		t.Errorf("without a shared store: %s", text)
	}
}

// TestStatusOfAFleet lists the Caddys, what each decides, and where a problem is.
func TestStatusOfAFleet(t *testing.T) {
	text := shownOf(t, adminapi.Status{
		Instances: []adminapi.Instance{{Name: "web-1", Address: "a:1", Version: "v1", Uptime: 90}, {Address: "c:1", Error: "no route"}},
		Problems:  []adminapi.Problem{{Store: "main", Text: "away", Addresses: []string{"a:1", "b:1"}}, {Text: "5 more"}},
		Zones: []adminapi.Zone{{Name: "api", Store: "main", Decisions: map[string]int64{"allowed": 4}, Shares: []adminapi.ZoneShare{
			{Address: "a:1", Decisions: map[string]int64{"allowed": 3}}, {Address: "b:1", Decisions: map[string]int64{"allowed": 1}},
		}}},
	}, showStatus)
	words := strings.Join(strings.Fields(text), " ")
	for _, part := range []string{
		"problem of store main: away (a:1, b:1)", "problem: 5 more", "a:1 web-1 v1 1m30s", "c:1 does not answer: no route", "api a:1 75% 3", "api b:1 25% 1",
	} {
		if !strings.Contains(words, part) {
			t.Errorf("it lacks %q:\n%s", part, text)
		}
	}
}

// TestWarnings: a change that was made while a shard of a resharding was away is told as made, with the shard
// that lacks it in a line of its own.
func TestWarnings(t *testing.T) {
	o := adminapi.Override{
		Kind: store.OverrideBlock, Zone: "api", Store: "main", Client: adminapi.Client{ClientKey: "x"},
		Warning: "store main does not have the change on all shards: shard old: away",
	}
	begun := o
	begun.Since = 1
	const want = "  warning: store main does not have the change on all shards: shard old: away\n"
	for made, show := range map[string]func(s *session){
		"block: x in zone api of store main\n" + want: func(s *session) {
			s.showChanges(http.MethodPost, &adminapi.Overrides{Overrides: []adminapi.Override{begun}})
		},
		"no block any more: x in zone api of store main\n" + want: func(s *session) {
			s.showChanges(http.MethodDelete, &adminapi.Overrides{Overrides: []adminapi.Override{o}})
		},
		"+ block api x\n" + want + "1 changed, 0 as they are\n": func(s *session) {
			s.showImport(&adminapi.Imported{Changes: []adminapi.ImportedChange{{After: &begun, Warning: o.Warning}}}, false)
		},
	} {
		got := shownOf(t, nil, func(s *session) error {
			show(s)
			return nil
		})
		if got != made {
			t.Errorf("got %q, want %q", got, made)
		}
	}
}

// TestRulesThatDiffer say where each holds, and are not exported as those of all.
func TestRulesThatDiffer(t *testing.T) {
	half := 50.0
	rule := adminapi.Override{Kind: store.OverrideZone, Zone: "api", Store: "memory", Enforce: &half, Addresses: []string{"b:1"}}
	zone := adminapi.Zone{Name: "api", Store: "memory", Events: "10", Enforce: 100, Shares: []adminapi.ZoneShare{{Address: "a:1"}, {Address: "b:1", Rule: &rule}}}
	overrides := adminapi.Overrides{Overrides: []adminapi.Override{rule}}
	bucket := adminapi.Buckets{Zone: "api", Store: "memory", Buckets: []adminapi.Bucket{{Overrides: overrides.Overrides}}}
	for want, shows := range map[string]func(s *session) error{
		"100% (50% at b:1)":            func(s *session) error { return showStatus(s) },
		"enforce 50% at b:1":           func(s *session) error { _, err := listRules(s, url.Values{}); return err },
		"\nenforce 50% at b:1\n":       func(s *session) error { s.showBuckets(&bucket); return nil },
		"enforce 50% at b:1: zone api": func(s *session) error { s.showChanges(http.MethodPost, &overrides); return nil },
	} {
		answer := any(overrides)
		if strings.HasPrefix(want, "100%") {
			answer = adminapi.Status{Zones: []adminapi.Zone{zone}}
		}
		if out := shownOf(t, answer, shows); !strings.Contains(out, want) {
			t.Errorf("%q is not in %s", want, out)
		}
	}
	out := new(bytes.Buffer)
	if _, err := exportRules(&session{api: fixed{overrides}, ctx: t.Context(), out: out}, url.Values{}); err == nil || !strings.Contains(err.Error(), "zone api: enforce 50% at b:1") {
		t.Errorf("the export: %v, %s", err, out)
	}
}
