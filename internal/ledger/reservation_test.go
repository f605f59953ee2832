package ledger

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// takeOf takes a cost of 1 for a request of that limit.
func (b *batches) takeOf(l *Ledger, events int64) store.State {
	r := b.request(1)
	r.Events = events
	// The client has read the last answer.
	pass(time.Microsecond)
	return store.Answers(b.Context(), l.Take, []store.Request{r})[0]
}

// TestBatchServesByTheRequestsOwnLimit: what was taken in advance under one limit serves
// requests of a lower one no further than that, beside what was spent.
func TestBatchServesByTheRequestsOwnLimit(t *testing.T) {
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow} {
		for _, batch := range []int64{200, store.BatchAuto} {
			synctest.Test(t, func(t *testing.T) {
				b := newBatches(t, 1, 1, 100_000, batch)
				b.limit.Algorithm = a
				l := b.ledgers[0]
				for range 3 {
					b.takeOf(l, 100_000)
					pass(time.Second)
					synctest.Wait()
				}
				for range 3 {
					b.takeOf(l, 100_000)
				}
				served := int64(0)
				for range 300 {
					if st := b.takeOf(l, 10); st.Allowed {
						served++
					} else if st.RetryAfter <= 0 || st.Limit != 10 {
						t.Errorf("%s, batch %d: %+v", a, batch, st)
					}
				}
				if served != 4 {
					t.Errorf("%s, batch %d: %d of limit 10 are served after 6, want 4", a, batch, served)
				}
				if st := b.takeOf(l, 100_000); !st.Allowed || st.Used != 11 {
					t.Errorf("%s, batch %d: of the higher limit: %+v", a, batch, st)
				}
				b.leave()
			})
		}
	}
}

// TestBatchOfALoweredLimitServesNoMore: a reload takes effect at once.
func TestBatchOfALoweredLimitServesNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 1000, 500)
		l := b.ledgers[0]
		for range 20 {
			b.takeOf(l, 1000)
		}
		if st := b.takeOf(l, 10); st.Allowed {
			t.Errorf("served after 20 of 10: %+v", st)
		}
		if st := b.takeOf(l, 21); !st.Allowed {
			t.Errorf("refused after 20 of 21: %+v", st)
		}
		b.leave()
	})
}

// TestPenaltyEndsABatch, whoever has set it: of others the process hears within the time
// of trust.
func TestPenaltyEndsABatch(t *testing.T) {
	for name, penalize := range map[string]func(b *batches, r store.Request){
		"here": func(b *batches, r store.Request) {
			b.sim.others(algorithm.Penalize, r)
			m := b.ledgers[0].moment()
			e := b.ledgers[0].look(&r)
			e.Penalize(&r, &m)
			e.release(&m)
		},
		"elsewhere": func(b *batches, r store.Request) { b.sim.others(algorithm.Penalize, r) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBatches(t, 1, 1, 1000, 100)
				l := b.ledgers[0]
				b.take(l, 1)
				r := b.request(1)
				r.Until = b.sim.now() + time.Hour.Microseconds()
				penalize(b, r)
				synctest.Wait()
				served := 0
				for range 50 {
					if st := b.take(l, 1); st.Allowed {
						served++
					} else if st.Penalty == 0 {
						t.Errorf("refused without the penalty: %+v", st)
					}
					pass(100 * time.Millisecond)
				}
				if most := 11; name == "here" && served > 0 || served > most {
					t.Errorf("%d served under a penalty", served)
				}
				if st := store.Answers(t.Context(), l.Take, []store.Request{b.request(0)})[0]; st.Allowed {
					t.Errorf("a cost of 0 passes under a penalty: %+v", st)
				}
				b.leave()
			})
		})
	}
}

// TestBatchOutlastsTheStore: while the store is silent, tokens serve without asking it.
func TestBatchOutlastsTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 1000, 100)
		l := b.ledgers[0]
		b.take(l, 1)
		b.sim.setDown(true, false)
		for i := range 30 {
			if st := b.take(l, 1); st.Err != nil || !st.Allowed || st.Used != int64(i+2) {
				t.Fatalf("request %d: %+v", i, st)
			}
			pass(300 * time.Millisecond)
		}
		b.sim.setDown(false, false)
		b.leave()
	})
}

// TestCostZeroIsNeverRefused for want of room, by any short cut.
func TestCostZeroIsNeverRefused(t *testing.T) {
	for a := range store.Algorithms {
		synctest.Test(t, func(t *testing.T) {
			b := newBatches(t, 1, 1, 5, 0)
			b.limit.Algorithm = a
			l := b.ledgers[0]
			full := b.request(5)
			full.ID = "full"
			store.Answers(t.Context(), l.Take, []store.Request{full})
			more := b.request(7)
			more.ID = "more"
			store.Answers(t.Context(), l.Charge, []store.Request{more})
			refused := b.request(1)
			refused.ID = "refused"
			for range 3 {
				if st := store.Answers(t.Context(), l.Take, []store.Request{refused})[0]; st.Allowed {
					t.Fatalf("%s: not full: %+v", a, st)
				}
				free := b.request(0)
				free.ID = "free"
				free.Reserved = 3
				if st := store.Answers(t.Context(), l.Take, []store.Request{free})[0]; !st.Allowed {
					t.Errorf("%s: a take of nothing is refused: %+v", a, st)
				}
				if st := admit(l, free); !st.Allowed {
					t.Errorf("%s: nothing is admitted: %+v", a, st)
				}
				if asks := store.Asks([]store.Request{free}); l.RefuseKnown(asks) {
					t.Errorf("%s: known to be refused: %+v", a, asks[0].State)
				}
				pass(100 * time.Millisecond)
			}
			b.leave()
		})
	}
}
