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

const (
	// resetTimeout bounds the removal of a bucket, including the search for its servers.
	resetTimeout = 2 * time.Second
	// resetMark is how long a bucket cannot migrate after its reset. Other processes
	// may have read it before; by then their restores have ended.
	resetMark = time.Minute
)

// Inspect returns the copies of a bucket that the servers of a shard have.
func (p *Operator) Inspect(ctx context.Context, m Member, r store.Request) store.Inspection {
	ctx, cancel := p.withinTimeout(ctx)
	defer cancel()
	end, _ := ctx.Deadline()
	at := p.await(ctx, m.Shard, r.ClientKey)
	if at == nil {
		return store.Inspection{Shard: m.Name, Copies: []store.Copy{{Role: store.RolePrimary, State: store.State{Err: wire.NotExecuted(wire.ErrNoServers)}}}}
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

// Reset removes a bucket from its owner, and from its previous owner, which may be nil. It
// also prevents other processes from migrating the bucket at the same time.
func (p *Operator) Reset(ctx context.Context, r store.Request, owner, previous *Member) error {
	// Half a reset is none, so it goes on when its caller leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetTimeout)
	defer cancel()
	if previous != nil {
		if err := p.remove(ctx, previous.Shard, &r, false); err != nil {
			return fmt.Errorf("reset at the previous shard %s: %w", previous.Name, err)
		}
	}
	if err := p.remove(ctx, owner.Shard, &r, previous != nil); err != nil {
		return fmt.Errorf("reset at shard %s: %w", owner.Name, err)
	}
	return nil
}

// remove removes a bucket from a shard, under all algorithms. marked keeps it from
// migrating there for a while.
func (p *Operator) remove(ctx context.Context, shard *Shard, r *store.Request, marked bool) error {
	at := p.await(ctx, shard, r.ClientKey)
	if at == nil {
		return wire.NotExecuted(wire.ErrNoServers)
	}
	// One command for each key: while a slot moves, its keys can be on either node.
	var marks, dels []*wire.Command
	keys, lease := p.asker.Keys.In(shard.Shard), store.Limit{Zone: r.Limit.Zone, Algorithm: store.Concurrency, Window: r.Limit.Window}
	slots := keys.Key(&lease, r.ClientKey)
	for _, key := range keys.Like(r.Limit, r.ClientKey) {
		marks = append(marks, wire.NewCommand("set", keys.Mark(key), "", "px", resetMark.Milliseconds()))
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
	return p.asker.Keys.Servers(shard.Shard, clientKey)
}
