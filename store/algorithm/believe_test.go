package algorithm_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const grace = algorithm.Grace

// full returns a bucket of ten events that was filled at an instant, and a request for it.
func full(kind store.Limit, window time.Duration, at int64) (algorithm.Bucket, store.Request) {
	kind.Window = window
	r := store.Request{Limit: &kind, Events: 10, Cost: 10, ID: "first"}
	b := algorithm.New(&kind)
	charge.Run(b, &r, at)
	r.Cost, r.ID = 1, "other"
	return b, r
}

// TestFutureIsNotBelieved: what a clock stored that was ahead by more than the grace counts
// no more once it is right, for any operation, and what is stored then is right.
func TestFutureIsNotBelieved(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		window := micros(number(t, "window", 1e3, 1e12))
		jump := number(t, "jump", grace.Microseconds()+2*window.Microseconds()+1, 1e14)
		b, r := full(kind, window, origin+jump)
		if algorithm.Of(kind.Algorithm).Penalties && t.maybe("penalty") {
			r.Until = origin + jump + 1e9
			penalize.Run(b, &r, origin+jump)
		}
		do := among(t, "operation", []op{check, charge, take, refund, algorithm.Peek})
		fresh := algorithm.New(r.Limit)
		if got, want := do.Run(b, &r, origin), do.Run(fresh, &r, origin); got != want {
			t.Fatalf("%s after a jump of %d:\n got %+v\nwant %+v", do, jump, got, want)
		}
		if got, want := b.Expiry(r.Limit), fresh.Expiry(r.Limit); got != want {
			t.Fatalf("it expires at %d, want %d", got, want)
		}
	})
}

// TestClocksMayDiffer: a clock that is behind another by no more than the grace gives nothing
// away.
func TestClocksMayDiffer(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		window := micros(number(t, "window", 1e3, 1e12))
		b, r := full(kind, window, origin)
		if st := take.Run(b, &r, origin-number(t, "behind", 0, grace.Microseconds())); st.Allowed || st.Used < 10 {
			t.Fatalf("a take by a clock that is behind: %+v", st)
		}
	})
}

// TestPenaltyIsNoLongerThanPenaltiesLast: those of the zone, or a day; or any, where the zone is not known.
func TestPenaltyIsNoLongerThanPenaltiesLast(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		kind.Window = time.Hour
		lasts := micros(number(t, "lasts", 1, 1e12))
		longest := max(lasts, 24*time.Hour)
		ahead := number(t, "ahead", 0, 2*grace.Microseconds())
		r := store.Request{Limit: &kind, Events: 10, Cost: 1, Until: origin + ahead + longest.Microseconds()}
		b := algorithm.New(&kind)
		penalize.Run(b, &r, origin)
		for known, want := range map[time.Duration]bool{0: longest+micros(ahead) <= store.MaxWindow+grace, lasts: ahead <= grace.Microseconds()} {
			asked := r
			asked.Penalty = known
			if st := check.Run(algorithm.Clone(b), &asked, origin); (st.Penalty != 0) != want {
				t.Fatalf("a penalty of %d beyond %v, of which %v is known: %+v", ahead, longest, known, st)
			}
		}
	}, withoutPenalty...)
}

// TestShorterPenaltyEndsNoLongerOne: a zone whose penalties are shorter, such as after a
// reload, leaves one that another config has begun, whatever it does.
func TestShorterPenaltyEndsNoLongerOne(t *testing.T) {
	forKinds(t, func(t *trial, kind store.Limit) {
		kind.Window = micros(number(t, "window", 1e3, 1e12))
		before := micros(number(t, "before", 1e6, (24 * time.Hour).Microseconds()))
		r := store.Request{Limit: &kind, Events: 10, Cost: 1, Penalty: before, Until: origin + before.Microseconds()}
		b := algorithm.New(&kind)
		penalize.Run(b, &r, origin)
		shorter := r
		shorter.Penalty = micros(number(t, "after", 1, before.Microseconds()))
		do := among(t, "operation", []op{check, charge, take, refund, penalize, algorithm.Peek})
		shorter.Until = origin + shorter.Penalty.Microseconds()
		do.Run(b, &shorter, origin)
		if st := check.Run(b, &r, r.Until-1); st.Penalty != r.Until {
			t.Fatalf("a penalty until %d, after a %s by a zone of %v: %+v", r.Until, do, shorter.Penalty, st)
		}
	}, withoutPenalty...)
}

// TestCopyOfTheFutureIsNotBelieved, nor raised to, by an answer of a clock that is right again.
func TestCopyOfTheFutureIsNotBelieved(t *testing.T) {
	for _, kind := range kinds {
		if !algorithm.Of(kind.Algorithm).Copies() {
			continue
		}
		const jump = 30 * 24 * 3600 * int64(1e6)
		ahead, r := full(kind, time.Minute, origin+jump)
		peek := r
		copied := algorithm.Known{Content: ahead.View(&peek, origin+jump, false).Content}
		if st := copied.View(&r, 0, origin); !st.Allowed || st.Used != 0 {
			t.Errorf("%s: the copy shows %+v", kind.Zone, st)
		}
		if copied.IsOpen(r.Limit, origin) && algorithm.Of(kind.Algorithm).Windowed() {
			t.Errorf("%s: the copy's window is open", kind.Zone)
		}
		now := algorithm.New(r.Limit)
		right := algorithm.Known{Content: charge.Run(now, &r, origin).Content}
		for what, pair := range map[string][2]algorithm.Known{"raised by": {copied, right}, "raises": {right, copied}} {
			raised := pair[0]
			raised.Raise(r.Limit, pair[1], origin)
			if raised.Content != right.Content {
				t.Errorf("%s: the copy %s the right one is %v, want %v", kind.Zone, what, raised.Content, right.Content)
			}
		}
		charged := copied
		charged.Charge(&r, 1, origin)
		if charged.View(&r, 0, origin).Used != 1 {
			t.Errorf("%s: a charge of the copy leaves %v", kind.Zone, charged.Content)
		}
	}
}

// TestChargeExpiry is when a charge counts no more: of a window when it ends, and of what
// drains when it has drained.
func TestChargeExpiry(t *testing.T) {
	day := store.Calendar{Unit: store.Day}
	for name, c := range map[string]struct {
		limit store.Limit
		cost  int64
		want  time.Duration
	}{
		"fixed":    {store.Limit{Algorithm: store.FixedWindow, Window: time.Minute}, 1, time.Minute},
		"align":    {store.Limit{Algorithm: store.FixedWindow, Window: 7 * time.Hour, Align: true}, 1, 7 * time.Hour},
		"calendar": {store.Limit{Algorithm: store.FixedWindow, Window: day.Window(), Align: true, Calendar: day}, 1, 24 * time.Hour},
		"sliding":  {store.Limit{Algorithm: store.SlidingWindow, Window: time.Minute}, 1, 2 * time.Minute},
		"gcra":     {store.Limit{Algorithm: store.GCRA, Window: time.Second}, 600, time.Minute},
	} {
		at := origin - origin%(7*24*3600*int64(1e6))
		r := store.Request{Limit: &c.limit, Events: 10, Burst: 600, Cost: c.cost}
		k := algorithm.Known{}
		if c.limit.Algorithm != store.GCRA {
			r.Until = at + 1e12
			k.Penalize(&r, at)
		}
		if got := k.ChargeExpiry(&r, c.cost, at); got != at+c.want.Microseconds() {
			t.Errorf("%s: after %v, want %v", name, micros(got-at), c.want)
		}
	}
}

// TestNothingCountsWithoutARate: what a bucket of gcra says that can never drain is not
// believed, but for its penalty.
func TestNothingCountsWithoutARate(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	r := store.Request{Limit: &limit, Events: 10, Cost: 1}
	for _, rate := range [][2]int64{{0, 0}, {0, 1}, {1, 0}} {
		content := store.Content{origin + 1e9, 0, rate[0], origin, 5, rate[1], origin + 1}
		if st := algorithm.View(&content, &r, origin, false); st.Used != 0 || st.Penalty != origin+1 {
			t.Errorf("%d events in %d µs: %+v", rate[0], rate[1], st)
		}
	}
}

// TestMoreThanWasSpentIsNotBelieved: a bucket of gcra whose events would take longer to drain
// than all that was spent takes is damaged. Its client does not wait for it, whether it is
// stored, replied or copied.
func TestMoreThanWasSpentIsNotBelieved(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Second}
	r := store.Request{Limit: &limit, Events: 20, Cost: 1}
	slow := store.Request{Limit: &limit, Events: 3, Cost: 4}
	for name, spent := range map[string][]store.Request{
		"one rate": {r, r, r}, "two rates": {r, slow, r}, "more than a second's": {{Limit: &limit, Events: 20, Cost: 1e6}},
	} {
		b := algorithm.New(&limit)
		for i := range spent {
			charge.Run(b, &spent[i], origin)
		}
		content := b.View(&r, origin, false).Content
		for late, want := range map[int64]bool{
			0: true, grace.Microseconds() - 1: true, grace.Microseconds() + 2: false, 529_079_877e6: false, store.MaxInteger - content[0]: false,
		} {
			damaged := content
			damaged[0] += late
			stored := *b.(*algorithm.GCRA)
			stored.TAT += late
			known, raised := algorithm.Known{Content: damaged}, algorithm.Known{}
			raised.Raise(&limit, known, origin)
			for how, st := range map[string]store.State{
				"stored": check.Run(&stored, &r, origin), "replied": algorithm.View(&damaged, &r, origin, false),
				"copied": known.View(&r, 0, origin), "raised": raised.View(&r, 0, origin),
			} {
				if (st.Used != 0) != want || !want && (!st.Allowed || st.Reset > origin) {
					t.Errorf("%s, %s, %d late: %+v", name, how, late, st)
				}
			}
		}
	}
}

// TestWhatWasSpentIsBelieved whatever the limits of its requests, in any order and with
// refunds, and by clocks that are behind.
func TestWhatWasSpentIsBelieved(t *testing.T) {
	forAll(t, func(t *trial) {
		s := newSubject(t, store.Limit{Algorithm: store.GCRA})
		s.varied, s.backwards = true, t.maybe("backwards")
		s.live(check, charge, charge, take, take)
		b, r := *s.bucket.(*algorithm.GCRA), s.request()
		believed := b
		believed.Believe(&r, max(s.latest, s.now)-number(t, "behind", 0, grace.Microseconds()))
		if b.Events != 0 && believed != b {
			t.Fatalf("of %+v is believed %+v", b, believed)
		}
	})
}

// TestLargestSumIsBelieved: what exceeds the largest sum of a busy time counts as well.
func TestLargestSumIsBelieved(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Second}
	r := store.Request{Limit: &limit, Events: 10, Cost: store.MaxInteger}
	b := algorithm.New(&limit)
	for range 3 {
		if st := charge.Run(b, &r, origin); st.Used == 0 || st.Reset != store.MaxInteger {
			t.Errorf("%+v", st)
		}
		r.Cost = 1
	}
}
