// Package shardlimit is a Caddy module that limits API clients against
// counters kept in sharded, replicated Redis, or in memory.
//
// It consists of the HTTP handler [Handler] (http.handlers.rate_limit,
// Caddyfile directive rate_limit), the app [App] (rate_limit, Caddyfile global
// option rate_limit) that holds the stores all handlers share, and the stores
// [memorystore.Store] and [redisstore.Store] in the namespace rate_limit.stores.
package shardlimit

import (
	"context"
	_ "time/tzdata" // windows of a calendar, where there is no time zone data

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	_ "github.com/shardlimit/caddy-shardlimit/internal/commands" // adds caddy rate-limit
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	_ "github.com/shardlimit/caddy-shardlimit/redisstore" // registers its module, as memorystore and internal/admin do
)

func init() {
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))

	httpcaddyfile.RegisterGlobalOption("rate_limit", parseGlobalOption)
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseDirective)
	// Before everything that authenticates: basicauth, basic_auth, and what plugins put right before either of them.
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.After, "try_files")

	// Caddy unloads modules in random order; only OnExit runs after all of them.
	caddy.OnExit(func(context.Context) {
		limiter.EndLeases(stores.Ending())
		stores.End(caddy.Log().Named("rate_limit"))
	})
}
