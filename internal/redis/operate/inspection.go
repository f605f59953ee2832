package operate

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// resetTimeout bounds the removal of a bucket, including the search for its servers.
const resetTimeout = 2 * time.Second

// Inspect returns the copies of a bucket that the servers of a shard have.
func (p *Operator) Inspect(ctx context.Context, m Member, r store.Request) store.Inspection {
	ctx, cancel := p.withinTimeout(ctx)
	defer cancel()
	end, _ := ctx.Deadline()
	at := p.await(ctx, m.Shard, r.ClientKey)
	if at == nil {
		return store.Inspection{Shard: m.Name, Copies: []store.Copy{{Role: store.RolePrimary, State: store.State{Err: store.NotExecuted(wire.ErrNoServers)}}}}
	}
	now, _ := p.asker.TimeAt(at, time.Now())
	lanes := append([]*wire.Lane{at.Checks}, at.Replicas...)
	copies := make([]store.Copy, len(lanes))
	var wg sync.WaitGroup
	for i, l := range lanes {
		role := store.RoleReplica
		if i == 0 {
			role = store.RolePrimary
		}
		wg.Go(func() {
			st := p.asker.AskOne(ctx, l, r, end, ask.Inspecting(role, now))
			if wire.Says(st.Err, wire.Lacking) {
				r := r
				r.Hold = 0
				st = p.asker.AskOne(ctx, l, r, end, ask.Reading(algorithm.Peek, role, now))
			}
			copies[i] = store.Copy{Address: l.Addr, Role: role, State: st, Exists: st.Holds(r.Limit)}
		})
	}
	wg.Wait()
	return store.Inspection{Shard: m.Name, Copies: copies}
}

// Reset removes a bucket from its owners, under all algorithms.
func (p *Operator) Reset(ctx context.Context, r store.Request, owners []*Member) error {
	// Half a reset is none, so it goes on when its caller leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetTimeout)
	defer cancel()
	for _, m := range owners {
		if err := p.remove(ctx, m.Shard, &r); err != nil {
			return fmt.Errorf("reset at shard %s: %w", m.Name, err)
		}
	}
	return nil
}

func (p *Operator) remove(ctx context.Context, shard *Shard, r *store.Request) error {
	at := p.await(ctx, shard, r.ClientKey)
	if at == nil {
		return store.NotExecuted(wire.ErrNoServers)
	}
	// One command for each key: while a slot moves, its keys can be on either node.
	var dels []*wire.Command
	keys, lease := p.asker.Keys.In(shard.Shard), store.Limit{Zone: r.Limit.Zone, Algorithm: store.Concurrency, Window: r.Limit.Window}
	slots := keys.Key(&lease, r.ClientKey)
	for _, key := range keys.Like(r.Limit, r.ClientKey) {
		doomed := []string{ask.Held(key), key} // a take of the new bucket keeps its hold
		if key == slots {
			doomed = doomed[1:]
		}
		for _, key := range doomed {
			del := wire.NewCommand("del", key)
			del.Reads = false
			dels = append(dels, del)
		}
	}
	return at.Checks.DoAll(ctx, dels...)
}

// await returns the servers in a shard that hold a client key's buckets, after waiting for
// discovery until ctx ends; nil while none are known.
func (p *Operator) await(ctx context.Context, shard *Shard, clientKey string) *wire.Servers {
	shard.Await(ctx)
	return p.asker.Keys.Servers(shard.Shard, clientKey)
}
