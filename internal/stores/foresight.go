package stores

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Foresight answers as a store would, and changes nothing. States are those before the cost is
// spent.
type Foresight struct{ *Opened }

// Overflow returns what [Opened.Overflow] would.
func (f Foresight) Overflow(ctx context.Context, asks []*store.Ask, now func() time.Time) []Overflow {
	if f.newcomers == nil {
		return nil
	}
	return f.newcomers.foresee(ctx, asks, now())
}

// RefuseKnown sets the states that [Opened.RefuseKnown] would.
func (f Foresight) RefuseKnown(asks []*store.Ask) (refused bool) {
	return f.Accounts.ForeseeKnown(asks)
}

// Admit sets the states that [Opened.Admit] would.
func (f Foresight) Admit(ctx context.Context, asks []*store.Ask) { f.foresee(ctx, asks, false) }

// Take sets the states that [Opened.Take] would.
func (f Foresight) Take(ctx context.Context, asks []*store.Ask) { f.foresee(ctx, asks, true) }

func (f Foresight) foresee(ctx context.Context, asks []*store.Ask, takes bool) {
	// A ledger asks about none of them if one is known to be refused.
	if len(asks) > 1 && f.RefuseKnown(asks) {
		return
	}
	for _, a := range asks {
		a.State = f.Accounts.Foresee(a.Request, takes, func(r store.Request) store.State { return f.Peek(ctx, r) })
	}
}

// AdmitAlone returns what [Opened.AdmitAlone] would.
func (f Foresight) AdmitAlone(known, local *store.Request, takes bool) store.State {
	asked := store.Ask{Request: *local}
	Foresight{f.Local.Opened}.foresee(context.Background(), []*store.Ask{&asked}, takes)
	if known == nil || !asked.Allowed {
		return asked.State
	}
	st := f.Accounts.ForeseeAlone(known)
	if !st.Allowed {
		return st
	}
	return higher(asked.State, st)
}
