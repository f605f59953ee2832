package core

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func requestOf(clientKey string, events int64) store.Request {
	return store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Minute}, ClientKey: clientKey, Events: events, Cost: 1}
}

// TestNewerAnswersStay: the reply to a charge does not replace an answer that
// arrived while the charge was in flight, and may be newer.
func TestNewerAnswersStay(t *testing.T) {
	const now = 1_000_000
	word := func(used int64) *store.State {
		return &store.State{Now: now, Content: store.Content{used, 2 * now}}
	}
	r := requestOf("alice", 100)
	b := New(0, &Moment{Now: 1})
	b.hear(&r, word(3), 1, &Moment{Now: 1})
	b.Settle([]*store.Request{new(r)}, 0, &Moment{Now: 2})
	b.hear(&r, word(7), 3, &Moment{Now: 3})
	b.Delivered(&r, word(5), &Moment{Now: 3})
	if used := b.known.Content[0]; used != 7 {
		t.Errorf("known is a count of %d, want the primary's 7", used)
	}
	// The reply to a charge sent later does.
	b.Settle([]*store.Request{new(r)}, 0, &Moment{Now: 4})
	b.Delivered(&r, word(6), &Moment{Now: 5})
	if used := b.known.Content[0]; used != 6 {
		t.Errorf("known is a count of %d, want the 6 of the last reply", used)
	}
}

// TestAnswerOfTheSameInstant: a clock may stand still between the reply to a charge and an
// answer asked for before it, which lacks the charge.
func TestAnswerOfTheSameInstant(t *testing.T) {
	const now = 1_000_000
	word := func(used int64) *store.State {
		return &store.State{Now: now, Content: store.Content{used, 2 * now}}
	}
	r, m := requestOf("alice", 100), &Moment{Now: 1}
	b := New(0, m)
	b.Settle([]*store.Request{new(r)}, 0, m)
	b.Delivered(&r, word(5), m)
	b.hear(&r, word(4), 1, m)
	if used := b.known.Content[0]; used != 5 {
		t.Errorf("known is a count of %d, want the 5 of the charge's reply", used)
	}
	// What is asked for later replaces it.
	b.hear(&r, word(4), 2, &Moment{Now: 2})
	if used := b.known.Content[0]; used != 4 {
		t.Errorf("known is a count of %d, want the 4 of the last answer", used)
	}
}

// TestPenaltyOnItsWay: an answer asked for before the penalty arrives lacks it. What the primary
// says later counts: somebody may have ended it.
func TestPenaltyOnItsWay(t *testing.T) {
	const now = 1_000_000
	r := requestOf("alice", 100)
	r.Until = 2 * now
	b := New(0, &Moment{Now: now})
	b.Penalize(&r, &Moment{Now: now})
	for _, c := range []struct {
		asked int64
		want  bool
	}{{now - 1, true}, {now + landing, true}, {now + landing + 1, false}} {
		b.hear(&r, &store.State{Now: now, Content: store.Content{1, 2 * now}}, c.asked, &Moment{Now: now})
		if st := b.known.View(&r, 0, now); (st.Penalty != 0) != c.want {
			t.Errorf("an answer of %d leaves the penalty %d, want one: %t", c.asked, st.Penalty, c.want)
		}
	}
}

// TestLookShowsWhatIsOnItsWay: an answer to a take that costs nothing may lack what this process
// has charged, whether the store has confirmed that meanwhile or not.
func TestLookShowsWhatIsOnItsWay(t *testing.T) {
	const now = 1_000_000
	for name, c := range map[string]struct {
		isConfirmed    bool
		answer, others int64
		want           int64
	}{
		"on its way":                {want: 60},
		"on its way, and counted":   {answer: 60, want: 60},
		"beside others":             {answer: 75, others: 75, want: 135},
		"confirmed meanwhile":       {isConfirmed: true, want: 60},
		"confirmed, and counted":    {isConfirmed: true, answer: 60, want: 60},
		"confirmed, others charged": {isConfirmed: true, answer: 80, want: 80},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Moment{Now: now}
			word := func(used int64) *store.State {
				return &store.State{Allowed: true, Limit: 100, Used: used, Remaining: max(100-used, 0), Now: now, Content: store.Content{used, 2 * now}}
			}
			look := requestOf("alice", 100)
			charge := look
			look.Cost, charge.Cost = 0, 60
			b := New(0, m)
			b.hear(&look, word(c.others), now-1, m)
			b.Settle([]*store.Request{new(charge)}, 0, m)
			mark := b.TakeSent(&look, m)
			asked := m.Now
			if c.isConfirmed {
				m.Now++
				b.Delivered(&charge, word(60), m)
			}
			st := word(c.answer)
			b.TakeAnswered(&look, st, asked, mark, m)
			if st.Used != c.want || st.Remaining != max(100-c.want, 0) || !st.Allowed {
				t.Errorf("the look shows %d used, %d remaining, allowed %t, want %d used", st.Used, st.Remaining, st.Allowed, c.want)
			}
		})
	}
}

// TestTakesBesideACharge: of takes whose answers a charge may have overtaken as many are refused as exceed
// the limit, and none before the charge is answered.
func TestTakesBesideACharge(t *testing.T) {
	const now = 1_000_000
	word := func(used int64) *store.State {
		return &store.State{Allowed: true, Limit: 100, Used: used, Remaining: max(100-used, 0), Now: now, Content: store.Content{used, 2 * now}}
	}
	take := requestOf("alice", 100)
	for name, c := range map[string]struct {
		// before is what is used; the store counts the charge before the take at a place.
		before      int64
		chargeFirst int
		// waits is set if the charge is answered after the takes.
		waits       bool
		wantRefused int
	}{
		"the charge came last":                       {before: 95, chargeFirst: 5, wantRefused: 1},
		"the charge came last, and is answered last": {before: 95, chargeFirst: 5, waits: true, wantRefused: 1},
		"the charge came first":                      {before: 94, chargeFirst: 0},
		"first, and is answered last":                {before: 94, chargeFirst: 0, waits: true},
		"there is room":                              {before: 90, chargeFirst: 5},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Moment{Now: now}
			b := New(0, m)
			b.hear(&take, word(c.before), now-1, m)
			b.Settle([]*store.Request{new(take)}, 0, m)
			var marks []int64
			var answers []*store.State
			used, charged := c.before, (*store.State)(nil)
			count := func(place int) {
				if place == c.chargeFirst {
					used++
					charged = word(used)
				}
			}
			for i := range 5 {
				marks = append(marks, b.TakeSent(&take, m))
				count(i)
				used++
				answers = append(answers, word(used))
			}
			count(5)
			if !c.waits {
				b.Delivered(&take, charged, m)
			}
			var waiting []int
			refused := 0
			judge := func(i int, do Do) {
				switch {
				case do == AwaitCharge:
					waiting = append(waiting, i)
				case !answers[i].Allowed:
					refused++
				}
			}
			for i, st := range answers {
				do, _ := b.TakeAnswered(&take, st, now, marks[i], m)
				judge(i, do)
			}
			if len(waiting) > 0 != c.waits {
				t.Errorf("%d takes wait for a charge that is answered: %t", len(waiting), !c.waits)
			}
			if c.waits {
				b.Delivered(&take, charged, m)
			}
			for _, i := range waiting {
				do, _ := b.JudgeTake(&take, answers[i], marks[i], true, m)
				judge(i, do)
			}
			if refused != c.wantRefused || b.taking != 0 {
				t.Errorf("%d are refused, want %d; %d are in flight", refused, c.wantRefused, b.taking)
			}
		})
	}
}

// TestChecksBesideTakes: later answers count takes whose own answers are on their way, which the answer to a check may
// lack. They need not count the charge in flight.
func TestChecksBesideTakes(t *testing.T) {
	const now = 1_000_000
	word := func(limit, used int64) *store.State {
		return &store.State{Allowed: true, Limit: limit, Used: used, Remaining: max(limit-used, 0), Now: now, Content: store.Content{used, 2 * now}}
	}
	for name, c := range map[string]struct {
		charges bool
		want    map[int64]Do
	}{
		"the answer to a check lacks takes":              {want: map[int64]Do{9: AwaitCharge, 10: Nothing}},
		"the answer to a check lacks takes and a charge": {charges: true, want: map[int64]Do{10: AwaitCharge, 11: Nothing}},
	} {
		for limit, want := range c.want {
			m, r := &Moment{Now: now}, requestOf("alice", limit)
			r.Limit.Algorithm = store.SlidingLog
			b := New(0, m)
			if c.charges {
				b.Settle([]*store.Request{new(r)}, 0, m)
			}
			var check Check
			var st store.State
			if do := b.Ask(Waiter{Request: &r, State: &st}, &check, m); do != CheckReplica && do != CheckPrimary {
				t.Fatalf("%s: a request that asks has to do %d, want a check", name, do)
			}
			// The store counts the take that comes first as the eighth, and the charge as the tenth.
			b.TakeSent(&r, m)
			mark := b.TakeSent(&r, m)
			b.TakeAnswered(&r, word(limit, 9), now, mark, m)
			if c.charges {
				b.Delivered(&r, word(limit, 10), m)
			}
			if do := b.Answered(Waiter{Request: &r, State: &st}, *word(limit, 7), &check, m); do != want || st.Allowed != (want == Nothing) {
				t.Errorf("%s: with a limit of %d there is %d to do, and it is allowed: %t; want %d", name, limit, do, st.Allowed, want)
			}
		}
	}
	for limit, want := range map[int64][2]judgement{6: {full, full}, 7: {unclear, full}, 8: {fits, fits}} {
		for _, chargeFirst := range []bool{false, true} {
			m, r := &Moment{Now: now}, requestOf("alice", limit)
			b := New(0, m)
			b.hear(&r, word(limit, 4), now-1, m)
			var first, second int64
			if chargeFirst {
				b.Settle([]*store.Request{new(r)}, 0, m)
			}
			first, second = b.TakeSent(&r, m), b.TakeSent(&r, m)
			b.TakeAnswered(&r, word(limit, 6), now, second, m)
			want := want
			if !chargeFirst {
				// What is known has both takes when the charge is sent.
				m.Now++
				b.Settle([]*store.Request{new(r)}, 0, m)
				want[0] = want[1]
			}
			if j := b.judge(&r, new(store.State), now, m); j != want[0] {
				t.Errorf("charge first %t: with a limit of %d a request is judged %d while a take is in flight, want %d", chargeFirst, limit, j, want[0])
			}
			look, st := r, word(limit, 6)
			look.Cost = 0
			if do := b.showUnheard(&look, st, true); do != Nothing || st.Used < 6 || st.Used > 7 {
				t.Errorf("charge first %t: a look shows a count of %d, and has to do %d; want 6 or 7 at once", chargeFirst, st.Used, do)
			}
			b.TakeAnswered(&r, word(limit, 5), now, first, m)
			if j := b.judge(&r, new(store.State), now, m); j != want[1] {
				t.Errorf("charge first %t: with a limit of %d a request is judged %d after all takes, want %d", chargeFirst, limit, j, want[1])
			}
		}
	}
}

// TestUnclearChargeBesideTakes: a charge of unknown outcome counts beside takes whose answers are on their way.
func TestUnclearChargeBesideTakes(t *testing.T) {
	const now = 1_000_000
	word := func(used int64) *store.State {
		return &store.State{Allowed: true, Limit: 7, Used: used, Remaining: 7 - used, Now: now, Content: store.Content{used, 2 * now}}
	}
	m, r := &Moment{Now: now}, requestOf("alice", 7)
	b := New(0, m)
	b.hear(&r, word(4), now-1, m)
	b.Settle([]*store.Request{&r}, 0, m)
	b.TakeSent(&r, m)
	mark := b.TakeSent(&r, m)
	// The store counts the take that comes first as the fifth, and the charge last.
	b.TakeAnswered(&r, word(6), now, mark, m)
	b.Delivered(&r, &store.State{Err: store.ErrUncertain, Now: now}, m)
	if st := b.known.View(&r, 0, now); st.Used != 7 {
		t.Errorf("%d count, want 7", st.Used)
	}
}

// TestTakesDrainBesideACharge: what takes have spent drains while a charge is in flight.
func TestTakesDrainBesideACharge(t *testing.T) {
	const millisecond = 1_000
	m, r := &Moment{Now: 1}, requestOf("alice", 100)
	r.Limit = &store.Limit{Zone: "zone", Algorithm: store.GCRA, Window: time.Second}
	r.Burst = 4
	primary, at := algorithm.New(r.Limit), int64(1_000_000)
	b := New(at, m)
	b.hear(&r, new(algorithm.Take.Run(primary, new(requestOf("alice", 0)), at)), 0, m)
	b.Settle([]*store.Request{&r}, 0, m)
	for range 4 {
		m.Now += 10 * millisecond
		mark := b.TakeSent(&r, m)
		st := algorithm.Take.Run(primary, &r, at+m.Now)
		if b.TakeAnswered(&r, &st, m.Now, mark, m); !st.Allowed {
			t.Fatalf("a take is refused: %+v", st)
		}
	}
	m.Now += 5 * millisecond
	if j := b.judge(&r, new(store.State), at+m.Now, m); j != fits {
		t.Errorf("a request is judged %d, want that it fits", j)
	}
}

// TestTakeOfBeforeAReset: its answer says nothing of the bucket that a later check is about.
func TestTakeOfBeforeAReset(t *testing.T) {
	const now = 1_000_000
	m, r := &Moment{Now: now, Trust: now}, requestOf("alice", 10)
	r.Limit.Algorithm = store.SlidingLog
	b := New(0, m)
	mark := b.TakeSent(&r, m)
	b.ResetSent(m)
	b.ResetDone(m)
	m.Now++
	var check Check
	var st store.State
	if do := b.Ask(Waiter{Request: &r, State: &st}, &check, m); do != CheckPrimary {
		t.Fatalf("a request that asks has to do %d, want a check", do)
	}
	b.TakeAnswered(&r, &store.State{Allowed: true, Limit: 10, Used: 9, Now: now}, now-1, mark, m)
	b.Answered(Waiter{Request: &r, State: &st}, store.State{Allowed: true, Limit: 10, Now: now}, &check, m)
	if used := b.known.Content[confirmedUsed]; !st.Allowed || used != 0 {
		t.Errorf("allowed: %t, known is a count of %d, want 0", st.Allowed, used)
	}
}

// TestPendingChargesAddToOthers: pending charges count on top of the cost that other
// processes have spent.
func TestPendingChargesAddToOthers(t *testing.T) {
	r := requestOf("alice", 100)
	b := Bucket{known: algorithm.Known{Content: store.Content{9, 100}}}
	b.pending = &pending{base: algorithm.Known{Content: store.Content{3, 100}}, cost: 2, waiting: &mergedCharge{req: store.Request{Limit: r.Limit, Cost: 4}}}
	v := b.viewOf(&r, nil, 50)
	if st := v.ahead(0); st.Used != 9+4 {
		t.Errorf("used is %d, want the 9 of the last reply and 4 pending", st.Used)
	}
}

// TestRation covers sizes at their bounds.
func TestRation(t *testing.T) {
	for _, c := range []struct{ events, batch, size, processes, want int64 }{
		{events: 1000, batch: 10, want: 10},
		{events: 5, batch: 10, want: 5},
		{events: 1000, batch: store.BatchAuto, processes: 0, want: 0},
		{events: 1000, batch: store.BatchAuto, processes: 1, want: 1},
		{events: 999, batch: store.BatchAuto, processes: 1, want: 1},
		{events: 1_000_000, batch: store.BatchAuto, processes: 1, want: 1000},
		{events: 1_000_000, batch: store.BatchAuto, size: 90_000_000, processes: 1, want: 100_000},
		{events: 1_000_000, batch: store.BatchAuto, size: 90_000_000, processes: 16, want: 6_250},
		{events: 50, batch: store.BatchAuto, size: 100, processes: 2, want: 2},
		{events: 50, batch: store.BatchAuto, size: 100, processes: 200, want: 1},
	} {
		r := store.Request{Limit: &store.Limit{}, Events: c.events, Batch: c.batch}
		if got := batchSize(&r, c.size, c.processes); got != c.want {
			t.Errorf("%s: %d", fmt.Sprintf("%+v", c), got)
		}
	}
}

// TestTokensTooMuchIsKnownOf: the bucket counts what a refund is giving back, and the store does not.
// Tokens that the store has given serve a request of the highest limit; where others have a higher one, or
// there is a penalty, the store decides.
func TestTokensTooMuchIsKnownOf(t *testing.T) {
	const now = 1_000_000
	for name, c := range map[string]struct {
		other   int64 // the events of another request
		penalty int64
		want    Do
	}{
		"one limit":      {5, 0, Nothing},
		"a higher limit": {6, 0, Take},
		"a lower limit":  {4, 0, Nothing},
		"a penalty":      {5, 3 * now, Take},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Moment{Now: 1, Trust: now}
			r := requestOf("alice", 5)
			r.Batch = 1
			answer := store.State{Allowed: true, Now: now, Used: 5, Content: store.Content{5, 2 * now}, Receipt: store.Receipt{Period: 2 * now}}
			b := New(0, m)
			b.hear(&r, &answer, 1, m)
			b.RefundSent(&store.Request{Cost: 1}, m)
			first, other := Waiter{Request: &r, State: new(store.State)}, r
			if do, size := b.Claim(first, m); do != Fetch || size != 1 {
				t.Fatalf("the first request has to do %d of %d", do, size)
			}
			other.Events = c.other
			b.Claim(Waiter{Request: &other, State: new(store.State), Call: nil}, m)
			b.known.Content[0], b.known.Content[2] = 6, c.penalty
			answer.Content = b.known.Content
			if do, _ := b.Fetched(first, &r, &answer, m); do != c.want {
				t.Errorf("the request has to do %d, want %d", do, c.want)
			}
			if served := first.State.Allowed; served != (c.want == Nothing) {
				t.Errorf("it was served: %t", served)
			}
		})
	}
}

func TestRetryPause(t *testing.T) {
	for i, c := range []struct {
		last     time.Duration
		executes bool
		want     time.Duration
	}{
		{0, false, 50 * time.Millisecond},
		{50 * time.Millisecond, false, 100 * time.Millisecond},
		{800 * time.Millisecond, false, time.Second},
		{time.Second, false, time.Second},
		{time.Second, true, 0},
	} {
		if got := RetryPause(c.last, c.executes); got != c.want {
			t.Errorf("%d: %v, want %v", i, got, c.want)
		}
	}
}

func TestStands(t *testing.T) {
	refusal, none := store.State{RetryAfter: 1}, store.State{}
	for i, c := range []struct {
		was, st store.State
		want    bool
	}{
		{refusal, store.State{Err: fmt.Errorf("down: %w", store.ErrNotExecuted)}, true},
		{none, store.State{Err: store.ErrNotExecuted}, false},
		{refusal, store.State{Err: store.ErrUncertain}, false},
		{refusal, store.State{Allowed: true}, false},
	} {
		if got := Stands(&c.was, &c.st); got != c.want {
			t.Errorf("%d: %v, want %v", i, got, c.want)
		}
	}
}

func TestReclaimable(t *testing.T) {
	batched, plain := requestOf("alice", 9), requestOf("alice", 9)
	batched.Batch = 2
	refused, allowed := store.State{}, store.State{Allowed: true}
	for i, c := range []struct {
		reqs   []store.Request
		states []store.State
		want   []int
	}{
		{[]store.Request{batched, batched}, []store.State{refused, refused}, []int{0, 1}},
		{[]store.Request{batched, batched}, []store.State{allowed, refused}, []int{1}},
		{[]store.Request{batched, plain}, []store.State{refused, allowed}, []int{0}},
		{[]store.Request{batched, plain}, []store.State{refused, refused}, nil},
		{[]store.Request{batched, batched}, []store.State{refused, {Err: store.ErrUncertain}}, []int{0}},
	} {
		asks := store.Asks(c.reqs)
		for n, st := range c.states {
			asks[n].State = st
		}
		if got := Reclaimable(asks); !slices.Equal(got, c.want) {
			t.Errorf("%d: %v, want %v", i, got, c.want)
		}
	}
}

// TestWorth: of what can be forgotten, what the store does not know goes last.
func TestWorth(t *testing.T) {
	const now = 10_000_000
	known := func(b *Bucket, m *Moment) {
		r := requestOf("alice", 9)
		b.hear(&r, &store.State{Now: now, Content: store.Content{1, 2 * now}}, m.Now, m)
	}
	for name, c := range map[string]struct {
		happens func(b *Bucket, m *Moment)
		after   int64
		want    Worth
	}{
		"nothing":                          {func(*Bucket, *Moment) {}, 0, Expired},
		"an answer":                        {known, 0, Idle},
		"an answer about a window in past": {known, 2 * now, Expired},
		"a decision alone": {func(b *Bucket, m *Moment) {
			r := requestOf("alice", 9)
			b.AskAlone(&r, m)
			b.SettleUnknown(&r, r.Cost, m)
		}, 0, Alone},
		"a penalty on its way": {func(b *Bucket, m *Moment) {
			known(b, m)
			r := requestOf("alice", 9)
			r.Until = 2 * now
			b.Penalize(&r, m)
		}, landing, Alone},
		"a penalty that has arrived": {func(b *Bucket, m *Moment) {
			known(b, m)
			r := requestOf("alice", 9)
			r.Until = 2 * now
			b.Penalize(&r, m)
		}, landing + 1, Idle},
		"a refund to a bucket of which nothing was heard": {func(b *Bucket, m *Moment) {
			r := requestOf("alice", 9)
			b.RefundSent(&r, m)
			b.RefundArrived(&r, new(store.State), m.Now, m)
		}, 0, Idle},
		"a charge that waits for its shard": {func(b *Bucket, m *Moment) {
			r := requestOf("alice", 9)
			b.Settle([]*store.Request{new(r)}, 0, m)
			b.Delivered(&r, &store.State{Err: store.ErrNotExecuted}, m)
		}, 0, Owing},
		"a charge in flight": {func(b *Bucket, m *Moment) {
			b.Settle([]*store.Request{new(requestOf("alice", 9))}, 0, m)
		}, 0, InUse},
	} {
		m := &Moment{Now: now, Trust: UsualTrust.Microseconds()}
		b := New(0, m)
		c.happens(&b, m)
		if got := b.Worth(&Moment{Now: now + c.after}); got != c.want {
			t.Errorf("%s: worth %d, want %d", name, got, c.want)
		}
	}
}

// TestClockWasAGuess: what this process has admitted alone counts on when the store's clock turns out
// to be another one than this machine's.
func TestClockWasAGuess(t *testing.T) {
	const guess, events = 1_700_000_000_000_000, 10
	for a := range store.Algorithms {
		for _, align := range []bool{false, true} {
			for _, ahead := range []int64{0, 1_234_567_890, -1_234_567_890} {
				limit := &store.Limit{Zone: "zone", Algorithm: a, Window: time.Minute, Align: align}
				if algorithm.Of(a).Lease || align && a != store.FixedWindow {
					continue
				}
				t.Run(fmt.Sprintf("%s, aligned %t, %d ahead", a, align, ahead), func(t *testing.T) {
					// In the middle of a window of either clock.
					m := &Moment{Now: 25_000_000}
					b, r := New(guess, m), store.Request{Limit: limit, ClientKey: "alice", Events: events, Cost: 1}
					for range events {
						if st := b.AskAlone(&r, m); !st.Allowed {
							t.Fatalf("refused: %+v", st)
						}
						b.Settle([]*store.Request{new(r)}, 1, m)
					}
					m.Now += 1000
					asked := m.Now
					storeNow := m.Now + guess + ahead
					b.TakeSent(&r, m)
					st := algorithm.Take.Run(algorithm.New(limit), &r, storeNow)
					if !st.Allowed {
						t.Fatalf("the store refuses: %+v", st)
					}
					b.TakeAnswered(&r, &st, asked, 0, m)
					if st.Allowed || st.Used < events {
						t.Errorf("one beside %d of %d that the store has not heard of: %+v", events, events, st)
					}
				})
			}
		}
	}
}

// TestArithmeticOfEachAlgorithm fails for an algorithm without a row, so that a new one gets no other's
// arithmetic. Each row has the rest of charges of 30 that wait for half a window, while 10 come back at the rate
// of a limit of 20; when a refused request may come again if the charges count from the end of this window on; and
// whether charges that wait expire with the first or the last of them.
func TestArithmeticOfEachAlgorithm(t *testing.T) {
	const minute = int64(60_000_000)
	for a := range store.Algorithms {
		want, hasRow := map[store.Algorithm]struct {
			left    int64
			wait    time.Duration
			expires int64
			isOpen  bool
		}{
			store.FixedWindow:   {30, 90 * time.Second, 2, true},
			store.SlidingWindow: {30, 70 * time.Second, 7, true},
			store.SlidingLog:    {30, 10 * time.Second, 7, false},
			store.GCRA:          {20, 10 * time.Second, 7, true},
			store.Concurrency:   {30, 10 * time.Second, 7, false},
		}[a]
		if !hasRow {
			t.Errorf("%s has no row", a)
			continue
		}
		r := requestOf("alice", 20)
		r.Limit.Algorithm, r.Cost = a, 30
		b := New(0, &Moment{Now: minute})
		w := mergedCharge{req: r, expires: 7, age: b.newAge(&r, b.known, minute)}
		if got := w.left(minute + minute/2); got != want.left {
			t.Errorf("%s: %d are left, want %d", a, got, want.left)
		}
		st := store.State{Now: minute + minute/2, Reset: 2 * minute, RetryAfter: 10 * time.Second}
		if got := waitForLanding(r.Limit, &st, 2*minute); got != want.wait {
			t.Errorf("%s: it may come again after %s, want %s", a, got, want.wait)
		}
		if w.merge(&r, 1, 2); w.expires != want.expires {
			t.Errorf("%s: expires at %d, want %d", a, w.expires, want.expires)
		}
		if algorithm.Of(a).Copies() {
			b.known.Charge(&r, 1, minute)
		}
		late := &pending{base: b.known, at: minute, expires: minute + countsFor(r.Limit)}
		if got := b.countsInOpenWindow(late, r.Limit, minute); got != want.isOpen {
			t.Errorf("%s: a charge in flight counts in the open window: %v", a, got)
		}
		if late.expires--; algorithm.Of(a).Clocked() && b.countsInOpenWindow(late, r.Limit, minute) {
			t.Errorf("%s: a charge of the window before counts in the open window", a)
		}
	}
}

// TestTakesAfterDecidingAlone: once the store answers again, takes pass up to the limit and not beyond.
func TestTakesAfterDecidingAlone(t *testing.T) {
	for _, algo := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.GCRA} {
		const now, events = 1_000_000_000, 5
		r, m := requestOf("alice", events), &Moment{Now: now}
		r.Limit.Algorithm, r.Burst = algo, events
		b := New(0, m)
		var server algorithm.Known
		take := func() store.State {
			mark := b.TakeSent(&r, m)
			st := server.View(&r, 0, m.Now)
			if st.Allowed {
				server.Charge(&r, r.Cost, m.Now)
				st = server.View(&r, 0, m.Now)
				st.Allowed = true
			}
			st.Now, st.Content = m.Now, server.Content
			b.TakeAnswered(&r, &st, m.Now, mark, m)
			return st
		}
		if st := take(); !st.Allowed {
			t.Fatalf("%v: the first take: %+v", algo, st)
		}
		for range 2 {
			m.Now++
			if st := b.AskAlone(&r, m); !st.Allowed {
				t.Fatalf("%v: alone: %+v", algo, st)
			}
			b.Settle([]*store.Request{new(r)}, r.Cost, m)
			server.Charge(&r, r.Cost, m.Now)
			st := server.View(&r, 0, m.Now)
			st.Now, st.Content = m.Now, server.Content
			b.Delivered(&r, &st, m)
		}
		m.Now++
		passed := 3
		for range 4 {
			if take().Allowed {
				passed++
			}
		}
		if passed != events {
			t.Errorf("%v: %d pass of %d", algo, passed, events)
		}
	}
}
