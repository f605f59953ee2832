package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// asks calls the admin API about a zone.
func (c *importedConfig) asks(t *testing.T, call call, method, zone, query string) (any, error) {
	t.Helper()
	r := httptest.NewRequest(method, "/rate_limit/?"+query, nil)
	r.SetPathValue("zone", zone)
	return call(c, r)
}

// asked returns the override that a call changes, or the error that it has to have.
func (c *importedConfig) asked(t *testing.T, call call, method, zone, query string, status int, says string) (o adminapi.Override) {
	t.Helper()
	answer, err := c.asks(t, call, method, zone, query)
	if got := statusOf(err, http.StatusOK); got != status || err != nil && !strings.Contains(err.Error(), says) {
		t.Fatalf("%s %s %s: %v, want status %d and %q", method, zone, query, err, status, says)
	}
	if err == nil {
		o = answer.(adminapi.Overrides).Overrides[0]
	}
	return o
}

// keeps puts an override into the store, such as one that was set under another config.
func (c *importedConfig) keeps(t *testing.T, o store.Override) {
	t.Helper()
	o.Since, o.Until = time.Now().UnixMicro(), store.NoEnd
	if err := c.stores[0].SetOverride(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

// shown returns what the list of overrides says of each, in order.
func (c *importedConfig) shown(t *testing.T, query string) (all []string) {
	t.Helper()
	answer, err := c.asks(t, overrides, http.MethodGet, "", query)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range answer.(adminapi.Overrides).Overrides {
		all = append(all, fmt.Sprintf("%s %s %d %d", o.Kind, o.Zone, o.Events, o.Burst))
	}
	return all
}

// TestLimitBeyondTheAlgorithm cannot be set; what was set under another config is shown as it is enforced, and
// changes of other settings leave it.
func TestLimitBeyondTheAlgorithm(t *testing.T) {
	const log, years = "events 100001: it must be from 1 to 100000 with sliding_log", "would take more than 100 years"
	for _, wrong := range []struct {
		call              call
		zone, query, says string
	}{
		{setZone, "log", "events=100001", log},
		{setLimit, "log", "key=a&events=100001", log},
		{grant, "log", "key=a&events=100001", log},
		{setZone, "slow", "events=1&burst=4503599627370496", years},
		{setLimit, "slow", "key=a&events=1&burst=4503599627370496", years},
	} {
		c := newImportedConfig(t)
		c.asked(t, wrong.call, http.MethodPost, wrong.zone, wrong.query, http.StatusBadRequest, wrong.says)
	}
	c, percent := newImportedConfig(t), 50.0
	c.keeps(t, store.Override{Kind: store.OverrideZone, Zone: "log", Events: 5_000_000, Enforce: &percent})
	c.keeps(t, store.Override{Kind: store.OverrideZone, Zone: "slow", Events: 1, Burst: store.MaxEvents})
	want := []string{"zone log 100000 0", "zone slow 1 876000"}
	if got := c.shown(t, ""); !slices.Equal(got, want) {
		t.Errorf("shown are %q, want %q", got, want)
	}
	if made, err := c.imports(t, `{"kind":"zone","zone":"log","store":"own","events":100000,"enforce":50}`, ""); err != nil || made.Unchanged != 1 {
		t.Errorf("an import of what is shown: %+v, %v", made, err)
	}
	if o := c.asked(t, setZone, http.MethodPost, "log", "enforce=25", http.StatusOK, ""); o.Events != 100_000 || *o.Enforce != 25 {
		t.Errorf("got %+v", o)
	}
	var status adminapi.Zone
	for _, l := range c.limiters {
		for _, z := range l.Zones {
			if z.Name == "log" {
				status = statusOfZone(l, z)
			}
		}
	}
	if status.Rule == nil || status.Rule.Events != 100_000 {
		t.Errorf("the status has %+v", status.Rule)
	}
}

// TestSettingOfAnotherConfig neither keeps others from being changed nor an import from being made, which says
// that it has no effect. It cannot be set itself.
func TestSettingOfAnotherConfig(t *testing.T) {
	c, percent := newImportedConfig(t), 50.0
	c.keeps(t, store.Override{Kind: store.OverrideZone, Zone: "log", Events: 30, Burst: 5, Rollout: &percent})
	if o := c.asked(t, setZone, http.MethodPost, "log", "enforce=25&events=31", http.StatusOK, ""); o.Burst != 5 || *o.Rollout != 50 || o.Events != 31 {
		t.Errorf("got %+v", o)
	}
	c.asked(t, setZone, http.MethodPost, "log", "burst=5", http.StatusBadRequest, "has no burst")
	c.asked(t, setZone, http.MethodPost, "log", "rollout=5", http.StatusBadRequest, "names the other store")
	c.asked(t, unsetZone, http.MethodDelete, "log", "settings=enforce", http.StatusOK, "")
	c.asked(t, unsetZone, http.MethodDelete, "log", "settings=burst", http.StatusOK, "")
	made, err := c.imports(t, `{"kind":"zone","zone":"log","store":"own","events":30,"burst":5},{"kind":"zone","zone":"slow","store":"own","rollout":5}`, "")
	if err != nil || len(made.Changes) != 2 || !strings.Contains(made.Changes[0].Warning, "has no burst") || !strings.Contains(made.Changes[1].Warning, "rollout: the handler") {
		t.Errorf("%+v, %v", made, err)
	}
}

// TestRolloutIsSetOfTheFirstZone of a handler, whichever others have the zone; status names it with the others.
func TestRolloutIsSetOfTheFirstZone(t *testing.T) {
	c := newImportedConfig(t)
	first := c.limiters[0]
	both := first.Config
	both.Zones = []*limiter.Zone{c.limiters[1].Zones[0], first.Zones[0]}
	c.limiters = []*limiter.Limiter{limiter.New(both), first}
	c.asked(t, setZone, http.MethodPost, "api", "rollout=5", http.StatusOK, "")
	c.limiters = c.limiters[:1]
	c.asked(t, setZone, http.MethodPost, "api", "rollout=5", http.StatusBadRequest, "the first zone of the handler decides, which is slow")
	if own, other := statusOfZone(c.limiters[0], both.Zones[0]), statusOfZone(c.limiters[0], both.Zones[1]); own.Rollout.By != "" || other.Rollout.By != "slow" {
		t.Errorf("status has %+v and %+v", own.Rollout, other.Rollout)
	}
}

// TestRuleHasOneEnd, which a change gives it: without a time span none. It is an error if that is another one for
// what the change does not name.
func TestRuleHasOneEnd(t *testing.T) {
	type step struct {
		query  string
		status int
		lasts  bool
	}
	for name, steps := range map[string][]step{
		"an end":             {{"enforce=25", 200, false}, {"events=200&for=1h", 409, false}, {"events=200&enforce=25&for=1h", 200, true}},
		"another end":        {{"events=5&enforce=25&for=1h", 200, true}, {"events=6&for=2h", 409, false}, {"events=6&enforce=30&for=2h", 200, true}},
		"no end any more":    {{"events=5&enforce=25&for=1h", 200, true}, {"events=6", 409, false}, {"events=6&enforce=25", 200, false}},
		"renewed":            {{"events=5&for=1h", 200, true}, {"events=6", 200, false}, {"events=7&for=1h", 200, true}},
		"all of it":          {{"events=5&enforce=25", 200, false}, {"for=1h", 200, true}},
		"a burst that goes":  {{"events=5&burst=6", 200, false}, {"events=unlimited&for=1h", 200, true}},
		"a burst that stays": {{"events=5&burst=6", 200, false}, {"events=7&for=1h", 409, false}, {"burst=7&for=1h", 409, false}},
	} {
		c := newImportedConfig(t)
		for _, s := range steps {
			if o := c.asked(t, setZone, http.MethodPost, "slow", s.query, s.status, ", and with the rest of the rule it would end "); (o.Until > 0) != s.lasts {
				t.Errorf("%s, %s: %+v", name, s.query, o)
			}
		}
	}
	c := newImportedConfig(t)
	c.asked(t, setLimit, http.MethodPost, "slow", "key=a&events=5&burst=6", 200, "")
	c.asked(t, setLimit, http.MethodPost, "slow", "key=a&events=5&for=1h", 409, "burst ends when it is unset, and with the rest of the rule it would end at ")
}

// TestRuleOfAZoneThatTheConfigLacks is listed, and ended where its store is named.
func TestRuleOfAZoneThatTheConfigLacks(t *testing.T) {
	c := newImportedConfig(t)
	c.keeps(t, store.Override{Kind: store.OverrideZone, Zone: "gone", Events: 5})
	if got := c.shown(t, "zone=gone&kind=zone"); !slices.Equal(got, []string{"zone gone 5 0"}) {
		t.Errorf("listed is %q", got)
	}
	if got := c.shown(t, "zone=gone&kind=block"); len(got) != 0 {
		t.Errorf("listed is %q", got)
	}
	c.asked(t, setZone, http.MethodPost, "gone", "events=5&store=own", http.StatusNotFound, "there is api, log, slow")
	c.asked(t, unsetZone, http.MethodDelete, "gone", "", http.StatusNotFound, "there is api, log, slow")
	c.asked(t, unsetZone, http.MethodDelete, "gone", "store=own", http.StatusOK, "")
	c.asked(t, unsetZone, http.MethodDelete, "gone", "store=own", http.StatusNotFound, "and the config lacks the zone")
	c.stores = c.stores[:1]
	c.keeps(t, store.Override{Kind: store.OverrideZone, Zone: "gone", Events: 5})
	c.asked(t, unsetZone, http.MethodDelete, "gone", "", http.StatusOK, "")
}

// TestUnknownZonesAndKinds of lists are errors that name what there is, unless not all could be read.
func TestUnknownZonesAndKinds(t *testing.T) {
	c := newImportedConfig(t)
	c.asked(t, overrides, http.MethodGet, "", "kind=blocks", http.StatusBadRequest, "there is zone, limit, block, grant")
	c.asked(t, overrides, http.MethodGet, "", "zone=gone", http.StatusNotFound, "there is api, log, slow")
	c.asked(t, audit, http.MethodGet, "", "zone=gone", http.StatusNotFound, "there is api, log, slow")
	c.keeps(t, store.Override{Kind: store.OverrideZone, Zone: "gone", Events: 5})
	for what, call := range map[string]call{"overrides": overrides, "audit": audit} {
		for _, zone := range []string{"api", "gone"} {
			if _, err := c.asks(t, call, http.MethodGet, "", "zone="+zone); err != nil {
				t.Errorf("%s of %s: %v", what, zone, err)
			}
		}
	}
	c.own.err = errors.New("shard a is away")
	if got := c.shown(t, "zone=absent"); len(got) != 0 {
		t.Errorf("got %q", got)
	}
}

// TestEndOfWhatIsNotSet is an error, and no change.
func TestEndOfWhatIsNotSet(t *testing.T) {
	c := newImportedConfig(t)
	c.asked(t, setZone, http.MethodPost, "slow", "enforce=25", 200, "")
	c.asked(t, setLimit, http.MethodPost, "slow", "key=a&events=5", 200, "")
	c.asked(t, unsetZone, http.MethodDelete, "slow", "settings=events,rollout", 404, "has nothing set of events, rollout")
	c.asked(t, unsetZone, http.MethodDelete, "slow", "settings=burst", 404, "zone slow has nothing set of burst")
	c.asked(t, unsetLimit, http.MethodDelete, "slow", "key=a&settings=burst", 404, "zone slow has nothing set of burst")
	c.asked(t, unsetZone, http.MethodDelete, "slow", "settings=,", 400, `settings has ""`)
	if changes, _ := c.own.Audit(context.Background()); len(changes) != 2 {
		t.Errorf("%d changes were made", len(changes))
	}
	c.asked(t, unsetZone, http.MethodDelete, "slow", "settings=events,enforce", 200, "")
}
