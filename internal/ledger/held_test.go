package ledger

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// held returns a ledger that holds charges for 50 ms, and the bucket of a client whose window is
// open.
func held(t *testing.T, s store.Remote, events int64, opts Options) (*Ledger, store.Request) {
	t.Helper()
	opts.ChargeDelay = 50 * time.Millisecond
	r := requestOf("alice", events)
	return known(t, s, r, opts), r
}

// known returns a ledger that has had a request and the reply to its charge.
func known(t *testing.T, s store.Remote, r store.Request, opts Options) *Ledger {
	t.Helper()
	l := New(NewRegistry(nil), s, opts)
	l.Run()
	comes(t, l, r)
	pass(time.Second)
	return l
}

// comes makes a request that is admitted and charged.
func comes(t *testing.T, l *Ledger, r store.Request) store.State {
	t.Helper()
	st := admit(l, r)
	if !st.Allowed {
		t.Fatalf("a request gets %+v", st)
	}
	l.Settle([]*store.Request{new(r)}, nil)
	return st
}

// TestNoDelayHoldsNoCharge checks that a charge of a client far from its limit leaves at once if the
// delay is 0, and waits otherwise. The clock stands still meanwhile.
func TestNoDelayHoldsNoCharge(t *testing.T) {
	for delay, calls := range map[time.Duration]int{0: 1, UsualChargeDelay: 0} {
		t.Run(fmt.Sprint(delay), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(1)
				r := requestOf("alice", 100)
				l := known(t, s, r, Options{ChargeDelay: delay})
				before := len(s.callSizes())
				comes(t, l, r)
				if n := len(s.callSizes()) - before; n != calls {
					t.Errorf("%d charges have left, want %d", n, calls)
				}
				pass(time.Second)
				if used := s.used(r); used != 2 {
					t.Errorf("%d is spent, want 2", used)
				}
			})
		})
	}
}

// TestOnlyFixedWindowsHoldCharges checks that charges of the other algorithms leave at once.
func TestOnlyFixedWindowsHoldCharges(t *testing.T) {
	for _, limit := range kinds {
		t.Run(fmt.Sprintf("%s, align %t", limit.Algorithm, limit.Align), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(1)
				limit.Zone, limit.Window = "zone", time.Hour
				r := store.Request{Limit: &limit, ClientKey: "alice", Events: 100, Cost: 1, ID: "id"}
				l := known(t, s, r, Options{ChargeDelay: UsualChargeDelay})
				before, want := len(s.callSizes()), 1
				if limit.Algorithm == store.FixedWindow {
					want = 0
				}
				comes(t, l, r)
				if n := len(s.callSizes()) - before; n != want {
					t.Errorf("%d charges have left, want %d", n, want)
				}
				pass(time.Second)
			})
		})
	}
}

// TestNoChargeIsHeldNearTheReset checks that a charge waits only if its window is open for more than
// twice the delay, and counts in that window either way.
func TestNoChargeIsHeldNearTheReset(t *testing.T) {
	// The ledger takes the window to end later by the time of a reply, less than a millisecond.
	for left, calls := range map[time.Duration]int{101 * time.Millisecond: 0, 99 * time.Millisecond: 1} {
		t.Run(fmt.Sprint(left), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(1)
				l, r := held(t, s, 100, Options{})
				reset := admit(l, r).Reset
				pass(time.Duration(reset-s.now())*time.Microsecond - left)
				before := len(s.callSizes())
				l.Settle([]*store.Request{new(r)}, nil)
				if n := len(s.callSizes()) - before; n != calls {
					t.Errorf("%d charges have left, want %d", n, calls)
				}
				pass(left - time.Millisecond)
				if used := s.used(r); used != 2 {
					t.Errorf("%d is spent at the end of the window, want 2", used)
				}
				pass(time.Second)
				if used := s.used(r); used != 0 {
					t.Errorf("%d is spent in the next window, want none", used)
				}
			})
		})
	}
}

// TestHeldChargesLeaveTogether checks that the held charges of several clients leave when the first
// of them has waited for the delay, in as few calls as tickBatch allows.
func TestHeldChargesLeaveTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l, _ := held(t, s, 100, Options{})
		clients := make([]store.Request, tickBatch+8)
		for i := range clients {
			clients[i] = requestOf(fmt.Sprint(i), 100)
			comes(t, l, clients[i])
		}
		pass(time.Second)
		before, began := len(s.callSizes()), time.Now()
		for _, r := range clients {
			l.ChargeDetached([]*store.Request{new(r)})
			pass(time.Millisecond)
		}
		pass(49*time.Millisecond - time.Since(began))
		if sizes := s.callSizes()[before:]; len(sizes) != 0 {
			t.Errorf("calls of %v charges were made before the delay", sizes)
		}
		pass(2 * time.Millisecond)
		if sizes, want := s.callSizes()[before:], []int{tickBatch, 8}; !slices.Equal(sizes, want) {
			t.Errorf("calls of %v charges were made after the delay, want %v", sizes, want)
		}
		pass(time.Second)
		for _, r := range clients {
			if used := s.used(r); used != 2 {
				t.Errorf("client %s has spent %d, want 2", r.ClientKey, used)
			}
		}
	})
}

// TestStoreLacksOneDelayAtMost checks that the store lacks at any instant, if the process is killed
// then, no more than what was settled within the delay before, or is in flight.
func TestStoreLacksOneDelayAtMost(t *testing.T) {
	// flight is how long a charge and its reply take in the simulation, at most. A charge waits for
	// the reply to the one before, for the delay, and arrives.
	const flight = 4 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l, r := held(t, s, 1_000_000, Options{})
		settled, due := []time.Time{time.Now()}, int64(0)
		for i := range 10_000 {
			comes(t, l, r)
			settled = append(settled, time.Now())
			pass(time.Duration(i%300) * 10 * time.Microsecond)
			for due < int64(len(settled)) && time.Since(settled[due]) > l.opts.ChargeDelay+2*flight {
				due++
			}
			if used := s.used(r); used < due || used > int64(len(settled)) {
				t.Fatalf("%d is spent of %d that were settled, %d of them longer ago than the delay", used, len(settled), due)
			}
		}
		pass(time.Second)
	})
}

// TestChargesAreHeldAndAddedUp checks that the charges of a sole writer leave as one, after the
// delay, as long as half of the limit is left, and at once from then on.
func TestChargesAreHeldAndAddedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l, r := held(t, s, 100, Options{})
		for i := int64(1); i < 50; i++ {
			before := s.sent()
			if st := admit(l, r); !st.Allowed || st.Used != i {
				t.Fatalf("request %d gets %+v", i, st)
			}
			l.Settle([]*store.Request{new(r)}, nil)
			if i%10 != 0 {
				continue
			}
			pass(20 * time.Millisecond)
			if n := s.sent() - before; n != 0 {
				t.Errorf("%d charges were sent before the delay", n)
			}
			pass(50 * time.Millisecond)
			if n, used := s.sent()-before, s.used(r); n != 1 || used != i+1 {
				t.Errorf("%d charges were sent, and %d is spent, want 1 and %d", n, used, i+1)
			}
		}
		pass(time.Second)
		if st := admit(l, r); !st.Allowed {
			t.Fatalf("a request gets %+v", st)
		}
		before := s.sent()
		l.Settle([]*store.Request{new(r)}, nil)
		pass(10 * time.Millisecond)
		if n := s.sent() - before; n != 1 {
			t.Errorf("%d charges were sent at once when half of the limit was spent, want 1", n)
		}
	})
}

// TestSeveralWritersHoldOneCharge checks that of a bucket that other processes charge too, one
// charge may wait, and leaves with the second.
func TestSeveralWritersHoldOneCharge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l, r := held(t, s, 100, Options{})
		s.others(algorithm.Charge, r)
		l.Settle([]*store.Request{new(r)}, make([]int64, 1))
		pass(time.Second)
		before := s.sent()
		l.Settle([]*store.Request{new(r)}, make([]int64, 1))
		pass(10 * time.Millisecond)
		if n := s.sent() - before; n != 0 {
			t.Errorf("%d charges were sent at once, want none", n)
		}
		l.Settle([]*store.Request{new(r)}, make([]int64, 1))
		pass(10 * time.Millisecond)
		if n, used := s.sent()-before, s.used(r); n != 1 || used != 5 {
			t.Errorf("%d charges were sent, and %d is spent, want 1 and 5", n, used)
		}
		pass(time.Second)
	})
}

// TestHeldChargesOutliveTheirView checks that held charges are delivered by a flush, by the next
// view, or reported by the last one, and that a full ledger drops none.
func TestHeldChargesOutliveTheirView(t *testing.T) {
	for name, test := range map[string]struct {
		end          func(s store.Remote, l *Ledger)
		used, undone int64
	}{
		"flush": {func(_ store.Remote, l *Ledger) {
			l.Flush(context.Background())
			l.Leave()
		}, 2, 0},
		"reload": {func(s store.Remote, l *Ledger) {
			next := New(l.registry, s, Options{})
			next.Run()
			l.Stop()
			l.Leave()
		}, 2, 0},
		"last view": {func(_ store.Remote, l *Ledger) { l.Leave() }, 2, 0},
		"a request outlasts the last view": {func(_ store.Remote, l *Ledger) {
			l.registry.End(context.Background())
			l.Settle([]*store.Request{new(requestOf("alice", 100))}, make([]int64, 1))
		}, 3, 0},
		"reset": {func(_ store.Remote, l *Ledger) {
			r := requestOf("alice", 100)
			if err := l.Reset(context.Background(), r); err != nil {
				panic(err)
			}
			pass(time.Second)
		}, 0, 0},
		"full ledger": {func(_ store.Remote, l *Ledger) {
			for i := range 10_000 {
				r := requestOf(fmt.Sprint("client-", i), 100)
				l.AdmitAlone(&r)
			}
		}, 2, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(1)
				undone := int64(0)
				l, r := held(t, s, 100, Options{MaxBuckets: 100, OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, _ error) { undone += n }})
				if st := admit(l, r); !st.Allowed {
					t.Fatalf("a request gets %+v", st)
				}
				l.Settle([]*store.Request{new(r)}, nil)
				test.end(s, l)
				pass(time.Second)
				if used := s.used(r); used != test.used || undone != test.undone {
					t.Errorf("%d is spent and %d charges are lost, want %d and %d", used, undone, test.used, test.undone)
				}
			})
		})
	}
}

// TestBusyClientCostsOneChargeATick checks that the charges of a sole writer leave once for each
// delay, however many requests come meanwhile.
func TestBusyClientCostsOneChargeATick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l, r := held(t, s, 1_000_000, Options{})
		before, began := s.sent(), time.Now()
		n := int64(1)
		for ; time.Since(began) < 2*time.Second; n++ {
			if st := admit(l, r); !st.Allowed {
				t.Fatalf("request %d gets %+v", n, st)
			}
			l.Settle([]*store.Request{new(r)}, nil)
			pass(200 * time.Microsecond)
		}
		pass(time.Second)
		if writes, used := s.sent()-before, s.used(r); writes > 42 || used != n {
			t.Errorf("%d charges were sent in 2s, and %d is spent, want at most 42 and %d", writes, used, n)
		}
	})
}
