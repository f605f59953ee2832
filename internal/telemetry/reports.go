package telemetry

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// ReportInterval is how often a condition that may hold for every request is
// logged.
const ReportInterval = time.Minute

// LogThrottle thins out reports of one condition to one a reportInterval, and
// counts those it holds back. The zero value is ready for use.
type LogThrottle struct {
	next atomic.Int64
	held atomic.Int64
}

// Report tells whether the condition is to be logged at the instant at, and
// how often it was met since the last time it was, this time included.
func (t *LogThrottle) Report(at time.Time) (times int64, log bool) {
	t.held.Add(1)
	next, now := t.next.Load(), at.UnixNano()
	if now < next || !t.next.CompareAndSwap(next, now+int64(ReportInterval)) {
		return 0, false
	}
	return t.held.Swap(0), true
}

// The events that a config can have handlers for.
const (
	// EventExceeded: a zone refused a request.
	EventExceeded = "rate_limit_exceeded"
	// EventShardDown and eventShardUp: a server of a shard is left out, or back.
	EventShardDown = "rate_limit_shard_down"
	EventShardUp   = "rate_limit_shard_up"
)

// Events emits events. The zero value emits none.
type Events struct {
	ctx caddy.Context
	app *caddyevents.App
}

func NewEvents(ctx caddy.Context) (Events, error) {
	app, err := ctx.App("events")
	if err != nil {
		return Events{}, fmt.Errorf("load the events app: %w", err)
	}
	return Events{ctx, app.(*caddyevents.App)}, nil
}

// Wants tells whether anybody listens: to gather what an event tells costs more
// than to ask.
func (e Events) Wants(name string) bool { return e.app != nil && e.app.ShouldEmit(name) }

func (e Events) Emit(name string, data map[string]any) { e.app.Emit(e.ctx, name, data) }
