package shardlimit

import "sync"

// byZone is what is kept for each zone of a store and outlives configs, as the
// buckets do that it is about. Zones are few.
type byZone[T any] struct {
	known sync.Map // of T by zoneID
	make  func() T
}

func (b *byZone[T]) of(store, zone string) T {
	id := zoneID{store, zone}
	if known, ok := b.known.Load(id); ok {
		return known.(T)
	}
	made, _ := b.known.LoadOrStore(id, b.make())
	return made.(T)
}
