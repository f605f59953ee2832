package limiter

import (
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// ZoneID identifies a zone in a store.
type ZoneID struct{ Store, Zone string }

// zoneState is what a zone has in a store beside its buckets. Configs and requests
// that use the store share it, and it ends with the last of them.
type zoneState struct {
	counts  telemetry.ZoneCounters
	refused *refusedClients
	logged  *loggedRefusals
	room    *waitingRoom
}

var zoneStates = shared[ZoneID, *zoneState]{
	begin: func(id ZoneID) *zoneState {
		return &zoneState{
			counts:  zoneSeries.acquire(id.Zone),
			refused: newRefusedClients(time.Now()), logged: newLoggedRefusals(), room: newWaitingRoom(),
		}
	},
	end: func(id ZoneID) { zoneSeries.release(id.Zone) },
}

// zoneSeries are the metrics of zones, which do not name the store.
var zoneSeries = shared[string, telemetry.ZoneCounters]{begin: telemetry.Default.Zone, end: telemetry.Default.ForgetZone}

// shared are values by keys. Each exists as long as it is used.
type shared[K comparable, V any] struct {
	begin func(K) V
	end   func(K)

	mu   sync.Mutex
	used map[K]*sharedValue[V]
}

type sharedValue[V any] struct {
	value V
	users int
}

func (s *shared[K, V]) acquire(key K) V {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.used[key]
	if !ok {
		if s.used == nil {
			s.used = map[K]*sharedValue[V]{}
		}
		v = &sharedValue[V]{value: s.begin(key)}
		s.used[key] = v
	}
	v.users++
	return v.value
}

// find returns the value of a key that is used.
func (s *shared[K, V]) find(key K) (value V, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.used[key]; v != nil {
		return v.value, true
	}
	return value, false
}

// release ends what one call of acquire began.
func (s *shared[K, V]) release(key K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.used[key]
	if v.users--; v.users == 0 {
		delete(s.used, key)
		s.end(key)
	}
}

// acquireState returns the state of a zone in a store, and keeps it until the
// store is closed.
func acquireState(use *stores.Handle, zone string) *zoneState {
	id := ZoneID{use.Name, zone}
	use.OnClose(func() { zoneStates.release(id) })
	return zoneStates.acquire(id)
}
