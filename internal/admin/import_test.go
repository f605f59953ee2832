package admin

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// keptModule opens a store in memory whose overrides can be asked for as away says.
type keptModule struct{ *awayStore }

func (m keptModule) OpenStore(string) (store.Store, error) { return m.awayStore, nil }
func (keptModule) CloseStore()                             {}
func (keptModule) OnErrorDefault() string                  { return stores.OnErrorAllow }

// awayStore has something damaged, and a shard that is away if err is set. It makes changes with a warning.
type awayStore struct {
	*memory.Store
	err, warning error
}

func (s *awayStore) ChangeOverrides(ctx context.Context, changes []store.OverrideChange) []store.OverrideOutcome {
	outcomes := s.Store.ChangeOverrides(ctx, changes)
	for i := range outcomes {
		outcomes[i].Warning = s.warning
	}
	return outcomes
}

func (s *awayStore) Overrides(ctx context.Context) (*store.OverrideSet, error) {
	if s.err != nil {
		return store.NewOverrideSet(nil, map[store.OverrideID]error{{Kind: store.OverrideBlock}: store.ErrDamaged}), s.err
	}
	return s.Store.Overrides(ctx)
}

// importedConfig is a config with the zones api, whose rollout counts in a store that keeps nothing, and slow.
type importedConfig struct {
	limiters []*limiter.Limiter
	stores   []*stores.Handle
	own      *awayStore
	log      *observer.ObservedLogs
}

func (c *importedConfig) Limiters() []*limiter.Limiter { return c.limiters }
func (c *importedConfig) Stores() []*stores.Handle     { return c.stores }
func (c *importedConfig) Watch() *Watch                { return nil }
func (*importedConfig) Accept()                        {}
func (*importedConfig) CountsInMemoryNow() bool        { return false }
func (*importedConfig) Warnings() []lint.Warning       { return nil }

func newImportedConfig(t *testing.T) *importedConfig {
	t.Helper()
	core, log := observer.New(zapcore.InfoLevel)
	c := &importedConfig{own: &awayStore{Store: memory.New(memory.NewBuckets(), memory.Options{})}, log: log}
	for name, module := range map[string]stores.Module{"own": keptModule{c.own}, "other": plainModule{}} {
		h := &stores.Handle{Name: name, Module: module, Logger: zap.NewNop()}
		if _, err := h.Enter(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(h.Unload)
		c.stores = append(c.stores, h)
	}
	slices.SortFunc(c.stores, func(a, b *stores.Handle) int { return strings.Compare(b.Name, a.Name) })
	zone := func(name string, algorithm store.Algorithm) *limiter.Zone {
		return &limiter.Zone{Name: name, Key: []string{"{http.request.header.X-Key}"}, Algorithm: algorithm, Events: limiter.Quantity{Number: 10}, Window: time.Hour}
	}
	own := limiter.Config{Store: c.stores[0], Logger: zap.New(core), LogKey: true, Now: time.Now}
	rolls := own
	rolls.Zones, rolls.Rollout = []*limiter.Zone{zone("api", store.FixedWindow)}, &limiter.Rollout{Store: c.stores[1]}
	own.Zones = []*limiter.Zone{zone("slow", store.GCRA), zone("log", store.SlidingLog)}
	c.limiters = []*limiter.Limiter{limiter.New(rolls), limiter.New(own)}
	return c
}

// imports makes what is in a text hold.
func (c *importedConfig) imports(t *testing.T, text, query string) (adminapi.Imported, error) {
	t.Helper()
	answer, err := importOverrides(c, httptest.NewRequest(http.MethodPost, "/rate_limit/overrides?by=me&"+query, strings.NewReader(`{"overrides":[`+text+`]}`)))
	made, _ := answer.(adminapi.Imported)
	return made, err
}

// TestChangeWithAWarning is reported as made, and the answer and the log name the shard that lacks it.
func TestChangeWithAWarning(t *testing.T) {
	c := newImportedConfig(t)
	c.own.warning = errors.New("shard a: no answer")
	made, err := c.imports(t, `{"kind":"zone","zone":"slow","store":"own","events":5}`, "")
	if err != nil || len(made.Changes) != 1 || made.Changes[0].Error != "" || !strings.Contains(made.Changes[0].Warning, "shard a") {
		t.Fatalf("%+v, %v", made, err)
	}
	r := httptest.NewRequest(http.MethodPost, "/rate_limit/blocks/slow?key=alice&for=1h", nil)
	r.SetPathValue("zone", "slow")
	set, err := block(c, r)
	if err != nil || !strings.Contains(set.(adminapi.Overrides).Overrides[0].Warning, "shard a") {
		t.Fatalf("%+v, %v", set, err)
	}
	for _, line := range []string{"operator's zone rule began", "operator's block of a client began"} {
		if found := c.log.FilterMessage(line).All(); len(found) != 1 || found[0].ContextMap()["warning"] != "shard a: no answer" {
			t.Errorf("%q: logged is %+v", line, found)
		}
	}
}

// TestImportSkips what has ended and zones that the config lacks, and makes and reports the rest.
func TestImportSkips(t *testing.T) {
	c := newImportedConfig(t)
	made, err := c.imports(t, `{"kind":"zone","zone":"slow","store":"own","events":5,"burst":2},
		{"kind":"limit","zone":"api","store":"own","client_key":"tag:old","events":5,"until":5},
		{"kind":"limit","zone":"gone","store":"own","client_key":"tag:a","events":5},
		{"kind":"limit","zone":"api","store":"elsewhere","client_key":"tag:a","events":5},
		{"kind":"block","zone":"api","store":"own","client_key":"tag:b"}`, "")
	if err != nil || len(made.Changes) != 2 || made.Ended != 1 || len(made.Skipped) != 2 {
		t.Fatalf("%+v, %v", made, err)
	}
	for i, want := range []string{`no zone "gone"`, `does not count in the store "elsewhere"`} {
		if got := made.Skipped[i].Error; !strings.Contains(got, want) {
			t.Errorf("skipped: %s, want %s", got, want)
		}
	}
	for _, line := range []string{"operator's zone rule began", "operator's block of a client began"} {
		if n := c.log.FilterMessage(line).Len(); n != 1 {
			t.Errorf("%q was logged %d times", line, n)
		}
	}
	if made, err = c.imports(t, "", "prune=true"); err != nil || len(made.Changes) != 1 || c.log.FilterMessage("operator's zone rule ended").Len() != 1 {
		t.Errorf("pruned: %+v, %v, logged %v", made, err, c.log.All())
	}
}

// TestImportChecksWhatSetChecks: nothing is changed if one could not be set.
func TestImportChecksWhatSetChecks(t *testing.T) {
	for name, entry := range map[string]string{
		"burst needs events":       `{"kind":"zone","zone":"slow","store":"own","burst":2,"enforce":3}`,
		"100000 with sliding_log":  `{"kind":"limit","zone":"log","store":"own","client_key":"tag:a","events":100001}`,
		"more than 100 years":      `{"kind":"limit","zone":"slow","store":"own","client_key":"tag:a","events":1,"burst":4503599627370496}`,
		"that clients share":       `{"kind":"block","zone":"api","store":"own","client_key":"*overflow"}`,
		"is kept in store own":     `{"kind":"zone","zone":"api","store":"other","events":5}`,
		"until is missing":         `{"kind":"grant","zone":"api","store":"own","client_key":"tag:a","events":5}`,
		"a limit has no enforce":   `{"kind":"limit","zone":"api","store":"own","client_key":"tag:a","events":5,"enforce":50}`,
		"a limit has no rollout":   `{"kind":"limit","zone":"api","store":"own","client_key":"tag:a","events":5,"rollout":50}`,
		"a block has no events":    `{"kind":"block","zone":"api","store":"own","client_key":"tag:a","events":5}`,
		"a grant has no burst":     `{"kind":"grant","zone":"slow","store":"own","client_key":"tag:a","events":5,"burst":2,"until":4000000000}`,
		"changes all clients":      `{"kind":"zone","zone":"api","store":"own","client_key":"tag:a","events":5}`,
		"write the value":          `{"kind":"limit","zone":"api","store":"own","template":"{header.X-Key}","events":5}`,
		"reason has":               `{"kind":"zone","zone":"api","store":"own","events":5,"reason":"` + strings.Repeat("x", 201) + `"}`,
		"cannot be":                `{"kind":"zone","zone":"api","store":"own","events":-5}`,
		"nothing is set":           `{"kind":"zone","zone":"api","store":"own"}`,
		"counts in several":        `{"kind":"zone","zone":"api","events":5}`,
		"is there twice":           `{"kind":"zone","zone":"api","store":"own","events":5},{"kind":"zone","zone":"api","store":"own","events":6}`,
		"key is empty":             `{"kind":"block","zone":"api","store":"own"}`,
		"events is missing":        `{"kind":"limit","zone":"slow","store":"own","client_key":"tag:a"}`,
		"this \"bless\" cannot be": `{"kind":"bless","zone":"api","store":"own","client_key":"tag:a","events":5}`,
	} {
		c := newImportedConfig(t)
		_, err := c.imports(t, `{"kind":"zone","zone":"slow","store":"own","events":5},`+entry, "")
		if api := (caddy.APIError{}); !errors.As(err, &api) || api.HTTPStatus != http.StatusBadRequest || !strings.Contains(api.Err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if set, _ := c.own.Overrides(t.Context()); set.Len() != 0 {
			t.Errorf("%s: %d were set", name, set.Len())
		}
	}
}

// TestWrongImportRemovesNothing: what is not clearly a list, and what prune would take for removed, are
// errors before anything is changed.
func TestWrongImportRemovesNothing(t *testing.T) {
	const rule = `{"kind":"zone","zone":"slow","store":"own","events":5}`
	for _, wrong := range []struct{ body, query, says string }{
		{`null`, "prune=true", "overrides is missing"},
		{`{}`, "prune=true", "overrides is missing"},
		{`{"overrides":null}`, "prune=true", "overrides is missing"},
		{`{"overrides":[` + rule + `],"overrides":[]}`, "prune=true", "duplicate"},
		{`{"overrides":[` + rule + `],"Overrides":[]}`, "prune=true", "duplicate"},
		{`{"overrides":[]} {"overrides":[` + rule + `]}`, "prune=true", "body"},
		{`{"overrides":[],"prune":true}`, "prune=true", `unknown field "prune"`},
		{`{"overrides":[{"kind":"zone","kind":"limit","zone":"slow","store":"own","events":5}]}`, "", "duplicate"},
		{`{"overrides":[{"kind":"zone","zone":"slow","store":"renamed","events":5}]}`, "prune=true", "does not count in the store"},
		{`{"overrides":[]}`, "prune=1", "it must be true or false"},
		{`{"overrides":[]}`, "prune=true&dry_run", "it must be true or false"},
		{`{"overrides":[]}`, "prune=true&dry_run=True", "it must be true or false"},
	} {
		c := newImportedConfig(t)
		if _, err := c.imports(t, rule, ""); err != nil {
			t.Fatal(err)
		}
		_, err := importOverrides(c, httptest.NewRequest(http.MethodPost, "/rate_limit/overrides?"+wrong.query, strings.NewReader(wrong.body)))
		if api := (caddy.APIError{}); !errors.As(err, &api) || api.HTTPStatus != http.StatusBadRequest || !strings.Contains(api.Err.Error(), wrong.says) {
			t.Errorf("%s %s: %v", wrong.query, wrong.body, err)
		}
		if set, _ := c.own.Overrides(t.Context()); set.Len() != 1 {
			t.Errorf("%s %s: %d are left", wrong.query, wrong.body, set.Len())
		}
	}
}

// TestImportIntoTwoStores tells of both, if one fails too.
func TestImportIntoTwoStores(t *testing.T) {
	c := newImportedConfig(t)
	made, err := c.imports(t, `{"kind":"block","zone":"api","store":"own","client_key":"tag:a"},{"kind":"block","zone":"api","store":"other","client_key":"tag:a"}`, "")
	if err != nil || len(made.Changes) != 2 {
		t.Fatalf("%+v, %v", made, err)
	}
	for _, change := range made.Changes {
		if fails := change.Error != ""; fails != (change.After.Store == "other") {
			t.Errorf("%+v: %q", change.After, change.Error)
		}
	}
}

// TestShardThatIsAway is an error for each who changes what was read, whatever else is damaged.
func TestShardThatIsAway(t *testing.T) {
	c := newImportedConfig(t)
	c.own.err = errors.New("shard a is away")
	_, imported := c.imports(t, `{"kind":"zone","zone":"slow","store":"own","events":5}`, "")
	r := httptest.NewRequest(http.MethodPost, "/rate_limit/zones/slow?events=5", nil)
	r.SetPathValue("zone", "slow")
	_, set := setZone(c, r)
	for what, err := range map[string]error{"import": imported, "set": set} {
		if api := (caddy.APIError{}); !errors.As(err, &api) || api.HTTPStatus != http.StatusBadGateway || !strings.Contains(api.Err.Error(), "shard a is away") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestSettingsStay that a request does not name, of a client as of a zone; the answer has the version that
// the next change may name.
func TestSettingsStay(t *testing.T) {
	c := newImportedConfig(t)
	ask := func(call call, path, query string) adminapi.Override {
		t.Helper()
		r := httptest.NewRequest(http.MethodPost, "/rate_limit/"+path+"?"+query, nil)
		r.SetPathValue("zone", "slow")
		answer, err := call(c, r)
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		return answer.(adminapi.Overrides).Overrides[0]
	}
	for path, calls := range map[string][2]call{"zones/slow": {setZone, unsetZone}, "limits/slow": {setLimit, unsetLimit}} {
		key := ""
		if path == "limits/slow" {
			key = "key=alice&"
		}
		version := "x"
		for i, step := range []struct {
			query         string
			events, burst int64
			lasts         bool
		}{
			{"events=5&burst=2", 5, 2, false}, {"events=6&version=", 6, 2, false}, {"burst=3", 6, 3, false}, {"for=1h", 6, 3, true},
			{"settings=burst", 6, 0, true}, {"events=unlimited", -1, 0, false}, {"settings=events", 0, 0, false},
		} {
			call := calls[0]
			if strings.HasPrefix(step.query, "settings") {
				call = calls[1]
			}
			query := key + step.query
			if strings.HasSuffix(query, "version=") {
				query += version
			}
			o := ask(call, path, query)
			if o.Events != step.events || o.Burst != step.burst || (o.Until > 0) != step.lasts || o.Version == version {
				t.Errorf("%s, step %d: %+v", path, i, o)
			}
			version = o.Version
		}
	}
	if set, _ := c.own.Overrides(t.Context()); set.Len() != 0 {
		t.Errorf("%d are left", set.Len())
	}
}
