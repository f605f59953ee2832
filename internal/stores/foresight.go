package stores

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Foresight returns a view of o that answers as o does, and changes nothing. It reads the store until ctx ends.
func (o *Opened) Foresight(ctx context.Context) *Opened {
	of := &Opened{
		Name: o.Name, Base: o.Base, Operable: o.Operable, IsRemote: o.IsRemote, newcomers: o.newcomers, foresees: true,
		Accounts: foresight{live: o.Accounts, peek: func(r store.Request) store.State { return o.Peek(ctx, r) }},
	}
	if o.Local.Opened != nil {
		of.Local = localCounts{o.Local.Foresight(ctx), o.Local.Buckets}
	}
	return of
}

// foresight are accounts that answer as others do, and change nothing.
type foresight struct {
	// Accounts are nil: what is not defined here is not for simulated requests.
	Accounts
	live Accounts
	peek ledger.PeekFunc
}

func (f foresight) foresee(asks []*store.Ask, takes bool) {
	// A ledger asks about none of them if one is known to be refused.
	if len(asks) > 1 && f.live.ForeseeKnown(asks) {
		return
	}
	for _, a := range asks {
		a.State = f.live.Foresee(a.Request, takes, f.peek)
	}
}

func (f foresight) Admit(_ context.Context, asks []*store.Ask) { f.foresee(asks, false) }
func (f foresight) Take(_ context.Context, asks []*store.Ask)  { f.foresee(asks, true) }
func (f foresight) RefuseKnown(asks []*store.Ask) bool         { return f.live.ForeseeKnown(asks) }
func (f foresight) AdmitAlone(r *store.Request) store.State    { return f.live.ForeseeAlone(r) }
func (f foresight) IsFull(r *store.Request) bool               { return f.live.IsFull(r) }

func (f foresight) CheckAhead(_ context.Context, r store.Request, _ time.Duration) store.State {
	return f.live.Foresee(r, false, f.peek)
}

func (foresight) Settle([]*store.Request, []int64)                       {}
func (foresight) SettleUnknown([]*store.Request, []int64, []*store.Late) {}
func (foresight) ChargeDetached([]*store.Request)                        {}
func (foresight) ChargeByID([]*store.Request)                            {}
func (foresight) RefundDetached([]*store.Request)                        {}
func (foresight) PenalizeDetached([]*store.Request)                      {}
func (foresight) PenalizeAlone(*store.Request)                           {}
