package shardlimit

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Handler limits how many requests each client may make. Requests that fit
// pass; the others are refused with status 429, for which error routes
// (`handle_errors`) work as usual. The response headers tell clients where
// they stand: `X-RateLimit-Limit`, `X-RateLimit-Remaining`,
// `X-RateLimit-Used`, `X-RateLimit-Reset` (seconds since the epoch) and
// `X-RateLimit-Resource` (the zone), and on refusals `Retry-After` (seconds).
// With several zones they are about the one with the least left, or on
// refusals the one that makes the client wait longest.
//
// These placeholders are set:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.zone}` | The zone that the response tells of
// `{http.rate_limit.key}` | Its client key, with `log_key`; else the beginning of its SHA-256
// `{http.rate_limit.limit}` | How many events the zone admits for this request
// `{http.rate_limit.remaining}` | How many are left
// `{http.rate_limit.used}` | How many are used up
// `{http.rate_limit.reset}` | When the window ends, in seconds since the epoch
// `{http.rate_limit.wait}` | In how many seconds a refused request fits
// `{http.rate_limit.cost}` | What the request costs
// `{http.rate_limit.outcome}` | `allowed`, `refused`, `would_refuse` (see `enforce`), `error_allowed` or `error_refused` (see `on_error`)
// `{http.rate_limit.reason}` | Why not: `over_limit`, `in_flight`, `penalty`, `reserved` or `store_error`
// `{http.rate_limit.<zone>.…}` | The same, of the zone of that name
// `{http.rate_limit.exceeded.name}` | The zone that refused the request
//
// They include this request's cost once it is charged.
type Handler struct {
	// The store in which the zones count: the name of one that is configured
	// in the `rate_limit` app, or a store of this handler's own, whose counts
	// in memory survive a reload only if it is written the same way. Default:
	// the store named `default`.
	StoreRaw json.RawMessage `json:"store,omitempty" caddy:"namespace=rate_limit.stores inline_key=module"`

	// The share of the clients that is counted in another store than that one.
	// Default: none.
	Rollout *Rollout `json:"rollout,omitempty"`

	// The zones. A request has to fit into all zones that match it; if one
	// refuses it, none is charged.
	Zones []*Zone `json:"zones,omitempty"`

	// Which response headers tell of the limit. `github`: `X-RateLimit-*`, of
	// one zone. `ietf`: `RateLimit-Policy` and `RateLimit` of
	// draft-ietf-httpapi-ratelimit-headers-10, of all zones in their order.
	// `both`, or `none`. `Retry-After` comes with each of them. Default:
	// `github`.
	Headers string `json:"headers,omitempty"`

	// By up to what part of itself `Retry-After` is lengthened at random, so
	// that refused clients do not all come back at the same moment; 0.2 is up
	// to 20 percent. Default: 0.
	Jitter float64 `json:"jitter,omitempty"`

	// Whether refused requests get a body of type `application/problem+json`
	// (RFC 9457) with the problem type `quota-exceeded` and the zones that were
	// exceeded, or `temporary-reduced-capacity` where what is left is reserved
	// for more important requests or the store cannot answer. Where an error
	// route of the server (`handle_errors`) matches, that makes the response. Default: false.
	Problem bool `json:"problem,omitempty"`

	// Which refusals are logged, at level INFO. `first`: the first one of each
	// client and zone in a window; 100000 clients are remembered. `all`, or
	// `none`. Default: `first`.
	LogRefusals string `json:"log_refusals,omitempty"`

	// Whether the log entries about refusals, the access log and the
	// placeholders show client keys, which may be addresses or secrets. If not,
	// they show the beginning of their SHA-256, by which entries about one
	// client can be found, and entries about refusals leave out the client's
	// address where the key has it or a network of it. Default: false.
	LogKey bool `json:"log_key,omitempty"`

	// Zones by name, in the form of the caddy-ratelimit plugin; they count in
	// alphabetical order.
	RateLimits map[string]*NamedZone `json:"rate_limits,omitempty"`

	// Accepted for the caddy-ratelimit plugin's configs, and without effect:
	// nothing here needs sweeping.
	SweepInterval caddy.Duration `json:"sweep_interval,omitempty"`

	// Accepted for the same reason, and without effect: metrics are by zone, and
	// no label tells of clients.
	DisableMetrics bool `json:"disable_metrics,omitempty"`

	// Not supported; see the error it causes.
	DistributedRaw json.RawMessage `json:"distributed,omitempty"`

	// Not supported; see the error it causes.
	StorageRaw json.RawMessage `json:"storage,omitempty"`

	logger   *zap.Logger
	now      func() time.Time
	use      *storeUse
	refusals *refusals
	// isSimulated is set on a copy that requests meet which are only imagined.
	isSimulated bool
	// ownsUse is set if the store is this handler's own.
	ownsUse bool
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
	h.logger = ctx.Logger()
	h.now = time.Now
	if err := h.adoptNamedZones(); err != nil {
		return err
	}
	if err := h.validate(); err != nil {
		return err
	}
	module, err := ctx.App("rate_limit")
	if err != nil {
		return fmt.Errorf("load the rate_limit app: %w", err)
	}
	app := module.(*App)
	if err := h.openStore(ctx, app); err != nil {
		return err
	}
	stores := []*storeUse{h.use}
	if h.Rollout != nil {
		if err := h.Rollout.provision(app); err != nil {
			return err
		}
		stores = append(stores, h.Rollout.use)
	}
	if h.refusals, err = newRefusals(ctx, h); err != nil {
		return err
	}
	for _, z := range h.Zones {
		for _, use := range stores {
			if err := app.claim(use.name, z); err != nil {
				return err
			}
		}
		if err := z.provision(ctx, stores...); err != nil {
			return err
		}
	}
	app.handlers = append(app.handlers, h)
	return nil
}

// validate tells what is wrong with the handler, and how to mend it.
func (h *Handler) validate() error {
	if len(h.Zones) == 0 {
		return errors.New("rate_limit has no zone: add one, such as zone api { key {client_ip}; events 100; window 1m } with a line for each option")
	}
	names := map[string]bool{}
	for _, z := range h.Zones {
		if err := z.validate(); err != nil {
			return err
		}
		if names[z.Name] {
			return badOption("zone "+z.Name, "is defined twice in one rate_limit: rename one")
		}
		names[z.Name] = true
	}
	if h.Jitter < 0 || h.Jitter > 10 || math.IsNaN(h.Jitter) {
		return badOption("jitter", "%v: it must be from 0 to 10, such as 0.2", h.Jitter)
	}
	if err := oneOf("headers", h.Headers, headersGitHub, headersIETF, headersBoth, headersNone); err != nil {
		return err
	}
	if err := oneOf("log_refusals", h.LogRefusals, logFirst, logAll, logNone); err != nil {
		return err
	}
	own, isName, err := rawStoreName(h.StoreRaw)
	if err != nil {
		return err
	}
	return h.Rollout.validate(own, isName)
}

func (h *Handler) openStore(ctx caddy.Context, app *App) error {
	name, isName, err := rawStoreName(h.StoreRaw)
	if err != nil {
		return err
	}
	if isName {
		h.use, err = app.store("store", name)
		return err
	}
	// A store without a name is the same store again if it is written the
	// same way.
	sum := sha256.Sum256(h.StoreRaw)
	name = "inline-" + hex.EncodeToString(sum[:6])
	module, err := ctx.LoadModule(h, "StoreRaw")
	if err != nil {
		return fmt.Errorf("load store: %w", err)
	}
	if h.use, err = openStore(ctx, name, module); err != nil {
		return err
	}
	h.ownsUse = true
	app.unnamed = append(app.unnamed, h.use)
	return nil
}

// Cleanup implements [caddy.CleanerUpper].
func (h *Handler) Cleanup() error {
	if h.ownsUse {
		h.use.unload()
	}
	return nil
}

// ServeHTTP implements [caddyhttp.MiddlewareHandler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	t := trackerOf(r)
	if t != nil && t.refusal != nil {
		// This is an error route of a request that was refused.
		return next.ServeHTTP(w, r)
	}
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if t == nil {
		repl.Map(placeholders(r))
	}
	nested := t != nil && !t.settled
	t, p, err := h.collect(t, w, r, repl)
	switch {
	case err != nil:
		return err
	case p == nil:
		return next.ServeHTTP(w, r)
	case !nested:
		err = t.serve(h, p, w, r, next)
		return h.answer(t, p, w, r, err)
	}
	if err := h.admit(t, p, w, r); err != nil {
		return h.answer(t, p, w, r, err)
	}
	// The outer handler's writer sees the final status.
	return next.ServeHTTP(w, r)
}

// answer answers a request that p ended with err, if the handler is to do that.
func (h *Handler) answer(t *tracker, p *part, w http.ResponseWriter, r *http.Request, err error) error {
	if err == nil || !h.Problem || t.refusal != p {
		return err
	}
	return p.writeProblem(w, r, err)
}

// collect resolves what the request asks of the zones that match it, as a new
// part of t, or of a new tracker if t is nil or, in an error route, settled. A
// zone that does not limit the request is left out, and so is a bucket that
// another handler counts the request in already. It returns no part if nothing is
// left.
func (h *Handler) collect(t *tracker, w http.ResponseWriter, r *http.Request, repl *caddy.Replacer) (*tracker, *part, error) {
	var p *part
	for _, z := range h.Zones {
		if len(z.matchers) > 0 {
			matches, err := z.matchers.AnyMatchWithError(r)
			if err != nil {
				return t, nil, err
			}
			if !matches {
				continue
			}
		}
		req, err := z.request(r, repl, h)
		if err != nil {
			return t, nil, err
		}
		if req.Events == unlimited {
			continue
		}
		use := z.useFor(req.ClientKey, h.Rollout)
		if t != nil && t.counts(use, &req) {
			continue
		}
		if p == nil {
			if t == nil || t.settled {
				t = newTracker(w, t)
			}
			p = t.newPart(h, repl)
		}
		p.add(use, req)
	}
	if p != nil {
		t.enroll(p, r)
	}
	return t, p, nil
}

// admit asks p's stores and returns nil if the request may pass.
func (h *Handler) admit(t *tracker, p *part, w http.ResponseWriter, r *http.Request) error {
	p.enter()
	if !p.refusesOutright() {
		p.divert(r.Context())
		if err := p.askInTurn(r); err != nil {
			t.refusal = p
			return err
		}
	}
	p.penalize()
	p.count()
	for _, i := range p.observed {
		if p.declines(i) {
			h.refusals.tell(p, i, r)
		}
	}
	switch refused := p.refusedBy(); {
	case refused >= 0:
		return h.refuse(t, p, refused, w, r)
	case p.isDenied():
		t.refusal = p
		deleteLimitHeaders(w.Header())
		return caddyhttp.Error(http.StatusServiceUnavailable, errStoreDown)
	default:
		p.holdLeases()
		return nil
	}
}

var errStoreDown = errors.New("rate limit store cannot answer, and on_error is deny")

// refuse answers by the state that refused; nothing more is asked of a store.
func (h *Handler) refuse(t *tracker, p *part, i int, w http.ResponseWriter, r *http.Request) error {
	z, st := p.zones[i].Zone, &p.states[i]
	t.refusal, t.refusedBy = p, z
	z.counts.declined.Inc()
	t.showRefunds()
	t.setRefusal(p, i, w.Header())
	switch {
	case st.RetryAfter != store.Never:
		setRetryAfter(w.Header(), h.retryAfter(st))
	case p.reqs[i].Events > 0:
		h.warnNever(z, &p.reqs[i])
	}
	h.refusals.tell(p, i, r)
	p.zones[i].refused.note(p.reqs[i].ClientKey, h.now())
	return caddyhttp.Error(http.StatusTooManyRequests, z.refusal)
}

// report tells whether a condition that a request has met is to be logged, as
// throttle does. An imagined request has met none.
func (h *Handler) report(t *throttle) (times int64, log bool) {
	if h.isSimulated {
		return 0, false
	}
	return t.report(h.now())
}

// warnNever tells of a request that costs more than its zone ever admits.
func (h *Handler) warnNever(z *Zone, req *store.Request) {
	if times, log := h.report(&z.never); log {
		h.logger.Warn("a request costs more than its zone ever admits; it is refused, and waiting will not help",
			zap.String("zone", z.Name), zap.Int64("cost", req.Cost), zap.Int64("capacity", req.Capacity()),
			zap.Int64("times", times), zap.String("hint", "raise events or, with gcra, burst; or lower cost or reserve"))
	}
}

// Interface guards.
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
