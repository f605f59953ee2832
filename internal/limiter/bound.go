package limiter

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

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

// storeOf returns the zone in the store in which the client is counted.
func (z *Zone) storeOf(clientKey string, rollout *Rollout) *boundZone {
	if rollout.moves(clientKey) {
		return &z.bound[rolloutStore]
	}
	return &z.bound[ownStore]
}

// Rollout is the share of the clients that is counted in another store.
type Rollout struct {
	Store *stores.Handle
	// Percent is from 0 to 100.
	Percent float64
	// moved is how many cohorts are in the other store.
	moved uint64
}

// moves reports whether the client is counted in the other store.
func (o *Rollout) moves(clientKey string) bool {
	return o != nil && cohortOf(rolloutSalt, clientKey) < o.moved
}

// enforces reports whether the zone refuses this client, and does not only observe
// it.
func (z *Zone) enforces(clientKey string) bool {
	return z.enforced == cohorts || cohortOf(enforceSalt, clientKey) < z.enforced
}

// The salts make the orders in which clients are moved and limits are enforced
// independent of each other, and of which shard owns a client. Other salts would
// choose other clients.
const (
	rolloutSalt = 0x726f6c6c6f7574
	enforceSalt = 0x656e666f726365
)

// cohorts is how many cohorts there are: as many as a float64 can count.
const cohorts = 1 << 53

// cohortOf returns a client's cohort, the same in every process. Each salt makes
// another order of the clients.
func cohortOf(salt uint64, clientKey string) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(salt)
	_, _ = d.WriteString(clientKey)
	return d.Sum64() % cohorts
}

// cohortsIn returns how many cohorts a share of the clients is.
func cohortsIn(percent float64) uint64 { return uint64(math.Round(percent / 100 * cohorts)) }

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
