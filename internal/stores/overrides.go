package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

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

// overrides are what operators have changed for the clients of an open store, as it was
// when the store was looked at last.
type overrides struct {
	kept    store.Operable
	current atomic.Pointer[map[store.OverrideID]store.Override]
	// changed is called after a look that has found another state.
	changed func()
	// failed is why overrides cannot be read that the store keeps, or nil; report is called when
	// it is another reason.
	failed atomic.Pointer[error]
	report func(err error)
	// looking is held during a look, so that none undoes a later one.
	looking sync.Mutex
	// looked is closed after the first look, whether or not it succeeded.
	looked  chan struct{}
	period  time.Duration
	started sync.Once
	life    context.Context
	stop    context.CancelFunc
}

// overridePeriod is the time for which an answer of the store is trusted.
func (h *Handle) overridePeriod() time.Duration {
	if m, ok := h.Module.(LedgerConfig); ok {
		return m.LedgerOptions(h.Name).Trust
	}
	return 0
}

// newOverrides returns those of a store, or nil if that is nil.
func newOverrides(kept store.Operable, period time.Duration, changed func(), report func(err error)) *overrides {
	if kept == nil {
		return nil
	}
	o := &overrides{kept: kept, changed: changed, report: report, looked: make(chan struct{}), period: max(cmp.Or(period, overridePeriod), minOverridePeriod)}
	o.life, o.stop = context.WithCancel(context.Background())
	return o
}

// start looks at the overrides from now on, until stop is called: not before the config
// runs, because one that is only validated makes no calls.
func (o *overrides) start() { o.started.Do(func() { go o.follow() }) }

func (o *overrides) follow() {
	first, cancel := context.WithTimeout(o.life, firstLook)
	err := o.refresh(first)
	cancel()
	close(o.looked)
	for {
		pause := o.period
		if err != nil {
			pause = minOverridePeriod
		}
		select {
		case <-time.After(pause):
			err = o.refresh(o.life)
		case <-o.life.Done():
			return
		}
	}
}

// refresh reads the overrides. Those of a shard that does not answer stay as they were.
func (o *overrides) refresh(ctx context.Context) error {
	o.looking.Lock()
	defer o.looking.Unlock()
	all, err := o.kept.Overrides(ctx)
	current := make(map[store.OverrideID]store.Override, len(all))
	for _, override := range all {
		current[store.OverrideID{Kind: override.Kind, Zone: override.Zone, ClientKey: o.kept.KeptKey(override.ClientKey)}] = override
	}
	if before := o.current.Swap(&current); before != nil && !maps.Equal(*before, current) {
		o.changed()
	}
	o.note(err)
	return err
}

// note remembers why overrides cannot be read, and reports it if that is another reason than before.
// A shard that does not answer is reported elsewhere.
func (o *overrides) note(err error) {
	was := o.failed.Load()
	switch {
	case err == nil:
		o.failed.Store(nil)
		return
	case !errors.Is(err, store.ErrFinal) && !errors.Is(err, store.ErrDamaged):
		return
	}
	o.failed.Store(&err)
	if was == nil || (*was).Error() != err.Error() {
		o.report(err)
	}
}

// holds reports whether the last look showed the override, or a later one of the same client. An
// earlier one shows that the write, or the look, failed.
func (o *overrides) holds(set *store.Override) bool {
	id := set.ID()
	id.ClientKey = o.kept.KeptKey(id.ClientKey)
	kept, ok := (*o.current.Load())[id]
	return ok && kept.Since >= set.Since
}

// known returns the overrides as the last look showed them. It waits for the first one.
func (o *overrides) known() map[store.OverrideID]store.Override {
	current := o.current.Load()
	if current == nil {
		o.start()
		<-o.looked
		current = o.current.Load()
	}
	return *current
}

// overrides returns those of the store if it is open and keeps any, and otherwise nil.
func (h *Handle) overrides() *overrides {
	if open := h.open.Load(); open != nil {
		return open.overrides
	}
	return nil
}

// HasOverrides reports whether there is any override in the store, as far as is known.
func (h *Handle) HasOverrides() bool {
	o := h.overrides()
	return o != nil && len(o.known()) > 0
}

// OverridesOf returns the block and the grant of a client that are in force, each nil if
// there is none.
func (h *Handle) OverridesOf(zone, clientKey string, now time.Time) (block, grant *store.Override) {
	o := h.overrides()
	if o == nil {
		return nil, nil
	}
	known := o.known()
	if len(known) == 0 {
		return nil, nil
	}
	keptKey := o.kept.KeptKey(clientKey)
	find := func(kind store.OverrideKind) *store.Override {
		if found, ok := known[store.OverrideID{Kind: kind, Zone: zone, ClientKey: keptKey}]; ok && found.Until > now.UnixMicro() {
			return &found
		}
		return nil
	}
	return find(store.OverrideBlock), find(store.OverrideGrant)
}

var errNoOverrides = fmt.Errorf("%w: the store keeps no blocks and grants", errors.ErrUnsupported)

// SetOverride begins an override, which counts here at once. It is an error if it cannot be read
// back: then it holds nowhere.
func (h *Handle) SetOverride(ctx context.Context, o store.Override) error {
	return h.changeOverrides(func(all *overrides) error {
		if err := all.kept.SetOverride(ctx, o); err != nil {
			return err
		}
		if err := all.refresh(ctx); !all.holds(&o) {
			return fmt.Errorf("it was written, and does not hold: %w", cmp.Or(err, errNotThere))
		}
		return nil
	})
}

var errNotThere = errors.New("the store does not show it")

// RemoveOverride ends one, and reports whether there was one.
func (h *Handle) RemoveOverride(ctx context.Context, kind store.OverrideKind, zone, clientKey string) (removed bool, err error) {
	err = h.changeOverrides(func(all *overrides) (err error) {
		removed, err = all.kept.RemoveOverride(ctx, kind, zone, clientKey)
		_ = all.refresh(ctx) // The next look comes soon.
		return err
	})
	return removed, err
}

func (h *Handle) changeOverrides(change func(all *overrides) error) error {
	open, err := h.Enter()
	if err != nil {
		return err
	}
	defer h.Leave()
	if open.overrides == nil {
		return errNoOverrides
	}
	return change(open.overrides)
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

// Overrides returns those in force, by what the store says now.
func (h *Handle) Overrides(ctx context.Context) ([]store.Override, error) {
	open, err := h.Enter()
	if err != nil {
		return nil, err
	}
	defer h.Leave()
	if open.overrides == nil {
		return nil, nil
	}
	return open.overrides.kept.Overrides(ctx)
}
