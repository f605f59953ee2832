package redis

import (
	"testing"
	"time"
)

func TestClockIsNeverAheadAndNearTheFastestReply(t *testing.T) {
	c := newPrimaryClock()
	start := c.start
	const ahead = int64(7_000_000_000_000)
	primary := func(at time.Time) int64 { return at.Sub(start).Microseconds() + ahead }
	last := int64(0)
	for i := range 10_000 {
		ran := start.Add(time.Duration(i) * 5 * time.Millisecond)
		// Replies take from 0.1 to 3 ms, one in ten the shortest.
		arrived := ran.Add(100*time.Microsecond + time.Duration(i%10)*300*time.Microsecond)
		c.observe(primary(ran), arrived)
		at := arrived.Add(time.Millisecond)
		now, age, ok := c.estimate(at)
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
	c := newPrimaryClock()
	at := func(s float64) time.Time { return c.start.Add(time.Duration(s * float64(time.Second))) }
	c.observe(1000e6, at(0))
	for s := 0.5; s < 4; s += 0.5 {
		c.observe(int64(s*1e6), at(s))
	}
	if now, _, _ := c.estimate(at(4)); now != 4e6 {
		t.Fatalf("estimate is %d µs, want 4 s: the primary was set back 4 s ago", now)
	}
}

func TestClockIsUnknownBeforeAnyReply(t *testing.T) {
	c := newPrimaryClock()
	if _, _, ok := c.estimate(c.start.Add(time.Hour)); ok {
		t.Fatal("there is an estimate without an observation")
	}
}
