package operate

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

const (
	// inspectTimeout bounds the reading of one bucket. No request waits for it.
	inspectTimeout = 500 * time.Millisecond
	// resetMark is how long a bucket cannot migrate after its reset. Other processes
	// may have read it before; by then their restores have ended.
	resetMark = time.Minute
)

// Inspect returns the copies of a bucket that the servers of a shard have.
func (p *Operator) Inspect(ctx context.Context, m Member, r store.Request) store.Inspection {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	at := p.await(ctx, m.Shard, r.ClientKey)
	if at == nil {
		return store.Inspection{Shard: m.Name, Copies: []store.Copy{{Role: store.RolePrimary, State: store.State{Err: wire.NotExecuted(wire.ErrNoServers)}}}}
	}
	now, _ := p.Asker.TimeAt(at, time.Now())
	lanes := append([]*wire.Lane{at.Checks}, at.Replicas...)
	copies := make([]store.Copy, len(lanes))
	var wg sync.WaitGroup
	for i, l := range lanes {
		role := store.RoleReplica
		if i == 0 {
			role = store.RolePrimary
		}
		wg.Go(func() {
			st := p.Asker.AskOne(ctx, l, r, time.Now().Add(inspectTimeout), ask.Reading(algorithm.Peek, role, now))
			copies[i] = store.Copy{Address: l.Addr, Role: role, State: st, Exists: st.Holds(r.Limit)}
		})
	}
	wg.Wait()
	return store.Inspection{Shard: m.Name, Copies: copies}
}

// Remove removes a bucket from a shard, under all algorithms. marked keeps it from
// migrating there for a while.
func (p *Operator) Remove(ctx context.Context, shard *Shard, r *store.Request, marked bool) error {
	at := p.await(ctx, shard, r.ClientKey)
	if at == nil {
		return wire.NotExecuted(wire.ErrNoServers)
	}
	// One command for each key: while a slot moves, its keys can be on either node.
	var marks, dels []*wire.Command
	keys := p.Asker.Keys.In(shard.Shard)
	for _, key := range keys.Like(r.Limit, r.ClientKey) {
		marks = append(marks, wire.NewCommand("set", keys.Mark(key), "", "px", resetMark.Milliseconds()))
		del := wire.NewCommand("del", key)
		del.Reads = false
		dels = append(dels, del)
	}
	if marked {
		// A server that is full refuses marks, and also migrations.
		if err := at.Checks.DoAll(ctx, marks...); err != nil && !wire.IsReply(err) {
			return err
		}
	}
	return at.Checks.DoAll(ctx, dels...)
}

// await returns the servers in a shard that hold a client key's buckets, after waiting for
// discovery until ctx ends; nil while none are known.
func (p *Operator) await(ctx context.Context, shard *Shard, clientKey string) *wire.Servers {
	shard.Await(ctx)
	return p.Asker.Keys.Servers(shard.Shard, clientKey)
}
