// Package admin answers /rate_limit/ on Caddy's admin endpoint, as the Caddy
// module admin.api.rate_limit ([API]), and collects the metrics of the stores'
// state. The types of the answers are in internal/adminapi; the commands and the
// page that show them are in cli and ui.
//
// It imports internal/limiter and internal/stores, and asks the app of the
// running config through an interface, because the root package imports this one.
package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
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
		route("overrides", map[string]call{http.MethodGet: overrides}),
		route("blocks/{zone}", map[string]call{http.MethodPost: block, http.MethodDelete: unblock}),
		route("grants/{zone}", map[string]call{http.MethodPost: grant, http.MethodDelete: ungrant}),
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
}

// runningApp returns the app of the running config.
func runningApp() (runningConfig, error) {
	app, err := caddy.ActiveContext().AppIfConfigured("rate_limit")
	switch {
	case errors.Is(err, caddy.ErrNotConfigured):
		return nil, apiErrorf(http.StatusNotFound, "the running config has no rate_limit")
	case err != nil:
		return nil, apiErrorf(http.StatusInternalServerError, "%w", err)
	}
	return app.(runningConfig), nil
}

// zoneInStore is a zone of one handler and a store in which it counts.
type zoneInStore struct {
	*limiter.Zone
	store   *stores.Handle
	limiter *limiter.Limiter
}

// zonesInStores returns the zones of the config by name: one for each store in which
// handlers count zones of that name.
func zonesInStores(running runningConfig) map[string][]zoneInStore {
	zones := map[string][]zoneInStore{}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, s := range l.Stores() {
				if !slices.Contains(storeNames(zones[z.Name]), s.Name) {
					zones[z.Name] = append(zones[z.Name], zoneInStore{z, s, l})
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
// error, and so is one given twice, except for key, which is a list.
func queryOf(r *http.Request, known ...string) (url.Values, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, apiErrorf(http.StatusBadRequest, "query: %w", err)
	}
	for name, values := range query {
		switch {
		case !slices.Contains(known, name):
			return nil, apiErrorf(http.StatusBadRequest, "parameter %q is unknown; there is %s", name, strings.Join(known, ", "))
		case len(values) > 1 && name != "key":
			return nil, apiErrorf(http.StatusBadRequest, "parameter %s is given twice", name)
		}
	}
	return query, nil
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
