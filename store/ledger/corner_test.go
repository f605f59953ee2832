package ledger

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestAnswersGoToTheirBuckets, also where a request asks about several again, in
// another order.
func TestAnswersGoToTheirBuckets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		one, other := requestOf("one", 100), requestOf("other", 100)
		s.others(algorithm.Charge, one)
		for range 5 {
			s.others(algorithm.Charge, other)
		}
		a := &admission{ledger: l, ctx: t.Context(), reqs: []store.Request{one, other}, states: make([]store.State, 2)}
		for _, place := range []int{1, 0} {
			l.join(a, place, l.books.now())
		}
		a.ask(a.asking, l.books.now())
		if a.states[0].Used != 1 || a.states[1].Used != 5 {
			t.Errorf("states %+v", a.states)
		}
		l.Leave()
	})
}

// TestReservationIsNoRefusal: a batch that took all that was left does not make
// its own tokens be refused.
func TestReservationIsNoRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 10, 10)
		l := b.ledgers[0]
		b.take(l, 1)
		states := make([]store.State, 1)
		if l.RefuseKnown([]store.Request{b.request(1)}, states) {
			t.Errorf("refused: %+v", states[0])
		}
		for range 9 {
			if st := b.take(l, 1); !st.Allowed {
				t.Fatalf("refused: %+v", st)
			}
		}
		// The last one has asked nobody, so it is the store that refuses.
		if st := b.take(l, 1); st.Allowed {
			t.Errorf("served more than there is: %+v", st)
		}
		if !l.RefuseKnown([]store.Request{b.request(1)}, states) {
			t.Error("not known to be full")
		}
		b.leave()
	})
}

// TestAlignedWindowInAnOutage: the charges of a client that was never heard of
// wait as others do.
func TestAlignedWindowInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) {
			t.Errorf("%d were lost: %v", n, err)
		}})
		aligned := store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: 24 * time.Hour, Align: true}
		r := store.Request{Limit: &aligned, ClientKey: "alice", Events: 100, Cost: 1}
		s.down = true
		for range 20 {
			l.ChargeDetached([]store.Request{r})
			time.Sleep(100 * time.Millisecond)
		}
		s.mu.Lock()
		s.down = false
		s.mu.Unlock()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if used := s.used(r); used != 20 {
			t.Errorf("%d are charged, want 20", used)
		}
		l.Leave()
	})
}

// TestLoans: what a request borrows of a batch, because its cost is higher, comes
// back if the store refuses the rest; not into another window, and not into a
// reservation that was forgotten.
func TestLoans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 11, 9)
		l := b.ledgers[0]
		b.take(l, 1)
		s := b.request(12)
		b.sim.others(algorithm.Charge, store.Request{Limit: &b.limit, ClientKey: "client", Events: 11, Cost: 2})
		loaned := l.borrow(&s)
		if loaned.tokens != 8 {
			t.Fatalf("borrowed %+v", loaned)
		}
		e := l.find(&s)
		if e.isIdle() {
			t.Error("may be forgotten with a loan")
		}
		e.page.mu.Unlock()
		l.repay(&s, loaned, &store.State{})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if spent := b.spent(); spent != 3 {
			t.Errorf("%d are spent once what was lent was idle, want 3", spent)
		}
		b.leave()
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 20, 10)
		b.limit.Window = 300 * time.Millisecond
		l := b.ledgers[0]
		b.take(l, 2)
		r := b.request(20)
		loaned := l.borrow(&r)
		time.Sleep(400 * time.Millisecond)
		b.take(l, 1)
		l.repay(&r, loaned, &store.State{})
		e := l.find(&r)
		if tokens := e.reservation.tokens; tokens != 9 {
			t.Errorf("%d are left of a batch of 10 of which 1 was used", tokens)
		}
		e.page.mu.Unlock()
		b.leave()
	})
}

// TestOwnRefundIsSeenAtOnce, and not only when the primary is asked again.
func TestOwnRefundIsSeenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		r := requestOf("alice", 1)
		taken := l.Take(t.Context(), []store.Request{r})[0]
		back := r
		back.Receipt = taken.Receipt
		l.RefundDetached([]store.Request{back})
		// The store is asked before the refund is there.
		if st := l.Take(t.Context(), []store.Request{r})[0]; st.Allowed {
			t.Fatalf("the refund was faster: %+v", st)
		}
		time.Sleep(10 * time.Millisecond)
		if st := l.Take(t.Context(), []store.Request{r})[0]; !st.Allowed {
			t.Errorf("refused after the refund: %+v", st)
		}
		l.Leave()
	})
}

// TestLateWordLacksARefund: a take was refused before a refund, and its reply comes
// after that of a take which was sent later.
func TestLateWordLacksARefund(t *testing.T) {
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog} {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(1)
			l := New(NewBooks(nil), s, Options{})
			request := func(id string, cost int64) store.Request {
				return store.Request{Limit: &store.Limit{Zone: "zone", Algorithm: a, Window: time.Hour}, ClientKey: "alice", Events: 10, Cost: cost, ID: id}
			}
			taken, late := request("taken", 8), request("late", 5)
			taken.Receipt = l.Take(t.Context(), []store.Request{taken})[0].Receipt
			asked := l.books.now()
			refusal := s.Take(t.Context(), []store.Request{late})[0]
			l.RefundDetached([]store.Request{taken})
			time.Sleep(10 * time.Millisecond)
			for _, cost := range []int64{1, 5} {
				if st := l.Take(t.Context(), []store.Request{request("", cost)})[0]; !st.Allowed {
					t.Errorf("%s: %d refused after the refund: %+v", a, cost, st)
				}
				l.hearTake(&late, &refusal, asked)
			}
			l.Leave()
		})
	}
}

// TestWhoIsLetThroughAsks: where another zone refuses, nobody asks, and the next
// request may.
func TestWhoIsLetThroughAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		one, other := requestOf("one", 1), requestOf("other", 1)
		for _, r := range []store.Request{one, other} {
			s.others(algorithm.Charge, r)
			l.Take(t.Context(), []store.Request{r})
		}
		time.Sleep(1500 * time.Millisecond)
		// The other's refusal is fresh.
		l.Take(t.Context(), []store.Request{other})
		s.reset("zone/one")
		l.Take(t.Context(), []store.Request{one, other})
		if st := l.Take(t.Context(), []store.Request{one})[0]; !st.Allowed {
			t.Errorf("refused without a question: %+v", st)
		}
		l.Leave()
	})
}

// TestPrimaryAway: a replica answers where the primary cannot, and the primary
// is not asked in vain for every request.
func TestPrimaryAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		r := requestOf("alice", 3)
		for range 3 {
			if st := admit(l, r); !st.Allowed {
				t.Fatalf("%+v", st)
			}
			l.Settle([]store.Request{r}, nil)
			time.Sleep(10 * time.Millisecond)
		}
		s.mu.Lock()
		s.away = true
		s.mu.Unlock()
		for range 300 {
			time.Sleep(10 * time.Millisecond)
			if st := admit(l, r); st.Allowed || st.Err != nil {
				t.Fatalf("a client over its limit while the primary is away: %+v", st)
			}
		}
		l.Leave()
	})
}
