package redis

import (
	"context"
	"slices"

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

// redirected are those of cmds that met another node of the cluster than theirs.
func (l *lane) redirected(cmds []*command) (elsewhere []*command) {
	if l.shard.cluster == nil {
		return nil
	}
	for _, cmd := range cmds {
		if cmd.isRedirected() {
			elsewhere = append(elsewhere, cmd)
		}
	}
	return elsewhere
}

// redirect brings commands that were redirected to their node.
func (l *lane) redirect(ctx context.Context, elsewhere []*command) {
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

// concludeSettled concludes those calls that were not redirected, and returns the
// others.
func (l *lane) concludeSettled(calls []*call) (open []*call) {
	for _, c := range calls {
		if slices.ContainsFunc(c.cmds, (*command).isRedirected) {
			open = append(open, c)
			continue
		}
		l.conclude(c)
	}
	return open
}
