package storetest

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func testEmpty(f *fixture) {
	f.answer(f.store.Check, nil)
	f.answer(f.store.Charge, nil)
	f.answer(f.store.Check, []store.Request{})
	f.answer(f.store.Charge, []store.Request{})
}

func testCheckSpendsNothing(f *fixture) {
	r := f.request()
	for range 10 {
		f.wantUsed("check of a fresh bucket", f.check(r), 0)
	}
	f.wantUsed("first charge", f.charge(r), 1)
	for range 10 {
		f.wantUsed("check after a charge", f.check(r), 1)
	}
	f.wantUsed("second charge", f.charge(r), 2)
}

func testCheckOpensWindow(f *fixture) {
	r := f.request()
	reset := f.now() + micros(r.Limit.Window)
	for i := range 20 {
		// A reset computed from a remaining time would vary with these fractions.
		f.clock.Advance(time.Duration(i) * 100_700 * time.Microsecond)
		if i == 0 {
			f.want("first check", f.check(r), store.State{
				Allowed: true, Limit: 5, Remaining: 5, Reset: reset, Now: f.now(),
			})
		}
		if got := f.check(r).Reset; got != reset {
			f.Errorf("check %d: reset %d, want %d", i, got, reset)
		}
		if got := f.charge(r).Reset; got != reset {
			f.Errorf("charge %d: reset %d, want %d", i, got, reset)
		}
	}
}

func testCheckFits(f *fixture) {
	r := f.request()
	for used := range int64(5) {
		s := f.check(r)
		if !s.Allowed || s.Used != used || s.Remaining != 5-used || s.RetryAfter != 0 {
			f.Errorf("check with %d of 5 used: %+v", used, s)
		}
		f.charge(r)
	}
	s := f.check(r)
	if s.Allowed || s.Used != 5 || s.Remaining != 0 || s.RetryAfter != time.Minute {
		f.Errorf("check with 5 of 5 used: %+v", s)
	}
}

func testChargeCounts(f *fixture) {
	r := f.request()
	r.Events = 100
	used := int64(0)
	for _, cost := range []int64{1, 2, 30, 0, 67} {
		r.Cost = cost
		used += cost
		f.want("charge", f.charge(r), store.State{
			Allowed: true, Limit: 100, Used: used, Remaining: 100 - used,
			Reset: f.now() + micros(time.Minute), Now: f.now(),
		})
	}
}

func testChargeCountsPastLimit(f *fixture) {
	r := f.request()
	for used := int64(1); used <= 20; used++ {
		want := store.State{
			Allowed: used <= 5, Limit: 5, Used: used, Remaining: max(5-used, 0),
			Reset: f.now() + micros(time.Minute), Now: f.now(),
		}
		if !want.Allowed {
			want.RetryAfter = time.Minute
		}
		f.want("charge", f.charge(r), want)
	}
	s := f.check(r)
	if s.Allowed || s.Used != 20 || s.Remaining != 0 {
		f.Errorf("check with 20 of 5 used: %+v", s)
	}
}

func testChargeOpensWindow(f *fixture) {
	r := f.request()
	reset := f.now() + micros(time.Minute)
	if got := f.charge(r).Reset; got != reset {
		f.Errorf("first charge: reset %d, want %d", got, reset)
	}
	f.clock.Advance(10 * time.Second)
	if got := f.check(r).Reset; got != reset {
		f.Errorf("check: reset %d, want %d", got, reset)
	}
}

func testCostZero(f *fixture) {
	r := f.request()
	r.Cost = 0
	open := store.State{
		Allowed: true, Limit: 5, Remaining: 5, Reset: f.now() + micros(time.Minute), Now: f.now(),
	}
	f.want("charge of nothing", f.charge(r), open)
	f.want("check of nothing", f.check(r), open)

	r.Cost = 5
	f.charge(r)
	r.Cost = 0
	full := open
	full.Used, full.Remaining = 5, 0
	f.want("check of nothing in a full window", f.check(r), full)
	f.want("charge of nothing to a full window", f.charge(r), full)

	r.Cost = 1
	f.charge(r)
	r.Cost = 0
	over := full
	over.Used = 6
	f.want("check of nothing past the limit", f.check(r), over)
	f.want("charge of nothing past the limit", f.charge(r), over)
}

func testCostAboveEvents(f *fixture) {
	r := f.request()
	r.Cost = 6
	want := store.State{
		Limit: 5, Remaining: 5, Reset: f.now() + micros(time.Minute),
		RetryAfter: store.Never, Now: f.now(),
	}
	f.want("check", f.check(r), want)
	want.Used, want.Remaining, want.RetryAfter = 6, 0, time.Minute
	f.want("charge", f.charge(r), want)
}

func testEventsChange(f *fixture) {
	r := f.request()
	r.Cost = 4
	f.charge(r)

	reset := f.now() + micros(time.Minute)
	r.Cost = 1
	for _, c := range []struct {
		events, remaining int64
		allowed           bool
	}{{5, 1, true}, {4, 0, false}, {2, 0, false}, {20, 16, true}, {1 << 40, 1<<40 - 4, true}} {
		r.Events = c.events
		s := f.check(r)
		if s.Allowed != c.allowed || s.Limit != c.events || s.Used != 4 || s.Remaining != c.remaining || s.Reset != reset {
			f.Errorf("check with %d events: %+v", c.events, s)
		}
	}
	r.Events = 20
	f.wantUsed("charge with other events", f.charge(r), 5)
	r.Events = 3
	s := f.charge(r)
	if s.Allowed || s.Used != 6 || s.Remaining != 0 || s.Reset != reset {
		f.Errorf("charge with fewer events: %+v", s)
	}
}

func testSaturation(f *fixture) {
	r := f.request()
	r.Events = store.MaxInteger
	charge := func(cost, used int64) {
		f.Helper()
		r.Cost = cost
		f.want("charge", f.charge(r), store.State{
			Allowed: true, Limit: store.MaxInteger, Used: used, Remaining: store.MaxInteger - used,
			Reset: f.now() + micros(time.Minute), Now: f.now(),
		})
		r.Cost = 0
		f.wantUsed("check", f.check(r), used)
	}
	charge(store.MaxInteger-3, store.MaxInteger-3)
	charge(1, store.MaxInteger-2)
	charge(1, store.MaxInteger-1)
	charge(1, store.MaxInteger)
	charge(1, store.MaxInteger)
	charge(store.MaxInteger, store.MaxInteger)

	r.Cost = 1
	if s := f.check(r); s.Allowed {
		f.Errorf("check of a saturated bucket: %+v", s)
	}
	f.clock.Advance(time.Minute)
	f.wantUsed("charge after the window", f.charge(r), 1)
	f.clock.Advance(time.Minute)
	charge(store.MaxInteger, store.MaxInteger)
}

func testRetryAfter(f *fixture) {
	r := f.request()
	r.Cost = 5
	f.charge(r)
	r.Cost = 1
	reset := f.now() + micros(time.Minute)
	for range 5 {
		f.clock.Advance(7*time.Second + 13*time.Microsecond)
		s := f.check(r)
		if s.Allowed || s.Now != f.now() || s.RetryAfter != time.Duration(reset-f.now())*time.Microsecond {
			f.Errorf("refusing check: %+v", s)
		}
		if s := f.charge(r); s.Allowed || s.RetryAfter != time.Duration(reset-s.Now)*time.Microsecond {
			f.Errorf("charge past the limit: %+v", s)
		}
	}
}

func testWindowClosesAtReset(f *fixture) {
	for name, ask := range map[string]func(store.Request) store.State{"check": f.check, "charge": f.charge} {
		r := f.request()
		r.ClientKey = name
		r.Cost = 5
		reset := f.charge(r).Reset

		f.clock.Advance(time.Minute - time.Microsecond)
		r.Cost = 1
		s := ask(r)
		if s.Reset != reset || s.Used < 5 || s.Allowed || s.RetryAfter != time.Microsecond {
			f.Errorf("%s a microsecond before the reset: %+v", name, s)
		}

		f.clock.Advance(time.Microsecond)
		s = ask(r)
		if s.Now != reset || s.Reset != reset+micros(time.Minute) || s.Used > 1 || !s.Allowed {
			f.Errorf("%s at the reset: %+v", name, s)
		}
	}
}

func testWindowFollowsWindow(f *fixture) {
	r := f.request()
	r.Cost = 2
	for _, pause := range []time.Duration{0, time.Microsecond, time.Second, 59 * time.Second, time.Hour} {
		f.clock.Advance(pause)
		want := store.State{
			Allowed: true, Limit: 5, Used: 2, Remaining: 3, Reset: f.now() + micros(time.Minute), Now: f.now(),
		}
		f.want("charge that opens a window", f.charge(r), want)
		want.Used, want.Remaining = 4, 1
		f.want("charge in the same window", f.charge(r), want)
		f.clock.Advance(time.Minute)
	}
}

// testWindowLeftAlone requires that no request postpones the reset.
func testWindowLeftAlone(f *fixture) {
	r := f.request()
	reset := f.check(r).Reset
	for f.now() < reset {
		if s := f.charge(r); s.Reset != reset {
			f.Fatalf("reset went from %d to %d, %v before it", reset, s.Reset, time.Duration(reset-f.now())*time.Microsecond)
		}
		f.clock.Advance(time.Second)
	}
	f.wantUsed("check at the reset", f.check(r), 0)
}

func testWindowLengths(f *fixture) {
	for _, window := range []time.Duration{
		time.Minute + time.Microsecond,
		time.Minute + 1500*time.Microsecond,
		time.Minute + 999_999*time.Microsecond,
		90 * time.Second,
		24 * time.Hour,
		100 * 365 * 24 * time.Hour,
	} {
		r := f.request()
		r.Limit = f.limit("zone", window)
		reset := f.now() + micros(window)
		if got := f.check(r).Reset; got != reset {
			f.Errorf("window of %v: reset %d, want %d", window, got, reset)
		}
		f.wantUsed("charge", f.charge(r), 1)
		f.clock.Advance(window - time.Microsecond)
		f.wantUsed("charge a microsecond before the reset", f.charge(r), 2)
		f.clock.Advance(time.Microsecond)
		f.wantUsed("charge at the reset", f.charge(r), 1)
	}

	// How long a backend remembers so short a window is its own business; the
	// answer that opens it is not.
	for _, window := range []time.Duration{
		time.Microsecond, 999 * time.Microsecond, 1500 * time.Microsecond, time.Second - time.Microsecond,
	} {
		want := store.State{
			Allowed: true, Limit: 5, Remaining: 5, Reset: f.now() + micros(window), Now: f.now(),
		}
		r := f.request()
		r.Limit = f.limit("check", window)
		f.want("check", f.check(r), want)
		r.Limit = f.limit("charge", window)
		want.Used, want.Remaining = 1, 4
		f.want("charge", f.charge(r), want)
		f.clock.Advance(window)
		want.Reset += micros(window)
		want.Now += micros(window)
		f.want("charge at the reset", f.charge(r), want)
	}
}

// testFractionalInstants lets the clock show fractions of microseconds, which
// belong to the microsecond that they are in.
func testFractionalInstants(f *fixture) {
	f.clock.Advance(123_456_789 * time.Nanosecond)
	r := f.request()
	s := f.charge(r)
	if s.Now != f.now() || s.Reset != f.now()+micros(time.Minute) {
		f.Errorf("charge at %v: %+v", f.clock.Now(), s)
	}
	f.clock.Advance(time.Minute - 789*time.Nanosecond - time.Nanosecond)
	f.wantUsed("charge a nanosecond before the reset", f.charge(r), 2)
	f.clock.Advance(time.Nanosecond)
	f.wantUsed("charge at the reset", f.charge(r), 1)
}

// testLateCharges: a charge whose time is over changes nothing, and none counts longer than a charge of this instant,
// even if its caller's clock is wrong. A charge that opens a window gives it the end that its caller names.
func testLateCharges(f *fixture) {
	for name, r := range f.kinds() {
		t := algorithm.Of(r.Limit.Algorithm)
		if t.Lease {
			continue
		}
		for used := range int64(2) {
			if over := r; !t.Drains() {
				over.Ends = f.now()
				f.wantUsed(name+": charge that is over", f.charge(over), used)
			}
			f.charge(r)
		}
		f.reset(r)
		r.Ends = f.now() + micros(10*r.Limit.Window)
		f.charge(r)
		f.clock.Advance(2 * r.Limit.Window)
		f.wantUsed(name+": check two windows later", f.check(r), 0)
	}
	r := f.request()
	r.Limit = f.limit("opened", time.Minute)
	if r.Ends = f.now() + micros(time.Second); f.check(r).Reset != r.Ends {
		f.Errorf("a check opens a window that ends at %d, want %d", f.check(r).Reset, r.Ends)
	}
}
