package redis

import (
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Observer is told of a command: the role of the server, what it was asked, how
// long that took, waiting included, and the error, if there is one. Of commands
// that were not made, because the server is left out or too many wait, nothing
// is told. It must be quick, and is called by many at once.
type Observer func(role store.Role, op algorithm.Operation, took time.Duration, err error)

// observersOf are those of members, by their shard. Of two, the later one counts.
func observersOf(members ...[]Member) map[*Shard]Observer {
	all := map[*Shard]Observer{}
	for _, some := range members {
		for _, m := range some {
			all[m.Shard] = m.Observe
		}
	}
	return all
}

// tell tells of one command.
func (o Observer) tell(role store.Role, op algorithm.Operation, began time.Time, err error) {
	if o != nil && isMade(err) {
		o(role, op, time.Since(began), err)
	}
}

// tellAll tells of the commands of a call that has ended.
func (o Observer) tellAll(role store.Role, op algorithm.Operation, c *call) {
	if o == nil {
		return
	}
	took := time.Since(c.began)
	for _, cmd := range c.cmds {
		if isMade(cmd.outcome) {
			o(role, op, took, cmd.outcome)
		}
	}
}

// isMade tells whether a command that ended with err was made, or tried.
func isMade(err error) bool {
	return err == nil || !errors.Is(err, ErrShardDown) && !errors.Is(err, errOverload) && !errors.Is(err, errClosed)
}
