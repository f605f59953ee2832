//go:build check

package simulation

import (
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// operate runs an operation on servers.
type operate = func(s servers, op algorithm.Operation, r store.Request, now int64) store.State

// broken are servers with a planted fault in one operation.
type broken struct {
	servers
	instead operate
}

func (s *broken) run(op algorithm.Operation, r store.Request, now int64) store.State {
	return s.instead(s.servers, op, r, now)
}

// breaks makes the servers of a history run operations otherwise.
func breaks(instead operate) func(s *Run) {
	return func(s *Run) { s.net.servers = &broken{s.net.servers, instead} }
}

// without runs an operation without its cost.
func without(which algorithm.Operation) operate {
	return func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
		if op == which {
			r.Cost = 0
		}
		return s.run(op, r, now)
	}
}

// runs runs an operation that often, and the history counts each.
func runs(which algorithm.Operation, times int) func(s *Run) {
	return func(s *Run) {
		ran := s.net.ran
		s.net.ran = func(op algorithm.Operation, r *store.Request, st *store.State) {
			n := 1
			if op == which {
				n = times
			}
			for range n {
				ran(op, r, st)
			}
		}
		breaks(func(on servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op != which {
				return on.run(op, r, now)
			}
			st := on.look(r, now, false)
			st.Allowed = true
			for range times {
				st = on.run(op, r, now)
			}
			return st
		})(s)
	}
}

// where plants a fault in the histories that it concerns. The others are over at once.
func where(concerns func(s *Run) bool, plant func(s *Run)) func(s *Run) {
	return func(s *Run) {
		if plant(s); !concerns(s) {
			s.end = 0
		}
	}
}

// hideRefunds makes takes miss refunds of the moment before, which they have to see.
func hideRefunds(s *Run) {
	type refund struct{ at, cost int64 }
	last := map[string]refund{}
	breaks(func(on servers, op algorithm.Operation, r store.Request, now int64) store.State {
		key := keyOf(&r)
		switch before := last[key]; {
		case op == opRefund:
			last[key] = refund{now, r.Cost}
		case op == opTake && now-before.at < 20_000 && r.Events-before.cost >= r.Cost:
			r.Events -= before.cost
		}
		return on.run(op, r, now)
	})(s)
}

// TestPlantedFaults requires that each check of the simulation finds servers that break its promise.
func TestPlantedFaults(t *testing.T) {
	const most = 100
	for _, fault := range []struct {
		name, finds string
		plant       func(s *Run)
	}{
		{"a charge spends nothing", "by itself", breaks(without(opCharge))},
		{"a take spends nothing", "by itself", breaks(without(opTake))},
		{"a take has room for one more", "by takes", breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == opTake {
				r.Events++
			}
			return s.run(op, r, now)
		})},
		{"a take lacks the last refund", "which had given back enough", where(func(s *Run) bool { return s.sequential }, hideRefunds)},
		{"a check sees half of the room", "were used", breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == algorithm.Check {
				r.Events = (r.Events + 1) / 2
			}
			return s.run(op, r, now)
		})},
		{"a check fails", "microseconds after another", where(func(s *Run) bool {
			return s.waits && !s.faults && !s.takes
		}, breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == algorithm.Check {
				return store.State{Err: errDown}
			}
			return s.run(op, r, now)
		}))},
		{"a penalty is forgotten", "under a penalty", breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == opPenalize {
				r.Until = now
			}
			return s.run(op, r, now)
		})},
		{"a refusal has no end", "without a time to wait", breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			st := s.run(op, r, now)
			st.RetryAfter = 0
			return st
		})},
		{"a take moves the end of its window", "is no window apart", breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			st := s.run(op, r, now)
			if op == opTake && st.Reset != 0 {
				st.Reset += now % 1000
			}
			return st
		})},
		{"an end of a hold is ignored", "are held at the end", breaks(func(s servers, op algorithm.Operation, r store.Request, now int64) store.State {
			if op == opRefund && r.Cost == 0 {
				return s.look(r, now, false)
			}
			return s.run(op, r, now)
		})},
		{"a charge is run twice", "was served only", runs(opCharge, 2)},
		{"a charge is answered, and not run", "are lost", runs(opCharge, 0)},
		{"a refund is answered, and not run", "was served only", runs(opRefund, 0)},
	} {
		found := ""
		for seed := uint64(1); seed <= most && !strings.Contains(found, fault.finds); seed++ {
			_, found = history(t, seed, Arithmetic(), nil, fault.plant)
		}
		if !strings.Contains(found, fault.finds) {
			t.Errorf("%s: no history of %d finds %q", fault.name, most, fault.finds)
		} else {
			t.Logf("%s: %s", fault.name, found)
		}
	}
}
