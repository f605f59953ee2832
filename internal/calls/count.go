package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

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
	stats, err := server.Info("commandstats")
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		text, ok := stats["cmdstat_"+name]
		if !ok {
			// It was never called.
			continue
		}
		first, _, _ := strings.Cut(text, ",")
		n, err := strconv.ParseInt(strings.TrimPrefix(first, "calls="), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the calls of %s from %q: %w", name, text, err)
		}
		sum += n
	}
	return sum, nil
}
