package memory

import (
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// wallClock notes when this machine's clock is set: when it and the monotonic clock part by
// more than what counts as a clock that is right. The zero value has seen no reading.
type wallClock struct {
	start atomic.Pointer[time.Time]
	// offset is by how much the clock was set since start, and jump the last time.
	offset   atomic.Int64
	jump     atomic.Int64
	jumpedAt atomic.Pointer[time.Time]
}

// observe takes in a reading, and returns by how much the clock was set since the one
// before; 0 if it was not.
func (c *wallClock) observe(at time.Time) (by time.Duration) {
	start := c.start.Load()
	if start == nil {
		c.begin(at)
		return 0
	}
	return c.compare(at, time.Duration(at.UnixMicro()-start.UnixMicro())*time.Microsecond, at.Sub(*start))
}

// compare compares how far this machine's clock and the monotonic one are from the start.
func (c *wallClock) compare(at time.Time, wall, monotonic time.Duration) (by time.Duration) {
	before := c.offset.Load()
	offset := (wall - monotonic).Microseconds()
	by = time.Duration(offset-before) * time.Microsecond
	if by.Abs() <= algorithm.Grace || !c.offset.CompareAndSwap(before, offset) {
		return 0
	}
	c.note(by, at)
	return by
}

// begin and note keep a copy of the reading, for which most calls need no memory.
func (c *wallClock) begin(at time.Time) { c.start.CompareAndSwap(nil, &at) }

func (c *wallClock) note(by time.Duration, at time.Time) {
	c.jump.Store(int64(by))
	c.jumpedAt.Store(&at)
}

func (c *wallClock) lastJump() (by time.Duration, at time.Time) {
	if jumped := c.jumpedAt.Load(); jumped != nil {
		return time.Duration(c.jump.Load()), *jumped
	}
	return 0, time.Time{}
}
