package main

import "github.com/shardlimit/caddy-shardlimit/internal/redistest"

// calls is how many calls the servers of a shard have had. What a replica gets by
// replication are commands that write, and none.
type calls struct{ primary, replica int64 }

func (c calls) sum() int64 { return c.primary + c.replica }

func (c calls) since(before calls) calls {
	return calls{c.primary - before.primary, c.replica - before.replica}
}

// countCalls asks the servers of a shard.
func countCalls(shard *redistest.Shard) (c calls, err error) {
	if c.primary, err = shard.Primary.Asked(); err != nil {
		return c, err
	}
	for _, replica := range shard.Replicas {
		n, err := replica.Asked()
		if err != nil {
			return c, err
		}
		c.replica += n
	}
	return c, nil
}
