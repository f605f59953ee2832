// Package admin answers /rate_limit/ on Caddy's admin endpoint, as the Caddy
// module admin.api.rate_limit ([API]), and collects the metrics of the stores'
// state. The types of the answers are in internal/adminapi; the commands and the
// page that show them are in cli and ui.
//
// It asks the app of the running config through an interface, because the root
// package imports this one.
package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	strict "github.com/go-json-experiment/json"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// API answers /rate_limit/ on Caddy's admin endpoint about the running config.
//
// It also registers the metrics whenever Caddy sets up that endpoint. Caddy does
// that before it loads a config's apps and does not undo it if they fail to load:
// without this module a rejected config would end the metrics.
type API struct{}

// root is the path of the admin API.
const root = "/rate_limit/"

func init() { caddy.RegisterModule(new(API)) }

// CaddyModule returns the Caddy module information.
func (*API) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.rate_limit",
		New: func() caddy.Module { return new(API) },
	}
}

// Provision implements [caddy.Provisioner].
func (*API) Provision(ctx caddy.Context) error {
	return RegisterMetrics(ctx)
}

// RegisterMetrics adds all metrics to the registry of a config.
func RegisterMetrics(ctx caddy.Context) error {
	return telemetry.Default.Register(ctx.GetMetricsRegistry(), stateCollector{})
}

// Routes implements [caddy.AdminRouter].
func (*API) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		route("{$}", map[string]call{http.MethodGet: status}),
		route("buckets/{zone}", map[string]call{http.MethodGet: inspect, http.MethodDelete: reset}),
		route("overrides", map[string]call{http.MethodGet: overrides, http.MethodPost: importOverrides}),
		route("history", map[string]call{http.MethodGet: historyOf}),
		route("audit", map[string]call{http.MethodGet: audit}),
		route("blocks", map[string]call{http.MethodPost: blockEverywhere, http.MethodDelete: endEverywhere(store.OverrideBlock)}),
		route("blocks/{zone}", map[string]call{http.MethodPost: block, http.MethodDelete: unblock}),
		route("grants", map[string]call{http.MethodDelete: endEverywhere(store.OverrideGrant)}),
		route("grants/{zone}", map[string]call{http.MethodPost: grant, http.MethodDelete: ungrant}),
		route("limits/{zone}", map[string]call{http.MethodPost: setLimit, http.MethodDelete: unsetLimit}),
		route("zones/{zone}", map[string]call{http.MethodPost: setZone, http.MethodDelete: unsetZone}),
		route("clients", map[string]call{http.MethodGet: find}),
		route("top", map[string]call{http.MethodGet: top}),
		route("near", map[string]call{http.MethodGet: near}),
		route("simulate", map[string]call{http.MethodPost: simulate}),
	}
}

// call answers one request about the running config. The answer is sent as JSON;
// an error is an [caddy.APIError], which has the status.
type call func(running runningConfig, r *http.Request) (answer any, err error)

// route returns the route of a path below root, with a call for each method.
func route(path string, calls map[string]call) caddy.AdminRoute {
	return caddy.AdminRoute{Pattern: root + path, Handler: caddy.AdminHandlerFunc(
		func(w http.ResponseWriter, r *http.Request) error {
			call, ok := calls[r.Method]
			if !ok {
				return apiErrorf(http.StatusMethodNotAllowed, "method %s is not allowed here", r.Method)
			}
			app, err := runningApp()
			if err != nil {
				return err
			}
			answer, err := call(app, r)
			if err != nil {
				return err
			}
			w.Header().Set("Content-Type", "application/json")
			return json.NewEncoder(w).Encode(answer)
		})}
}

// runningConfig is the app rate_limit of a config.
type runningConfig interface {
	// Limiters returns the limiters of all handlers.
	Limiters() []*limiter.Limiter
	// Stores returns the stores, in alphabetical order of their names, each once.
	Stores() []*stores.Handle
	// CountsInMemoryNow reports whether handlers count in memory that counted in a remote store, because no store is
	// configured any more.
	CountsInMemoryNow() bool
	// Warnings returns the findings of package lint about the routes around the handlers.
	Warnings() []lint.Warning
	// Watch returns what finds the problems of the config.
	Watch() *Watch
	// Accept lets the config change what others use, if it does not yet.
	Accept()
}

// runningApp returns the app of the running config, which Caddy has accepted.
func runningApp() (runningConfig, error) {
	app, err := caddy.ActiveContext().AppIfConfigured("rate_limit")
	switch {
	case errors.Is(err, caddy.ErrNotConfigured):
		return nil, apiErrorf(http.StatusNotFound, "the running config has no rate_limit")
	case err != nil:
		return nil, apiErrorf(http.StatusInternalServerError, "%w", err)
	}
	running := app.(runningConfig)
	running.Accept()
	return running, nil
}

// zoneInStore is a zone of one handler and a store in which it counts.
type zoneInStore struct {
	*limiter.Zone
	store   *stores.Handle
	limiter *limiter.Limiter
}

// rule returns what operators have changed of the zone, or nil.
func (z zoneInStore) rule() *store.Override { return z.limiter.Store.ZoneOverride(z.Name, time.Now) }

// limitNow returns what makes a request about a bucket of the zone ask for what holds now, and reports
// whether it has a limit then.
func (z zoneInStore) limitNow() func(r *store.Request) bool {
	rule := z.rule()
	return func(r *store.Request) bool { return z.LimitNow(r, z.store, rule, z.limiter) }
}

// zonesInStores returns the zones of the config by name: one for each store in which
// handlers count zones of that name. It prefers handlers with that store of their own, and
// among them one with a rollout that moves the zone's clients.
func zonesInStores(running runningConfig) map[string][]zoneInStore {
	zones := map[string][]zoneInStore{}
	for _, best := range [][2]bool{{true, true}, {true, false}, {false, true}, {false, false}} {
		for _, l := range running.Limiters() {
			for _, z := range l.Zones {
				for _, s := range l.Stores() {
					if is := [2]bool{s == l.Store, l.Moves(z)}; is == best && !slices.Contains(storeNames(zones[z.Name]), s.Name) {
						zones[z.Name] = append(zones[z.Name], zoneInStore{z, s, l})
					}
				}
			}
		}
	}
	return zones
}

func storeNames(zones []zoneInStore) []string {
	var names []string
	for _, z := range zones {
		names = append(names, z.store.Name)
	}
	return names
}

func unknownZone(name string, zones map[string][]zoneInStore) error {
	return apiErrorf(http.StatusNotFound, "zone %q is unknown; there is %s", name, strings.Join(sortedKeys(zones), ", "))
}

// queryOf returns the parameters of a request. A parameter that is not known is an
// error, and so is one given twice, except for one that is known with three dots, which is a list.
func queryOf(r *http.Request, known ...string) (url.Values, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, apiErrorf(http.StatusBadRequest, "query: %w", err)
	}
	for name, values := range query {
		switch isList := slices.Contains(known, name+"..."); {
		case !isList && !slices.Contains(known, name):
			return nil, apiErrorf(http.StatusBadRequest, "parameter %q is unknown; there is %s", name, strings.ReplaceAll(strings.Join(known, ", "), "...", ""))
		case !isList && len(values) > 1:
			return nil, apiErrorf(http.StatusBadRequest, "parameter %s is given twice", name)
		}
	}
	return query, nil
}

// flagOf returns a parameter that is true or false, which it is without a value.
func flagOf(query url.Values, name string) (bool, error) {
	switch text := query.Get(name); {
	case text == "true":
		return true, nil
	case text == "false", !query.Has(name):
		return false, nil
	default:
		return false, apiErrorf(http.StatusBadRequest, "%s=%q: it must be true or false", name, text)
	}
}

// readBody reads the JSON value that is a request's body, of most bytes. Unknown and repeated names,
// and what follows the value, are errors.
func readBody(body io.ReadCloser, most int64, value any) error {
	err := strict.UnmarshalRead(http.MaxBytesReader(nowhere{}, body, most), value, strict.RejectUnknownMembers(true), strict.MatchCaseInsensitiveNames(true))
	status := http.StatusBadRequest
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		status = http.StatusRequestEntityTooLarge
	}
	wrong := new(strict.SemanticError)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong) && errors.Is(err, strict.ErrUnknownName):
		err = fmt.Errorf("unknown field %q", strings.TrimPrefix(string(wrong.JSONPointer), "/"))
	}
	return apiErrorf(status, "body: %w", err)
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}

func apiErrorf(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// Interface guards.
var (
	_ caddy.Provisioner = (*API)(nil)
	_ caddy.AdminRouter = (*API)(nil)
)
