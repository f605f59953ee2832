package wire

import (
	"context"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// NewClock returns a clock that reads at instants after start, on a machine whose clock is now.
func NewClock(start time.Time, now func() time.Time) *Clock { return &Clock{start: start, now: now} }

// Observe makes the clock hear a time at an instant.
func (c *Clock) Observe(now, at time.Time) { c.observe(now.UnixMicro(), at, at) }

// Offline runs commands as a lane does, without its connection.
type Offline struct {
	// To runs commands.
	To goredis.Pipeliner
	// Now is the clock of the callers.
	Now func() time.Time
	// Estimate returns the time of the clock that decides, or 0 while it is not known.
	Estimate func() int64
	// Clock is that of the commands, or nil.
	Clock *Clock
	// Bundles is set if scripts are called for several buckets at once.
	Bundles bool
}

// Execute is pipeline and exec of a lane.
func (o *Offline) Execute(cmds []*Command) {
	for _, cmd := range cmds {
		if cmd.write != nil {
			cmd.CheckTime(o.Estimate())
		}
	}
	var bundles []*bundle
	others := cmds
	if o.Bundles && len(cmds) > 1 {
		bundles, others = newBundles(cmds)
	}
	passed := int64(0)
	if o.Clock != nil {
		passed = o.Clock.passed(o.Now())
	}
	ctx := context.Background()
	for _, b := range bundles {
		_ = o.To.Process(ctx, b)
		b.share()
	}
	for _, cmd := range others {
		if cmd.asksClock() {
			cmd.stamp(passed)
		}
		cmd.AddTo(ctx, o.To)
	}
	for _, cmd := range cmds {
		cmd.SetOutcome(nil)
	}
	observe(cmds, o.Now(), o.Now())
}
