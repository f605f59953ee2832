package memory

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// overrides are those of all views. The zero value is empty.
type overrides struct {
	mu      sync.Mutex
	current *store.OverrideSet
	version int64
	audit   []store.Audited
}

// ChangeOverrides implements [store.Operable].
func (s *Store) ChangeOverrides(_ context.Context, changes []store.OverrideChange) []store.OverrideOutcome {
	kept := &s.buckets.overrides
	kept.mu.Lock()
	defer kept.mu.Unlock()
	now := s.now().UnixMicro()
	all := map[store.OverrideID]*store.Override{}
	kept.current.All(func(o *store.Override) bool {
		if o.Until > now {
			all[o.ID()] = o
		}
		return true
	})
	outcomes := make([]store.OverrideOutcome, len(changes))
	for i := range changes {
		outcomes[i] = kept.change(all, changes[i], now)
	}
	kept.current = store.NewOverrideSet(all, nil)
	return outcomes
}

// change makes a change in all. mu is held.
func (o *overrides) change(all map[store.OverrideID]*store.Override, c store.OverrideChange, now int64) store.OverrideOutcome {
	id := c.ID()
	before, after := all[id], (*store.Override)(nil)
	if err := refusal(before, &c, len(all)); err != nil {
		return store.OverrideOutcome{Before: before, Err: err}
	}
	switch {
	case !c.Removes:
		o.version++
		after = &c.Override
		after.Version = strconv.FormatInt(o.version, 10)
		all[id] = after
	case before == nil:
		return store.OverrideOutcome{}
	default:
		delete(all, id)
	}
	o.audit = append(o.audit, store.Audited{At: now, By: c.By, Reason: c.Reason, ID: id, Before: before, After: after})
	if surplus := len(o.audit) - store.MaxAudited; surplus > 0 {
		o.audit = slices.Delete(o.audit, 0, surplus)
	}
	outcome := store.OverrideOutcome{Before: before}
	if after != nil {
		outcome.Version = after.Version
	}
	return outcome
}

// refusal returns why a change of what is there cannot be made, where so many overrides are, or nil.
func refusal(before *store.Override, c *store.OverrideChange, count int) error {
	version := ""
	if before != nil {
		version = before.Version
	}
	switch {
	case c.Expected != store.AnyVersion && c.Expected != version:
		return store.ErrChanged
	case !c.Removes && before == nil && count >= store.MaxOverrides:
		return fmt.Errorf("there are %d overrides, which is the most: remove some", store.MaxOverrides)
	}
	return nil
}

// Overrides implements [store.Operable].
func (s *Store) Overrides(context.Context) (*store.OverrideSet, error) {
	kept := &s.buckets.overrides
	kept.mu.Lock()
	defer kept.mu.Unlock()
	return kept.current, nil
}

// Audit implements [store.Operable].
func (s *Store) Audit(context.Context) ([]store.Audited, error) {
	kept := &s.buckets.overrides
	kept.mu.Lock()
	defer kept.mu.Unlock()
	all := slices.Clone(kept.audit)
	slices.Reverse(all)
	return all, nil
}

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string { return clientKey }
