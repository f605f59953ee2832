package shardlimit

import "cmp"

// A handler counts in its own store and, with a rollout, in another one.
const (
	ownStore = iota
	rolloutStore
	mostStores
)

// zoneUse is a zone in one of the stores in which its handler counts.
type zoneUse struct {
	*compiledZone
	// in is ownStore or rolloutStore.
	in      int
	use     *storeUse
	onError string
	// room is nil if the zone holds no requests.
	room    *waitingRoom
	refused *refusedClients
	logged  *loggedRefusals
}

// countIn makes the zone count in a store.
func (z *compiledZone) countIn(in int, use *storeUse) {
	state := acquireState(use, z.Name)
	z.counts = state.counts
	z.uses[in] = zoneUse{compiledZone: z, in: in, use: use, onError: cmp.Or(z.OnError, use.onError), refused: state.refused, logged: state.logged}
	if z.MaxWait > 0 {
		z.uses[in].room = state.room
	}
}

// useFor is the zone in the store in which the client is counted.
func (z *compiledZone) useFor(clientKey string, rollout *movedShare) *zoneUse {
	if rollout.moves(clientKey) {
		return &z.uses[rolloutStore]
	}
	return &z.uses[ownStore]
}

// movedShare is the share of the clients that is counted in another store.
type movedShare struct {
	Store *storeUse
	// Percent is from 0 to 100.
	Percent float64
	// bound is how far in the order of rolloutPlace clients are moved.
	bound uint64
}

// moves reports whether the client is counted in the other store.
func (o *movedShare) moves(clientKey string) bool {
	return o != nil && rolloutPlace(clientKey) < o.bound
}
