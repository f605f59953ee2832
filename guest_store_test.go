package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

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
	// Unsure makes checks fail as only what writes should.
	Unsure bool `json:"unsure,omitempty"`
}

// unsureStore is a store whose checks fail so.
type unsureStore struct{ store.Store }

func (unsureStore) Check(_ context.Context, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	for i := range states {
		states[i].Err = store.ErrUncertain
	}
	return states
}

// guests counts how often guest stores were opened, and how many are open.
var guests struct{ opened, open atomic.Int64 }

func (*guestStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit.stores.guest", New: func() caddy.Module { return new(guestStore) }}
}

func (g *guestStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
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

func (g *guestStore) OpenStore(string) (store.Store, error) {
	guests.opened.Add(1)
	guests.open.Add(1)
	s := memory.New(memory.NewBuckets(), memory.Options{})
	if g.Unsure {
		return unsureStore{s}, nil
	}
	if g.Plain {
		return struct{ store.Store }{s}, nil
	}
	return s, nil
}

func (*guestStore) CloseStore() { guests.open.Add(-1) }

func (*guestStore) OnErrorDefault() string { return "deny" }

// TestUnsureCheckSpendsNothing, so that what its request costs is charged, and held
// in flight no longer than the request runs.
func TestUnsureCheckSpendsNothing(t *testing.T) {
	const requests = 3
	for _, onError := range []string{"local", "allow"} {
		c := startCaddy(t, zonesSite("rate_limit {\nstore guest {\nunsure\n}\n}", zoneWith("api", "events 10", "on_error "+onError), "respond ok"))
		for range requests {
			must(t, onError, want("status", c.ask("/", "X-Key: alice").status, http.StatusOK))
		}
		eventually(t, "nothing is in flight", func() error {
			status, _ := c.adminStatus()
			return want("in flight", status.Stores[0].Ledger.InFlight, 0)
		})
		must(t, onError, want("charged", c.metric(`caddy_rate_limit_settled_cost_total{kind="charged",zone="api"}`), fmt.Sprint(requests)))
	}
}

var (
	_ shardlimit.StoreModule = (*guestStore)(nil)
	_ caddyfile.Unmarshaler  = (*guestStore)(nil)
)
