package redis

import (
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// newcomersWhole is the share of all, and newcomersMost that from which the primary
	// is asked first.
	newcomersWhole = 1 << 16
	newcomersMost  = newcomersWhole * 3 / 4
	// newcomersDecay is how many checks the share looks back, and newcomersSample of how
	// many that are expected to fail one asks a replica nevertheless.
	newcomersDecay, newcomersSample = 32, 16
)

// newcomers tracks, by zone, how often a replica has no window for a client that this
// process has not seen. Where that is usual, checks skip the replica, which saves a call.
type newcomers struct {
	mu    sync.RWMutex
	zones map[string]*newcomerShare
}

// newcomerShare is what is known of one zone.
type newcomerShare struct {
	// share is the part of the checked clients that no replica knew.
	share atomic.Int64
	// expected counts the checks that a replica was expected not to answer.
	expected atomic.Uint32
}

// expects reports whether to ask the primary first: no replica is likely to know any of
// the buckets.
func (n *newcomers) expects(g group) bool {
	var z *newcomerShare
	for _, i := range g.members {
		if z = n.of(&g.reqs[i]); z == nil || z.share.Load() < newcomersMost {
			return false
		}
	}
	return z.expected.Add(1)%newcomersSample != 0
}

func (n *newcomers) learn(g group) {
	for _, i := range g.members {
		z := n.of(&g.reqs[i])
		if z == nil || g.states[i].Err != nil {
			continue
		}
		was, sample := z.share.Load(), int64(0)
		if isUnopened(&g.reqs[i], &g.states[i]) {
			sample = newcomersWhole
		}
		// Of two at a time one may be lost: it is an estimate.
		z.share.Store(was + (sample-was)/newcomersDecay)
	}
}

// of returns the zone of a request whose window is not known to be open, or nil.
func (n *newcomers) of(r *store.Request) *newcomerShare {
	if r.Until != 0 || !algorithm.Of(r.Limit.Algorithm).Windowed {
		return nil
	}
	n.mu.RLock()
	z := n.zones[r.Limit.Zone]
	n.mu.RUnlock()
	if z != nil {
		return z
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if z = n.zones[r.Limit.Zone]; z == nil {
		if n.zones == nil {
			n.zones = map[string]*newcomerShare{}
		}
		z = new(newcomerShare)
		n.zones[r.Limit.Zone] = z
	}
	return z
}
