package shardlimit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/admin"
	"github.com/shardlimit/caddy-shardlimit/internal/history"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/memorystore"
)

// StoreModule is what a module in the namespace rate_limit.stores implements.
type StoreModule = stores.Module

const defaultStore = stores.DefaultName

// App holds the stores in which all `rate_limit` handlers count.
type App struct {
	// The stores, by name. Handlers that name no store use the one named
	// `default`. Default: a memory store of that name.
	StoresRaw caddy.ModuleMap `json:"stores,omitempty" caddy:"namespace=rate_limit.stores inline_key=module"`

	handles map[string]*stores.Handle
	// unnamed are the stores that belong to one handler.
	unnamed []*stores.Handle
	zones   claims
	// limiters are the limiters of all handlers of the config.
	limiters []*limiter.Limiter
	// handlers are those in servers whose routes have not been looked at yet.
	handlers []*Handler
	servers  []*caddyhttp.Server
	// warnings are the findings of package lint about the routes around the handlers.
	warnings []lint.Warning
	logger   *zap.Logger
	watch    *admin.Watch
	// hasNoStores is set if none is configured.
	hasNoStores bool
	// lost are the zones that count in memory for that reason, and counted in a remote store in an earlier config.
	lost map[string]bool

	mu sync.Mutex
	// life ends, under mu, with the config.
	life context.Context
	end  context.CancelFunc
	// isAccepted is set once Caddy has accepted the config.
	isAccepted bool
	// endHistory ends what Accept began; nil before that.
	endHistory func()
}

// UnmarshalJSON implements [json.Unmarshaler].
func (a *App) UnmarshalJSON(text []byte) error {
	type plain App
	return option.Decode(text, (*plain)(a))
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision implements [caddy.Provisioner].
func (a *App) Provision(ctx caddy.Context) error {
	a.life, a.end = context.WithCancel(context.Background())
	a.zones = claims{}
	a.handles = map[string]*stores.Handle{}
	a.logger = ctx.Logger()
	a.watch = admin.NewWatch(a, a.logger, time.Now)
	if err := admin.RegisterMetrics(ctx); err != nil {
		return err
	}
	inMemory := new(memorystore.Store)
	if err := inMemory.Provision(ctx); err != nil {
		return err
	}
	modules := map[string]any{defaultStore: inMemory}
	for name, raw := range a.StoresRaw {
		if err := checkModule("store "+name, "stores."+name, raw); err != nil {
			return option.InJSON(err)
		}
	}
	if a.hasNoStores = len(a.StoresRaw) == 0; !a.hasNoStores {
		loaded, err := ctx.LoadModule(a, "StoresRaw")
		if err != nil {
			return fmt.Errorf("load stores: %w", err)
		}
		modules = loaded.(map[string]any)
	}
	for name, module := range modules {
		handle, err := stores.Open(ctx, name, module)
		if err != nil {
			return err
		}
		a.handles[name] = handle
	}
	return nil
}

// Missing returns an error that names the variables and files of the stores that this machine lacks, or nil.
func (a *App) Missing() error {
	var all []error
	for _, handle := range a.allHandles() {
		if m, ok := handle.Module.(interface{ Missing() error }); ok {
			if err := m.Missing(); err != nil {
				all = append(all, fmt.Errorf("store %s: %w", handle.Name, err))
			}
		}
	}
	return errors.Join(all...)
}

// Start implements [caddy.App]. It connects to the stores in the background, ahead of
// the first requests. Caddy may reject the config even when all apps have started.
// That something is missing is an error only here, because a config may be validated elsewhere.
func (a *App) Start() error {
	a.lookAtRoutes()
	if err := a.Missing(); err != nil {
		return err
	}
	for _, handle := range a.allHandles() {
		go handle.Warm()
	}
	if before := running(); before != nil && a.hasNoStores {
		a.lost = a.lostSince(before)
	}
	go a.awaitAcceptance()
	return nil
}

// acceptancePeriod is how often a config that has started looks whether Caddy has accepted
// it, which Caddy does not tell.
const acceptancePeriod = 10 * time.Millisecond

func (a *App) awaitAcceptance() {
	tick := time.NewTicker(acceptancePeriod)
	defer tick.Stop()
	for running() != a {
		select {
		case <-tick.C:
		case <-a.life.Done():
			return
		}
	}
	a.Accept()
}

// running returns the app of the config that Caddy has accepted, or nil.
func running() *App {
	module, err := caddy.ActiveContext().AppIfConfigured("rate_limit")
	if err != nil {
		return nil
	}
	return module.(*App)
}

// Accept lets a config that Caddy has accepted change what others use, unless it has ended.
// From then on it delivers waiting charges, older configs' too, and reads the overrides. Its limits
// hold for waiting requests, and its max_buckets bounds shared memory. Its metrics are exported, its
// problems are watched, and the history goes on. Other processes see it.
func (a *App) Accept() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.isAccepted || a.life.Err() != nil {
		return
	}
	a.isAccepted = true
	for _, handle := range a.allHandles() {
		handle.Run()
	}
	for _, l := range a.limiters {
		l.Run()
	}
	a.watch.Start()
	a.endHistory = history.Default.Start(admin.Reading)
}

// looksAt notes a handler of a server, whose routes are looked at once all are loaded.
func (a *App) looksAt(ctx caddy.Context, h *Handler) {
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		h.document = nil
		return
	}
	a.handlers = append(a.handlers, h)
	if !slices.Contains(a.servers, server) {
		a.servers = append(a.servers, server)
	}
}

// lookAtRoutes looks once for what makes limiters ineffective, and logs it.
func (a *App) lookAtRoutes() {
	if len(a.servers) == 0 {
		return
	}
	defer func() {
		for _, h := range a.handlers {
			h.document = nil
		}
		a.handlers, a.servers = nil, nil
		if reason := recover(); reason != nil {
			a.logger.Error("looking at the routes panicked; no rule was applied", zap.Any("reason", reason), zap.Stack("stack"))
		}
	}()
	slices.SortFunc(a.servers, func(one, other *caddyhttp.Server) int { return strings.Compare(one.Name(), other.Name()) })
	a.warnings = lint.Servers(a.servers)
	for i := range a.warnings {
		w := &a.warnings[i]
		a.logger.Warn("a limit may not do what it should", zap.String("rule", w.Rule), zap.String("store", w.Store), zap.String("zone", w.Zone),
			zap.String("at", w.Place), zap.Int("times", w.Times), zap.String("problem", w.Text()))
	}
}

// Warnings returns the findings of package lint about the routes around the handlers.
func (a *App) Warnings() []lint.Warning { return a.warnings }

// allHandles returns all stores of the config.
func (a *App) allHandles() []*stores.Handle {
	return slices.AppendSeq(slices.Clone(a.unnamed), maps.Values(a.handles))
}

// leave ends the config, which is not accepted any more.
func (a *App) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.end()
}

// Stop implements [caddy.App]. A config that was accepted takes over before this one ends.
// Cleanup, which Caddy calls after Stop and also for a config that never started, leaves
// the stores.
func (a *App) Stop() error {
	a.leave()
	if next := running(); next != nil {
		next.Accept()
	}
	return nil
}

// Cleanup implements [caddy.CleanerUpper]. Running requests keep their stores open
// until they have settled.
func (a *App) Cleanup() error {
	a.lookAtRoutes() // by `caddy validate`, which starts nothing
	a.leave()
	if a.watch != nil {
		a.watch.Stop()
	}
	if a.endHistory != nil {
		a.endHistory()
	}
	for _, handle := range a.handles {
		handle.Unload()
	}
	return nil
}

// Limiters returns the limiters of all handlers of the config.
func (a *App) Limiters() []*limiter.Limiter { return a.limiters }

// Watch returns what finds the problems of the config.
func (a *App) Watch() *admin.Watch { return a.watch }

// CountsInMemoryNow reports whether zones that counted in a remote store count in memory, because no store is
// configured any more.
func (a *App) CountsInMemoryNow() bool { return len(a.lost) > 0 }

// lostSince returns the zones that count only in the memory store that there is without a configured one, and that
// before counted in a remote store or had lost one.
func (a *App) lostSince(before *App) map[string]bool {
	lost := before.zonesIn((*stores.Handle).IsRemote)
	maps.Copy(lost, before.lost)
	remote := a.zonesIn((*stores.Handle).IsRemote)
	inMemory := a.zonesIn(func(h *stores.Handle) bool { return h == a.handles[defaultStore] })
	maps.DeleteFunc(lost, func(zone string, _ bool) bool { return remote[zone] || !inMemory[zone] })
	return lost
}

// zonesIn returns the names of the zones with a store of some kind.
func (a *App) zonesIn(is func(*stores.Handle) bool) map[string]bool {
	names := map[string]bool{}
	for _, l := range a.limiters {
		if slices.ContainsFunc(l.Stores(), is) {
			for _, z := range l.Zones {
				names[z.Name] = true
			}
		}
	}
	return names
}

// Stores returns all stores of the config, in alphabetical order of their names.
// Each comes once, even if several handlers define the same one.
func (a *App) Stores() []*stores.Handle {
	byName := map[string]*stores.Handle{}
	for _, handle := range a.unnamed {
		byName[handle.Name] = handle
	}
	maps.Copy(byName, a.handles)
	return slices.SortedFunc(maps.Values(byName), func(one, other *stores.Handle) int { return strings.Compare(one.Name, other.Name) })
}

// store returns the store with the name that the option which gives.
func (a *App) store(which, name string) (*stores.Handle, error) {
	if handle, ok := a.handles[cmp.Or(name, defaultStore)]; ok {
		return handle, nil
	}
	return nil, option.InJSON(unknownStore(which, name, slices.Sorted(maps.Keys(a.handles))))
}

func unknownStore(which, name string, known []string) error {
	names := strings.Join(known, ", ")
	if name == "" {
		return option.Errorf(which, "is missing, and no configured store is called %s: name one with the option store; there is %s", defaultStore, names).
			JSONf("is missing, and no configured store is called %s: name one; there is %s", defaultStore, names)
	}
	return option.Errorf(which, "%s is not configured: add it to the stores of the global rate_limit, or name another; there is %s", name, names).
		Field(map[string]string{"store": "store", "rollout": "rollout.store"}[which]).
		JSONf("%s is not configured: add it to stores of the app rate_limit, or name another; there is %s", name, names)
}

// claims are the zones in each store, and where a Caddyfile defines them.
type claims map[limiter.ZoneID]claim

type claim struct {
	definition string
	origin     origin
}

// add returns an error if a handler's zone is defined differently elsewhere. The origin of one in JSON is empty.
func (c claims) add(z *Zone, from origin, storeNames []string) error {
	definition := z.definition()
	for _, name := range storeNames {
		id := limiter.ZoneID{Store: name, Zone: z.Name}
		other, taken := c[id]
		if !taken {
			c[id] = claim{definition, from}
		} else if other.definition != definition {
			err := fmt.Errorf("zone %s is defined twice, differently: once with %s, once with %s; make them equal or rename one", z.Name, other.definition, definition)
			if from.zone.Line == 0 {
				return err
			}
			return twice(other.origin, from, err)
		}
	}
	return nil
}

// rawStoreName returns the name in a handler's option store, if that is a name and
// not a store of the handler's own.
func rawStoreName(raw json.RawMessage) (name string, isName bool, err error) {
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return "", true, nil
	case raw[0] == '{':
		return "", false, checkModule("store", "store", raw)
	case raw[0] == '[':
		return "", true, option.Errorf("store", "is a list: it must be the name of a store, or an object with the field module")
	}
	if err := json.Unmarshal(raw, &name); err != nil || !option.ValidName(name) {
		return "", true, option.Errorf("store", "is no name: it must be the name of a store, or an object with the field module")
	}
	return name, true, nil
}

// checkModule returns an error if the JSON of a store names no module. Caddy's own error has all of it, with the
// passwords.
func checkModule(what, path string, raw json.RawMessage) error {
	var fields map[string]json.RawMessage
	var module string
	if json.Unmarshal(raw, &fields) != nil || json.Unmarshal(fields["module"], &module) != nil || module == "" {
		return option.Errorf(what, "has no module: add the field module, such as redis or memory").Field(path)
	}
	return nil
}

// Interface guards.
var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
