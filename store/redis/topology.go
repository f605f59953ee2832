package redis

// topology is which servers of a shard hold which of its buckets.
type topology struct {
	servers []*servers
	// slots are the places in servers, from 1, of those who own the slots of a
	// Redis Cluster, 0 where nobody does; nil for a shard that is none.
	slots *[slotCount]uint16
	// spare are the lanes to primaries of a Redis Cluster that own no slots: the
	// owner of a slot that one of them is about to get redirects commands there.
	spare []*lane
}

// owner returns the servers that hold the buckets of a slot, or nil if none are
// known.
func (t *topology) owner(slot uint16) *servers {
	switch {
	case t == nil || len(t.servers) == 0:
		return nil
	case t.slots == nil:
		return t.servers[0]
	case t.slots[slot] == 0:
		return nil
	default:
		return t.servers[t.slots[slot]-1]
	}
}

// lanes are all of them, each once.
func (t *topology) lanes() []*lane {
	var all []*lane
	if t != nil {
		for _, s := range t.servers {
			all = append(all, s.lanes()...)
		}
		all = append(all, t.spare...)
	}
	return all
}

// slotRange is some slots of a Redis Cluster, both ends included.
type slotRange struct{ first, last int }

// assign gives slots to the servers at a place.
func (t *topology) assign(slots []slotRange, place int) {
	if t.slots == nil {
		t.slots = new([slotCount]uint16)
	}
	for _, r := range slots {
		for n := max(r.first, 0); n <= min(r.last, slotCount-1); n++ {
			t.slots[n] = uint16(place + 1) //nolint:gosec // fewer than slots
		}
	}
}
