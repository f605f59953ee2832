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
func (f Foresight) Overflow(ctx context.Context, reqs []store.Request, now func() time.Time) []Overflow {
	if f.newcomers == nil {
		return nil
	}
	return f.newcomers.foresee(ctx, reqs, now())
}

// RefuseKnown sets the states that [Opened.RefuseKnown] would.
func (f Foresight) RefuseKnown(reqs []store.Request, states []store.State) (refused bool) {
	return f.Accounts.ForeseeKnown(reqs, states)
}

// Admit sets the states that [Opened.Admit] would.
func (f Foresight) Admit(ctx context.Context, reqs []store.Request, states []store.State) {
	f.foresee(ctx, reqs, states, false)
}

// Take sets the states that [Opened.Take] would.
func (f Foresight) Take(ctx context.Context, reqs []store.Request, states []store.State) {
	f.foresee(ctx, reqs, states, true)
}

func (f Foresight) foresee(ctx context.Context, reqs []store.Request, states []store.State, takes bool) {
	// A ledger asks about none of them if one is known to be refused.
	if len(reqs) > 1 && f.RefuseKnown(reqs, states) {
		return
	}
	for i := range reqs {
		states[i] = f.Accounts.Foresee(reqs[i], takes, func(r store.Request) store.State { return f.Peek(ctx, r) })
	}
}

// AdmitAlone returns what [Opened.AdmitAlone] would.
func (f Foresight) AdmitAlone(known, local *store.Request, takes bool) store.State {
	states := make([]store.State, 1)
	Foresight{f.Local.Opened}.foresee(context.Background(), []store.Request{*local}, states, takes)
	if known == nil || !states[0].Allowed {
		return states[0]
	}
	st := f.Accounts.ForeseeAlone(known)
	if !st.Allowed {
		return st
	}
	return higher(states[0], st)
}
