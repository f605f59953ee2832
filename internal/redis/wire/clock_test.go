package wire

import (
	"testing"
	"time"
)

func TestClockIsNeverAheadAndNearTheFastestReply(t *testing.T) {
	c := newClock()
	start := c.start
	const ahead = int64(7_000_000_000_000)
	primary := func(at time.Time) int64 { return at.Sub(start).Microseconds() + ahead }
	last := int64(0)
	for i := range 10_000 {
		ran := start.Add(time.Duration(i) * 5 * time.Millisecond)
		// Replies take 0.1 to 3 ms; one in ten is the fastest.
		arrived := ran.Add(100*time.Microsecond + time.Duration(i%10)*300*time.Microsecond)
		c.observe(primary(ran), ran, arrived)
		at := arrived.Add(time.Millisecond)
		now, age, ok := c.Estimate(at)
		if !ok || age != time.Millisecond {
			t.Fatalf("estimate %d: age %v, ok %v", i, age, ok)
		}
		if now > primary(at) {
			t.Fatalf("estimate %d is %d µs ahead", i, now-primary(at))
		}
		if i > 20 && primary(at)-now > 150 {
			t.Fatalf("estimate %d is %d µs behind", i, primary(at)-now)
		}
		if now < last {
			t.Fatalf("estimate %d runs backwards by %d µs", i, last-now)
		}
		last = now
	}
}

func TestClockFollowsAPrimaryThatIsSetBack(t *testing.T) {
	c := newClock()
	at := func(s float64) time.Time { return c.start.Add(time.Duration(s * float64(time.Second))) }
	c.observe(1000e6, at(0), at(0))
	for s := 0.5; s < 4; s += 0.5 {
		c.observe(int64(s*1e6), at(s), at(s))
	}
	if now, _, _ := c.Estimate(at(4)); now != 4e6 {
		t.Fatalf("estimate is %d µs, want 4 s: the primary was set back 4 s ago", now)
	}
}

func TestClockIsUnknownBeforeAnyReply(t *testing.T) {
	c := newClock()
	if _, _, ok := c.Estimate(c.start.Add(time.Hour)); ok {
		t.Fatal("there is an estimate without an observation")
	}
}

// TestLateReplyIsNoJump: a reply that took long carries a time that is as old.
func TestLateReplyIsNoJump(t *testing.T) {
	c := newClock()
	at := func(s int) time.Time { return c.start.Add(time.Duration(s) * time.Second) }
	c.observe(1000e6, at(0), at(0))
	if !c.observe(1001e6, at(1), at(20)) {
		t.Error("a reply that took 19 s is not believed")
	}
	if c.observe(990e6, at(20), at(21)) {
		t.Error("a reply whose time is 11 s behind is believed")
	}
	if by, _ := c.LastJump(); by != 0 {
		t.Errorf("a jump by %v", by)
	}
}
