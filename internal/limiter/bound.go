package limiter

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// A handler counts in its own store and, with a rollout, in another one.
const (
	ownStore = iota
	rolloutStore
	maxStores
)

// boundZone is a zone in one of the stores in which its handler counts.
type boundZone struct {
	*Zone
	*zoneState
	// in is ownStore or rolloutStore.
	in      int
	handle  *stores.Handle
	onError string
}

// countIn makes the zone count in a store.
func (z *Zone) countIn(in int, handle *stores.Handle) {
	state := acquireState(handle, z.Name)
	z.Counts = state.counts
	handle.OnOverrides(state.room.wakeAll)
	z.bound[in] = boundZone{z, state, in, handle, cmp.Or(z.OnError, handle.OnError)}
}

// ZoneID identifies a zone in a store.
type ZoneID struct{ Store, Zone string }

// zoneState is what a zone has in a store besides its buckets. Configs and requests
// that use the store share it, and it ends with the last of them.
type zoneState struct {
	counts  telemetry.ZoneCounters
	refused *refusedClients
	recent  *recentClients
	running runningTakes
	room    *waitingRoom
	pace    pace
	aborted abortedRequests
	users   int
	// started are the zones of the configs that use it and have started, the latest last.
	started []*Zone
}

// zoneStates are the states in use. Unlike [caddy.UsagePool] they begin none while one
// of the same zone ends, whose metrics go.
var zoneStates = struct {
	sync.Mutex
	used map[ZoneID]*zoneState
}{used: map[ZoneID]*zoneState{}}

// acquireState returns the state of a zone in a store, and keeps it until the
// store is closed.
func acquireState(handle *stores.Handle, zone string) *zoneState {
	id := ZoneID{handle.Name, zone}
	handle.OnClose(func() { releaseState(id) })
	zoneStates.Lock()
	defer zoneStates.Unlock()
	state := zoneStates.used[id]
	if state == nil {
		state = &zoneState{
			counts:  telemetry.Default.Zone(zone),
			refused: newRefusedClients(time.Now()), recent: newRecentClients(), room: newWaitingRoom(),
		}
		zoneStates.used[id] = state
	}
	state.users++
	return state
}

// run notes that the config of z runs, until its store is closed.
func (z *boundZone) run() {
	s := z.zoneState
	zoneStates.Lock()
	s.started = append(s.started, z.Zone)
	zoneStates.Unlock()
	z.handle.OnClose(func() {
		zoneStates.Lock()
		defer zoneStates.Unlock()
		s.started = slices.DeleteFunc(s.started, func(other *Zone) bool { return other == z.Zone })
	})
	s.room.wakeAll()
}

// latest returns the zone in the config that began to run last, if it has the same buckets, or
// else the zone itself.
func (z *boundZone) latest() *Zone {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	if n := len(z.started); n > 0 && z.started[n-1].limit == z.limit {
		return z.started[n-1]
	}
	return z.Zone
}

// findState returns the state of a zone in a store, or nil if it is not in use.
func findState(id ZoneID) *zoneState {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	return zoneStates.used[id]
}

// releaseState ends one use. A zone's metrics, which do not name the store, end with
// its last state.
func releaseState(id ZoneID) {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	state := zoneStates.used[id]
	if state.users--; state.users > 0 {
		return
	}
	delete(zoneStates.used, id)
	for other := range zoneStates.used {
		if other.Zone == id.Zone {
			return
		}
	}
	telemetry.Default.ForgetZone(id.Zone)
}
