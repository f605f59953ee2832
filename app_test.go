package shardlimit

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/admin"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// awayModule opens stores that are unreachable while away is set.
type awayModule struct{ away *atomic.Bool }

func (m awayModule) OpenStore(string) (store.Store, error) {
	return awayStore{memory.New(memory.NewBuckets(), memory.Options{}), m.away}, nil
}
func (awayModule) CloseStore()            {}
func (awayModule) OnErrorDefault() string { return stores.OnErrorAllow }

type awayStore struct {
	*memory.Store
	away *atomic.Bool
}

func (s awayStore) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	for i := range reqs {
		if s.away.Load() {
			report(i, store.State{Err: store.ErrNotExecuted})
		} else {
			report(i, store.Answers(context.Background(), s.Charge, storetest.Posted(reqs[i:i+1]))[0])
		}
	}
}

func (s awayStore) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.ChargeReported(reqs, report)
}

func (s awayStore) PenalizeDetached(reqs []*store.Request) {
	store.Answers(context.Background(), s.Penalize, storetest.Posted(reqs))
}

func (awayStore) Owner(string) string { return "a" }

func (awayStore) Owners(string) []string { return []string{"a"} }

func (awayStore) Hurry(string) {}

func (awayStore) Warm(context.Context) {}

var _ store.Remote = awayStore{}

// TestEndedConfigIsNotAccepted, although Caddy had accepted it when that was looked up.
func TestEndedConfigIsNotAccepted(t *testing.T) {
	app := new(App)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	redistest.Must(t, app.Provision(ctx))
	redistest.Must(t, app.Stop())
	app.Accept()
	if app.isAccepted || app.handles[defaultStore].EnterRunning() {
		t.Error("it is accepted")
	}
	redistest.Must(t, app.Cleanup())
}

// TestConfigDeliversOnceItIsAccepted: Caddy ends the previous config right afterwards, and no other
// config may deliver in between.
func TestConfigDeliversOnceItIsAccepted(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	var away atomic.Bool
	away.Store(true)
	start := func() *stores.Opened {
		handle, err := stores.Open(ctx, t.Name(), awayModule{&away})
		redistest.Must(t, err)
		open, err := handle.Enter()
		redistest.Must(t, err)
		t.Cleanup(func() {
			handle.Unload()
			handle.Leave()
		})
		app := &App{unnamed: []*stores.Handle{handle}}
		app.life, app.end = context.WithCancel(ctx)
		app.watch = admin.NewWatch(app, ctx.Logger(), time.Now)
		t.Cleanup(app.watch.Stop)
		app.Accept()
		return open
	}
	before := start()
	before.Charge([]*store.Request{{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: "alice", Events: 100, Cost: 1,
	}})
	if !before.Accounts.IsNeeded() {
		t.Fatal("no charge is pending")
	}
	running := start()
	if before.Accounts.IsNeeded() {
		t.Error("the previous config delivers pending charges")
	}
	// Pending charges keep the ledger, and other tests check for leftovers.
	away.Store(false)
	caddytest.Eventually(t, "pending charges are delivered", func() error {
		return caddytest.Want("charges pending", running.Accounts.IsNeeded(), false)
	})
}
