package shardlimit

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// The events that a config can have handlers for.
const (
	// eventExceeded: a zone refused a request.
	eventExceeded = "rate_limit_exceeded"
	// eventShardDown and eventShardUp: a server of a shard is left out, or back.
	eventShardDown = "rate_limit_shard_down"
	eventShardUp   = "rate_limit_shard_up"
)

// events emits events. The zero value emits none.
type events struct {
	ctx caddy.Context
	app *caddyevents.App
}

func newEvents(ctx caddy.Context) (events, error) {
	app, err := ctx.App("events")
	if err != nil {
		return events{}, fmt.Errorf("load the events app: %w", err)
	}
	return events{ctx, app.(*caddyevents.App)}, nil
}

// wants tells whether anybody listens: to gather what an event tells costs more
// than to ask.
func (e events) wants(name string) bool { return e.app != nil && e.app.ShouldEmit(name) }

func (e events) emit(name string, data map[string]any) { e.app.Emit(e.ctx, name, data) }
