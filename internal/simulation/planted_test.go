//go:build check

package simulation

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// broken are servers that run an operation otherwise than those that they stand for.
type broken struct {
	servers
	instead func(s servers, op algorithm.Operation, r store.Request, now int64) store.State
}

func (s *broken) run(op algorithm.Operation, r store.Request, now int64) store.State {
	return s.instead(s.servers, op, r, now)
}

// without runs an operation without its cost.
func without(which algorithm.Operation) func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
	return func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
		if op == which {
			r.Cost = 0
		}
		return s.run(op, r, now)
	}
}

// TestPlantedFaults requires that the simulation finds servers that break a promise.
func TestPlantedFaults(t *testing.T) {
	const most = 100
	for _, fault := range []struct {
		name    string
		instead func(s servers, op algorithm.Operation, r store.Request, now int64) store.State
	}{
		{"a charge spends nothing", without(opCharge)},
		{"a take spends nothing", without(opTake)},
		{"a take has room for one more", func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == opTake {
				r.Events++
			}
			return s.run(op, r, now)
		}},
		{"a check sees half of the room", func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == algorithm.Check {
				r.Events = (r.Events + 1) / 2
			}
			return s.run(op, r, now)
		}},
		{"a penalty is forgotten", func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == opPenalize {
				r.Until = now
			}
			return s.run(op, r, now)
		}},
		{"a refusal has no end", func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			st := s.run(op, r, now)
			st.RetryAfter = 0
			return st
		}},
	} {
		found := ""
		for seed := uint64(1); seed <= most && found == ""; seed++ {
			_, found = history(t, seed, func(time.Duration) servers { return &broken{newArithmetic(), fault.instead} }, nil)
		}
		if found == "" {
			t.Errorf("%s: no history of %d finds that", fault.name, most)
		} else {
			t.Logf("%s: %s", fault.name, found)
		}
	}
}
