package stores

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// StoreModule is what a module in the namespace rate_limit.stores implements.
type StoreModule interface {
	// OpenStore returns the store that the config calls name, without I/O.
	// What is counted in it survives as long as some store of that name is
	// open. It may be opened again after it was closed, by a request that was
	// overtaken by a new config.
	OpenStore(name string) (store.Store, error)

	// CloseStore ends the use of what OpenStore returned, once for each call
	// of it, in the same order. It may be called while OpenStore runs.
	CloseStore()

	// OnErrorDefault is what zones do that have no on_error of their own:
	// allow, deny or local.
	OnErrorDefault() string
}

// What a zone does while its store cannot answer.
const (
	OnErrorAllow = "allow"
	OnErrorDeny  = "deny"
	OnErrorLocal = "local"
)

// ValidateOnError checks the option on_error; empty is the default.
func ValidateOnError(s string) error {
	return option.OneOf("on_error", s, OnErrorAllow, OnErrorDeny, OnErrorLocal)
}

// Handle is one config's use of a store. It stays open until the config is
// unloaded and the last request that entered it has left.
type Handle struct {
	Name    string
	Module  StoreModule
	OnError string
	Logger  *zap.Logger
	errors  telemetry.LogThrottle

	// Users counts the config and the requests. Only under mu does it leave
	// zero, and is the store opened and closed.
	Users atomic.Int64
	Open  atomic.Pointer[Opened]
	mu    sync.Mutex
	ended bool
	// opened is set once the store was.
	opened bool
	// closing are called when the store is closed.
	closing []func()
}

// Opened is a store and what handlers need to know of it.
type Opened struct {
	Name  string
	Store store.Store
	// Base is the store without a ledger.
	Base      store.Store
	Accounts  accounts
	Detacher  store.Detacher
	Penalizer store.Penalizer
	// Local counts where the store cannot.
	Local localCounts
	// Newcomers bounds new buckets, if that is wanted.
	Newcomers *newcomers
	// Full are the buckets that refused.
	Full *fullBuckets
	// Direct charges without a ledger.
	Direct store.Detacher
	// Ledger is store, if it is one.
	Ledger *ledger.Ledger
}

func Open(ctx caddy.Context, name string, module any) (*Handle, error) {
	m, ok := module.(StoreModule)
	if !ok {
		return nil, fmt.Errorf("store %s: module %T is not a rate_limit store", name, module)
	}
	u := &Handle{Name: name, Module: m, OnError: m.OnErrorDefault(), Logger: ctx.Logger()}
	if _, err := u.Enter(); err != nil {
		return nil, fmt.Errorf("store %s: %w", name, err)
	}
	return u, nil
}

// Enter returns the store for use until leave is called.
func (u *Handle) Enter() (*Opened, error) {
	if open := u.EnterOpen(); open != nil {
		return open, nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.Open.Load() == nil {
		s, err := u.Module.OpenStore(u.Name)
		if err != nil {
			return nil, err
		}
		open := &Opened{Name: u.Name, Store: s, Base: s, Full: newFullBuckets()}
		open.Detacher, _ = s.(store.Detacher)
		open.Direct = open.Detacher
		open.Penalizer, _ = s.(store.Penalizer)
		open.boundNewcomers(u.Name, u.Module, u.Logger)
		open.keepLedger(u.Name, u.Module)
		if u.opened && open.Ledger != nil {
			// For a request that was overtaken by a new config.
			open.Ledger.Stop()
		}
		u.opened = true
		u.Open.Store(open)
	}
	u.Users.Add(1)
	return u.Open.Load(), nil
}

// EnterOpen is enter, but returns nil if the store is not open.
func (u *Handle) EnterOpen() *Opened {
	for n := u.Users.Load(); n > 0; n = u.Users.Load() {
		if u.Users.CompareAndSwap(n, n+1) {
			return u.Open.Load()
		}
	}
	return nil
}

// Admit checks, and holds in flight what is allowed.
func (open *Opened) Admit(ctx context.Context, reqs []store.Request, states []store.State) {
	ctx, span := open.startSpan(ctx, "check", reqs)
	open.Accounts.Admit(ctx, reqs, states)
	endSpan(span, states)
}

func (open *Opened) Take(ctx context.Context, reqs []store.Request, states []store.State) {
	ctx, span := open.startSpan(ctx, "take", reqs)
	copy(states, open.Store.Take(ctx, reqs))
	endSpan(span, states)
}

// question is a method of a store that answers requests.
type question = func(s store.Store, ctx context.Context, reqs []store.Request) []store.State

// CheckAhead checks a request that waits behind others. A ledger answers most such
// checks by what it knows.
func (open *Opened) CheckAhead(ctx context.Context, r store.Request, patience time.Duration) store.State {
	if open.Ledger != nil {
		return open.Ledger.CheckAhead(ctx, r, patience)
	}
	return open.Store.Check(ctx, []store.Request{r})[0]
}

// detachedTimeout bounds a call for which nobody waits, in a store that cannot
// make it by itself.
const detachedTimeout = 5 * time.Second

// Detach makes a call for which nobody waits.
func (open *Opened) Detach(s store.Detacher, alone func(store.Detacher, []store.Request), q question, reqs []store.Request) {
	switch {
	case len(reqs) == 0:
	case s != nil:
		alone(s, reqs)
	default:
		ctx, cancel := context.WithTimeout(context.Background(), detachedTimeout)
		defer cancel()
		q(open.Store, ctx, reqs)
	}
}

// KnowsPenalties tells whether the store, which is open, can keep clients
// refused.
func (u *Handle) KnowsPenalties() bool { return u.Open.Load().Penalizer != nil }

// warmTimeout bounds the connecting ahead of the first request.
const warmTimeout = 5 * time.Second

// Run tells the store, which the config has open, that the config runs.
func (u *Handle) Run() {
	if l := u.Open.Load().Ledger; l != nil {
		l.Run()
	}
}

// Warm lets the store get ready.
func (u *Handle) Warm() {
	open := u.EnterOpen()
	if open == nil {
		// The config has ended.
		return
	}
	defer u.Leave()
	if w, ok := open.Store.(store.Warmer); ok {
		ctx, cancel := context.WithTimeout(context.Background(), warmTimeout)
		defer cancel()
		w.Warm(ctx)
	}
}

// Leave ends what enter began.
func (u *Handle) Leave() {
	if u.Users.Add(-1) > 0 {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.Users.Load() == 0 {
		if open := u.Open.Swap(nil); open != nil && !u.ended {
			u.close(open)
		}
	}
}

// Unload ends the config's use of the store. When the process ends it closes
// the store, though requests that outlasted the grace period may still be in
// it: what was charged is to be delivered.
func (u *Handle) Unload() {
	if open := u.Open.Load(); open != nil && open.Ledger != nil && !caddy.Exiting() {
		open.Ledger.Stop()
	}
	u.Leave()
	if !caddy.Exiting() {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if open := u.Open.Load(); open != nil && !u.ended {
		u.ended = true
		u.close(open)
	}
}

// OnClose calls f when the store, which is open, is closed.
func (u *Handle) OnClose(f func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = append(u.closing, f)
}

// close ends the use of the store. mu is held.
func (u *Handle) close(open *Opened) {
	for _, f := range u.closing {
		f()
	}
	u.closing = nil
	open.leaveNewcomers()
	open.leaveLedger(u.Name, u.Module, u.Module.CloseStore)
}

// Failed reports an error of the store, at most once a minute.
func (u *Handle) Failed(now time.Time, zone string, err error) {
	telemetry.Default.StoreErrors.WithLabelValues(u.Name, redis.KindOf(err)).Inc()
	if times, log := u.errors.Report(now); log {
		u.Logger.Error("store cannot answer",
			zap.String("store", u.Name), zap.String("zone", zone), zap.Int64("times", times), zap.Error(err))
	}
}

// ErrNoPeek is the error of a store that cannot be asked without being changed.
var ErrNoPeek = errors.New("the store cannot tell what is in a bucket without changing it")

// Peek is what the store, without what is known of it, says about a bucket. The
// server that is written to is asked first.
func (open *Opened) Peek(ctx context.Context, r store.Request) store.State {
	var s any = open.Direct
	if open.Direct == nil {
		s = open.Store
	}
	inspector, ok := s.(store.Inspector)
	if !ok {
		if peeker, ok := s.(store.Peeker); ok {
			return peeker.Peek(ctx, []store.Request{r})[0]
		}
		return store.State{Err: ErrNoPeek}
	}
	found := inspector.Inspect(ctx, r)
	if found.Former != nil && !found.Copies[0].Exists {
		found = *found.Former
	}
	for i := range found.Copies {
		if found.Copies[i].State.Err == nil {
			return found.Copies[i].State
		}
	}
	return found.Copies[0].State
}

// tracerName is the instrumentation scope of the spans.
const tracerName = "github.com/shardlimit/caddy-shardlimit"

// startSpan begins a span of a call to a store, if the request is traced;
// otherwise the span is nil. What is known without the store makes it short.
func (open *Opened) startSpan(ctx context.Context, operation string, reqs []store.Request) (context.Context, trace.Span) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	zones := make([]string, len(reqs))
	for i := range reqs {
		zones[i] = reqs[i].Limit.Zone
	}
	return parent.TracerProvider().Tracer(tracerName).Start(ctx, "rate_limit "+operation,
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
			attribute.String("rate_limit.store", open.Name),
			attribute.StringSlice("rate_limit.zones", zones)))
}

// endSpan ends what startSpan began.
func endSpan(span trace.Span, states []store.State) {
	if span == nil {
		return
	}
	allowed := true
	for i := range states {
		if err := states[i].Err; err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, "the store cannot answer")
		} else if !states[i].Allowed {
			allowed = false
		}
	}
	span.SetAttributes(attribute.Bool("rate_limit.allowed", allowed))
	span.End()
}
