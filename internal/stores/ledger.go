package stores

import (
	"context"
	"reflect"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// accounts hold what requests cost from their admission until they are settled.
type accounts interface {
	// Admit is [ledger.Ledger.Admit].
	Admit(ctx context.Context, reqs []store.Request, states []store.State)
	// RefuseKnown is [ledger.Ledger.RefuseKnown].
	RefuseKnown(reqs []store.Request, states []store.State) bool
	// Foresee is [ledger.Ledger.Foresee].
	Foresee(r store.Request, takes bool, word ledger.Word) store.State
	// Hold is [ledger.Ledger.Hold].
	Hold(reqs []store.Request)
	// Settle is [ledger.Ledger.Settle].
	Settle(reqs []store.Request, held []int64)
	// Figures are [ledger.Ledger.Figures].
	Figures() ledger.Figures
}

// ledgerKey is the key in the pool of what is known of a store: what waits for one kind of store
// cannot be delivered through another.
type ledgerKey struct {
	name string
	kind reflect.Type
}

func ledgerKeyOf(name string, module StoreModule) ledgerKey {
	return ledgerKey{name, reflect.TypeOf(module)}
}

// pooledLedger is what is known of a store, and of the local counts in its place.
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

// localCounts decide where the store cannot: a store in memory, like others.
type localCounts struct {
	*Opened
	Buckets *memory.Store
}

func newLocalCounts(name string, known pooledLedger) localCounts {
	s := memory.New(known.local, memory.Options{})
	return localCounts{&Opened{
		Name: name, Store: s, Base: s, Detacher: s, Direct: s, Penalizer: s, Accounts: ledger.NewLocal(known.localFlights, s),
	}, s}
}

// keepLedger puts a ledger before the store that open has, and local counts beside
// it.
func (open *Opened) keepLedger(name string, module StoreModule) {
	pooled, _, _ := Pool.LoadOrNew(ledgerKeyOf(name, module), newPooledLedger)
	known := pooled.(pooledLedger)
	open.Local = newLocalCounts(name, known)
	remote, isRemote := open.Store.(ledger.Remote)
	if !isRemote {
		open.Accounts = ledger.NewLocal(known.flights, open.Store)
		return
	}
	opts := ledger.Options{}
	if m, ok := module.(LedgerConfig); ok {
		opts = m.LedgerOptions(name)
	}
	l := ledger.New(known.books, remote, opts)
	open.Ledger, open.Store, open.Accounts, open.Detacher = l, l, l, l
	if open.Penalizer != nil {
		open.Penalizer = l
	}
}

// LedgerConfig is a store module that says how its ledger is kept.
type LedgerConfig interface {
	LedgerOptions(name string) ledger.Options
}

// leaveLedger ends the use of the ledger, and calls then. If something waits that
// is delivered through this store, both happen later: when that was delivered,
// when another config does it, or when there is no more time. Until then a config
// that comes finds what is known, and what waits.
func (open *Opened) leaveLedger(name string, module StoreModule, then func()) {
	leave := func() {
		if open.Ledger != nil {
			open.Ledger.Leave()
		}
		_, _ = Pool.Delete(ledgerKeyOf(name, module))
		then()
	}
	if open.Ledger == nil || !open.Ledger.IsNeeded() {
		leave()
		return
	}
	flushes.settle(func(ctx context.Context) {
		open.Ledger.Flush(ctx)
		leave()
	})
}

// endLedgers delivers, at the end of the process, what waits in ledgers that requests
// of older configs still use, and gives up the rest.
func endLedgers(ctx context.Context) {
	var used []pooledLedger
	Pool.Range(func(_, pooled any) bool {
		if known, ok := pooled.(pooledLedger); ok {
			used = append(used, known)
		}
		return true
	})
	for _, known := range used {
		known.books.End(ctx)
	}
}

var _ caddy.Destructor = pooledLedger{}
