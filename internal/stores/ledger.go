package stores

import (
	"context"
	"reflect"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// accounts hold what requests cost from their admission until they are settled:
// a [ledger.Ledger], or a [ledger.Local] for a store that answers at once.
type accounts interface {
	Admit(ctx context.Context, reqs []store.Request, states []store.State)
	RefuseKnown(reqs []store.Request, states []store.State) bool
	Foresee(r store.Request, takes bool, peek ledger.PeekFunc) store.State
	Hold(reqs []store.Request)
	Settle(reqs []store.Request, held []int64)
	Figures() ledger.Figures
}

// LedgerConfig is a [Module] with settings for its ledger.
type LedgerConfig interface {
	LedgerOptions(name string) ledger.Options
}

// localCounts decide where the store cannot. They are a store in memory.
type localCounts struct {
	*Opened
	Buckets *memory.Store
}

// ledgerKey is the key in the pool of a pooledLedger. What waits for one kind of
// store cannot be delivered through another.
type ledgerKey struct {
	name string
	kind reflect.Type
}

func (h *Handle) ledgerKey() ledgerKey { return ledgerKey{h.Name, reflect.TypeOf(h.Module)} }

// pooledLedger is what the configs with a store share: its books, and the local
// counts.
type pooledLedger struct {
	books   *ledger.Books
	flights *ledger.Flights

	local        *memory.Buckets
	localFlights *ledger.Flights
}

func newPooledLedger() (caddy.Destructor, error) {
	return pooledLedger{ledger.NewBooks(nil), ledger.NewFlights(), memory.NewBuckets(), ledger.NewFlights()}, nil
}

// Destruct implements [caddy.Destructor].
func (pooledLedger) Destruct() error { return nil }

// keepLedger puts a ledger before the store of o, and local counts beside it.
func (h *Handle) keepLedger(o *Opened) {
	pooled, _, _ := Pool.LoadOrNew(h.ledgerKey(), newPooledLedger)
	shared := pooled.(pooledLedger)
	buckets := memory.New(shared.local, memory.Options{})
	o.Local = localCounts{&Opened{
		Name: h.Name, Store: buckets, Base: buckets, Accounts: ledger.NewLocal(shared.localFlights, buckets),
		detacher: buckets, direct: buckets, penalizer: buckets,
	}, buckets}
	remote, isRemote := o.Store.(ledger.Remote)
	if !isRemote {
		o.Accounts = ledger.NewLocal(shared.flights, o.Store)
		return
	}
	opts := ledger.Options{}
	if m, ok := h.Module.(LedgerConfig); ok {
		opts = m.LedgerOptions(h.Name)
	}
	l := ledger.New(shared.books, remote, opts)
	o.Ledger, o.Store, o.Accounts, o.detacher = l, l, l, l
	if o.penalizer != nil {
		o.penalizer = l
	}
}

// leaveLedger leaves the ledger, which may be nil, and closes the module's store.
// While something waits that is delivered through that store, both happen later:
// once it is delivered, another config delivers it, or there is no more time.
// Until then a new config finds the books, and what waits.
func (h *Handle) leaveLedger(l *ledger.Ledger) {
	leave := func() {
		if l != nil {
			l.Leave()
		}
		_, _ = Pool.Delete(h.ledgerKey())
		h.Module.CloseStore()
	}
	if l == nil || !l.IsNeeded() {
		leave()
		return
	}
	flushes.deliver(func(ctx context.Context) {
		l.Flush(ctx)
		leave()
	})
}

var _ caddy.Destructor = pooledLedger{}
