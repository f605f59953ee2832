package memory

import (
	"context"
	"fmt"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// overrides are those of all views. The zero value is empty.
type overrides struct {
	mu  sync.Mutex
	all map[store.OverrideID]store.Override
}

// live removes those that have ended, and returns the others. mu is held.
func (o *overrides) live(now int64) map[store.OverrideID]store.Override {
	for id, override := range o.all {
		if override.Until <= now {
			delete(o.all, id)
		}
	}
	return o.all
}

// SetOverride implements [store.Operable].
func (s *Store) SetOverride(_ context.Context, o store.Override) error {
	kept := &s.buckets.overrides
	kept.mu.Lock()
	defer kept.mu.Unlock()
	id := o.ID()
	all := kept.live(s.now().UnixMicro())
	if _, ok := all[id]; !ok && len(all) >= store.MaxOverrides {
		return fmt.Errorf("there are %d overrides, which is the most: remove some", store.MaxOverrides)
	}
	if kept.all == nil {
		kept.all = map[store.OverrideID]store.Override{}
	}
	kept.all[id] = o
	return nil
}

// RemoveOverride implements [store.Operable].
func (s *Store) RemoveOverride(_ context.Context, kind store.OverrideKind, zone, clientKey string) (bool, error) {
	kept := &s.buckets.overrides
	kept.mu.Lock()
	defer kept.mu.Unlock()
	id := store.OverrideID{Kind: kind, Zone: zone, ClientKey: clientKey}
	_, removed := kept.live(s.now().UnixMicro())[id]
	delete(kept.all, id)
	return removed, nil
}

// Overrides implements [store.Operable].
func (s *Store) Overrides(context.Context) (all []store.Override, err error) {
	kept := &s.buckets.overrides
	kept.mu.Lock()
	defer kept.mu.Unlock()
	for _, o := range kept.live(s.now().UnixMicro()) {
		all = append(all, o)
	}
	return all, nil
}

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string { return clientKey }
