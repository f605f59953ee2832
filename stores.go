package shardlimit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

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
	onErrorAllow = "allow"
	onErrorDeny  = "deny"
	onErrorLocal = "local"
)

// validateOnError checks the option on_error; empty is the default.
func validateOnError(s string) error {
	return oneOf("on_error", s, onErrorAllow, onErrorDeny, onErrorLocal)
}

// storeUse is one config's use of a store. It stays open until the config is
// unloaded and the last request that entered it has left.
type storeUse struct {
	name    string
	module  StoreModule
	onError string
	logger  *zap.Logger
	errors  throttle

	// users counts the config and the requests. Only under mu does it leave
	// zero, and is the store opened and closed.
	users atomic.Int64
	open  atomic.Pointer[openedStore]
	mu    sync.Mutex
	ended bool
	// opened is set once the store was.
	opened bool
	// closing are called when the store is closed.
	closing []func()
}

// openedStore is a store and what handlers need to know of it.
type openedStore struct {
	name  string
	store store.Store
	// base is the store without a ledger.
	base      store.Store
	accounts  accounts
	detacher  store.Detacher
	penalizer store.Penalizer
	// local counts where the store cannot.
	local localCounts
	// newcomers bounds new buckets, if that is wanted.
	newcomers *newcomers
	// full are the buckets that refused.
	full *fullBuckets
	// direct charges without a ledger.
	direct store.Detacher
	// ledger is store, if it is one.
	ledger *ledger.Ledger
}

func openStore(ctx caddy.Context, name string, module any) (*storeUse, error) {
	m, ok := module.(StoreModule)
	if !ok {
		return nil, fmt.Errorf("store %s: module %T is not a rate_limit store", name, module)
	}
	u := &storeUse{name: name, module: m, onError: m.OnErrorDefault(), logger: ctx.Logger()}
	if _, err := u.enter(); err != nil {
		return nil, fmt.Errorf("store %s: %w", name, err)
	}
	return u, nil
}

// enter returns the store for use until leave is called.
func (u *storeUse) enter() (*openedStore, error) {
	if open := u.enterOpen(); open != nil {
		return open, nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.open.Load() == nil {
		s, err := u.module.OpenStore(u.name)
		if err != nil {
			return nil, err
		}
		open := &openedStore{name: u.name, store: s, base: s, full: newFullBuckets()}
		open.detacher, _ = s.(store.Detacher)
		open.direct = open.detacher
		open.penalizer, _ = s.(store.Penalizer)
		open.boundNewcomers(u.name, u.module, u.logger)
		open.keepLedger(u.name, u.module)
		if u.opened && open.ledger != nil {
			// For a request that was overtaken by a new config.
			open.ledger.Stop()
		}
		u.opened = true
		u.open.Store(open)
	}
	u.users.Add(1)
	return u.open.Load(), nil
}

// enterOpen is enter, but returns nil if the store is not open.
func (u *storeUse) enterOpen() *openedStore {
	for n := u.users.Load(); n > 0; n = u.users.Load() {
		if u.users.CompareAndSwap(n, n+1) {
			return u.open.Load()
		}
	}
	return nil
}

// admit checks, and holds in flight what is allowed.
func (open *openedStore) admit(ctx context.Context, reqs []store.Request, states []store.State) {
	ctx, span := open.startSpan(ctx, "check", reqs)
	open.accounts.Admit(ctx, reqs, states)
	endSpan(span, states)
}

func (open *openedStore) take(ctx context.Context, reqs []store.Request, states []store.State) {
	ctx, span := open.startSpan(ctx, "take", reqs)
	copy(states, open.store.Take(ctx, reqs))
	endSpan(span, states)
}

// question is a method of a store that answers requests.
type question = func(s store.Store, ctx context.Context, reqs []store.Request) []store.State

// checkAhead checks a request that waits behind others. A ledger answers most such
// checks by what it knows.
func (open *openedStore) checkAhead(ctx context.Context, r store.Request, patience time.Duration) store.State {
	if open.ledger != nil {
		return open.ledger.CheckAhead(ctx, r, patience)
	}
	return open.store.Check(ctx, []store.Request{r})[0]
}

// detachedPatience bounds a call for which nobody waits, in a store that cannot
// make it by itself.
const detachedPatience = 5 * time.Second

// detach makes a call for which nobody waits.
func (open *openedStore) detach(s store.Detacher, alone func(store.Detacher, []store.Request), q question, reqs []store.Request) {
	switch {
	case len(reqs) == 0:
	case s != nil:
		alone(s, reqs)
	default:
		ctx, cancel := context.WithTimeout(context.Background(), detachedPatience)
		defer cancel()
		q(open.store, ctx, reqs)
	}
}

// knowsPenalties tells whether the store, which is open, can keep clients
// refused.
func (u *storeUse) knowsPenalties() bool { return u.open.Load().penalizer != nil }

// warmPatience bounds the connecting ahead of the first request.
const warmPatience = 5 * time.Second

// run tells the store, which the config has open, that the config runs.
func (u *storeUse) run() {
	if l := u.open.Load().ledger; l != nil {
		l.Run()
	}
}

// warm lets the store get ready.
func (u *storeUse) warm() {
	open := u.enterOpen()
	if open == nil {
		// The config has ended.
		return
	}
	defer u.leave()
	if w, ok := open.store.(store.Warmer); ok {
		ctx, cancel := context.WithTimeout(context.Background(), warmPatience)
		defer cancel()
		w.Warm(ctx)
	}
}

// leave ends what enter began.
func (u *storeUse) leave() {
	if u.users.Add(-1) > 0 {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.users.Load() == 0 {
		if open := u.open.Swap(nil); open != nil && !u.ended {
			u.close(open)
		}
	}
}

// unload ends the config's use of the store. When the process ends it closes
// the store, though requests that outlasted the grace period may still be in
// it: what was charged is to be delivered.
func (u *storeUse) unload() {
	if open := u.open.Load(); open != nil && open.ledger != nil && !caddy.Exiting() {
		open.ledger.Stop()
	}
	u.leave()
	if !caddy.Exiting() {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if open := u.open.Load(); open != nil && !u.ended {
		u.ended = true
		u.close(open)
	}
}

// onClose calls f when the store, which is open, is closed.
func (u *storeUse) onClose(f func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = append(u.closing, f)
}

// close ends the use of the store. mu is held.
func (u *storeUse) close(open *openedStore) {
	for _, f := range u.closing {
		f()
	}
	u.closing = nil
	open.leaveNewcomers()
	open.leaveLedger(u.name, u.module, u.module.CloseStore)
}

// failed reports an error of the store, at most once a minute.
func (u *storeUse) failed(now time.Time, zone string, err error) {
	metrics.storeErrors.WithLabelValues(u.name, redis.KindOf(err)).Inc()
	if times, log := u.errors.report(now); log {
		u.logger.Error("store cannot answer",
			zap.String("store", u.name), zap.String("zone", zone), zap.Int64("times", times), zap.Error(err))
	}
}

// errNoPeek is the error of a store that cannot be asked without being changed.
var errNoPeek = errors.New("the store cannot tell what is in a bucket without changing it")

// peek is what the store, without what is known of it, says about a bucket. The
// server that is written to is asked first.
func (open *openedStore) peek(ctx context.Context, r store.Request) store.State {
	var s any = open.direct
	if open.direct == nil {
		s = open.store
	}
	inspector, ok := s.(store.Inspector)
	if !ok {
		if peeker, ok := s.(store.Peeker); ok {
			return peeker.Peek(ctx, []store.Request{r})[0]
		}
		return store.State{Err: errNoPeek}
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
