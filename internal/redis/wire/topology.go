package wire

import (
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Servers are a primary and its replicas, which hold the same buckets.
type Servers struct {
	// Primary is the primary's address, and Clock estimates its time.
	Primary string
	Clock   *Clock
	// Checks is the primary's lane for calls that a request waits for: checks, takes,
	// migrations and resets. Charges is its lane for charges, refunds and penalties,
	// whose calls are retried.
	Checks  *Lane
	Charges *Lane
	// Replicas answer checks, in turn.
	Replicas []*Lane
	turn     *atomic.Uint32
}

// Owner returns the servers that hold the buckets of a slot, or nil.
func (s *Shard) Owner(slot uint16) *Servers {
	s.started.Do(s.start)
	return s.topology.Load().owner(slot)
}

// topology maps the buckets of a shard to servers.
type topology struct {
	servers []*Servers
	// slots, in a Redis Cluster, are the places of their owners in servers, from 1;
	// 0 for a slot without an owner.
	slots *[SlotCount]uint16
	// spare are the lanes to primaries of a Redis Cluster without slots: the owner
	// of a slot that is about to move to one redirects commands there.
	spare []*Lane
}

func (t *topology) owner(slot uint16) *Servers {
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

// Replica returns the next of the replicas that can answer checks, or nil if none can.
func (s *Servers) Replica() *Lane {
	usable := make([]*Lane, 0, 8)
	for _, l := range s.Replicas {
		if l.isUsable() {
			usable = append(usable, l)
		}
	}
	if len(usable) == 0 {
		return nil
	}
	return usable[s.turn.Add(1)%uint32(len(usable))] //nolint:gosec // a handful
}

// MayMiss reports whether a replica's answer may miss an existing bucket: while a
// slot of a Redis Cluster moves, half of its keys are elsewhere.
func (s *Servers) MayMiss(st *store.State) bool {
	return s != nil && s.Checks.Shard.InCluster && st.Content == store.Content{} && st.Used == 0
}

// Roles are the addresses of a primary and its replicas, which of them are considered
// down, and their slots in a Redis Cluster.
type Roles struct {
	Primary  string
	Replicas []string
	Down     []string
	// Elsewhere are the servers that only other sources than the accepted one list as up.
	Elsewhere []string
	Slots     []SlotRange
}

// SlotRange is a range of slots, both ends included.
type SlotRange struct{ First, Last int }

func (t *topology) ledBy(primary string) *Servers {
	if t != nil {
		for _, s := range t.servers {
			if s.Primary == primary {
				return s
			}
		}
	}
	return nil
}

func (t *topology) lanes() []*Lane {
	var all []*Lane
	if t != nil {
		for _, s := range t.servers {
			all = append(append(all, s.Checks, s.Charges), s.Replicas...)
		}
		all = append(all, t.spare...)
	}
	return all
}

func (t *topology) assign(slots []SlotRange, place int) {
	if t.slots == nil {
		t.slots = new([SlotCount]uint16)
	}
	for _, r := range slots {
		for n := max(r.First, 0); n <= min(r.Last, SlotCount-1); n++ {
			t.slots[n] = uint16(place + 1) //nolint:gosec // fewer than slots
		}
	}
}

// SlotCount is the number of slots of a Redis Cluster.
const SlotCount = 1 << 14

// SlotOf returns the slot of a hash tag: its CRC-16 (XMODEM).
func SlotOf(tag []byte) uint16 {
	var crc uint16
	for _, b := range tag {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return crc % SlotCount
}

// crcTable holds the effect of each byte on the CRC.
var crcTable = func() (table [256]uint16) {
	const polynomial = 0x1021
	for i := range table {
		crc := uint16(i) << 8
		for range 8 {
			if carry := crc&0x8000 != 0; carry {
				crc = crc<<1 ^ polynomial
			} else {
				crc <<= 1
			}
		}
		table[i] = crc
	}
	return table
}()
