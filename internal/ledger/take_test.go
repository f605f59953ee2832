package ledger

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// batches is a bucket from which several processes take batches.
type batches struct {
	*testing.T
	sim     *simulation
	ledgers []*Ledger
	limit   store.Limit
	events  int64
	batch   int64
	served  atomic.Int64
}

func newBatches(t *testing.T, seed uint64, processes int, events, batch int64) *batches {
	b := &batches{T: t, sim: newSimulation(seed), events: events, batch: batch}
	b.limit = store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	for range processes {
		b.ledgers = append(b.ledgers, New(NewRegistry(nil), b.sim, Options{}))
	}
	return b
}

func (b *batches) request(cost int64) store.Request {
	return store.Request{Limit: &b.limit, ClientKey: "client", Events: b.events, Cost: cost, Batch: b.batch}
}

func (b *batches) take(l *Ledger, cost int64) store.State {
	st := store.Answers(context.Background(), l.Take, []store.Request{b.request(cost)})[0]
	if st.Err == nil && st.Allowed {
		b.served.Add(cost)
	}
	return st
}

func (b *batches) refund(l *Ledger, cost int64, st store.State) {
	r := b.request(cost)
	r.Receipt = st.Receipt
	b.served.Add(-cost)
	l.RefundDetached([]*store.Request{new(r)})
}

// spent is the cost spent in the store.
func (b *batches) spent() int64 {
	r := b.request(0)
	return b.sim.used(r)
}

func (b *batches) leave() {
	for _, l := range b.ledgers {
		l.Flush(context.Background())
		l.Leave()
	}
	pass(2 * time.Second)
	synctest.Wait()
}

// TestNoRequestIsRefusedWhileEveryFetchSucceeds: a batch serves the requests that
// wait for it first, so that no waiter finds it used up.
func TestNoRequestIsRefusedWhileEveryFetchSucceeds(t *testing.T) {
	for _, batch := range []int64{2, 5, 50, store.BatchAuto} {
		synctest.Test(t, func(t *testing.T) {
			const workers, requests = 64, 100
			b := newBatches(t, 1, 1, 1_000_000, batch)
			b.take(b.ledgers[0], 1)
			pass(time.Second)
			synctest.Wait()
			var wg sync.WaitGroup
			for worker := range workers {
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(worker), 0))
					for range requests {
						if st := b.take(b.ledgers[0], 1+rng.Int64N(3)); st.Err != nil || !st.Allowed {
							t.Errorf("batch %d: refused although every fetch succeeds: %+v", batch, st)
						}
						if rng.IntN(10) == 0 {
							pass(time.Duration(rng.IntN(1000)) * time.Microsecond)
						}
					}
				})
			}
			wg.Wait()
			b.leave()
			pass(time.Second)
			synctest.Wait()
			if spent, served := b.spent(), b.served.Load(); spent != served {
				t.Errorf("batch %d: served %d, but %d are spent in the store", batch, served, spent)
			}
		})
	}
}

// TestNoRequestIsRefusedBeforeTheLastToken: a request finds the rest of the limit in
// the store, in a batch in flight, or in a reservation.
func TestNoRequestIsRefusedBeforeTheLastToken(t *testing.T) {
	for seed := range uint64(sweep.Size(60, 3000)) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 10))
			events := 100 + rng.Int64N(500)
			batch := []int64{store.BatchAuto, store.BatchAuto, 7, 50}[rng.IntN(4)]
			b := newBatches(t, seed, 1, events, batch)
			b.take(b.ledgers[0], 1)
			// Long enough to know of other processes, so that batches grow, and for
			// the first one to be given back.
			pass(3 * time.Second)
			synctest.Wait()
			var mu sync.Mutex
			var firstRefused, lastServed time.Time
			var wg sync.WaitGroup
			for worker := range 32 {
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(seed, uint64(worker)))
					for range 32 {
						sent := time.Now()
						st := b.take(b.ledgers[0], 1)
						mu.Lock()
						switch {
						case st.Allowed && sent.After(lastServed):
							lastServed = sent
						case !st.Allowed && (firstRefused.IsZero() || time.Now().Before(firstRefused)):
							firstRefused = time.Now()
						}
						mu.Unlock()
						pass(time.Duration(rng.IntN(3000)) * time.Microsecond)
					}
				})
			}
			wg.Wait()
			if served := b.served.Load(); served != events {
				t.Errorf("seed %d: batch %d: served %d of %d", seed, batch, served, events)
			}
			if firstRefused.Before(lastServed) {
				t.Errorf("seed %d: batch %d: a request that was sent %v after a refusal was served", seed, batch, lastServed.Sub(firstRefused))
			}
			b.leave()
		})
	}
}

// TestBatchesNeverServeMoreThanTheLimit: several processes use up one bucket, with
// refunds and lost replies.
func TestBatchesNeverServeMoreThanTheLimit(t *testing.T) {
	for seed := range uint64(sweep.Size(60, 3000)) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 9))
			processes := 1 + rng.IntN(4)
			events := []int64{10, 100, 1000, 3000}[rng.IntN(4)]
			batch := []int64{store.BatchAuto, 1, 7, events / 2}[rng.IntN(4)]
			b := newBatches(t, seed, processes, events, batch)
			lossy := rng.IntN(4) == 0
			if lossy {
				b.sim.lossy = 0.1
			}
			var wg sync.WaitGroup
			for i := range 4 * processes {
				l := b.ledgers[i%processes]
				wg.Go(func() { b.spendAll(l, rand.New(rand.NewPCG(seed, uint64(i)))) })
			}
			wg.Wait()
			b.leave()
			b.sim.mu.Lock()
			b.sim.lossy = 0
			b.sim.mu.Unlock()
			pass(3 * time.Second)
			synctest.Wait()
			spent, served := b.spent(), b.served.Load()
			switch {
			case served > events:
				t.Errorf("seed %d: served %d of %d", seed, served, events)
			case served > spent || !lossy && served != spent:
				t.Errorf("seed %d: served %d of %d at batch %d by %d, but %d are spent in the store", seed, served, events, batch, processes, spent)
			}
		})
	}
}

// spendAll takes until requests are refused for good, and refunds some.
func (b *batches) spendAll(l *Ledger, rng *rand.Rand) {
	for refusals := 0; refusals < 5; {
		cost := 1 + rng.Int64N(2)
		st := b.take(l, cost)
		switch {
		case st.Err != nil:
		case !st.Allowed:
			refusals++
			b.isShort(l, &st, cost)
			pass(time.Duration(rng.Int64N(int64(time.Second))))
		case rng.IntN(8) == 0:
			b.refund(l, cost, st)
		}
		if rng.IntN(3) == 0 {
			pass(time.Duration(rng.IntN(2000)) * time.Microsecond)
		}
	}
}

// isShort requires that a refusal is due to tokens held elsewhere.
func (b *batches) isShort(l *Ledger, st *store.State, cost int64) {
	if st.RetryAfter <= 0 {
		b.Errorf("refused without a time to wait: %+v", *st)
	}
	r := b.request(cost)
	e := l.look(&r)
	if e == nil {
		return
	}
	defer e.stripe.mu.Unlock()
	// Other processes may have refunded some at the same instant.
	if tokens := e.Gauges().Tokens; tokens > 8*cost {
		b.Errorf("refused %d while %d are reserved here: %+v", cost, tokens, *st)
	}
}

// TestIdleBatchIsGivenBack, after a second and at the end.
func TestIdleBatchIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 2, 1000, 100)
		b.take(b.ledgers[0], 3)
		synctest.Wait()
		if spent := b.spent(); spent != 100 {
			t.Fatalf("%d are spent for a batch of 100", spent)
		}
		pass(1500 * time.Millisecond)
		if spent := b.spent(); spent != 3 {
			t.Errorf("%d are spent once the batch was idle, want 3", spent)
		}
		b.take(b.ledgers[1], 4)
		b.leave()
		pass(10 * time.Millisecond)
		if spent := b.spent(); spent != 7 {
			t.Errorf("%d are spent at the end, want 7", spent)
		}
	})
}

// TestRefundsGoToTheReservation, without a call.
func TestRefundsGoToTheReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 1000, 10)
		l := b.ledgers[0]
		for range 100 {
			b.refund(l, 1, b.take(l, 1))
		}
		b.sim.mu.Lock()
		if b.sim.writes != 1 {
			t.Errorf("the store was written to %d times, want once", b.sim.writes)
		}
		b.sim.mu.Unlock()
		b.leave()
		pass(time.Second)
		synctest.Wait()
		if spent := b.spent(); spent != 0 {
			t.Errorf("%d are spent, want nothing", spent)
		}
	})
}

// TestBatchDiesWithItsWindow: later windows do not get its tokens.
func TestBatchDiesWithItsWindow(t *testing.T) {
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow} {
		synctest.Test(t, func(t *testing.T) {
			b := newBatches(t, 1, 1, 1000, 100)
			b.limit.Algorithm, b.limit.Window = a, 500*time.Millisecond
			first := b.take(b.ledgers[0], 1)
			pass(time.Duration(first.Reset-first.Now) * time.Microsecond)
			second := b.take(b.ledgers[0], 1)
			if second.Receipt == first.Receipt {
				t.Errorf("%s: served from a batch of a window that is over: %+v after %+v", a, second, first)
			}
			// Refunds of that window do not come back either.
			b.refund(b.ledgers[0], 1, first)
			r := b.request(1)
			e := b.ledgers[0].look(&r)
			tokens := e.Gauges().Tokens
			e.stripe.mu.Unlock()
			if tokens != 99 {
				t.Errorf("%s: %d are left of a batch of 100 of which one was used", a, tokens)
			}
			b.leave()
		})
	}
}

// TestAutoBatch follows the sizes of automatic batches.
func TestAutoBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 2, 100_000, store.BatchAuto)
		sizes := func(l *Ledger) int64 {
			r := b.request(1)
			e := l.look(&r)
			defer e.stripe.mu.Unlock()
			return inside(e, "batch", "size").Int()
		}
		// Nothing is taken in advance before the processes are counted.
		b.take(b.ledgers[0], 1)
		b.take(b.ledgers[1], 1)
		if spent := b.spent(); spent != 2 {
			t.Errorf("%d were taken before the processes were counted", spent)
		}
		pass(3 * time.Second)
		synctest.Wait()
		for i, l := range b.ledgers {
			r := b.request(1)
			if n := l.processes(&r); n != 2 {
				t.Errorf("process %d counts %d", i, n)
			}
		}
		l := b.ledgers[0]
		b.take(l, 1)
		if size := sizes(l); size != 100 {
			t.Errorf("the first batch is %d of 100,000, want 100", size)
		}
		// At more than the limit's rate batches grow as far as the share.
		for range 60_000 {
			b.take(l, 1)
		}
		if size := sizes(l); size != 5_000 {
			t.Errorf("batches grow to %d, want 10 %% of 100,000 for two processes", size)
		}
		pass(3 * time.Second)
		synctest.Wait()
		if size := sizes(l); size != 2_500 {
			t.Errorf("a batch that was wasted leaves a size of %d, want 2,500", size)
		}
		b.leave()
		pass(time.Second)
		synctest.Wait()
		if spent, served := b.spent(), b.served.Load(); spent != served {
			t.Errorf("served %d, but %d are spent", served, spent)
		}
		if n := bucketIn(b.sim.primary, &store.Request{Limit: &store.Limit{Zone: membershipZone, Algorithm: store.Concurrency, Window: membershipLease}}).(*algorithm.Concurrency); n != nil {
			if used := n.View(&store.Request{Limit: &store.Limit{Algorithm: store.Concurrency, Window: membershipLease}, Events: 10}, b.sim.now(), false).Used; used != 0 {
				t.Errorf("%d processes are counted that have left", used)
			}
		}
	})
}

// TestAutoBatchGrowsFromOne: a size of 1 is no dead end.
func TestAutoBatchGrowsFromOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 1000, store.BatchAuto)
		l := b.ledgers[0]
		b.take(l, 1)
		pass(3 * time.Second)
		synctest.Wait()
		b.sim.mu.Lock()
		before := b.sim.writes
		b.sim.mu.Unlock()
		for range 500 {
			b.take(l, 1)
		}
		b.sim.mu.Lock()
		calls := b.sim.writes - before
		b.sim.mu.Unlock()
		if calls > 50 {
			t.Errorf("%d calls for 500 requests", calls)
		}
		b.leave()
	})
}

// awaitWindow sleeps until a window begins in the store.
func (b *batches) awaitWindow() {
	window := b.limit.Window.Microseconds()
	pass(time.Duration(window-b.sim.now()%window) * time.Microsecond)
}

// TestNoRefusalOutlastsARefund: a take that is answered before a refund has arrived waits for
// it.
func TestNoRefusalOutlastsARefund(t *testing.T) {
	// giveBack begins a refund of 4, before which the limit is used up.
	for name, giveBack := range map[string]func(b *batches, l *Ledger){
		"of a loan": func(b *batches, l *Ledger) {
			b.take(l, 1)
			r := b.request(9)
			loaned := l.borrow(&r)
			b.awaitWindow()
			pass(10 * time.Millisecond)
			b.take(l, 1)
			l.repay(&r, loaned, &store.State{})
		},
		"of the rest of a batch": func(b *batches, l *Ledger) {
			b.take(l, 1)
			b.awaitWindow()
			b.take(l, 5)
		},
		"that is waited for": func(b *batches, l *Ledger) {
			r := b.request(4)
			r.Batch = 0
			r.Receipt = store.Answers(b.Context(), l.Take, []store.Request{r})[0].Receipt
			b.take(l, 5)
			go store.Answers(b.Context(), l.Refund, []store.Request{r})
			synctest.Wait()
		},
		"beside a charge": func(b *batches, l *Ledger) {
			r := b.request(4)
			r.Batch = 0
			r.Receipt = store.Answers(b.Context(), l.Take, []store.Request{r})[0].Receipt
			b.take(l, 5)
			more := b.request(1)
			more.Batch = 0
			l.ChargeDetached([]*store.Request{new(more)})
			l.RefundDetached([]*store.Request{new(r)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(50) {
				synctest.Test(t, func(t *testing.T) {
					b := newBatches(t, seed, 1, 10, 5)
					l := b.ledgers[0]
					b.limit.Algorithm = store.SlidingWindow
					b.awaitWindow()
					pass(b.limit.Window - 10*time.Millisecond)
					giveBack(b, l)
					r := b.request(4)
					r.Batch = 0
					if st := store.Answers(t.Context(), l.Take, []store.Request{r})[0]; !st.Allowed {
						t.Errorf("seed %d: refused although a refund is in flight: %+v", seed, st)
					}
					b.leave()
				})
			}
		})
	}
}

// TestFlushAwaitsRefunds, because a later registry knows nothing of them.
func TestFlushAwaitsRefunds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 10, 10)
		b.take(b.ledgers[0], 3)
		b.ledgers[0].Flush(t.Context())
		if spent := b.spent(); spent != 3 || b.ledgers[0].Owes() {
			t.Errorf("%d are spent once a batch was given back of which 3 were used; owes: %t", spent, b.ledgers[0].Owes())
		}
		b.leave()
	})
}

// newOvertaken returns batches with 2 tokens left here and 1 in the store.
func newOvertaken(t *testing.T) *batches {
	b := newBatches(t, 1, 1, 10, 5)
	b.take(b.ledgers[0], 3)
	b.sim.others(algorithm.Charge, b.request(4))
	return b
}

// refusedTake is a take that the store refused with that much remaining.
func (b *batches) refusedTake(remaining int64, reqs ...store.Request) *taking {
	t := &taking{call: call{ledger: b.ledgers[0], ctx: context.Background(), asks: store.Asks(reqs)}}
	for _, a := range t.asks {
		a.State = store.State{Limit: b.events, Used: b.events - remaining, Remaining: remaining, RetryAfter: 1}
	}
	return t
}

func (b *batches) requireLeft(here, there int64) {
	b.Helper()
	r := b.request(1)
	e := b.ledgers[0].look(&r)
	tokens := e.Gauges().Tokens
	e.stripe.mu.Unlock()
	if spent := b.spent(); tokens != here || b.events-spent != there {
		b.Errorf("%d are left here and %d in the store, want %d and %d", tokens, b.events-spent, here, there)
	}
}

// TestReclaim: a request that a batch overtook gets a part of it.
func TestReclaim(t *testing.T) {
	for name, c := range map[string]struct {
		cost        int64
		beside      bool
		served      bool
		here, there int64
	}{
		"here":                        {cost: 2, served: true, here: 0, there: 1},
		"here and in the store":       {cost: 3, served: true, here: 0, there: 0},
		"more than is left":           {cost: 4, here: 2, there: 1},
		"refused by another zone too": {cost: 2, beside: true, here: 2, there: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newOvertaken(t)
				reqs := []store.Request{b.request(c.cost)}
				if c.beside {
					other := b.request(1)
					other.ClientKey, other.Batch = "other", 0
					reqs = append(reqs, other)
				}
				k := b.refusedTake(1, reqs...)
				k.until = time.Now().Add(DefaultTimeout)
				k.reclaim(b.ledgers[0].registry.now())
				if st := k.asks[0].State; st.Err != nil || st.Allowed != c.served {
					t.Errorf("a request that costs %d: %+v", c.cost, st)
				}
				b.requireLeft(c.here, c.there)
				b.leave()
			})
		})
	}
}

// TestRefusalStands if the batch, or the call for the rest, fails.
func TestRefusalStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newOvertaken(t)
		l := b.ledgers[0]
		fetch := b.request(5)
		e := l.look(&fetch)
		m := l.moment()
		first := b.request(3)
		first.Batch = 10
		if do, size := e.Claim(b.refusedTake(0, first).waiter(0), &m); do != core.Fetch || size != 10 {
			t.Fatalf("a request that the tokens do not serve: %v of %d", do, size)
		}
		e.release(&m)
		k := b.refusedTake(0, b.request(4))
		k.until = time.Now().Add(DefaultTimeout)
		go k.reclaim(b.ledgers[0].registry.now())
		synctest.Wait()
		b.refusedTake(0, b.request(1)).fetched(0, &fetch, &store.State{Err: store.ErrUncertain})
		synctest.Wait()
		if st := k.asks[0].State; st.Err != nil || st.Allowed || st.RetryAfter != 1 {
			t.Errorf("the batch was lost: %+v", st)
		}
		b.sim.setDown(true, false)
		k = b.refusedTake(1, b.request(3))
		k.until = time.Now().Add(DefaultTimeout)
		k.reclaim(b.ledgers[0].registry.now())
		if st := k.asks[0].State; st.Err != nil || st.Allowed || st.RetryAfter != 1 {
			t.Errorf("the store is away: %+v", st)
		}
		b.sim.setDown(false, false)
		b.requireLeft(2, 1)
		b.leave()
	})
}

// TestLookShowsWhatATakeFinds: a take that costs nothing counts a charge in flight as the next take does, also
// where its window ended before it was sent, and so does what is foreseen.
func TestLookShowsWhatATakeFinds(t *testing.T) {
	for _, kind := range kinds {
		for ms := range 12 {
			simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
				limit := kind
				limit.Zone, limit.Window = "zone", 3*time.Second
				request := func(cost int64) store.Request {
					return store.Request{Limit: &limit, ClientKey: "alice", Events: 10, Cost: cost, ID: strconv.FormatInt(cost, 10)}
				}
				take := func(cost int64) store.State {
					return store.Answers(t.Context(), l.Take, []store.Request{request(cost)})[0]
				}
				take(2)
				pass(7 * time.Second)
				l.ChargeDetached([]*store.Request{new(request(6))})
				pass(time.Duration(ms) * 500 * time.Microsecond)
				foreseen, look := l.Foresee(request(0), true, s.word), take(0)
				if look.Remaining != 4 || foreseen.Remaining != 4 {
					t.Errorf("%s, aligned %t, after %d half milliseconds: %d are left, foreseen %d; want 4", limit.Algorithm, limit.Align, ms, look.Remaining, foreseen.Remaining)
				}
				if st := take(5); st.Allowed {
					t.Errorf("%s, aligned %t: 5 of 4 are taken: %+v", limit.Algorithm, limit.Align, st)
				}
				pass(time.Second)
			})
		}
	}
}
