package core

import (
	"context"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestSoleWriterHearsOfOthers: once an answer counts another process's charges, this one admits nothing without
// a check, or both would exceed the limit.
func TestSoleWriterHearsOfOthers(t *testing.T) {
	const second = 1_000_000
	for _, outcome := range []error{nil, store.ErrUncertain} {
		m, r := &Moment{Now: 1000 * second, Trust: second}, requestOf("alice", 100)
		primary, b := algorithm.New(r.Limit), New(0, m)
		spend := func(cost int64) *store.State {
			other := r
			other.Cost = cost
			return new(algorithm.Charge.Run(primary, &other, m.Now))
		}
		settle := func(hold int64) {
			b.Settle([]*store.Request{new(r)}, hold, m)
			b.Delivered(&r, spend(1), m)
		}
		asks := func() bool {
			var st store.State
			do := b.Ask(Waiter{Request: new(r), State: &st}, new(Check), m)
			return do != Nothing
		}
		settle(0)
		m.Now += second
		settle(0)
		if asks() {
			t.Fatal("the only writer asks")
		}
		b.Settle([]*store.Request{new(r)}, 1, m)
		if outcome == nil {
			b.Delivered(&r, spend(1), m)
		}
		m.Now++
		b.hear(&r, spend(30), m.Now, m)
		if outcome != nil {
			b.Delivered(&r, &store.State{Err: outcome}, m)
			m.Now++
			look := r
			look.Cost = 0
			b.hear(&r, new(algorithm.Check.Run(primary, &look, m.Now)), m.Now, m)
		}
		if !asks() {
			t.Errorf("with the outcome %v a request is admitted without a check, beside another process", outcome)
		}
	}
}

// bucketWithTokens returns a bucket with tokens of an aligned window, of a batch of three.
func bucketWithTokens(t *testing.T, m *Moment) (b Bucket, r store.Request, answer store.State) {
	t.Helper()
	r = requestOf("alice", 9)
	r.Limit.Align, r.Batch = true, 3
	b = New(0, m)
	first := Waiter{Request: &r, State: new(store.State)}
	if do, size := b.Claim(first, m); do != Fetch || size != 3 {
		t.Fatalf("the first request has to do %d of %d", do, size)
	}
	end := m.Now + r.Limit.Window.Microseconds()
	fetch := r
	fetch.Cost = 3
	answer = store.State{Allowed: true, Limit: 9, Used: 3, Now: m.Now, Content: store.Content{3, end}, Receipt: store.Receipt{Period: end}}
	b.hear(&fetch, &answer, m.Now, m)
	b.Fetched(first, &fetch, &answer, m)
	return b, r, answer
}

// TestTokensOfASilentStore serve requests that would otherwise wait for it in vain.
func TestTokensOfASilentStore(t *testing.T) {
	m := &Moment{Now: 1_000_000_000, Trust: 1_000_000}
	b, r, _ := bucketWithTokens(t, m)
	b.TakeAnswered(&store.Request{Limit: r.Limit}, &store.State{Err: store.ErrNotExecuted}, m.Now, 0, m)
	m.Now += 2 * m.Trust
	var st store.State
	if do, _ := b.Claim(Waiter{Request: &r, State: &st}, m); do != Nothing || !st.Allowed {
		t.Errorf("a request that tokens cover has to do %d", do)
	}
}

// TestTokensOfBeforeAReset that a request has borrowed are gone with the bucket: given back to the next one, whose
// window has the same name, they would be too many.
func TestTokensOfBeforeAReset(t *testing.T) {
	for _, fetches := range []bool{false, true} {
		m := &Moment{Now: 1_000_000_000, Trust: 1_000_000}
		b, r, answer := bucketWithTokens(t, m)
		large := r
		large.Cost = 4
		loan := b.Borrow(&large, m)
		b.ResetSent(m)
		b.ResetDone(m)
		want := int64(0)
		if fetches {
			want = 2
			next, fetch := Waiter{Request: &r, State: new(store.State)}, r
			b.Claim(next, m)
			fetch.Cost = 3
			b.Fetched(next, &fetch, &answer, m)
		}
		refund := b.Repay(&large, loan, new(store.State), m)
		if refund.Cost != 0 || b.batch.tokens != want {
			t.Errorf("after another batch %t: %d are refunded, and %d tokens left, want %d", fetches, refund.Cost, b.batch.tokens, want)
		}
	}
}

// TestResetForgetsUncertainCharges: an uncertain charge of before a reset refuses nobody after it.
func TestResetForgetsUncertainCharges(t *testing.T) {
	const now = 1_000_000_000
	m, r := &Moment{Now: now, Trust: 1_000_000}, requestOf("alice", 2)
	b := New(0, m)
	b.Settle([]*store.Request{new(r)}, 0, m)
	b.Delivered(&r, &store.State{Err: store.ErrUncertain}, m)
	b.Settle([]*store.Request{new(r)}, 0, m)
	b.ResetSent(m)
	b.ResetDone(m)
	m.Now++
	var check Check
	var st store.State
	b.Ask(Waiter{Request: &r, State: &st}, &check, m)
	if do := b.Answered(Waiter{Request: &r, State: &st}, store.State{Allowed: true, Limit: 2, Now: now}, &check, m); do != Nothing || !st.Allowed {
		t.Errorf("a request beside the one charge in flight has to do %d, and is allowed: %t", do, st.Allowed)
	}
}

// TestRefusedTakesDoNotCount among the requests that this process has admitted alone: the client passes again as its
// cost drains.
func TestRefusedTakesDoNotCount(t *testing.T) {
	const millisecond = 1_000
	m, r := &Moment{Now: 1, Trust: 1_000_000}, requestOf("alice", 10)
	r.Limit = &store.Limit{Zone: "zone", Algorithm: store.GCRA, Window: time.Second}
	primary, b := algorithm.New(r.Limit), New(1_000_000, m)
	for range 10 {
		if st := b.AskAlone(&r, m); !st.Allowed {
			t.Fatalf("alone: %+v", st)
		}
		b.SettleUnknown(&r, 1, m)
	}
	passed := 0
	for range 50 {
		m.Now += 10 * millisecond
		mark := b.TakeSent(&r, m)
		st := algorithm.Take.Run(primary, &r, m.Now+1_000_000)
		_, refund := b.TakeAnswered(&r, &st, m.Now, mark, m)
		if st.Allowed {
			passed++
		}
		if refund.Cost > 0 {
			algorithm.Refund.Run(primary, &refund, m.Now+1_000_000)
		}
	}
	if passed != 5 {
		t.Errorf("%d pass in half a window, want 5 of 10", passed)
	}
}

// TestPrimaryThatIsAway is not waited for by each request of a client that is refused: it is asked once for each time
// of trust.
func TestPrimaryThatIsAway(t *testing.T) {
	const now = 1_000_000_000
	m, r := &Moment{Now: now, Trust: 1_000_000}, requestOf("alice", 5)
	b := New(0, m)
	answer := store.State{Replica: true, Limit: 5, Used: 5, Now: now, RetryAfter: time.Minute, Content: store.Content{5, now + 30_000_000}}
	for n, want := range []Do{CheckReplica, CheckPrimary, CheckReplica, CheckReplica, CheckPrimary} {
		var check Check
		w := Waiter{Request: &r, State: new(store.State)}
		if do := b.Ask(w, &check, m); do != want {
			t.Errorf("request %d has to do %d, want %d", n, do, want)
		}
		b.Answered(w, answer, &check, m)
		if m.Now++; n == 3 {
			m.Now += m.Trust
		}
	}
}

// TestClientThatLeavesDuringACheck decides nothing about the requests behind it, which ask themselves.
func TestClientThatLeavesDuringACheck(t *testing.T) {
	m, r := &Moment{Now: 1}, requestOf("alice", 5)
	b := New(0, m)
	var check Check
	first, second := Waiter{Request: &r, State: new(store.State)}, Waiter{Request: new(r), State: new(store.State), Place: 1}
	b.Ask(first, &check, m)
	if do := b.Ask(second, new(Check), m); do != Wait {
		t.Fatalf("the second request has to do %d", do)
	}
	b.Answered(first, store.State{Err: context.Canceled}, &check, m)
	if len(m.Turns) != 1 || m.Turns[0].Do != CheckReplica || second.State.Err != nil {
		t.Errorf("the turns are %+v, and the second request got %v", m.Turns, second.State.Err)
	}
}

// TestOldRefusalIsNotRepeated while one request asks: others may have emptied the bucket long ago.
func TestOldRefusalIsNotRepeated(t *testing.T) {
	const now = 1_000_000_000
	m, r := &Moment{Now: now, Trust: 1_000_000}, requestOf("alice", 5)
	b := New(0, m)
	b.hear(&r, &store.State{Limit: 5, Used: 5, Now: now, Content: store.Content{5, now + 30_000_000}}, now, m)
	if do, _ := b.AskTake(&r, new(store.State), m); do != Nothing {
		t.Errorf("a full bucket has to do %d", do)
	}
	m.Now += 10 * m.Trust
	for n, want := range []bool{true, false} {
		if do, asks := b.AskTake(&r, new(store.State), m); do != Take || asks != want {
			t.Errorf("request %d later has to do %d, and asks: %t", n, do, asks)
		}
	}
}

// TestNothingIsAwaitedFromASilentStore: a take that it will not answer waits for no refund before.
func TestNothingIsAwaitedFromASilentStore(t *testing.T) {
	m, r := &Moment{Now: 1, Trust: 1_000_000}, requestOf("alice", 1)
	b := New(0, m)
	b.RefundSent(&r, m)
	w := Waiter{Request: &r, State: new(store.State)}
	if !b.AwaitReturn(w, m) {
		t.Error("a take does not wait for a refund")
	}
	b.TakeAnswered(&store.Request{Limit: r.Limit}, &store.State{Err: store.ErrNotExecuted}, m.Now, 0, m)
	if b.AwaitReturn(w, m) {
		t.Error("a take waits for a store that does not answer")
	}
}

// TestOneRequestReliesAtATime: beyond the time of trust one request relies on an old answer, and no other one until the
// store has counted it, whatever earlier answers say.
func TestOneRequestReliesAtATime(t *testing.T) {
	const second = 1_000_000
	for _, settles := range []bool{false, true} {
		m, r := &Moment{Now: 1000 * second, Trust: second}, requestOf("alice", 100)
		primary, b := algorithm.New(r.Limit), New(0, m)
		for range 2 {
			b.Settle([]*store.Request{new(r)}, 0, m)
			b.Delivered(&r, new(algorithm.Charge.Run(primary, &r, m.Now)), m)
			m.Now += 2 * second
		}
		m.Now -= second / 2
		asks := func() bool { return b.Ask(Waiter{Request: new(r), State: new(store.State)}, new(Check), m) != Nothing }
		if asks() {
			t.Fatal("no request relies on an old answer")
		}
		look := r
		look.Cost = 0
		b.hear(&look, new(algorithm.Check.Run(primary, &look, m.Now)), m.Now-1, m)
		if settles {
			b.Settle([]*store.Request{new(r)}, 1, m)
		}
		m.Now += second + 1
		if !asks() {
			t.Errorf("charge sent %t: a second request relies on an old answer", settles)
		}
	}
}

// TestRepeatedCheckForgetsLandedCharges: they went with the reset for which the check is repeated.
func TestRepeatedCheckForgetsLandedCharges(t *testing.T) {
	const now = 1_000_000_000
	m, r := &Moment{Now: now, Trust: 1_000_000}, requestOf("alice", 5)
	r.Limit = &store.Limit{Zone: "zone", Algorithm: store.SlidingLog, Window: time.Minute}
	b := New(0, m)
	var check Check
	w := Waiter{Request: &r, State: new(store.State)}
	b.Ask(w, &check, m)
	for n := range int64(5) {
		b.Settle([]*store.Request{new(r)}, 0, m)
		b.Delivered(&r, &store.State{Allowed: true, Limit: 5, Used: n + 1, Now: now}, m)
	}
	b.ResetSent(m)
	b.ResetDone(m)
	b.Settle([]*store.Request{new(r)}, 0, m)
	if do := b.Answered(w, store.State{Limit: 5, Used: 5, Now: now}, &check, m); do != CheckPrimary {
		t.Fatalf("a check of before a reset has to do %d", do)
	}
	m.Now++
	if do := b.Answered(w, store.State{Allowed: true, Limit: 5, Now: now}, &check, m); do != Nothing || !w.State.Allowed {
		t.Errorf("a request beside the one charge in flight has to do %d, and is allowed: %t", do, w.State.Allowed)
	}
}
