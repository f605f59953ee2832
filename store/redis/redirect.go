package redis

import (
	"context"

	goredis "github.com/redis/go-redis/v9"
)

// isRedirected tells whether a node of a Redis Cluster did not run c, because
// its slot is, or is about to be, another node's.
func (c *command) isRedirected() bool {
	if c.outcome == nil {
		return false
	}
	_, moved := goredis.IsMovedError(c.outcome)
	_, ask := goredis.IsAskError(c.outcome)
	return moved || ask
}

// redirect brings to their node those of cmds that met another one.
func (l *lane) redirect(ctx context.Context, cmds []*command) {
	if l.shard.cluster == nil {
		return
	}
	var elsewhere []*command
	for _, cmd := range cmds {
		if cmd.isRedirected() {
			elsewhere = append(elsewhere, cmd)
		}
	}
	if len(elsewhere) == 0 {
		return
	}
	l.shard.nudge()
	pipe := l.shard.cluster.redirects.Pipeline()
	for _, cmd := range elsewhere {
		// The node may not know the script.
		cmd.spellOut()
		_ = pipe.Process(ctx, cmd)
	}
	_, err := pipe.Exec(ctx)
	for _, cmd := range elsewhere {
		l.settle(cmd, err)
	}
}
