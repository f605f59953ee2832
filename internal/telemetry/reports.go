// Package telemetry has what the limits report of themselves: metrics that outlive
// configs ([Metrics], [Default]), Caddy events ([Events]) and logs of conditions that
// may hold for every request ([LogThrottle]).
//
// It imports Caddy and store/**, and no other package of internal.
package telemetry

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// ReportInterval is the shortest time between two logs of a condition that may hold
// for every request.
const ReportInterval = time.Minute

// LogThrottle limits the logs of one condition to one in each [ReportInterval], and
// counts those that it suppresses. The zero value is ready for use.
type LogThrottle struct {
	next atomic.Int64
	held atomic.Int64
}

// Report reports whether to log the condition at the instant at, and how many times
// the condition was met since it was last logged, this time included.
func (t *LogThrottle) Report(at time.Time) (times int64, log bool) {
	t.held.Add(1)
	next, now := t.next.Load(), at.UnixNano()
	if now < next || !t.next.CompareAndSwap(next, now+int64(ReportInterval)) {
		return 0, false
	}
	return t.held.Swap(0), true
}

// The names of events, for which a config can have handlers.
const (
	// EventExceeded is emitted when a zone refuses a request.
	EventExceeded = "rate_limit_exceeded"
	// EventShardDown and EventShardUp are emitted when a server of a shard is left out,
	// and when it is back.
	EventShardDown = "rate_limit_shard_down"
	EventShardUp   = "rate_limit_shard_up"
)

// Events emits events. The zero value emits none.
type Events struct {
	ctx caddy.Context
	app *caddyevents.App
}

// NewEvents returns the events of a config.
func NewEvents(ctx caddy.Context) (Events, error) {
	app, err := ctx.App("events")
	if err != nil {
		return Events{}, fmt.Errorf("load the events app: %w", err)
	}
	return Events{ctx, app.(*caddyevents.App)}, nil
}

// Wants reports whether the config has a handler for an event. Gathering the data of
// an event costs more than asking.
func (e Events) Wants(name string) bool { return e.app != nil && e.app.ShouldEmit(name) }

// Emit emits an event with its data.
func (e Events) Emit(name string, data map[string]any) { e.app.Emit(e.ctx, name, data) }
