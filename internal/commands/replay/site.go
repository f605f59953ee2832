package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/routes"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// site is the server of a config whose limits are replayed. Of its handlers only those are loaded
// that limit requests or prepare them.
type site struct {
	server *caddyhttp.Server
	// zones are all zones of all handlers, in their order.
	zones []*zone
	// limiters are those of the config, and those that replay.
	limiters map[*limiter.Limiter]*limiter.Limiter
	// defined are the placeholders that handlers of the config set.
	defined map[string]bool
	logging *logging
	// unlogged are what keeps requests out of Caddy's log.
	unlogged []string
	// notes are what is not replayed.
	notes []string
	end   []func()
}

// zone is a zone of one handler.
type zone struct {
	*limiter.Zone
	// stores are its store and, while its counts move, the new one.
	stores []string
	needs  needs
	// onlyInKey are the needs whose values only tell clients apart.
	onlyInKey needs
	// reason is why it is left out, or "".
	reason string
}

// loader loads a site.
type loader struct {
	*site
	ctx    caddy.Context
	clock  *clock
	config *Config
	stores map[string]*stores.Handle
	// enclosing are what the matchers of the routes around need.
	enclosing []needs
}

const handlerPrefix = "http.handlers."

// loadSite loads what limits requests of a config.
func loadSite(ctx caddy.Context, config *Config, c *clock) (*site, error) {
	name, raw, err := config.find()
	if err != nil {
		return nil, err
	}
	s := &site{
		server: &caddyhttp.Server{}, limiters: map[*limiter.Limiter]*limiter.Limiter{}, defined: map[string]bool{},
	}
	if s.logging, err = loggingOf(config.Logging); err != nil {
		return nil, err
	}
	if raw.Logs != nil {
		s.logging.server = *raw.Logs
	}
	if hosts := s.logging.server.SkipHosts; len(hosts) > 0 {
		s.unlogged = append(s.unlogged, "skip_hosts "+strings.Join(hosts, " "))
	}
	l := &loader{site: s, ctx: ctx, clock: c, config: config, stores: map[string]*stores.Handle{}}
	if s.server.Routes, err = l.routes(raw.Routes); err != nil {
		return nil, fmt.Errorf("server %s: %w", name, err)
	}
	s.server.NamedRoutes = map[string]*caddyhttp.Route{}
	for name, route := range raw.NamedRoutes {
		list, err := l.routes([]json.RawMessage{route})
		if err != nil {
			return nil, fmt.Errorf("named route %s: %w", name, err)
		}
		s.server.NamedRoutes[name] = &list[0]
	}
	if limits(raw.Errors) {
		s.note("rate_limit in error routes (handle_errors) is not replayed")
	}
	return s, nil
}

// note notes once what is not replayed.
func (s *site) note(text string) {
	if !slices.Contains(s.notes, text) {
		s.notes = append(s.notes, text)
	}
}

// close leaves the stores.
func (s *site) close() {
	for _, f := range s.end {
		f()
	}
}

// limits reports whether there is a rate_limit in a value of JSON.
func limits(raw json.RawMessage) bool {
	var value any
	return json.Unmarshal(raw, &value) == nil && has(value, func(m map[string]any) bool { return m["handler"] == "rate_limit" })
}

// has reports whether is holds for an object in a value of JSON.
func has(value any, is func(map[string]any) bool) bool {
	in := func(v any) bool { return has(v, is) }
	switch value := value.(type) {
	case map[string]any:
		return is(value) || slices.ContainsFunc(slices.Collect(maps.Values(value)), in)
	case []any:
		return slices.ContainsFunc(value, in)
	}
	return false
}

func (l *loader) routes(raw []json.RawMessage) (caddyhttp.RouteList, error) {
	list := make(caddyhttp.RouteList, len(raw))
	for i := range raw {
		if err := l.route(raw[i], &list[i]); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (l *loader) route(raw json.RawMessage, route *caddyhttp.Route) error {
	if err := json.Unmarshal(raw, route); err != nil {
		return err
	}
	var around struct {
		Match any `json:"match"`
	}
	_ = json.Unmarshal(raw, &around) // decoded before
	handlers := route.HandlersRaw
	route.HandlersRaw = nil
	if err := route.ProvisionMatchers(l.ctx); err != nil {
		return err
	}
	l.enclosing = append(l.enclosing, needsOfMatchers(around.Match))
	defer func() { l.enclosing = l.enclosing[:len(l.enclosing)-1] }()
	for _, raw := range handlers {
		h, err := l.handler(raw)
		if err != nil {
			return err
		}
		route.Handlers = append(route.Handlers, h)
	}
	return nil
}

// handler loads a handler that limits requests or prepares them, or what stands in for another one.
func (l *loader) handler(raw json.RawMessage) (caddyhttp.MiddlewareHandler, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, err
	}
	var name string
	_ = json.Unmarshal(fields["handler"], &name) // as it is checked below
	delete(fields, "handler")
	switch id := caddy.ModuleID(handlerPrefix + name); {
	case name == "subroute":
		var list []json.RawMessage
		if err := unmarshal(fields["routes"], &list); err != nil {
			return nil, err
		}
		routes, err := l.routes(list)
		return &caddyhttp.Subroute{Routes: routes}, err
	case name == "invoke":
		invoke := new(caddyhttp.Invoke)
		return invoke, unmarshal(fields["name"], &invoke.Name)
	case name == "rate_limit":
		h, err := l.load(id, fields)
		if err == nil {
			err = l.adopt(h.(routes.Limiting).Limiter(), fields)
		}
		return h, err
	case routes.Runs(id):
		l.define(name, fields)
		return l.load(id, fields)
	default:
		if limits(raw) {
			l.note("rate_limit inside " + string(id) + " is not replayed")
		}
		other := &standIn{id: id}
		_ = json.Unmarshal(raw, other) // fields of another kind are as good as none
		return other, nil
	}
}

func unmarshal(raw json.RawMessage, to any) error {
	if raw == nil {
		return nil
	}
	return json.Unmarshal(raw, to)
}

func (l *loader) load(id caddy.ModuleID, fields map[string]json.RawMessage) (caddyhttp.MiddlewareHandler, error) {
	raw, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	module, err := l.ctx.LoadModuleByID(string(id), raw)
	if err != nil {
		return nil, err
	}
	return module.(caddyhttp.MiddlewareHandler), nil
}

// define notes the placeholders that a handler sets.
func (l *loader) define(name string, fields map[string]json.RawMessage) {
	switch name {
	case "vars":
		for key := range fields {
			l.defined["http.vars."+key] = true
			if key == caddyhttp.LogSkipVar && !slices.Contains(l.unlogged, key) {
				l.unlogged = append(l.unlogged, key)
			}
		}
	case "map":
		var to []string
		_ = unmarshal(fields["destinations"], &to) // the module reports what is wrong
		for _, text := range to {
			for _, name := range limiter.PlaceholdersIn(text) {
				l.defined[name] = true
			}
		}
	}
}

// standIn is in place of a handler that is not loaded. Its fields are those that say whether
// requests may go on behind it.
type standIn struct {
	id             caddy.ModuleID
	PassThru       bool              `json:"pass_thru"`
	HandleResponse []json.RawMessage `json:"handle_response"`
}

// ModuleID implements [routes.StandIn].
func (s *standIn) ModuleID() caddy.ModuleID { return s.id }

// ServeHTTP implements [caddyhttp.MiddlewareHandler]. A walk does not call it.
func (*standIn) ServeHTTP(http.ResponseWriter, *http.Request, caddyhttp.Handler) error {
	return errors.ErrUnsupported
}

// adopt makes the limiter that replays what one of the config limits.
func (l *loader) adopt(of *limiter.Limiter, fields map[string]json.RawMessage) error {
	config := of.Config
	config.Now, config.AfterFunc = l.clock.Now, l.clock.AfterFunc
	config.Headers, config.Problem, config.Jitter = limiter.HeadersNone, false, 0
	config.LogRefusals, config.Logger, config.Events = limiter.LogNone, zap.NewNop(), telemetry.Events{}
	var err error
	if config.Store, err = l.store(of.Store.Name); err != nil {
		return err
	}
	if of.Rollout != nil {
		config.Rollout = &limiter.Rollout{Percent: of.Rollout.Percent}
		if config.Rollout.Store, err = l.store(of.Rollout.Store.Name); err != nil {
			return err
		}
	}
	for _, z := range config.Zones {
		// Nothing is logged, and nobody waits.
		z.Warn = 0
		if z.MaxWait > 0 {
			z.MaxWait = 0
			l.note("max_wait of zone " + z.Name + " is not replayed: what it would have held counts as refused")
		}
	}
	l.limiters[of] = limiter.New(config)
	for _, z := range config.Zones {
		added := &zone{Zone: z, stores: []string{config.Store.Name}, needs: needsBesideKey(z, fields)}
		if config.Rollout != nil {
			added.stores = append(added.stores, config.Rollout.Store.Name)
			added.needs.add(needsOfKey(config.Zones[0]))
		}
		added.needs.add(l.enclosing...)
		key := needsOfKey(z)
		added.onlyInKey = slices.DeleteFunc(slices.Clone(key), func(name string) bool {
			return slices.Contains(added.needs, name) || limiter.IsAddress(name)
		})
		added.needs.add(key)
		l.zones = append(l.zones, added)
	}
	return nil
}

// store opens the store of that name, in memory and by the clock of the log.
func (l *loader) store(name string) (*stores.Handle, error) {
	if h := l.stores[name]; h != nil {
		return h, nil
	}
	h, err := stores.Open(l.ctx, name, &module{
		buckets: memory.NewBuckets(), newBuckets: l.config.MaxNewBuckets[name],
		options: memory.Options{MaxBuckets: l.config.MostBuckets, Now: l.clock.Now, OnEvict: func(string) { l.config.evicted++ }},
	})
	if err == nil {
		l.stores[name] = h
		l.end = append(l.end, h.Unload)
	}
	return h, err
}

// module is the [stores.Module] of a replay.
type module struct {
	buckets    *memory.Buckets
	options    memory.Options
	newBuckets int
}

// OpenStore implements [stores.Module].
func (m *module) OpenStore(string) (store.Store, error) { return memory.New(m.buckets, m.options), nil }

// CloseStore implements [stores.Module].
func (*module) CloseStore() {}

// OnErrorDefault implements [stores.Module]. Memory always answers.
func (*module) OnErrorDefault() string { return stores.OnErrorAllow }

// NewBuckets implements [stores.NewcomerConfig].
func (m *module) NewBuckets() int { return m.newBuckets }

// find returns the server whose limits are replayed: the one that is named, or the only one that
// has limits.
func (c *Config) find() (name string, s rawServer, err error) {
	var app struct {
		Servers map[string]rawServer `json:"servers"`
	}
	if err := json.Unmarshal(c.HTTP, &app); err != nil {
		return "", s, fmt.Errorf("decode the http app: %w", err)
	}
	var limiting []string
	for _, name := range slices.Sorted(maps.Keys(app.Servers)) {
		s := app.Servers[name]
		named, err := json.Marshal(s.NamedRoutes)
		if err == nil && (slices.ContainsFunc(s.Routes, limits) || limits(named)) {
			limiting = append(limiting, name)
		}
	}
	switch {
	case c.Server != "" && slices.Contains(limiting, c.Server):
		return c.Server, app.Servers[c.Server], nil
	case len(limiting) == 0:
		return "", s, errors.New("no server of the config has a rate_limit")
	case c.Server != "":
		return "", s, fmt.Errorf("server %q has no rate_limit; there is %s", c.Server, strings.Join(limiting, ", "))
	case len(limiting) > 1:
		return "", s, fmt.Errorf("several servers have a rate_limit: name that of the log with --server, one of %s", strings.Join(limiting, ", "))
	}
	return limiting[0], app.Servers[limiting[0]], nil
}

type rawServer struct {
	Routes      []json.RawMessage          `json:"routes"`
	NamedRoutes map[string]json.RawMessage `json:"named_routes"`
	Errors      json.RawMessage            `json:"errors"`
	Logs        *serverLogs                `json:"logs"`
}
