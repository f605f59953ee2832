package redis

import (
	"sync"
	"time"
)

const (
	// clockPeriod is how long one observation of the primary's clock can keep
	// the estimate up after that clock was set back.
	clockPeriod = time.Second
	// clockTrust is how long the estimate is as good as new: monotonic clocks
	// drift apart by a few milliseconds in that time. Afterwards it is renewed.
	clockTrust = 30 * time.Second
)

// primaryClock estimates the time of a shard's primary from what its replies
// said and the monotonic time passed since. The estimate is never ahead, and
// behind by no more than the fastest recent reply took; it does not run
// backwards unless the primary's clock does.
type primaryClock struct {
	mu sync.Mutex
	// start anchors the monotonic readings.
	start time.Time
	// now - (monotonic time since start), the highest of this and the previous
	// period. The highest is the nearest, for every reply is late.
	offset, previous int64
	period           time.Duration
	observed         time.Duration
	claimed          time.Duration
	known            bool
}

func newPrimaryClock() *primaryClock { return &primaryClock{start: time.Now()} }

// observe takes in that a reply which arrived at the instant at says the
// primary's clock showed now.
func (c *primaryClock) observe(now int64, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	mono := at.Sub(c.start)
	offset := now - mono.Microseconds()
	switch {
	case !c.known || mono-c.period >= 2*clockPeriod:
		c.offset, c.previous, c.period = offset, offset, mono
	case mono-c.period >= clockPeriod:
		c.offset, c.previous, c.period = offset, c.offset, mono
	default:
		c.offset = max(c.offset, offset)
	}
	c.known, c.observed = true, max(c.observed, mono)
}

// estimate returns the primary's time at the instant at, how long ago that
// clock was last observed, and whether it ever was.
func (c *primaryClock) estimate(at time.Time) (now int64, age time.Duration, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	mono := at.Sub(c.start)
	return mono.Microseconds() + max(c.offset, c.previous), mono - c.observed, c.known
}

// passed returns an instant that the primary's clock has passed at the instant
// at, or 0.
func (c *primaryClock) passed(at time.Time) int64 {
	now, age, ok := c.estimate(at)
	if !ok || age > clockTrust {
		return 0
	}
	return now
}

// claimObservation tells whether the caller is to see to a new observation,
// because the last one is old; it tells so once in clockTrust.
func (c *primaryClock) claimObservation(at time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	mono := at.Sub(c.start)
	if mono-max(c.observed, c.claimed) <= clockTrust {
		return false
	}
	c.claimed = mono
	return true
}

// timeAt returns the time that decides what is over at servers, and how long ago
// their primary told it; 0 while the primary has not been heard.
func (s *Store) timeAt(at *servers, start time.Time) (now int64, age time.Duration) {
	if s.opts.LocalClock {
		return s.opts.Now().UnixMicro(), 0
	}
	now, age, ok := at.clock.estimate(start)
	if !ok {
		return 0, 0
	}
	return now, age
}
