package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// API answers /rate_limit/ on Caddy's admin endpoint, about the config that
// is running. It also registers the metrics whenever Caddy sets up that endpoint.
// Caddy does that before it loads a config's apps, and does not undo it where
// they fail to load: without this module the metrics would be gone after a
// rejected config.
type API struct{}

// adminRoot is where the admin API begins.
const adminRoot = "/rate_limit/"

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

// adminCall answers one request to the admin API about the running config, with
// what is sent as JSON, or with an error, of which an [caddy.APIError] tells
// the status.
type adminCall func(running runningConfig, r *http.Request) (any, error)

// RegisterMetrics adds all metrics to the registry of a config.
func RegisterMetrics(ctx caddy.Context) error {
	return telemetry.Default.Register(ctx.GetMetricsRegistry(), stateCollector{})
}

// Routes implements [caddy.AdminRouter].
func (*API) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		adminRoute("{$}", map[string]adminCall{http.MethodGet: adminStatus}),
		adminRoute("buckets/{zone}", map[string]adminCall{http.MethodGet: adminInspect, http.MethodDelete: adminReset}),
		adminRoute("top", map[string]adminCall{http.MethodGet: adminTop}),
		adminRoute("simulate", map[string]adminCall{http.MethodPost: adminSimulate}),
	}
}

// adminRoute is the route of a path below adminRoot, with a call for each
// method.
func adminRoute(path string, calls map[string]adminCall) caddy.AdminRoute {
	return caddy.AdminRoute{Pattern: adminRoot + path, Handler: caddy.AdminHandlerFunc(
		func(w http.ResponseWriter, r *http.Request) error {
			call, ok := calls[r.Method]
			if !ok {
				return apiError(http.StatusMethodNotAllowed, fmt.Errorf("method %s is not allowed here", r.Method))
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
	// Limiters returns those of all handlers.
	Limiters() []*limiter.Limiter
	// Stores returns the stores, in alphabetical order of their names, each once.
	Stores() []*stores.Handle
}

// runningApp returns the app of the config that is running.
func runningApp() (runningConfig, error) {
	app, err := caddy.ActiveContext().AppIfConfigured("rate_limit")
	switch {
	case errors.Is(err, caddy.ErrNotConfigured):
		return nil, apiError(http.StatusNotFound, errors.New("the running config has no rate_limit"))
	case err != nil:
		return nil, apiError(http.StatusInternalServerError, err)
	}
	return app.(runningConfig), nil
}

func apiError(status int, err error) error {
	return caddy.APIError{HTTPStatus: status, Err: err}
}

// Interface guards.
var (
	_ caddy.Provisioner = (*API)(nil)
	_ caddy.AdminRouter = (*API)(nil)
)
