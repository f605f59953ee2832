package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// overridePeriod is how often the overrides of a store are looked at that has no trust
// of its own; minOverridePeriod bounds that trust.
const (
	overridePeriod    = time.Second
	minOverridePeriod = 250 * time.Millisecond
)

// firstLook bounds the first look at a store, for which requests wait: a restart must not
// let blocked clients through.
const firstLook = 250 * time.Millisecond

// overrides are what operators have changed for the zones of an open store and their clients, as it was
// when the store was looked at last.
type overrides struct {
	kept    store.Operable
	current atomic.Pointer[store.OverrideSet]
	// changed is called after a look that has found another state.
	changed func()
	// failed is why overrides cannot be read that the store keeps, or nil.
	failed atomic.Pointer[error]
	// looking is held during a look, so that none undoes a later one.
	looking sync.Mutex
	// looked is closed after the first look, whether or not it succeeded.
	looked  chan struct{}
	period  time.Duration
	started sync.Once
	// due has an element if the next look is due.
	due  chan struct{}
	life context.Context
	stop context.CancelFunc
}

// overridePeriod is the time for which an answer of the store is trusted.
func (h *Handle) overridePeriod() time.Duration {
	if m, ok := h.Module.(LedgerConfig); ok {
		return m.LedgerOptions(h.Name).Trust
	}
	return 0
}

// CheckTimeout is how long the store may take to answer a request, or 0 if it answers at once.
func (h *Handle) CheckTimeout() time.Duration {
	if m, ok := h.Module.(LedgerConfig); ok {
		return m.LedgerOptions(h.Name).Timeout
	}
	return 0
}

// DeliveryTime is how long a charge or refund may take, or 0 if the store answers at once.
func (h *Handle) DeliveryTime() time.Duration {
	if m, ok := h.Module.(LedgerConfig); ok {
		return m.DeliveryTime()
	}
	return 0
}

// newOverrides returns those of a store, or nil if that is nil.
func newOverrides(kept store.Operable, period time.Duration, changed func()) *overrides {
	if kept == nil {
		return nil
	}
	o := &overrides{kept: kept, changed: changed, looked: make(chan struct{}), due: make(chan struct{}, 1), period: max(cmp.Or(period, overridePeriod), minOverridePeriod)}
	o.life, o.stop = context.WithCancel(context.Background())
	return o
}

// start looks at the overrides from now on, until stop is called, and reports whether that is new: not before a
// request needs them or the config runs, because one that is only validated makes no calls.
func (o *overrides) start() (isNew bool) {
	o.started.Do(func() {
		isNew = true
		go o.follow()
	})
	return isNew
}

// run is start once the config runs. It looks at once, because until then the store may show another config's overrides.
func (o *overrides) run() {
	if o.start() {
		return
	}
	select {
	case o.due <- struct{}{}:
	default:
	}
}

func (o *overrides) follow() {
	first, cancel := context.WithTimeout(o.life, firstLook)
	err := o.refresh(first)
	cancel()
	close(o.looked)
	for {
		pause := o.period
		// What only an operator can mend is looked at no sooner.
		if err != nil && !errors.Is(err, store.ErrFinal) {
			pause = minOverridePeriod
		}
		select {
		case <-time.After(pause):
			err = o.refresh(o.life)
		case <-o.due:
			err = o.refresh(o.life)
		case <-o.life.Done():
			return
		}
	}
}

// noOverrides is the set of a store that keeps none.
var noOverrides = store.NewOverrideSet(nil, nil)

// refresh reads the overrides. Those of a shard that does not answer stay as they were.
func (o *overrides) refresh(ctx context.Context) error {
	o.looking.Lock()
	defer o.looking.Unlock()
	var err error
	if panicked := contain.Run(func() error {
		err = o.look(ctx)
		return nil
	}); panicked != nil {
		// What was known stays.
		o.current.CompareAndSwap(nil, noOverrides)
		o.failed.Store(&panicked)
		return panicked
	}
	return err
}

func (o *overrides) look(ctx context.Context) error {
	current, err := o.kept.Overrides(ctx)
	if current == nil {
		current = noOverrides
	}
	if before := o.current.Swap(current); before != nil && before != current {
		o.changed()
	}
	o.note(current, err)
	return err
}

// note remembers why overrides cannot be read. A shard that does not answer is known elsewhere, and leaves
// what is known.
func (o *overrides) note(current *store.OverrideSet, err error) {
	if err != nil && !errors.Is(err, store.ErrFinal) && !errors.Is(err, contain.ErrPanic) {
		if o.failed.Load() != nil {
			return
		}
		err = nil
	}
	if err = errors.Join(err, current.Damaged()); err == nil {
		o.failed.Store(nil)
		return
	}
	o.failed.Store(&err)
}

// holds reports whether the last look showed the override, or a later one of the same client. An
// earlier one shows that the write, or the look, failed.
func (o *overrides) holds(set *store.Override) bool {
	kept := o.current.Load().Of(o.keptID(set.ID()), set.Since)
	return kept != nil && kept.Since >= set.Since
}

// shows reports whether the last look shows that very override, and no later one.
func (o *overrides) shows(one *store.Override) bool {
	kept := o.current.Load().Of(o.keptID(one.ID()), one.Since)
	return kept != nil && kept.Since == one.Since
}

func (o *overrides) keptID(id store.OverrideID) store.OverrideID {
	if id.ClientKey != "" {
		id.ClientKey = o.kept.KeptKey(id.ClientKey)
	}
	return id
}

// known returns the overrides as the last look showed them. It waits for the first one.
func (o *overrides) known() *store.OverrideSet {
	current := o.current.Load()
	if current == nil {
		o.start()
		<-o.looked
		current = o.current.Load()
	}
	return current
}

// overrides returns those of the store if it is open and keeps any, and otherwise nil.
func (h *Handle) overrides() *overrides {
	if open := h.open.Load(); open != nil {
		return open.overrides
	}
	return nil
}

// ClientOverrides are the overrides of a client in a zone that are in force, each nil if there is none.
type ClientOverrides struct{ Block, Grant, Limit *store.Override }

// OverridesOf returns the overrides of a client that are in force at now, as far as is known. It calls
// now only if there may be any.
func (h *Handle) OverridesOf(zone, clientKey string, now func() time.Time) (of ClientOverrides) {
	o := h.overrides()
	if o == nil {
		return of
	}
	known := o.known()
	if !known.Has(store.OverrideBlock) && !known.Has(store.OverrideGrant) && !known.Has(store.OverrideLimit) {
		return of
	}
	id, at := o.keptID(store.OverrideID{Zone: zone, ClientKey: clientKey}), now().UnixMicro()
	find := func(kind store.OverrideKind) *store.Override {
		id.Kind = kind
		return known.Of(id, at)
	}
	return ClientOverrides{find(store.OverrideBlock), find(store.OverrideGrant), find(store.OverrideLimit)}
}

// ZoneOverride returns what operators have changed of a zone that is in force at now, as far as is
// known, or nil. It calls now only if there may be any.
func (h *Handle) ZoneOverride(zone string, now func() time.Time) *store.Override {
	o := h.overrides()
	if o == nil {
		return nil
	}
	known := o.known()
	if !known.Has(store.OverrideZone) {
		return nil
	}
	return known.Of(store.OverrideID{Kind: store.OverrideZone, Zone: zone}, now().UnixMicro())
}

var errNoOverrides = fmt.Errorf("%w: the store keeps no blocks, grants and rules", errors.ErrUnsupported)

// ChangeOverrides makes changes, which count here at once. It is an error if one cannot be read back:
// then it holds nowhere.
func (h *Handle) ChangeOverrides(ctx context.Context, changes []store.OverrideChange) ([]store.OverrideOutcome, error) {
	open, err := h.Enter()
	if err != nil {
		return nil, err
	}
	defer h.Leave()
	all := open.overrides
	if all == nil {
		return nil, errNoOverrides
	}
	outcomes := all.kept.ChangeOverrides(ctx, changes)
	err = all.refresh(ctx)
	for i := range changes {
		if outcomes[i].Err == nil && !changes[i].Removes && !all.holds(&changes[i].Override) {
			outcomes[i] = all.lost(&changes[i].Override, err)
		}
		if before := outcomes[i].Before; changes[i].Removes && outcomes[i].Err == nil && before != nil && all.shows(before) {
			outcomes[i].Err = fmt.Errorf("it was ended, and still holds: %w", cmp.Or(err, errStillThere))
		}
	}
	return outcomes, nil
}

// lost is the outcome of setting an override that the last look does not show. The look ended with err. If
// it has seen all overrides, another operator has changed this one since.
func (o *overrides) lost(set *store.Override, err error) store.OverrideOutcome {
	current, id := o.current.Load(), o.keptID(set.ID())
	if err == nil && current.IsDamaged(id) {
		err = current.Damaged()
	}
	if err != nil {
		return store.OverrideOutcome{Err: fmt.Errorf("it was written, and does not hold: %w", err)}
	}
	return store.OverrideOutcome{Before: current.Of(id, set.Since), Err: store.ErrChanged}
}

var errStillThere = errors.New("the store still shows it")

// SetOverride sets one, whatever there is.
func (h *Handle) SetOverride(ctx context.Context, o store.Override) error {
	outcomes, err := h.ChangeOverrides(ctx, []store.OverrideChange{{Override: o, Expected: store.AnyVersion}})
	if err != nil {
		return err
	}
	return outcomes[0].Err
}

// OverridesFailed returns why overrides cannot be read that the store keeps, or nil. It calls no server.
func (o *Opened) OverridesFailed() error {
	if o.overrides == nil {
		return nil
	}
	if failed := o.overrides.failed.Load(); failed != nil {
		return *failed
	}
	return nil
}

// Overrides returns those of the store, by what it says now.
func (h *Handle) Overrides(ctx context.Context) (*store.OverrideSet, error) {
	var set *store.OverrideSet
	err := h.askOverrides(func(kept store.Operable) (err error) {
		set, err = kept.Overrides(ctx)
		return err
	})
	return set, err
}

// KeptID returns the ID by which the store knows an override.
func (h *Handle) KeptID(id store.OverrideID) store.OverrideID {
	if o := h.overrides(); o != nil {
		return o.keptID(id)
	}
	return id
}

// Audit returns the last changes of overrides, the latest first.
func (h *Handle) Audit(ctx context.Context) (all []store.Audited, err error) {
	err = h.askOverrides(func(kept store.Operable) (err error) {
		all, err = kept.Audit(ctx)
		return err
	})
	return all, err
}

// askOverrides calls ask if the store keeps overrides.
func (h *Handle) askOverrides(ask func(kept store.Operable) error) error {
	open, err := h.Enter()
	if err != nil {
		return err
	}
	defer h.Leave()
	if open.overrides == nil {
		return nil
	}
	return ask(open.overrides.kept)
}
