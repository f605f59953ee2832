package core

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// refusal is what a store says of a bucket of five events that are used, of which so many are held.
func refusal(r *store.Request, now, held int64) *store.State {
	st := &store.State{
		Limit: 5, Used: 5, Reset: now + 60e6, ResetOtherwise: now + 60e6, RetryAfter: time.Minute, Now: now,
		Content: store.Content{5, now + 60e6},
	}
	algorithm.ShowHeld(st, r, held)
	return st
}

// asks makes a take that has to ask, and has the store refuse it.
func asks(t *testing.T, b *Bucket, r *store.Request, m *Moment, held int64) {
	t.Helper()
	var st store.State
	if do, _ := b.AskTake(r, &st, m); do != Take {
		t.Fatalf("at %d a request is refused without a call: %+v", m.Now, st)
	}
	mark := b.TakeSent(r, m)
	b.TakeAnswered(r, refusal(r, m.Now, held), m.Now, mark, m)
}

// isRefused requires that a take is refused without a call, for what is held or for good.
func isRefused(t *testing.T, b *Bucket, r *store.Request, m *Moment, isHeld bool) {
	t.Helper()
	var st store.State
	do, _ := b.AskTake(r, &st, m)
	if do != Nothing || st.InFlight != isHeld || (st.RetryAfter > time.Second) == isHeld {
		t.Errorf("at %d the request has to do %d: %+v", m.Now, do, st)
	}
}

// TestHeldIsAskedAbout every 50 ms by one request, and not once nothing is held.
func TestHeldIsAskedAbout(t *testing.T) {
	m := &Moment{Now: 1_000_000, Trust: 1_000_000}
	r := requestOf("alice", 5)
	r.Hold = store.HearsHeld
	b := New(0, m)
	asks(t, &b, &r, m, 2)
	for range 3 {
		m.Now += heldPause / 2
		isRefused(t, &b, &r, m, true)
		m.Now += heldPause/2 + 1
		asks(t, &b, &r, m, 2)
	}
	m.Now += heldPause + 1
	if do, _ := b.AskTake(&r, new(store.State), m); do != Take {
		t.Fatalf("the request has to do %d", do)
	}
	mark := b.TakeSent(&r, m)
	asked := m.Now
	m.Now += 3 * heldPause
	isRefused(t, &b, &r, m, true) // one is in flight
	b.TakeAnswered(&r, refusal(&r, m.Now, 0), asked, mark, m)
	for range 5 {
		m.Now += heldPause + 1
		isRefused(t, &b, &r, m, false)
	}
	m.Now = asked + m.Trust + 1
	asks(t, &b, &r, m, 0)
	unheard := r
	unheard.Hold = 0
	asks(t, &b, &r, &Moment{Now: m.Now + 2_000_000, Trust: m.Trust}, 3)
	m.Now += 2_000_000 + heldPause + 1
	isRefused(t, &b, &unheard, m, false)
}

// TestEndOfWhatIsHeldIsHeard: its reply says what is still held, and takes that find no room wait for it.
func TestEndOfWhatIsHeldIsHeard(t *testing.T) {
	m := &Moment{Now: 1_000_000, Trust: 1_000_000}
	r := requestOf("alice", 5)
	r.Hold = store.HearsHeld
	b := New(0, m)
	asks(t, &b, &r, m, 1)
	end := r
	end.Cost, end.Hold = 0, 7
	b.RefundSent(&end, m)
	sent := m.Now
	if b.Gauges().Owing != 1 || b.Worth(m) != InUse || b.isDisturbed() {
		t.Errorf("%+v, worth %d, disturbed %v", b.Gauges(), b.Worth(m), b.isDisturbed())
	}
	m.Now++
	if w := (Waiter{Request: &r}); !b.AwaitReturn(w, m) {
		t.Error("a take does not wait for it")
	}
	st := refusal(&end, m.Now, 0)
	st.Allowed, st.RetryAfter = true, 0
	b.RefundArrived(&end, st, sent, m)
	if b.Gauges().Owing != 0 || len(m.Turns) != 1 {
		t.Errorf("%+v, %d turns", b.Gauges(), len(m.Turns))
	}
	m.Now += heldPause / 2
	isRefused(t, &b, &r, m, false)
}

// TestUnheardIsTakenForHeld: an answer that does not say what is held fills the bucket.
func TestUnheardIsTakenForHeld(t *testing.T) {
	m := &Moment{Now: 1_000_000, Trust: 1_000_000}
	r := requestOf("alice", 5)
	b := New(0, m)
	asks(t, &b, &r, m, 0)
	b.asked = m.Now
	r.Hold = store.HearsHeld
	m.Now += heldPause / 2
	isRefused(t, &b, &r, m, true)
	m.Now += heldPause
	asks(t, &b, &r, m, 0)
	m.Now += heldPause / 2
	isRefused(t, &b, &r, m, false)
}

// TestBatchIsHeldUntilItIsGone: what is fetched is held until it is used up or given back; but what one request uses up,
// until that settles.
func TestBatchIsHeldUntilItIsGone(t *testing.T) {
	for name, c := range map[string]struct {
		cost          int64
		waiters, uses int
		left          int64
	}{
		"used up":                {1, 0, 2, 0},
		"used up at once":        {1, 2, 0, 0},
		"used up by one request": {3, 0, 0, 0},
		"given back":             {1, 0, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Moment{Now: 1_000_000, Trust: 1_000_000}
			r := requestOf("alice", 5)
			r.Cost, r.Batch, r.Hold = c.cost, 3, 7
			b, first := New(0, m), Waiter{Request: &r, State: new(store.State)}
			if do, size := b.Claim(first, m); do != Fetch || size != 3 {
				t.Fatalf("the first request has to do %d of %d", do, size)
			}
			fetch := r
			fetch.FetchBatch(3)
			isOwn := fetch.Hold == r.Hold
			mark := b.TakeSent(&fetch, m)
			use := func(want Do) {
				if do, _ := b.Claim(Waiter{Request: &r, State: new(store.State)}, m); do != want {
					t.Fatalf("another request has to do %d, want %d", do, want)
				}
			}
			for range c.waiters {
				use(Wait)
			}
			st := &store.State{
				Allowed: true, IsHeld: true, Held: 3, Limit: 5, Used: 3, Remaining: 2, Now: m.Now, Content: store.Content{3, m.Now + 60e6},
				Receipt: store.Receipt{Period: m.Now + 60e6},
			}
			b.TakeAnswered(&fetch, st, m.Now, mark, m)
			_, leftover := b.Fetched(first, &fetch, st, m)
			isSpent := c.waiters > 0
			if isOwn != (c.cost == 3) || isOwn != first.State.IsHeld || leftover.MayHold() != isSpent || isSpent && leftover.Hold != fetch.Hold || leftover.Cost != 0 {
				t.Errorf("%+v is left over, and the request is answered %+v", leftover, *first.State)
			}
			if isSpent || isOwn {
				if b.Gauges().Reserves || b.Worth(m) == InUse {
					t.Errorf("the store holds no batch: %+v, worth %d", b.Gauges(), b.Worth(m))
				}
				return
			}
			for range c.uses {
				use(Nothing)
			}
			if !b.Gauges().Reserves || b.Worth(m) != InUse {
				t.Errorf("the store holds the batch: %+v, worth %d", b.Gauges(), b.Worth(m))
			}
			m.Now += 2 * IdleBatch
			b.batch.coming = 3
			if got := b.Surplus(IdleBatch, m); got.Cost != 0 || got.MayHold() || !b.Gauges().Reserves {
				t.Errorf("while another batch is fetched, the surplus is %d under %d, and the bucket has %+v", got.Cost, got.Hold, b.Gauges())
			}
			b.batch.coming = 0
			for _, want := range []store.Request{{Cost: c.left, Hold: fetch.Hold}, {}} {
				if got := b.Surplus(IdleBatch, m); got.Cost != want.Cost || got.MayHold() != want.MayHold() || got.MayHold() && got.Hold != want.Hold {
					t.Errorf("the surplus is %d under %d, want %d under %d", got.Cost, got.Hold, want.Cost, want.Hold)
				}
			}
		})
	}
}

// TestWhatReturnsToABatchStaysHeld, under the number of the request that gives it back, until the batch is gone.
func TestWhatReturnsToABatchStaysHeld(t *testing.T) {
	m := &Moment{Now: 1_000_000, Trust: 1_000_000}
	r := requestOf("alice", 5)
	r.Batch, r.Hold = 1, 7
	b, first := New(0, m), Waiter{Request: &r, State: new(store.State)}
	b.Claim(first, m)
	st := &store.State{Allowed: true, IsHeld: true, Limit: 5, Used: 1, Now: m.Now, Content: store.Content{1, m.Now + 60e6}, Receipt: store.Receipt{Period: m.Now + 60e6}}
	b.TakeAnswered(&r, st, m.Now, b.TakeSent(&r, m), m)
	b.Fetched(first, &r, st, m)
	back := r
	back.Receipt = first.State.Receipt
	if !b.Restore(&back, m) || back.MayHold() || !b.Gauges().Reserves {
		t.Errorf("a refund is still to end %d, and the bucket has %+v", back.Hold, b.Gauges())
	}
	m.Now += 2 * IdleBatch
	if got := b.Surplus(IdleBatch, m); got.Cost != 1 || got.Hold != 7 {
		t.Errorf("the surplus is %d under %d", got.Cost, got.Hold)
	}
}

// TestBatchThatHasEndedTakesNoRefund: the cost of a sliding window counts in the next one too, so a refund that
// arrives then goes to the store.
func TestBatchThatHasEndedTakesNoRefund(t *testing.T) {
	r, m := requestOf("alice", 10), &Moment{Now: 60e6 + 1, Trust: 1_000_000}
	limit := *r.Limit
	limit.Algorithm, limit.Window = store.SlidingWindow, time.Minute
	r.Limit, r.Batch = &limit, 4
	b, w := New(0, m), Waiter{Request: &r, State: new(store.State)}
	b.Claim(w, m)
	st := &store.State{Allowed: true, Limit: 10, Used: 4, Now: m.Now, Content: store.Content{60e6, 4}, Receipt: store.Receipt{Period: 60e6}}
	b.TakeAnswered(&r, st, m.Now, b.TakeSent(&r, m), m)
	b.Fetched(w, &r, st, m)
	back := r
	back.Receipt = w.State.Receipt
	if m.Now = 120e6 - 1; !b.Restore(&back, m) {
		t.Fatal("the batch does not take back what it served in its window")
	}
	b.Claim(w, m)
	if m.Now = 120e6; b.Restore(&back, m) {
		t.Error("a batch whose window is over takes a refund that the store counts")
	}
}

// TestHeldInTheWay: the primary is asked about what is held, and refusals are for it, only where that alone is in the way.
func TestHeldInTheWay(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *Bucket, r *store.Request, m *Moment)
		want   bool
	}{
		"it is":                         {func(*Bucket, *store.Request, *Moment) {}, true},
		"a penalty is":                  {func(b *Bucket, r *store.Request, m *Moment) { r.Until = m.Now + 10e6; b.Penalize(r, m) }, false},
		"the request never fits":        {func(_ *Bucket, r *store.Request, _ *Moment) { r.Cost = 6 }, false},
		"it needs more than what it is": {func(_ *Bucket, r *store.Request, _ *Moment) { r.Cost = 3 }, false},
		"it does not hear of that":      {func(_ *Bucket, r *store.Request, _ *Moment) { r.Hold = 0 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Moment{Now: 1_000_000, Trust: 1_000_000}
			r := requestOf("alice", 5)
			r.Hold = store.HearsHeld
			b := New(0, m)
			asks(t, &b, &r, m, 2)
			m.Now += heldPause + 1
			end := r
			end.Cost, end.Hold = 0, 7
			b.RefundSent(&end, m)
			c.change(&b, &r, m)
			if got := b.AwaitsEnd(&r, m); got != c.want {
				t.Errorf("a take waits for ends: %v, want %v", got, c.want)
			}
			if got := b.AwaitReturn(Waiter{Request: &r}, m); got != c.want {
				t.Errorf("a take that is not refused unasked waits for ends: %v, want %v", got, c.want)
			}
			if got := !b.Refuse(&r, new(store.State), m); got != c.want {
				t.Errorf("a check asks: %v, want %v", got, c.want)
			}
			var st store.State
			if do, got := b.AskTake(&r, &st, m); got != c.want || st.InFlight {
				t.Errorf("a take asks: %v, want %v, and has to do %d: %+v", got, c.want, do, st)
			}
		})
	}
}

// TestNothingHeldIsKnown although much is left, as far as the answer goes of which something is known, in no more memory.
func TestNothingHeldIsKnown(t *testing.T) {
	m := &Moment{Now: 1_000_000, Trust: 1_000_000}
	r := requestOf("alice", 100)
	r.Hold, r.Cost = store.HearsHeld, 60
	b := New(0, m)
	answers := func(allowed bool, used, held int64) {
		t.Helper()
		mark := b.TakeSent(&r, m)
		st := &store.State{
			Allowed: allowed, Limit: 100, Used: used, Remaining: 100 - used, Now: m.Now, Reset: m.Now + 60e6, ResetOtherwise: m.Now + 60e6,
			Content: store.Content{used, m.Now + 60e6},
		}
		if !allowed {
			st.RetryAfter = time.Minute
		}
		algorithm.ShowHeld(st, &r, held)
		b.TakeAnswered(&r, st, m.Now, mark, m)
	}
	answers(true, 60, 0)
	m.Now++
	if do, _ := b.AskTake(&r, new(store.State), m); do != Take {
		t.Errorf("nobody has said what is held, and a refusal has to do %d", do)
	}
	answers(false, 60, 0)
	m.Now++
	isRefused(t, &b, &r, m, false)
	if b.extra != nil {
		t.Errorf("it is known in %+v", *b.extra)
	}
	m.Now += m.Trust + 1
	answers(false, 60, 30)
	m.Now++
	isRefused(t, &b, &r, m, true)
	end := r
	end.Cost, end.Hold = 0, 7
	b.RefundSent(&end, m)
	b.RefundArrived(&end, &store.State{Limit: 100, Used: 60, Remaining: 40, Now: m.Now}, m.Now, m)
	isRefused(t, &b, &r, m, false)
	if b.extra != nil {
		t.Errorf("what is held no more is known in %+v", *b.extra)
	}
}

// TestHeldByAClockThatIsSetBack: later answers count, and of answers at the same time the one that was given last.
func TestHeldByAClockThatIsSetBack(t *testing.T) {
	m := &Moment{Now: 10_000_000, Trust: 1_000_000}
	r := requestOf("alice", 5)
	r.Hold = store.HearsHeld
	b := New(0, m)
	asks(t, &b, &r, m, 2)
	b.hearHeld(&r, refusal(&r, m.Now-10, 3), m.Now-1)
	if held := b.heldFrom(&r); held != 2 {
		t.Errorf("after an answer that was given earlier %d are held", held)
	}
	b.hearHeld(&r, refusal(&r, m.Now-5_000_000, 4), m.Now-1)
	if held := b.heldFrom(&r); held != 2 {
		t.Errorf("after one that was given and asked for earlier %d are held", held)
	}
	b.hearHeld(&r, refusal(&r, m.Now-5_000_000, 1), m.Now+1)
	if held := b.heldFrom(&r); held != 1 {
		t.Errorf("after one by a clock that was set back %d are held", held)
	}
	b.hearHeld(&r, refusal(&r, m.Now-4_900_000, 0), m.Now+2)
	if held := b.heldFrom(&r); held != 0 {
		t.Errorf("after one that says that nothing is, %d are held", held)
	}
}

// TestTakesThatLeaveMuchAreNotHeld, as far as recent answers say, and are repeated if they are refused.
func TestTakesThatLeaveMuchAreNotHeld(t *testing.T) {
	for _, c := range []struct {
		used, after int64
		want        uint32
	}{{48, 0, 0}, {50, 0, 7}, {48, 1_000_001, 7}} {
		m := &Moment{Now: 1_000_000, Trust: 1_000_000}
		r := requestOf("alice", 100)
		b := New(0, m)
		b.hear(&r, &store.State{Now: m.Now, Content: store.Content{c.used, m.Now + 60e6}}, m.Now, m)
		m.Now += c.after
		r.Hold = 7
		if b.TakeSent(&r, m); r.Hold != c.want {
			t.Errorf("%d of 100 are known to be used since %d microseconds, and the take is held under %d", c.used, c.after, r.Hold)
		}
	}
}
