package stores

import (
	"context"
	"errors"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// Opened is a store that is open, with what surrounds it.
type Opened struct {
	Name string
	// Store is the ledger of the module's store, or that store if it has none.
	Store store.Store
	// Base is the module's store.
	Base store.Store
	// Accounts hold what requests cost until they are settled.
	Accounts accounts
	// Ledger is nil if the store has none.
	Ledger *ledger.Ledger
	// Local decides while the store fails.
	Local localCounts
	// overrides is nil if the store keeps none.
	overrides *overrides
	// forgiving counts the buckets that are being emptied.
	forgiving atomic.Int64

	// With a remote store, Store, Accounts, Ledger, detacher and penalizer are one
	// ledger. direct is Base as a Detacher: calls of it pass the ledger by. The three
	// are nil if the store lacks the ability.
	detacher, direct store.Detacher
	penalizer        store.Penalizer
	// newcomers is nil if new buckets are not bounded.
	newcomers *newcomers
	// full remembers, for a bounded number of buckets, which takes they refuse and until
	// when: the ledger refuses such takes only while it trusts the primary's answer, and
	// the memory store has none.
	full *otter.Cache[bucketID, refusedTake]
}

func (h *Handle) newOpened() (*Opened, error) {
	s, err := h.Module.OpenStore(h.Name)
	if err != nil {
		return nil, err
	}
	open := &Opened{
		Name: h.Name, Store: s, Base: s,
		full: otter.Must(&otter.Options[bucketID, refusedTake]{MaximumSize: maxFullBuckets}),
	}
	open.detacher, _ = s.(store.Detacher)
	open.direct = open.detacher
	open.penalizer, _ = s.(store.Penalizer)
	open.newcomers = h.newNewcomers(s)
	h.keepLedger(open)
	open.overrides = newOverrides(s, h.overridePeriod(), h.reportOverrides)
	return open, nil
}

// Overflow returns the requests of clients beyond the module's bound, unless the store says
// that they are not new.
func (o *Opened) Overflow(ctx context.Context, reqs []store.Request, now func() time.Time) []Overflow {
	if o.newcomers == nil {
		return nil
	}
	return o.newcomers.overflow(ctx, reqs, now(), false)
}

// RefuseKnown sets the states of requests that are refused without a call, and reports whether
// there are any.
func (o *Opened) RefuseKnown(reqs []store.Request, states []store.State) (refused bool) {
	return o.Accounts.RefuseKnown(reqs, states)
}

// Admit checks requests, and holds in flight the cost of those that are allowed.
func (o *Opened) Admit(ctx context.Context, reqs []store.Request, states []store.State) {
	ctx, span := o.startSpan(ctx, "check", reqs)
	o.Accounts.Admit(ctx, reqs, states)
	endSpan(span, states)
}

// Take checks requests, and spends the cost of those that are allowed.
func (o *Opened) Take(ctx context.Context, reqs []store.Request, states []store.State) {
	ctx, span := o.startSpan(ctx, "take", reqs)
	if immediate, ok := o.Store.(store.Immediate); ok {
		immediate.TakeInto(reqs, states)
	} else {
		copy(states, o.Store.Take(ctx, reqs))
	}
	endSpan(span, states)
}

// IsFull reports whether a take of r is known to be refused. A request that takes from
// several buckets asks the full ones first, so that it touches no other if they refuse.
func (o *Opened) IsFull(r *store.Request, now time.Time) bool {
	refused, ok := o.full.GetIfPresent(bucketOf(r))
	return ok && now.Before(refused.until) && r.Cost >= refused.cost && r.Reserved >= refused.reserved
}

// NoteFull notes that a take of r was refused with the state st.
func (o *Opened) NoteFull(r *store.Request, st *store.State, now time.Time) {
	if st.RetryAfter != store.Never {
		o.full.Set(bucketOf(r), refusedTake{now.Add(st.RetryAfter), r.Cost, r.Reserved})
	}
}

// CheckAhead checks a request that waits behind others. A ledger that knows that
// the request has to wait longer than timeout makes no call.
func (o *Opened) CheckAhead(ctx context.Context, r store.Request, timeout time.Duration) store.State {
	if o.Ledger != nil {
		return o.Ledger.CheckAhead(ctx, r, timeout)
	}
	// What is in flight counts as well.
	return o.Accounts.Foresee(r, false, func(r store.Request) store.State {
		return o.Store.Check(ctx, []store.Request{r})[0]
	})
}

// ErrNoPeek is the error of a store that cannot show a bucket without changing it.
var ErrNoPeek = errors.New("the store cannot tell what is in a bucket without changing it")

// Peek returns what the module's store says about a bucket; the primary is asked
// first.
func (o *Opened) Peek(ctx context.Context, r store.Request) store.State {
	inspector, ok := o.Base.(store.Inspector)
	if !ok {
		if peeker, ok := o.Base.(store.Peeker); ok {
			return peeker.Peek(ctx, []store.Request{r})[0]
		}
		return store.State{Err: ErrNoPeek}
	}
	found := inspector.Inspect(ctx, r)
	if found.Previous != nil && !found.Copies[0].Exists {
		found = *found.Previous
	}
	for i := range found.Copies {
		if found.Copies[i].State.Err == nil {
			return found.Copies[i].State
		}
	}
	return found.Copies[0].State
}

// Charge charges requests without waiting.
func (o *Opened) Charge(reqs []store.Request) {
	o.detach(o.detacher, store.Detacher.ChargeDetached, store.Store.Charge, reqs)
}

// ChargeByID charges requests that the store may have charged already: it knows
// them by their IDs, so the ledger must not add them to others.
func (o *Opened) ChargeByID(reqs []store.Request) {
	o.detach(o.direct, store.Detacher.ChargeDetached, store.Store.Charge, reqs)
}

// Refund gives back what requests have spent, without waiting.
func (o *Opened) Refund(reqs []store.Request) {
	o.detach(o.detacher, store.Detacher.RefundDetached, store.Store.Refund, reqs)
}

// Penalize keeps the client of r refused, without waiting.
func (o *Opened) Penalize(r store.Request) { o.penalizer.PenalizeDetached([]store.Request{r}) }

// detachedTimeout bounds a detached call of a store that is no [store.Detacher].
const detachedTimeout = 5 * time.Second

// detach makes a call without waiting: of d or, if that is nil, of the store.
func (o *Opened) detach(
	d store.Detacher, detached func(store.Detacher, []store.Request),
	call func(store.Store, context.Context, []store.Request) []store.State, reqs []store.Request,
) {
	switch {
	case len(reqs) == 0:
	case d != nil:
		detached(d, reqs)
	default:
		ctx, cancel := context.WithTimeout(context.Background(), detachedTimeout)
		defer cancel()
		call(o.Store, ctx, reqs)
	}
}

// tracerName is the instrumentation scope of the spans.
const tracerName = "github.com/shardlimit/caddy-shardlimit"

// startSpan begins a span of a call to the store if the request is traced;
// otherwise the span is nil.
func (o *Opened) startSpan(ctx context.Context, operation string, reqs []store.Request) (context.Context, trace.Span) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	zones := make([]string, len(reqs))
	for i := range reqs {
		zones[i] = reqs[i].Limit.Zone
	}
	return parent.TracerProvider().Tracer(tracerName).Start(ctx, "rate_limit "+operation,
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
			attribute.String("rate_limit.store", o.Name),
			attribute.StringSlice("rate_limit.zones", zones)))
}

// endSpan ends what startSpan began.
func endSpan(span trace.Span, states []store.State) {
	if span == nil {
		return
	}
	allowed := true
	for i := range states {
		if err := states[i].Err; err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, "the store cannot answer")
		} else if !states[i].Allowed {
			allowed = false
		}
	}
	span.SetAttributes(attribute.Bool("rate_limit.allowed", allowed))
	span.End()
}

type bucketID struct{ zone, clientKey string }

func bucketOf(r *store.Request) bucketID { return bucketID{r.Limit.Zone, r.ClientKey} }

// refusedTake stands for all takes of as much or more.
type refusedTake struct {
	until          time.Time
	cost, reserved int64
}

// maxFullBuckets bounds the memory. A bucket beyond it costs a take and its
// refund.
const maxFullBuckets = 100_000

// accounts hold what requests cost from their admission until they are settled:
// a [ledger.Ledger], or a [ledger.Local] for a store that answers at once.
type accounts interface {
	Admit(ctx context.Context, reqs []store.Request, states []store.State)
	RefuseKnown(reqs []store.Request, states []store.State) bool
	Foresee(r store.Request, takes bool, peek ledger.PeekFunc) store.State
	AdmitAlone(r *store.Request) store.State
	ForeseeAlone(r *store.Request) store.State
	Settle(reqs []store.Request, held []int64)
	SettleUnknown(reqs []store.Request, held []int64)
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

// keepLedger puts a ledger before the store of o, and local counts beside it.
func (h *Handle) keepLedger(o *Opened) {
	pooled, _ := Pool.LoadOrStore(h.ledgerKey(), pooledLedger{ledger.NewBooks(nil), ledger.NewFlights(), memory.NewBuckets(), ledger.NewFlights()})
	shared := pooled.(pooledLedger)
	buckets := memory.New(shared.local, MemoryOptions(h.Name, h.Logger, 0))
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
	deliver(func(ctx context.Context) {
		l.Flush(ctx)
		leave()
	})
}
