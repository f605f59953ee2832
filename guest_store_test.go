package shardlimit_test

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

func init() { caddy.RegisterModule(new(guestStore)) }

// guestStore is a store module as another plugin would bring along.
type guestStore struct {
	Motto string `json:"motto,omitempty"`
	// Plain leaves out what a store need not have.
	Plain bool `json:"plain,omitempty"`
}

// guests counts how often guest stores were opened, and how many are open.
var guests struct{ opened, open atomic.Int64 }

func (*guestStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit.stores.guest", New: func() caddy.Module { return new(guestStore) }}
}

func (g *guestStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	for d.NextBlock(0) {
		if d.Val() != "motto" || !d.AllArgs(&g.Motto) {
			return d.ArgErr()
		}
	}
	return nil
}

func (g *guestStore) OpenStore(string) (store.Store, error) {
	guests.opened.Add(1)
	guests.open.Add(1)
	s := memory.New(memory.NewBuckets(), memory.Options{})
	if g.Plain {
		return struct{ store.Store }{s}, nil
	}
	return s, nil
}

func (*guestStore) CloseStore() { guests.open.Add(-1) }

func (*guestStore) OnErrorDefault() string { return "deny" }

var (
	_ shardlimit.StoreModule = (*guestStore)(nil)
	_ caddyfile.Unmarshaler  = (*guestStore)(nil)
)
