package caddytest

import (
	"context"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func init() { caddy.RegisterModule(new(GuestStore)) }

// GuestStore is the store module guest, as another plugin would provide it.
type GuestStore struct {
	Motto string `json:"motto,omitempty"`
	// Plain makes it a store that is not operable.
	Plain bool `json:"plain,omitempty"`
	// Unsure makes checks fail with ErrUncertain, as only writes should.
	Unsure bool `json:"unsure,omitempty"`
}

type unsureStore struct{ store.Store }

func (unsureStore) Check(_ context.Context, asks []*store.Ask) {
	for _, a := range asks {
		a.State = store.State{Err: store.ErrUncertain}
	}
}

// Guests counts how often guest stores were opened, and how many are open.
var Guests struct{ Opened, Open atomic.Int64 }

// CaddyModule implements [caddy.Module].
func (*GuestStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit.stores.guest", New: func() caddy.Module { return new(GuestStore) }}
}

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler].
func (g *GuestStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	for d.NextBlock(0) {
		switch g.Unsure = g.Unsure || d.Val() == "unsure"; {
		case d.Val() == "unsure" && !d.NextArg():
		case d.Val() != "motto" || !d.AllArgs(&g.Motto):
			return d.ArgErr()
		}
	}
	return nil
}

// OpenStore opens a store in memory.
func (g *GuestStore) OpenStore(string) (store.Store, error) {
	Guests.Opened.Add(1)
	Guests.Open.Add(1)
	s := memory.New(memory.NewBuckets(), memory.Options{})
	if g.Unsure {
		return unsureStore{s}, nil
	}
	if g.Plain {
		return struct{ store.Store }{s}, nil
	}
	return s, nil
}

// CloseStore counts the store as closed, and logs it.
func (*GuestStore) CloseStore() {
	Guests.Open.Add(-1)
	caddy.Log().Info("the guest store is closed")
}

// OnErrorDefault returns the on_error of zones that set none.
func (*GuestStore) OnErrorDefault() string { return "deny" }

var _ caddyfile.Unmarshaler = (*GuestStore)(nil)
