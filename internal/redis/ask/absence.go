package ask

import (
	"sync"
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// absenceWhole is the share of all, and absenceMost that from which the primary
	// is asked first.
	absenceWhole = 1 << 16
	absenceMost  = absenceWhole * 3 / 4
	// absenceDecay is how many checks the share looks back, and absenceSample of how
	// many that are expected to fail one asks a replica nevertheless.
	absenceDecay, absenceSample = 32, 16
)

// absences tracks, by zone, how often a replica has no window for a client that this
// process has not seen. Where that is usual, checks skip the replica, which saves a call.
type absences struct {
	mu    sync.RWMutex
	zones map[string]*absence
}

// absence is how often replicas lack the windows of one zone.
type absence struct {
	// share is the part of the checked clients that no replica knew.
	share atomic.Int64
	// expected counts the checks that a replica was expected not to answer.
	expected atomic.Uint32
}

// expects reports whether to ask the primary first: no replica is likely to have any of
// the windows.
func (a *absences) expects(asks []*store.Ask) bool {
	var z *absence
	for _, asked := range asks {
		if z = a.of(&asked.Request); z == nil || z.share.Load() < absenceMost {
			return false
		}
	}
	return z.expected.Add(1)%absenceSample != 0
}

// note adds what a replica has answered.
func (a *absences) note(asks []*store.Ask) {
	for _, asked := range asks {
		z := a.of(&asked.Request)
		if z == nil || asked.Err != nil {
			continue
		}
		was, sample := z.share.Load(), int64(0)
		if lacksWindow(asked) {
			sample = absenceWhole
		}
		// Of two at a time one may be lost: it is an estimate.
		z.share.Store(was + (sample-was)/absenceDecay)
	}
}

// of returns the zone of a request whose window is not known to be open, or nil.
func (a *absences) of(r *store.Request) *absence {
	if r.Until != 0 || !algorithm.Of(r.Limit.Algorithm).Windowed() {
		return nil
	}
	a.mu.RLock()
	z := a.zones[r.Limit.Zone]
	a.mu.RUnlock()
	if z != nil {
		return z
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if z = a.zones[r.Limit.Zone]; z == nil {
		if a.zones == nil {
			a.zones = map[string]*absence{}
		}
		z = new(absence)
		a.zones[r.Limit.Zone] = z
	}
	return z
}
