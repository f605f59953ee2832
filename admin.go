package shardlimit

import "github.com/caddyserver/caddy/v2"

// adminMetrics registers the metrics whenever Caddy sets up its admin endpoint.
// Caddy does that before it loads a config's apps, and does not undo it where
// they fail to load: without this module the metrics would be gone after a
// rejected config.
type adminMetrics struct{}

// CaddyModule returns the Caddy module information.
func (*adminMetrics) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.rate_limit",
		New: func() caddy.Module { return new(adminMetrics) },
	}
}

// Provision implements [caddy.Provisioner].
func (*adminMetrics) Provision(ctx caddy.Context) error {
	return metrics.register(ctx.GetMetricsRegistry())
}

// Routes implements [caddy.AdminRouter].
func (*adminMetrics) Routes() []caddy.AdminRoute { return nil }

// Interface guards.
var (
	_ caddy.Provisioner = (*adminMetrics)(nil)
	_ caddy.AdminRouter = (*adminMetrics)(nil)
)
