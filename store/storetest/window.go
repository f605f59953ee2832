package storetest

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

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

// testWindowLeftAlone looks for a window that a request postpones.
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
