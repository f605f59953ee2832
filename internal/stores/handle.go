// Package stores keeps the stores that configs open, across reloads.
//
// A [Handle] is one config's use of a store, which a [Module] opens. An [Opened]
// is the store while it is open, with what surrounds it: its ledger, the buckets in
// memory where that cannot decide while the store fails, and the bound on new clients.
// [Pool] keeps what outlives a config, and [End] delivers at the end of the process what
// still waits.
package stores

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Module is what a module in the namespace rate_limit.stores implements.
type Module interface {
	// OpenStore opens the store that has this name in the config, without I/O. The store
	// may be a [store.Remote] and [store.Operable] too.
	// Its counts survive as long as some store of that name is open. A request
	// that outlives its config may open it again after it was closed. The config may be
	// rejected until it runs: until then the store changes nothing for others.
	OpenStore(name string) (store.Store, error)

	// CloseStore ends the use of what OpenStore returned, once for each call
	// of it, in the same order. It may be called while OpenStore runs.
	CloseStore()

	// OnErrorDefault returns what zones without an on_error of their own do:
	// allow, deny or local.
	OnErrorDefault() string
}

// Runner is a [Module] that is told when its config runs.
type Runner interface {
	// RunStore lets an open store of the module change what others use.
	RunStore(name string, open store.Store)
}

// What a zone does while its store cannot answer.
const (
	OnErrorAllow = "allow"
	OnErrorDeny  = "deny"
	OnErrorLocal = "local"
)

// OnErrorWords are these, as the arguments of an option.
const OnErrorWords = OnErrorAllow + "|" + OnErrorDeny + "|" + OnErrorLocal

// Handle is one config's use of a store. The store stays open until the config
// is unloaded and the last request that entered it has left.
type Handle struct {
	Name    string
	Module  Module
	OnError string
	Logger  *zap.Logger
	// errors has a telemetry.LogThrottle for each kind of error.
	errors sync.Map

	// users counts the config and the requests. It leaves zero, and the store is
	// opened and closed, only under mu.
	users atomic.Int64
	open  atomic.Pointer[Opened]
	mu    sync.Mutex
	// unloaded is set once the config has ended, and hasRun once it runs, for good: a request opens the store anew after
	// the config has ended.
	unloaded bool
	hasRun   atomic.Bool
	// onClose are called when the store is closed, and onOverrides until then when overrides
	// have changed.
	onClose, onOverrides []func()
}

// Open opens the store of a module. The config keeps it open, as one of its users,
// until it calls Unload.
func Open(ctx caddy.Context, name string, module any) (*Handle, error) {
	m, ok := module.(Module)
	if !ok {
		return nil, fmt.Errorf("store %s: module %T is not a rate_limit store", name, module)
	}
	h := &Handle{Name: name, Module: m, OnError: m.OnErrorDefault(), Logger: ctx.Logger()}
	if _, err := h.Enter(); err != nil {
		return nil, fmt.Errorf("store %s: %w", name, err)
	}
	return h, nil
}

// maxForgiving bounds how many buckets of a store are emptied at the same time, by a reset or by a
// refund whose outcome is awaited.
const maxForgiving = 256

var errForgiving = fmt.Errorf("%d other buckets are being emptied", maxForgiving)

// Forgive empties a bucket, in the store and in memory, without waiting, and
// calls done with the error, if there was one. The bucket of the store then stays as it is.
func (h *Handle) Forgive(r store.Request, done func(open *Opened, err error)) {
	open, err := h.Enter()
	if err != nil {
		done(nil, err)
		return
	}
	_ = open.Local.Buckets.Reset(context.Background(), r) // in memory, it does not fail
	if open.forgiving.Add(1) > maxForgiving {
		open.forgiving.Add(-1)
		done(open, errForgiving)
		h.Leave()
		return
	}
	forgive := func(ctx context.Context) {
		defer h.Leave()
		defer open.forgiving.Add(-1)
		done(open, open.Accounts.Reset(ctx, r))
	}
	if !open.IsRemote {
		forgive(context.Background())
		return
	}
	deliver(forgive)
}

// RefundReported refunds a request without waiting, and reports its bucket after that. If too many
// buckets are being emptied, it refunds nothing, and the error says so.
func (h *Handle) RefundReported(r store.Request, report func(st store.State)) {
	open, err := h.Enter()
	if err != nil {
		report(store.State{Err: store.NotExecuted(err)})
		return
	}
	if !open.IsRemote {
		defer h.Leave()
		open.Accounts.RefundReported(r, report)
		return
	}
	if open.forgiving.Add(1) > maxForgiving {
		defer h.Leave()
		open.forgiving.Add(-1)
		report(store.State{Err: store.NotExecuted(errForgiving)})
		return
	}
	refunded := make(chan store.State, 1)
	open.Accounts.RefundReported(r, func(st store.State) { refunded <- st })
	deliver(func(ctx context.Context) {
		defer h.Leave()
		st := store.State{}
		select {
		case st = <-refunded:
		case <-ctx.Done():
			st.Err = fmt.Errorf("%w: %w", store.ErrUncertain, ctx.Err())
		}
		open.forgiving.Add(-1)
		report(st)
	})
}

// OnClose calls f when the store, which is open, is closed.
func (h *Handle) OnClose(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.onClose = append(h.onClose, f)
}

// OnOverrides calls f, until the store is closed, when what operators change there for clients is
// known to be different.
func (h *Handle) OnOverrides(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.onOverrides = append(h.onOverrides, f)
}

func (h *Handle) reportOverrides() {
	h.mu.Lock()
	all := slices.Clone(h.onOverrides)
	h.mu.Unlock()
	for _, f := range all {
		f()
	}
}

// Run lets the ledger of the store deliver what waits, and follows what operators change: the config
// runs, unless it has ended meanwhile.
func (h *Handle) Run() {
	open := h.EnterOpen()
	if open == nil {
		return
	}
	defer h.Leave()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.unloaded {
		return
	}
	h.hasRun.Store(true)
	open.Accounts.Run()
	if m, ok := h.Module.(Runner); ok {
		m.RunStore(h.Name, open.Base)
	}
	if open.overrides != nil {
		open.overrides.run()
	}
	if open.presence != nil {
		open.presence.start()
	}
}

// warmTimeout bounds the connecting ahead of the first request.
const warmTimeout = 5 * time.Second

// Warm connects to the store ahead of the first request.
func (h *Handle) Warm() {
	open := h.EnterOpen()
	if open == nil {
		// The config has ended.
		return
	}
	defer h.Leave()
	ctx, cancel := context.WithTimeout(context.Background(), warmTimeout)
	defer cancel()
	open.Accounts.Warm(ctx)
}

// Enter returns the store for use until Leave is called.
func (h *Handle) Enter() (*Opened, error) {
	if open := h.EnterOpen(); open != nil {
		return open, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.open.Load() == nil {
		open, err := h.newOpened()
		if err != nil {
			return nil, err
		}
		if h.hasRun.Load() {
			// The request outlived its config, which delivers nothing any more.
			open.Accounts.Stop()
		}
		h.open.Store(open)
	}
	h.users.Add(1)
	return h.open.Load(), nil
}

// EnterOpen is Enter, but returns nil if the store is not open.
func (h *Handle) EnterOpen() *Opened {
	for n := h.users.Load(); n > 0; n = h.users.Load() {
		if h.users.CompareAndSwap(n, n+1) {
			return h.open.Load()
		}
	}
	return nil
}

// EnterRunning is EnterOpen if the config runs, or did, and reports whether that is so.
func (h *Handle) EnterRunning() bool { return h.hasRun.Load() && h.EnterOpen() != nil }

// ReportError counts an error of the store about a client, notes it for [Opened.Unanswered], and logs one of
// each kind a minute.
func (h *Handle) ReportError(now time.Time, zone, clientKey string, err error) {
	if open := h.open.Load(); open != nil && h.hasRun.Load() {
		failureOf{h.Name, open.Accounts.Owner(clientKey), false}.note(now, err)
	}
	kind := store.KindOf(err)
	telemetry.Default.StoreErrors.WithLabelValues(h.Name, string(kind)).Inc()
	throttle, ok := h.errors.Load(kind)
	if !ok {
		throttle, _ = h.errors.LoadOrStore(kind, new(telemetry.LogThrottle))
	}
	if times, log := throttle.(*telemetry.LogThrottle).Report(now); log {
		h.Logger.Error("store cannot answer",
			zap.String("store", h.Name), zap.String("zone", zone), zap.Int64("times", times), zap.Error(err))
	}
}

// IsRemote reports whether the store is open, and is a [store.Remote].
func (h *Handle) IsRemote() bool {
	open := h.open.Load()
	return open != nil && open.IsRemote
}

// IsInMemory reports whether the store is open, and that of the module memory.
func (h *Handle) IsInMemory() bool {
	open := h.open.Load()
	if open == nil {
		return false
	}
	_, isInMemory := open.Base.(*memory.Store)
	return isInMemory
}

// Leave ends what Enter began.
func (h *Handle) Leave() {
	if h.users.Add(-1) > 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users.Load() == 0 {
		if open := h.open.Swap(nil); open != nil {
			h.close(open)
		}
	}
}

// Unload ends the config's use of the store. At the end of the process requests that
// outlasted the grace period, and upgraded connections, may use it until [End].
func (h *Handle) Unload() {
	if open := h.open.Load(); open != nil {
		if open.presence != nil {
			// What requests that outlast the config go by, others do not have to know.
			open.presence.stop()
		}
		if open.overrides != nil {
			open.overrides.stop()
		}
		h.mu.Lock()
		// A rejected config has not run: requests that it has served go on in its store.
		if h.unloaded = true; h.hasRun.Load() && !caddy.Exiting() {
			open.Accounts.Stop()
		}
		h.mu.Unlock()
	}
	h.Leave()
}

// close ends the use of the store. mu is held.
func (h *Handle) close(open *Opened) {
	for _, f := range h.onClose {
		f()
	}
	h.onClose, h.onOverrides = nil, nil
	if open.overrides != nil {
		open.overrides.stop()
	}
	if open.presence != nil {
		open.presence.stop()
	}
	if open.newcomers != nil {
		_, _ = Pool.Delete(knownClientsKey(h.Name))
	}
	h.leaveAccounts(open)
}
