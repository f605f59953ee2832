// Package shardlimit is a Caddy module that limits API clients against
// counters kept in sharded, replicated Redis, or in memory.
//
// It consists of the HTTP handler [Handler] (http.handlers.rate_limit,
// Caddyfile directive rate_limit), the app [App] (rate_limit, Caddyfile global
// option rate_limit) that holds the stores all handlers share, and the stores
// [MemoryStore] and [RedisStore] in the namespace rate_limit.stores.
package shardlimit

import (
	"context"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

func init() {
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(MemoryStore))
	caddy.RegisterModule(new(RedisStore))
	caddy.RegisterModule(new(adminAPI))

	httpcaddyfile.RegisterGlobalOption("rate_limit", parseGlobalOption)
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseDirective)
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")

	// Only here all modules, which Caddy unloads in random order, are unloaded.
	caddy.OnExit(func(context.Context) { endFlushes(caddy.Log().Named("rate_limit")) })
}
