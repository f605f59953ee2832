package shardlimit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// Handler limits how many requests each client may make. Requests that fit
// pass; it refuses the others with status 429, or the zone's `status`, for which
// error routes (`handle_errors`) work as usual. Response headers show clients where they
// stand: `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Used`,
// `X-RateLimit-Reset` (seconds since the epoch) and `X-RateLimit-Resource` (the
// zone), and on refusals `Retry-After` (seconds). With several zones they are
// about the one with the least left, or on refusals the one that makes the client
// wait longest.
//
// These placeholders are set:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.zone}` | The zone that the response is about
// `{http.rate_limit.key}` | Its client key, with `log_key`; otherwise the beginning of the key's SHA-256
// `{http.rate_limit.limit}` | How many events the zone admits for this request
// `{http.rate_limit.remaining}` | How many are left
// `{http.rate_limit.used}` | How many are used up
// `{http.rate_limit.reset}` | When the window ends, in seconds since the epoch
// `{http.rate_limit.wait}` | The seconds until a refused request fits
// `{http.rate_limit.cost}` | What the request costs
// `{http.rate_limit.outcome}` | `allowed`, `refused`, `would_refuse` (`enforce` only observes the client), `error_allowed` (the store cannot answer, and `on_error` lets pass), `error_refused` (the store cannot answer, and `on_error` refuses) or `blocked` (an operator has blocked the client)
// `{http.rate_limit.reason}` | Why it was not allowed: `over_limit`, `in_flight` (only what may come back is in the way), `penalty`, `reserved` (room is kept for others), `store_error` or `blocked`
// `{http.rate_limit.<zone>.…}` | The same, for the zone of that name
// `{http.rate_limit.exceeded.name}` | The zone that refused the request
//
// The numbers include the cost of this request once it is charged.
type Handler struct {
	Limits

	// Zones by name, in the form of the caddy-ratelimit plugin. They count in
	// alphabetical order. Default: none.
	RateLimits map[string]*NamedZone `json:"rate_limits,omitempty"`

	// Has no effect: nothing needs sweeping. It is accepted from configs of the
	// caddy-ratelimit plugin.
	SweepInterval caddy.Duration `json:"sweep_interval,omitempty"`

	// Has no effect: metrics are by zone, and no label names a client. It is
	// accepted from configs of the caddy-ratelimit plugin.
	DisableMetrics bool `json:"disable_metrics,omitempty"`

	// Not supported: the error that it causes names the replacement.
	DistributedRaw json.RawMessage `json:"distributed,omitempty"`

	// Not supported: the error that it causes names the replacement.
	StorageRaw json.RawMessage `json:"storage,omitempty"`

	// document is the handler's JSON, until its config has been looked at: loading matchers removes theirs.
	document []byte
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.rate_limit",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision implements [caddy.Provisioner]. It touches no network.
func (h *Handler) Provision(ctx caddy.Context) error {
	if err := h.adoptNamedZones(); err != nil {
		return err
	}
	if err := h.provision(ctx); err != nil {
		return err
	}
	h.app.looksAt(ctx, h)
	return nil
}

// Document implements [lint.Documented].
func (h *Handler) Document() []byte { return h.document }

// ServeHTTP implements [caddyhttp.MiddlewareHandler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return h.limiter.ServeHTTP(w, r, next)
}

// Limiter returns the limiter of the handler's requests.
func (h *Handler) Limiter() *limiter.Limiter { return h.limiter }

// Interface guards.
var (
	_ caddy.Provisioner  = (*Handler)(nil)
	_ caddy.CleanerUpper = (*Handler)(nil)
)

// Limits are the options that the handlers `rate_limit` and `rate_limit_service` share.
type Limits struct {
	// The store in which the zones count: the name of a store in the `rate_limit`
	// app, or a store of this handler's own. The counts in memory of such a store
	// survive a reload only if its definition does not change. Default: `default`.
	StoreRaw json.RawMessage `json:"store,omitempty" caddy:"namespace=rate_limit.stores inline_key=module"`

	// Another store, and the percentage of clients, 0 to 100, that are [counted
	// there
	// instead](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#another-store-for-some-clients).
	// Default: 0.
	Rollout *Rollout `json:"rollout,omitempty"`

	// The zones. A request has to fit into all zones that match it; if one refuses
	// it, none charges it. Required, unless `rate_limits` has zones. In a
	// Caddyfile: `zone <name>`.
	Zones []*Zone `json:"zones,omitempty"`

	// The response headers that show the limit: `github` (`X-RateLimit-*`), `ietf`
	// (`RateLimit-Policy`, `RateLimit`), `both` or `none`. Refusals have
	// `Retry-After` with each:
	// [Headers](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#headers).
	// Default: `github`.
	Headers string `json:"headers,omitempty"`

	// Lengthens `Retry-After`, and moves the reset with it, at random by up to
	// this fraction, 0 to 1. Default: 0.
	Jitter float64 `json:"jitter,omitempty"`

	// Gives refused requests [a
	// body](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#headers)
	// of type `application/problem+json`. Default: off.
	Problem bool `json:"problem,omitempty"`

	// Gives refused calls of gRPC [its
	// status](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/grpc.md),
	// and HTTP status 200: not where proxies ask. Default: off; on if a zone has
	// `grpc:` statuses.
	GRPC bool `json:"grpc,omitempty"`

	// Which refusals are logged: the `first` of each client and zone in a window,
	// `all`, or `none`. Default: `first`.
	LogRefusals string `json:"log_refusals,omitempty"`

	// Shows client keys in log entries and placeholders, which otherwise show the
	// beginning of their SHA-256. Default: off.
	LogKey bool `json:"log_key,omitempty"`

	// The [rules](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#limits-that-do-nothing)
	// about configs that are not applied to this handler. Default: none.
	Ignore []string `json:"ignore,omitempty"`

	limiter *limiter.Limiter
	app     *App
	// own is the store of this handler alone, or nil.
	own *stores.Handle
	// named is how many of the zones, the last ones, come from a map.
	named int
	// isService is set if a service asks the zones, and not requests of HTTP.
	isService bool
}

// ProvisionService makes the limiter of a service. It touches no network.
func (l *Limits) ProvisionService(ctx caddy.Context) (*limiter.Limiter, error) {
	l.isService = true
	const noEffect = "has no effect in rate_limit_service, whose responses are those of the protocol: remove it"
	switch {
	case l.Problem:
		return nil, option.InJSON(option.Errorf("problem", noEffect))
	case l.GRPC:
		return nil, option.InJSON(option.Errorf("grpc", noEffect))
	case len(l.Ignore) > 0:
		return nil, option.InJSON(option.Errorf("ignore", "has no effect in rate_limit_service, which no rule is about: remove it"))
	}
	err := l.provision(ctx)
	return l.limiter, err
}

// provision makes the limiter. It touches no network.
func (l *Limits) provision(ctx caddy.Context) error {
	if err := l.validate(); err != nil {
		return option.InJSON(err)
	}
	module, err := ctx.App("rate_limit")
	if err != nil {
		return fmt.Errorf("load the rate_limit app: %w", err)
	}
	app := module.(*App)
	l.app = app
	config := limiter.Config{
		Headers: cmp.Or(l.Headers, limiter.HeadersGitHub), Jitter: l.Jitter, Problem: l.Problem, GRPC: l.GRPC,
		LogRefusals: cmp.Or(l.LogRefusals, limiter.LogFirst), LogKey: l.LogKey,
		Logger: ctx.Logger(), Now: time.Now, IsService: l.isService,
	}
	if config.Store, err = l.openStore(ctx, app); err != nil {
		return err
	}
	storeNames := []string{config.Store.Name}
	if l.Rollout != nil {
		config.Rollout = &limiter.Rollout{Percent: l.Rollout.Percent}
		if config.Rollout.Store, err = app.store("rollout", l.Rollout.Store); err != nil {
			return err
		}
		storeNames = append(storeNames, l.Rollout.Store)
	}
	if config.Events, err = telemetry.NewEvents(ctx); err != nil {
		return err
	}
	for i, z := range l.Zones {
		if err := app.zones.add(z, origin{}, storeNames); err != nil {
			return err
		}
		compiled, err := z.provision(ctx)
		if err != nil {
			return option.InJSON(option.In("zone "+z.Name, l.pathOf(i), err))
		}
		config.Zones, config.GRPC = append(config.Zones, compiled), config.GRPC || compiled.KnowsGRPC
	}
	l.limiter = limiter.New(config)
	app.limiters = append(app.limiters, l.limiter)
	// A reload is refused here, because its server may take requests before the app's Start refuses it.
	if isRunning := caddy.ActiveContext().Context != nil; isRunning {
		return app.Missing()
	}
	return nil
}

func (l *Limits) openStore(ctx caddy.Context, app *App) (*stores.Handle, error) {
	name, isName, _ := rawStoreName(l.StoreRaw) // validated
	if isName {
		return app.store("store", name)
	}
	name = stores.OwnName(l.StoreRaw)
	module, err := ctx.LoadModule(l, "StoreRaw")
	if err != nil {
		return nil, fmt.Errorf("load store: %w", err)
	}
	if l.own, err = stores.Open(ctx, name, module); err != nil {
		return nil, err
	}
	app.unnamed = append(app.unnamed, l.own)
	return l.own, nil
}

// Cleanup implements [caddy.CleanerUpper].
func (l *Limits) Cleanup() error {
	if l.own != nil {
		l.own.Unload()
	}
	return nil
}

// Rollout moves a share of a handler's clients to another store, to try it out on
// some of them before all use it. A hash of the key of the handler's first zone, the same in
// every process, decides which clients move: a higher percentage moves more clients, and
// none of them back. If that key is the same for all requests, they move together. In
// `rate_limit_service` the zone of a call's first descriptor decides.
//
// A request counts in one store, in all its zones: while the percentage is between 0 and 100,
// the clients of zones with another key than the first one have a limit in each store.
// Counts do not move. Handlers that share a zone therefore need the same rollout
// and the same first zone, which of `rate_limits` is the first in alphabetical order.
type Rollout struct {
	// The name of the other store: one in the `rate_limit` app that is not the
	// handler's own. Required.
	Store string `json:"store,omitempty"`

	// The percentage of the clients that count in the other store, from 0 (none)
	// to 100 (all); fractions are allowed. To change it while Caddy runs, replace
	// this value through the admin API; the next load replaces it again. A client
	// that is moved begins with fresh counts in the other store, so around that
	// moment it can get up to twice its limit; one that is moved back finds what is
	// left of its old counts. Default: 0.
	Percent float64 `json:"percent"`
}

// validate returns what is wrong with the rollout of a handler whose store has that
// name, or is the handler's own.
func (o *Rollout) validate(own string, ownIsName bool) error {
	switch {
	case o == nil:
		return nil
	case o.Store == "":
		return option.Errorf("rollout", "names no store: add the one to which clients are moved, such as rollout other 10").
			Field("rollout.store").JSONf("is missing: add the store to which clients are moved")
	case !isPercent(o.Percent):
		return option.Errorf("rollout", "%s %v: it must be from 0 to 100 percent, such as 12.5", o.Store, o.Percent).
			Field("rollout.percent").JSONf("%v: it must be from 0 to 100, such as 12.5", o.Percent)
	case ownIsName && cmp.Or(own, defaultStore) == o.Store:
		return option.Errorf("rollout", "%s: that is the handler's own store: name the store to which clients are moved, or remove rollout", o.Store).
			Field("rollout.store")
	}
	return nil
}
