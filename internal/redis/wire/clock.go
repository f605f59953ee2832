package wire

import (
	"context"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	// ClockPeriod bounds for how long the estimate stays too high after the primary's
	// clock was set back.
	ClockPeriod = time.Second
	// ClockTrust is the age from which an estimate has to be renewed: monotonic
	// clocks drift apart by a few milliseconds in that time.
	ClockTrust = 30 * time.Second
)

// Clock estimates the time of a shard's primary from its replies. The estimate is
// never ahead, behind by at most the round trip of the fastest recent reply, and runs
// backwards only if the primary's clock does.
type Clock struct {
	// now is the clock of this machine.
	now func() time.Time
	mu  sync.Mutex
	// start anchors the monotonic readings.
	start time.Time
	// offset and previous are the highest difference between the primary's time and
	// the monotonic time since start, in this period and in the one before. Every
	// reply is late, so the highest is the most accurate.
	offset, previous int64
	// period, observed and claimed are when the period began, when the clock was
	// last observed, and when an observation was last claimed.
	period, observed, claimed time.Duration
	known                     bool
	// doubted is the difference by a time that was not believed; nil if the last one was.
	doubted *int64
	// jump is by how much the primary's clock was last set, and jumpedAt when; zero if it
	// was not. jumped, if not nil, is told of it.
	jump     time.Duration
	jumpedAt time.Time
	jumped   func(by time.Duration)
}

func newClock() *Clock { return &Clock{now: time.Now, start: time.Now()} }

// observe records a reply to what was sent at an instant, which arrived at the instant at
// and carried the time now. It reports whether that is believed. A time that is off by
// more than clocks may differ is damaged, or the primary's clock was set: then the next
// reading agrees.
func (c *Clock) observe(now int64, sent, at time.Time) (believed bool) {
	if now < 0 || now > store.MaxInteger {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	mono := at.Sub(c.start)
	offset := now - mono.Microseconds()
	if jump := c.jumpTo(offset, at.Sub(sent)); jump != 0 {
		if c.doubted == nil || differ(*c.doubted, offset) {
			c.doubted = &offset
			return false
		}
		c.known = false
		c.jump, c.jumpedAt = jump, at
		if c.jumped != nil {
			c.jumped(jump)
		}
	}
	c.doubted = nil
	switch {
	case !c.known || mono-c.period >= 2*ClockPeriod:
		c.offset, c.previous, c.period = offset, offset, mono
	case mono-c.period >= ClockPeriod:
		c.offset, c.previous, c.period = offset, c.offset, mono
	default:
		c.offset = max(c.offset, offset)
	}
	c.known, c.observed = true, max(c.observed, mono)
	return true
}

// jumpTo is by how much the primary's clock was set if it now shows that difference, in a
// reply that took so long; 0 if it was not.
func (c *Clock) jumpTo(offset int64, took time.Duration) time.Duration {
	before := max(c.offset, c.previous)
	if !c.known || !differ(offset, before) || offset < before && !differ(offset+took.Microseconds(), before) {
		return 0
	}
	return time.Duration(offset-before) * time.Microsecond
}

// agrees reports whether the primary's clock showed a time at about the instant at.
func (c *Clock) agrees(now int64, at time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !differ(now-at.Sub(c.start).Microseconds(), max(c.offset, c.previous))
}

func differ(one, other int64) bool { return max(one-other, other-one) > algorithm.Grace.Microseconds() }

// LastJump returns by how much the primary's clock was last set, and when; zero if it was
// not.
func (c *Clock) LastJump() (by time.Duration, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.jump, c.jumpedAt
}

// Estimate returns the primary's time at the instant at, the age of the last
// observation, and whether there is one.
func (c *Clock) Estimate(at time.Time) (now int64, age time.Duration, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	mono := at.Sub(c.start)
	return mono.Microseconds() + max(c.offset, c.previous), mono - c.observed, c.known
}

// Now is the primary's time, or that of this machine until a reply has told it. A nil
// clock is this machine's.
func (c *Clock) Now() int64 {
	if c == nil {
		return time.Now().UnixMicro()
	}
	at := c.now()
	if now, _, ok := c.Estimate(at); ok {
		return now
	}
	return at.UnixMicro()
}

// passed returns an instant that the primary's clock has passed at at, or 0.
func (c *Clock) passed(at time.Time) int64 {
	now, age, ok := c.Estimate(at)
	if !ok || age > ClockTrust {
		return 0
	}
	return now
}

// ClaimObservation reports whether the caller should make a new observation,
// because the last one is old. Within clockTrust it returns true only once.
func (c *Clock) ClaimObservation(at time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	mono := at.Sub(c.start)
	if mono-max(c.observed, c.claimed) <= ClockTrust {
		return false
	}
	c.claimed = mono
	return true
}

var timeReader = goredis.NewScript("return redis.call('TIME')[1]")

// LackOfTime returns the error of scripts that read the clock of a client's server if that lacks TIME,
// or nil: behind a proxy that alone hides TIME scripts have it. Some proxies want a key.
func LackOfTime(ctx context.Context, client *goredis.Client, keys ...string) error {
	read := timeReader.EvalSha
	if timeReader.Load(ctx, client).Err() != nil {
		read = timeReader.Eval
	}
	if err := read(ctx, client, keys).Err(); Says(err, LackingInside) {
		return err
	}
	return nil
}
