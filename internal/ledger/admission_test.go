package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// steady is a client that makes ten requests a second.
type steady struct {
	*testing.T
	sim    *simulation
	ledger *Ledger
	req    store.Request
}

func newSteady(t *testing.T, limit store.Limit, events int64) *steady {
	return newClient(t, limit, time.Minute, events, Options{})
}

func newClient(t *testing.T, limit store.Limit, window time.Duration, events int64, opts Options) *steady {
	limit.Zone, limit.Window = "zone", window
	s := newSimulation(1)
	return &steady{t, s, New(NewRegistry(nil), s, opts), store.Request{Limit: &limit, ClientKey: "client", Events: events, Cost: 1}}
}

// come makes n requests, charges them, and returns the number of checks.
func (c *steady) come(n int) (checks int) {
	before := c.sim.checks
	for range n {
		st := admit(c.ledger, c.req)
		if st.Err == nil && st.Allowed {
			c.ledger.Settle([]*store.Request{new(c.req)}, nil)
		}
		pass(100 * time.Millisecond)
	}
	return c.sim.checks - before
}

func (c *steady) want(what string, got, least, most int) {
	c.Helper()
	if got < least || got > most {
		c.Errorf("%s, %s: %d checks, want %d to %d", c.req.Limit.Algorithm, what, got, least, most)
	}
}

// TestSoleWriterMakesNoChecks: once this process has been the sole writer for the
// time of trust, requests that leave half of the limit are admitted without a
// check, until anything speaks against it.
func TestSoleWriterMakesNoChecks(t *testing.T) {
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			c := newSteady(t, kind, 1000)
			c.want("at first", c.come(15), 10, 15)
			if !algorithm.Of(kind.Algorithm).Copies() {
				c.want("of an algorithm that is not copied", c.come(20), 20, 20)
				c.ledger.Leave()
				return
			}
			c.want("as the sole writer", c.come(20), 0, 1)

			c.sim.others(algorithm.Charge, c.req)
			c.want("after another process has charged", c.come(10), 8, 10)
			c.want("as the sole writer again", c.come(20), 0, 5)

			pass(c.req.Limit.Window/10 + DefaultTrust)
			c.want("after trust has run out", c.come(1), 1, 1)
			c.want("after the check that renews trust", c.come(10), 0, 0)

			c.sim.setDown(true, false)
			c.want("in an outage", c.come(20), 18, 20)
			c.sim.setDown(false, false)
			c.come(30)
			c.want("after an outage", c.come(20), 0, 0)

			store.Answers(t.Context(), c.ledger.Refund, []store.Request{c.req})
			c.want("after a refund", c.come(5), 1, 5)
			c.ledger.Leave()
		})
	}
}

// TestWithoutTrustTheStoreIsAlwaysAsked, about clients that it admits and about those that it refuses.
func TestWithoutTrustTheStoreIsAlwaysAsked(t *testing.T) {
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			c := newClient(t, kind, time.Hour, 50, Options{Trust: NoTrust})
			c.want("as the sole writer", c.come(40), 40, 80)
			c.come(20)
			c.want("at its limit", c.come(10), 10, 20)
			if figures := c.ledger.Figures(); figures.LocalRefusals != 0 || figures.UnaskedAdmissions != 0 {
				t.Errorf("%s: %d refusals and %d admissions without a call", kind.Algorithm, figures.LocalRefusals, figures.UnaskedAdmissions)
			}
			c.ledger.Leave()
		})
	}
}

// TestSoleWriterChecksNearTheLimit, and exactly the limit is admitted.
func TestSoleWriterChecksNearTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSteady(t, store.Limit{Algorithm: store.FixedWindow}, 100)
		c.want("at first", c.come(15), 10, 15)
		c.want("with more than half left", c.come(30), 0, 2)
		c.come(10)
		c.want("with less than half left", c.come(30), 30, 30)
		c.come(30)
		if used := c.sim.used(c.req); used != 100 {
			t.Errorf("%d are used, want 100", used)
		}
		c.ledger.Leave()
	})
}

// TestOtherWriterIsSeenWithinTrust: a sole writer learns of another one from the reply to
// its own next charge.
func TestOtherWriterIsSeenWithinTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSteady(t, store.Limit{Algorithm: store.FixedWindow}, 1000)
		c.come(30)
		for range 970 {
			c.sim.others(algorithm.Charge, c.req)
		}
		// One request passes on a stale answer; the reply to its charge shows the rest.
		c.come(5)
		if used := c.sim.used(c.req); used != 1001 {
			t.Errorf("%d of 1000 are used, want one more than that", used)
		}
		c.ledger.Leave()
	})
}

// newSeldom returns a client with a limit of 100 in an hour.
func newSeldom(t *testing.T, limit store.Limit, opts Options) *steady {
	return newClient(t, limit, time.Hour, 100, opts)
}

// visit makes a request every pause, n times, and returns the number of checks.
func (c *steady) visit(n int, pause time.Duration) (checks int) {
	before := c.sim.checks
	for range n {
		if st := admit(c.ledger, c.req); st.Allowed {
			c.ledger.Settle([]*store.Request{new(c.req)}, nil)
		}
		pass(pause)
	}
	return c.sim.checks - before
}

// TestReturningClientMakesNoChecks checks that a client that returns to this process alone is
// admitted on the primary's last answer for as long as it had come here alone before, that a longer
// pause costs a check, and that after another process has filled the bucket, or has given the client
// a penalty, one request passes at most, charged or not.
func TestReturningClientMakesNoChecks(t *testing.T) {
	const pause = 20 * time.Second
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			c := newSeldom(t, kind, Options{})
			defer c.ledger.Leave()
			if !algorithm.Of(kind.Algorithm).Copies() {
				c.want("of an algorithm that is not copied", c.visit(10, pause), 10, 20)
				return
			}
			c.want("at first", c.visit(5, pause), 2, 5)
			c.want("later", c.visit(10, pause), 0, 0)
			pass(4 * time.Minute)
			c.want("after a pause as long as it is known", c.visit(1, pause), 0, 1)
			pass(6*time.Minute - pause)
			c.want("after a tenth of the window", c.visit(1, pause), 1, 1)
			if kind.Algorithm == store.FixedWindow && !kind.Align {
				c.visit(33, time.Second)
				c.want("with less than half left", c.visit(10, pause), 10, 10)
			}
		})
		if !algorithm.Of(kind.Algorithm).Copies() {
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			c := newSeldom(t, kind, Options{})
			defer c.ledger.Leave()
			c.visit(10, pause)
			first := admit(c.ledger, c.req)
			c.want("of two at a time", c.visit(1, pause), 1, 1)
			if !first.Allowed {
				t.Errorf("the first of two gets %+v", first)
			}
			c.ledger.Settle([]*store.Request{new(c.req)}, nil)
			pass(time.Second)
		})
		for _, isFree := range []bool{false, true} {
			for name, spoil := range map[string]func(c *steady){
				"filled the bucket": func(c *steady) {
					for range 100 - c.sim.used(c.req) {
						c.sim.others(algorithm.Charge, c.req)
					}
				},
				"given it a penalty": func(c *steady) {
					penalty := c.req
					penalty.Until = c.sim.now() + time.Hour.Microseconds()
					c.sim.others(algorithm.Penalize, penalty)
				},
			} {
				synctest.Test(t, func(t *testing.T) {
					c := newSeldom(t, kind, Options{ChargeDelay: UsualChargeDelay})
					c.ledger.Run()
					c.visit(10, pause)
					spoil(c)
					passed := 0
					for range 5 {
						r := c.req
						if st := admit(c.ledger, r); st.Allowed {
							passed++
							if isFree {
								r.Cost = 0
							}
							c.ledger.Settle([]*store.Request{new(r)}, []int64{1})
						}
						pass(time.Second)
					}
					if passed > 1 {
						t.Errorf("%s, free %t: %d requests pass after another process has %s, want at most 1", kind.Algorithm, isFree, passed, name)
					}
					c.ledger.Leave()
				})
			}
		}
		for _, trust := range []time.Duration{NoTrust, DefaultTrust - time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				c := newSeldom(t, kind, Options{Trust: trust})
				defer c.ledger.Leave()
				c.want(fmt.Sprint("with a trust of ", trust), c.visit(10, pause), 10, 20)
			})
		}
	}
}

// newLine returns a ledger on a store in which alice's bucket is full, and a request
// of alice.
func newLine(limit store.Limit) (*simulation, *Ledger, store.Request) {
	s := newSimulation(1)
	limit.Zone, limit.Window = "zone", time.Hour
	r := store.Request{Limit: &limit, ClientKey: "alice", Events: 5, Cost: 1, ID: "id"}
	full := r
	full.Cost, full.ID = 5, "other"
	s.others(algorithm.Charge, full)
	return s, New(NewRegistry(nil), s, Options{}), r
}

// TestLineIsCheckedOnceASecond, however many requests wait, and every answer equals the
// store's.
func TestLineIsCheckedOnceASecond(t *testing.T) {
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			s, l, r := newLine(kind)
			for i := range 10_000 {
				if r.Ahead = 7; algorithm.Of(kind.Algorithm).Copies() {
					r.Ahead = int64(i % 20)
				}
				st, exact := l.CheckAhead(t.Context(), r, time.Minute), s.word(r)
				if st.Err != nil || st.Allowed || st.Used != 5 || (st.RetryAfter-exact.RetryAfter).Abs() > time.Second {
					t.Fatalf("%s, %d ahead: %+v, want %+v", kind.Algorithm, r.Ahead, st, exact)
				}
				pass(time.Millisecond)
			}
			// Ten seconds have passed.
			if s.checks < 9 || s.checks > 12 {
				t.Errorf("%s: %d checks in 10 s", kind.Algorithm, s.checks)
			}
			l.Leave()
		})
	}
}

// TestLineOfALog: a refusal of a bucket that cannot be copied answers a request of
// greater need only if its wait exceeds the request's.
func TestLineOfALog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l, r := newLine(store.Limit{Algorithm: store.SlidingLog})
		for _, step := range []struct {
			ahead   int64
			maxWait time.Duration
			wait    time.Duration
			checks  int
		}{
			{0, 2 * time.Hour, time.Hour, 1},
			{0, 2 * time.Hour, time.Hour, 1},
			{0, time.Minute, time.Hour, 1},
			// The wait is one window or two: only a check shows which.
			{7, 2 * time.Hour, time.Hour, 2},
			{7, 2 * time.Hour, time.Hour, 2},
			{12, 90 * time.Minute, 2 * time.Hour, 3},
			{17, 90 * time.Minute, 2 * time.Hour, 3},
			{17, 150 * time.Minute, 3 * time.Hour, 4},
			// The refusal of a larger need does not refuse a smaller one.
			{0, time.Minute, time.Hour, 5},
		} {
			r.Ahead = step.ahead
			st := l.CheckAhead(t.Context(), r, step.maxWait)
			if wait := st.RetryAfter.Round(time.Minute); st.Allowed || wait != step.wait || s.checks != step.checks {
				t.Errorf("%+v: wait %v, %d checks", step, st.RetryAfter, s.checks)
			}
		}
		l.Leave()
	})
}

// TestLineInAnOutage: the ledger refuses nothing while the store does not answer,
// and answers again after it. A client that leaves during its check says nothing
// about the store, so the next request checks.
func TestLineInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l, r := newLine(store.Limit{Algorithm: store.FixedWindow})
		check := func(what string, fails bool, checks int) {
			t.Helper()
			before := s.checks
			for range 3 {
				if st := l.CheckAhead(t.Context(), r, 0); (st.Err != nil) != fails {
					t.Errorf("%s: %+v", what, st)
				}
			}
			if s.checks-before != checks {
				t.Errorf("%s: %d checks, want %d", what, s.checks-before, checks)
			}
		}
		check("at first", false, 1)
		pass(2 * DefaultTrust)
		left, leave := context.WithCancel(t.Context())
		leave()
		if st := l.CheckAhead(left, r, 0); !errors.Is(st.Err, context.Canceled) {
			t.Errorf("a client that has left: %+v", st)
		}
		check("after a client has left", false, 1)
		pass(2 * DefaultTrust)
		s.setDown(true, false)
		check("in an outage", true, 3)
		s.setDown(false, false)
		check("after it", false, 1)
		l.Leave()
	})
}

// TestSoleWriterCostsOnlyCharges: clients of one process cost no checks, those
// that alternate between two processes a check for each request.
func TestSoleWriterCostsOnlyCharges(t *testing.T) {
	const clients, perSecond, seconds = 20, 200, 5
	for _, shared := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(1)
			ledgers := []*Ledger{New(NewRegistry(nil), s, Options{}), New(NewRegistry(nil), s, Options{})}
			var wg sync.WaitGroup
			// come makes n requests; shared clients alternate between two processes.
			come := func(n int) {
				for i := range n {
					l := ledgers[0]
					if shared {
						l = ledgers[i/clients%2]
					}
					r := requestOf(fmt.Sprint(i%clients), 1_000_000_000)
					r.Limit = &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
					wg.Go(func() {
						if st := admit(l, r); st.Err != nil || !st.Allowed {
							t.Errorf("%+v", st)
						}
						pass(2 * time.Millisecond)
						l.Settle([]*store.Request{new(r)}, nil)
					})
					pass(time.Second / perSecond)
				}
				wg.Wait()
			}
			// The time of trust shows whether this process is the sole writer.
			come(3 * perSecond)
			s.mu.Lock()
			before := s.checks
			s.mu.Unlock()
			come(seconds * perSecond)
			checks := float64(s.checks-before) / (seconds * perSecond)
			if !shared && checks > 0.01 {
				t.Errorf("%.3f checks a request of clients of one process", checks)
			}
			if shared && checks < 0.6 {
				t.Errorf("%.3f checks a request of clients of two processes", checks)
			}
			for _, l := range ledgers {
				l.Leave()
			}
			pass(time.Second)
		})
	}
}

// TestBatchesSaveCalls: most requests of steady traffic at random instants through
// four processes cost no call, and of heavy traffic nearly the whole limit is
// admitted.
func TestBatchesSaveCalls(t *testing.T) {
	const processes = 4
	for _, events := range []int64{1_000, 3_000} {
		for _, batch := range []int64{store.BatchAuto, events / 100} {
			synctest.Test(t, func(t *testing.T) {
				b := newBatches(t, 1, processes, events, batch)
				b.limit.Window, b.limit.Align = time.Second, true
				rng := rand.New(rand.NewPCG(uint64(events), 1))
				// send makes the requests of one aligned window, a percentage of the
				// limit, and returns the calls for each request and the admitted
				// number.
				send := func(percent int64) (calls float64, admitted int64) {
					var wg sync.WaitGroup
					now := b.sim.now()
					end := (now/1_000_000 + 1) * 1_000_000
					pass(time.Duration(end-now) * time.Microsecond)
					b.sim.mu.Lock()
					before := b.sim.checks + b.sim.writes
					b.sim.mu.Unlock()
					was, requests := b.served.Load(), events*percent/100
					pause := float64(time.Second) / float64(requests)
					for n, left := int64(0), time.Second; n < requests; n++ {
						p := min(time.Duration(rng.ExpFloat64()*pause), left)
						pass(p)
						left -= p
						wg.Go(func() { b.take(b.ledgers[n%processes], 1) })
					}
					wg.Wait()
					b.sim.mu.Lock()
					defer b.sim.mu.Unlock()
					return float64(b.sim.checks+b.sim.writes-before) / float64(requests), b.served.Load() - was
				}
				for range 5 {
					send(80)
				}
				steady, served := send(80)
				heavy, admitted := send(120)
				again, _ := send(80)
				what := fmt.Sprintf("limit %d, batch %d", events, batch)
				t.Logf("%s: %.3f, %.3f and %.3f calls a request, %d and %d admitted", what, steady, heavy, again, served, admitted)
				if most := 0.5; steady > most || again > most {
					t.Errorf("%s: %.3f calls a request, and %.3f after heavy traffic, want at most %.1f", what, steady, again, most)
				}
				if admitted < events*9/10 {
					t.Errorf("%s: %d requests of heavy traffic were admitted", what, admitted)
				}
				b.leave()
			})
		}
	}
}

// TestChecksAndTakesTogetherKeepTheLimit sends requests that check and are charged afterwards among requests that take,
// as a site and rate_limit_service do with one bucket.
func TestChecksAndTakesTogetherKeepTheLimit(t *testing.T) {
	for _, kind := range kinds {
		for seed := range uint64(150) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(seed)
				l := New(NewRegistry(nil), s, Options{})
				defer l.Leave()
				limit := kind
				limit.Zone, limit.Window = "zone", 100*time.Hour
				rng := rand.New(rand.NewPCG(seed, 9))
				const events = 17
				spread, dearest := 5_000*(1+int(seed)%8), 1+int(seed)%3
				var wg sync.WaitGroup
				for i := range 60 {
					r := store.Request{Limit: &limit, ClientKey: "alice", Events: events, Cost: 1 + int64(rng.IntN(dearest)), ID: fmt.Sprint(i)}
					comes, lasts, takes, isFree := rng.IntN(spread), rng.IntN(8_000), rng.IntN(2) == 0, rng.IntN(6) == 0
					wg.Go(func() {
						pass(time.Duration(comes) * time.Microsecond)
						a, decide := &store.Ask{Request: r}, l.Admit
						if takes {
							decide = l.Take
						}
						if decide(context.Background(), []*store.Ask{a}); a.Err != nil || !a.Allowed {
							return
						}
						if !takes {
							pass(time.Duration(lasts) * time.Microsecond)
						}
						switch {
						case !takes && isFree:
							held := r.Cost
							r.Cost = 0
							l.Settle([]*store.Request{new(r)}, []int64{held})
						case !takes:
							l.Settle([]*store.Request{new(r)}, nil)
						case isFree:
							r.Receipt = a.State.Receipt
							l.RefundDetached([]*store.Request{new(r)})
						}
					})
				}
				wg.Wait()
				l.Flush(t.Context())
				pass(3 * time.Second)
				synctest.Wait()
				if used := s.used(store.Request{Limit: &limit, ClientKey: "alice", Events: events}); used > events {
					t.Errorf("%s, align %t, seed %d: %d are used of %d", limit.Algorithm, limit.Align, seed, used, events)
				}
			})
		}
	}
}

// TestCheckOutlastsItsClient: if a client leaves whose check others wait for, the check goes on.
func TestCheckOutlastsItsClient(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		ctx, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		send := func(ctx context.Context) {
			wg.Go(func() { l.Admit(ctx, store.Asks([]store.Request{requestOf("alice", 60)})) })
			synctest.Wait()
		}
		send(t.Context())
		send(ctx)
		send(t.Context())
		leave()
		if wg.Wait(); s.checks != 2 {
			t.Errorf("the store was asked %d times, want twice", s.checks)
		}
	})
}
