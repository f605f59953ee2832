package stores

import (
	"context"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Opened is a store that is open, with what surrounds it.
type Opened struct {
	Name string
	// at is when it was opened.
	at time.Time
	// closeModule closes the module's store, once.
	closeModule func()
	// Base is the module's store.
	Base store.Store
	// Operable is Base if operators may ask it, and otherwise nil.
	Operable store.Operable
	// Accounts hold what requests cost until they are settled, and make all calls of
	// requests.
	Accounts Accounts
	// IsRemote is set if Base is a [store.Remote].
	IsRemote bool
	// Local decides while the store fails, where Accounts cannot.
	Local localCounts
	// overrides and presence are nil if the store keeps none.
	overrides *overrides
	presence  *presence
	// forgiving counts the buckets that are being emptied.
	forgiving atomic.Int64
	// newcomers is nil if new buckets are not bounded.
	newcomers *newcomers
	// foresees is set if the store changes nothing: see [Opened.Foresight].
	foresees bool
}

// Accounts are a store with an account of what its buckets are about to spend: a
// [ledger.Owners], or a [ledger.Local] for a store that answers at once. A Ledger documents the
// methods.
type Accounts interface {
	Admit(ctx context.Context, asks []*store.Ask)
	Take(ctx context.Context, asks []*store.Ask)
	Charge(ctx context.Context, asks []*store.Ask)
	Peek(ctx context.Context, asks []*store.Ask)
	Reset(ctx context.Context, r store.Request) error
	RefuseKnown(asks []*store.Ask) bool
	ForeseeKnown(asks []*store.Ask) bool
	IsFull(r *store.Request) bool
	CheckAhead(ctx context.Context, r store.Request, timeout time.Duration) store.State
	Foresee(r store.Request, takes bool, peek ledger.PeekFunc) store.State
	AdmitAlone(r *store.Request) store.State
	ForeseeAlone(r *store.Request) store.State
	PenalizeAlone(r *store.Request)

	Settle(reqs []*store.Request, held []int64)
	SettleUnknown(reqs []*store.Request, held []int64, ends []*store.Late)
	ChargeDetached(reqs []*store.Request)
	ChargeByID(reqs []*store.Request)
	RefundDetached(reqs []*store.Request)
	RefundReported(r store.Request, report func(st store.State))
	PenalizeDetached(reqs []*store.Request)

	Account(r *store.Request) *store.Account
	Recall(r *store.Request) bool
	Walk(reqs []store.Request, about func(i int, r *store.Request) bool, visit func(i int, clientKey string, st *store.State))
	Owner(clientKey string) string
	Delays(shard string) error
	Figures() ledger.Figures

	Warm(ctx context.Context)
	Run()
	Stop()
	IsNeeded() bool
	Flush(ctx context.Context)
	Leave()
}

// inUse has each Opened of a module, until that is closed: [End] closes those that requests still use.
var inUse sync.Map

func (h *Handle) newOpened() (*Opened, error) {
	s, err := h.Module.OpenStore(h.Name)
	if err != nil {
		return nil, err
	}
	operable, _ := s.(store.Operable)
	remote, isRemote := s.(store.Remote)
	open := &Opened{at: time.Now(), Name: h.Name, Base: s, Operable: operable, IsRemote: isRemote}
	open.closeModule = sync.OnceFunc(func() {
		inUse.Delete(open)
		h.Module.CloseStore()
	})
	h.keepAccounts(open, remote)
	open.newcomers = h.newNewcomers(open.Accounts)
	if shared, isShared := s.(store.Shared); isShared {
		open.presence = newPresence(h.Name, shared)
	}
	open.overrides = newOverrides(operable, h.overridePeriod(), h.reportOverrides)
	inUse.Store(open, nil)
	return open, nil
}

// Overflow returns the requests of clients beyond the module's bound, unless the store says
// that they are not new.
func (o *Opened) Overflow(ctx context.Context, asks []*store.Ask, now func() time.Time) []Overflow {
	if o.newcomers == nil {
		return nil
	}
	return o.newcomers.overflow(ctx, asks, now(), o.foresees)
}

// RefuseKnown sets the states of requests that are refused without a call, and reports whether
// there are any.
func (o *Opened) RefuseKnown(asks []*store.Ask) (refused bool) {
	return o.Accounts.RefuseKnown(asks)
}

// Admit checks requests, and holds in flight the cost of those that are allowed.
func (o *Opened) Admit(ctx context.Context, asks []*store.Ask) {
	ctx, span := o.startSpan(ctx, "check", asks)
	o.Accounts.Admit(ctx, asks)
	endSpan(span, asks)
}

// Take checks requests, and spends the cost of those that are allowed.
func (o *Opened) Take(ctx context.Context, asks []*store.Ask) {
	ctx, span := o.startSpan(ctx, "take", asks)
	o.Accounts.Take(ctx, asks)
	endSpan(span, asks)
}

// IsFull reports whether a take of r is expected to be refused. A request that takes from
// several buckets asks the full ones first, so that it touches no other if they refuse.
func (o *Opened) IsFull(r *store.Request) bool { return o.Accounts.IsFull(r) }

// Peek returns what the module's store says about a bucket. The primary is asked first if
// the store shows all copies.
func (o *Opened) Peek(ctx context.Context, r store.Request) store.State {
	if o.Operable == nil {
		return store.Answers(ctx, o.Base.Peek, []store.Request{r})[0]
	}
	found := o.Operable.Inspect(ctx, r)
	for _, before := range found.Previous {
		if !found.Copies[0].Exists {
			found = before
		}
	}
	for i := range found.Copies {
		if found.Copies[i].State.Err == nil {
			return found.Copies[i].State
		}
	}
	return found.Copies[0].State
}

// Recall makes r ask for what the bucket's last request did, and reports whether this process
// knows that.
func (o *Opened) Recall(r *store.Request) bool {
	return o.Accounts.Recall(r) || o.Operable != nil && o.Operable.Recall(r) || o.Local.Buckets.Recall(r)
}

// Inspect returns all copies of a bucket, and what this process knows of it beyond them. The
// store is Operable.
func (o *Opened) Inspect(ctx context.Context, r store.Request) store.Inspection {
	found := o.Operable.Inspect(ctx, r)
	found.Account = o.Accounts.Account(&r)
	return found
}

// Alone returns the state of a bucket about which this process has decided without the store, or nil if there is
// none. known is the account of the bucket.
func (o *Opened) Alone(r store.Request, known *store.Account) *store.State {
	if local := o.Local.Buckets.Inspect(context.Background(), r).Copies[0]; local.Exists {
		return &local.State
	}
	if known == nil || !known.IsAlone {
		return nil
	}
	r.Cost = 0
	st := o.Accounts.ForeseeAlone(&r)
	return &st
}

// Walk visits the buckets of which this process knows something, as [store.Operable] says.
// The store is Operable.
func (o *Opened) Walk(reqs []store.Request, about func(i int, r *store.Request) bool, visit func(i int, clientKey string, st *store.State)) {
	o.Operable.Walk(reqs, about, visit)
	o.Accounts.Walk(reqs, about, visit)
}

// Charge charges requests without waiting.
func (o *Opened) Charge(reqs []*store.Request) {
	if len(reqs) > 0 {
		o.Accounts.ChargeDetached(reqs)
	}
}

// ChargeByID charges requests that the store may have charged already.
func (o *Opened) ChargeByID(reqs []*store.Request) {
	if len(reqs) > 0 {
		o.Accounts.ChargeByID(reqs)
	}
}

// Refund gives back what requests have spent, without waiting.
func (o *Opened) Refund(reqs []*store.Request) {
	if len(reqs) > 0 {
		o.Accounts.RefundDetached(reqs)
	}
}

// Penalize keeps the client of r refused, without waiting.
func (o *Opened) Penalize(r store.Request) { o.Accounts.PenalizeDetached([]*store.Request{&r}) }

// tracerName is the instrumentation scope of the spans.
const tracerName = "github.com/shardlimit/caddy-shardlimit"

// startSpan begins a span of a call to the store if the request is traced;
// otherwise the span is nil.
func (o *Opened) startSpan(ctx context.Context, operation string, asks []*store.Ask) (context.Context, trace.Span) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	zones := make([]string, len(asks))
	for i, a := range asks {
		zones[i] = a.Request.Limit.Zone
	}
	return parent.TracerProvider().Tracer(tracerName).Start(ctx, "rate_limit "+operation,
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
			attribute.String("rate_limit.store", o.Name),
			attribute.StringSlice("rate_limit.zones", zones)))
}

// endSpan ends what startSpan began.
func endSpan(span trace.Span, asks []*store.Ask) {
	if span == nil {
		return
	}
	allowed, isAnswered := true, true
	for _, a := range asks {
		if err := a.Err; err != nil {
			isAnswered = false
			span.RecordError(err)
			span.SetStatus(codes.Error, "the store cannot answer")
		}
		allowed = allowed && a.Allowed
	}
	if isAnswered {
		span.SetAttributes(attribute.Bool("rate_limit.allowed", allowed))
	}
	span.End()
}

// LedgerConfig is a [Module] with settings for its ledger.
type LedgerConfig interface {
	LedgerOptions(name string) ledger.Options
	// DeliveryTime is how long a charge or refund may take, from its first attempt to its reply.
	DeliveryTime() time.Duration
}

// localCounts are a store in memory. While the other one fails, they decide where no ledger does.
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

// pooledLedger is what the configs with a store share: its registry, and the local
// counts.
type pooledLedger struct {
	registry *ledger.Registry
	flights  *ledger.Flights
	local    *memory.Buckets
}

// keepAccounts opens the accounts of the store of o, which is remote unless that is nil, and
// local counts beside it.
func (h *Handle) keepAccounts(o *Opened, remote store.Remote) {
	pooled, _ := Pool.LoadOrStore(h.ledgerKey(), pooledLedger{ledger.NewRegistry(nil), ledger.NewFlights(), memory.NewBuckets()})
	shared := pooled.(pooledLedger)
	buckets := memory.New(shared.local, MemoryOptions(h.Name, h.Logger, 0))
	o.Local = localCounts{&Opened{
		Name: h.Name, Base: buckets, Operable: buckets, Accounts: ledger.NewLocal(shared.flights, buckets),
	}, buckets}
	if remote == nil {
		o.Accounts = ledger.NewLocal(shared.flights, o.Base)
		return
	}
	opts := ledger.Options{}
	if m, ok := h.Module.(LedgerConfig); ok {
		opts = m.LedgerOptions(h.Name)
	}
	o.Accounts = ledger.NewOwners(ledger.New(shared.registry, remote, opts))
}

// leaveAccounts leaves the accounts, and closes the module's store. While charges wait to be
// delivered through that store, both happen later: once they are delivered, another config
// delivers them, or there is no more time. Until then a new config finds the registry and the
// charges. The config's record at the shards is withdrawn first.
func (h *Handle) leaveAccounts(open *Opened) {
	a := open.Accounts
	leave := func() {
		a.Leave()
		_, _ = Pool.Delete(h.ledgerKey())
		open.closeModule()
	}
	if !a.IsNeeded() && !open.presence.isTold() {
		leave()
		return
	}
	deliver(func(ctx context.Context) {
		// First, because the flush may take all the time.
		open.presence.withdraw(ctx)
		a.Flush(ctx)
		leave()
	})
}
