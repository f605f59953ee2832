package redis

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// inspectPatience bounds the question to each server about one bucket. Nobody's
// request waits for it.
const inspectPatience = 500 * time.Millisecond

// Inspect implements [store.Inspector]. A bucket that is yet to be brought from
// its former shard is there only.
func (s *Store) Inspect(ctx context.Context, r store.Request) store.Inspection {
	place := s.sharder.owner(r.ClientKey)
	found := s.copies(ctx, s.opts.Members[place].Name, s.shards[place], r)
	if was := s.formerOf(r.ClientKey); was != nil {
		former := s.copies(ctx, s.former.name(r.ClientKey), was, r)
		found.Former = &former
	}
	return found
}

// copies are those of a bucket at the servers of a shard.
func (s *Store) copies(ctx context.Context, name string, shard *Shard, r store.Request) store.Inspection {
	ctx, cancel := context.WithTimeout(ctx, inspectPatience)
	defer cancel()
	at := s.at(ctx, shard, r.ClientKey)
	if at == nil {
		return store.Inspection{Shard: name, Copies: []store.Copy{{Role: store.RolePrimary, State: store.State{Err: notExecuted(errNoServers)}}}}
	}
	now, _ := s.timeAt(at, time.Now())
	lanes := append([]*lane{at.checks}, at.replicas...)
	copies := make([]store.Copy, len(lanes))
	var wg sync.WaitGroup
	for i, l := range lanes {
		op := reading(algorithm.Peek, at, now)
		if i == 0 {
			op = peeking(at, now)
		}
		wg.Go(func() { copies[i] = s.copyAt(ctx, l, op, r) })
	}
	wg.Wait()
	return store.Inspection{Shard: name, Copies: copies}
}

func (s *Store) copyAt(ctx context.Context, l *lane, op operation, r store.Request) store.Copy {
	states := make([]store.State, 1)
	s.ask(ctx, l, whole([]store.Request{r}, states), time.Now().Add(inspectPatience), op)
	return store.Copy{Address: l.addr, Role: op.role(), State: states[0], Exists: states[0].Holds(r.Limit)}
}

var _ store.Inspector = (*Store)(nil)
