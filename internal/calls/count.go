package main

import "github.com/shardlimit/caddy-shardlimit/internal/redistest"

// calls is how many calls the servers of a shard have had.
type calls struct{ primary, replica int64 }

func (c calls) sum() int64 { return c.primary + c.replica }

func (c calls) since(before calls) calls {
	return calls{c.primary - before.primary, c.replica - before.replica}
}

// The commands that are calls of the limiter. A primary is only asked by
// scripts: the HMGET and MGET in its statistics are what scripts do inside. A
// replica answers checks, mostly without a script. What it gets by replication
// are commands that write, and none of these.
var (
	primaryCommands = []string{"evalsha", "evalsha_ro"}
	replicaCommands = []string{"hmget", "mget", "evalsha", "evalsha_ro"}
)

// countCalls asks the servers of a shard.
func countCalls(shard *redistest.Shard) (c calls, err error) {
	if c.primary, err = countCommands(shard.Primary, primaryCommands); err != nil {
		return c, err
	}
	for _, replica := range shard.Replicas {
		n, err := countCommands(replica, replicaCommands)
		if err != nil {
			return c, err
		}
		c.replica += n
	}
	return c, nil
}

func countCommands(server *redistest.Server, names []string) (sum int64, err error) {
	calls, err := server.Calls()
	for _, name := range names {
		sum += calls[name]
	}
	return sum, err
}
