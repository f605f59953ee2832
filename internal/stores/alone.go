package stores

import (
	"context"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// AdmitAlone decides about a request that the store did not answer. It has to fit into the
// local counts and, unless known is nil, beside what the ledger knows of the bucket of known:
// the local counts lack what the store has admitted, and the ledger, how the events of a log
// leave it. Neither is added to the other, because both count what is admitted alone. Of an
// admitted request the cost is in flight in the ledger, and in the local counts unless
// it takes, which spends it there.
func (o *Opened) AdmitAlone(known, local *store.Request, takes bool) store.State {
	asked := store.Ask{Request: *local}
	if asks := []*store.Ask{&asked}; takes {
		o.Local.Accounts.Take(context.Background(), asks)
	} else {
		o.Local.Accounts.Admit(context.Background(), asks)
	}
	if known == nil || !asked.Allowed {
		return asked.State
	}
	st := o.Accounts.AdmitAlone(known)
	if !st.Allowed {
		o.leaveLocal(&asked, takes)
		return st
	}
	if takes {
		ledger.ShowTaken(&st, local.Cost)
	}
	return higher(asked.State, st)
}

// leaveLocal undoes what a request has in the local counts.
func (o *Opened) leaveLocal(asked *store.Ask, takes bool) {
	req := asked.Request
	if takes {
		req.Receipt = asked.State.Receipt
		o.Local.Refund([]*store.Request{&req})
		return
	}
	req.Cost = 0
	o.Local.Accounts.Settle([]*store.Request{&req}, []int64{asked.Cost})
}

// higher returns the state that counts more, with the receipt of the local one.
func higher(local, known store.State) store.State {
	if known.Used <= local.Used {
		return local
	}
	known.Receipt, known.IsHeld = local.Receipt, local.IsHeld
	return known
}
