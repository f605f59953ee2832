package ledger

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// lateCharges is a simulation that takes some time to charge.
type lateCharges struct {
	*simulation
	delay time.Duration
}

func (s *lateCharges) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	go func() {
		pass(s.delay)
		s.simulation.ChargeReported(reqs, report)
	}()
}

// TestWaitForSlowCharges: a client that is refused while its charges are on their way, which may
// count in the next window, waits long enough, wherever in the window it is, and whether or not
// earlier charges show how long they take.
func TestWaitForSlowCharges(t *testing.T) {
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow} {
		for phase := range 22 {
			simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
				slow := New(l.registry, &lateCharges{s, 300 * time.Millisecond}, Options{})
				defer slow.Leave()
				slow.Run()
				limit := store.Limit{Zone: "zone", Algorithm: a, Window: 1100 * time.Millisecond}
				charge := func(client string, i int) store.State {
					r := store.Request{Limit: &limit, ClientKey: client, Events: 3, Cost: 1, ID: fmt.Sprint(client, i)}
					st := admit(slow, r)
					if st.Err == nil && st.Allowed {
						slow.Settle([]*store.Request{new(r)}, nil)
					}
					return st
				}
				if phase >= 11 {
					// It becomes known how long charges take.
					for i := range 20 {
						charge(fmt.Sprint("other", i), 0)
						pass(limit.Window)
					}
				}
				pass(time.Duration(phase%11) * 100 * time.Millisecond)
				for i := range 3 {
					if st := charge("alice", i); !st.Allowed {
						t.Fatalf("request %d is refused: %+v", i, st)
					}
				}
				st := charge("alice", 3)
				if st.Allowed {
					t.Fatalf("%v, phase %d: the fourth is allowed", a, phase)
				}
				pass(st.RetryAfter + 2*time.Millisecond) // what the clock of the store is known to
				if again := charge("alice", 4); !again.Allowed {
					t.Errorf("%v, phase %d: refused again after %v: %+v", a, phase, st.RetryAfter, again)
				}
				slow.Flush(t.Context())
				synctest.Wait()
			})
		}
	}
}

// TestForeseeReadsAgain: of a log it foresees no room where a charge that was in flight has landed while it read.
func TestForeseeReadsAgain(t *testing.T) {
	for _, takes := range []bool{false, true} {
		simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
			r := requestOf("alice", 1)
			r.Limit = &store.Limit{Zone: "zone", Algorithm: store.SlidingLog, Window: time.Minute}
			l.ChargeDetached([]*store.Request{new(r)})
			st := l.Foresee(r, takes, func(r store.Request) store.State {
				read := s.word(r)
				pass(time.Second)
				return read
			})
			if st.Allowed {
				t.Errorf("takes %t: room is foreseen: %+v", takes, st)
			}
		})
	}
}
