package redis

import (
	"context"
	"fmt"
	"slices"
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

// Shards implements [store.Sharded].
func (s *Store) Shards() []store.Shard {
	var all []store.Shard
	for _, m := range s.opts.Members {
		all = append(all, m.Shard.figures(m.Name))
	}
	for _, m := range s.opts.Former {
		if slices.ContainsFunc(all, func(other store.Shard) bool { return other.Name == m.Name }) {
			continue
		}
		retired := m.Shard.figures(m.Name)
		retired.Retired = true
		all = append(all, retired)
	}
	return all
}

// figures tell how the shard is, which a store calls so.
func (s *Shard) figures(name string) store.Shard {
	t := s.topology.Load()
	f := store.Shard{Name: name, Kind: s.kind(), Found: t != nil}
	if t == nil {
		return f
	}
	for _, at := range t.servers {
		f.Servers = append(f.Servers, s.serverFigures(store.RolePrimary, at.checks, at.charges))
		for _, replica := range at.replicas {
			f.Servers = append(f.Servers, s.serverFigures(store.RoleReplica, replica))
		}
	}
	return f
}

// kind is how the servers are found.
func (s *Shard) kind() string {
	switch {
	case s.cluster != nil:
		return "cluster"
	case s.finder != nil:
		return "sentinel"
	default:
		return "static"
	}
}

// serverFigures tell how the server is that these lanes lead to.
func (s *Shard) serverFigures(role store.Role, lanes ...*lane) store.Server {
	addr := lanes[0].addr
	s.mu.Lock()
	_, met := s.met[addr]
	s.mu.Unlock()
	f := store.Server{Address: addr, Role: role, State: store.ServerUp}
	if !met {
		f.State = store.ServerUnmet
	}
	if role == store.RoleReplica {
		lag := time.Duration(lanes[0].lag.Load())
		f.Lag, f.LagKnown = lag, lag != unknownLag && lag != foreign
		switch {
		case !lanes[0].lags.Load():
		case lag == foreign:
			f.State = store.ServerForeign
		default:
			f.State = store.ServerLagging
		}
		if !f.LagKnown {
			f.Lag = 0
		}
	}
	for _, l := range lanes {
		if !l.isUp() {
			f.State = store.ServerLeftOut
		}
		f.Lanes = append(f.Lanes, l.figures())
	}
	return f
}

func (l *lane) figures() store.Lane {
	pool := l.client.Load().PoolStats()
	f := store.Lane{
		Purpose: string(RoleChecks),
		Breaker: l.breaker.State().String(),
		Latency: time.Duration(l.pace.Load()),
		Queued:  l.queue.len() + int(l.awaiting.Load()),
		Pool: store.Pool{
			Connections: int64(pool.TotalConns), Idle: int64(pool.IdleConns),
			Hits: int64(pool.Hits), Misses: int64(pool.Misses), Timeouts: int64(pool.Timeouts), Stale: int64(pool.StaleConns),
		},
	}
	if l.persistent {
		f.Purpose = string(RoleCharges)
	}
	return f
}

var _ store.Sharded = (*Store)(nil)

const (
	// resetPatience bounds the removal of a bucket from a server, and the search
	// for the servers.
	resetPatience = 2 * time.Second
	// resetMark is how long a bucket that was reset is not brought from its former
	// owner: what other processes had read there before is on its way no longer.
	resetMark = time.Minute
)

// Reset implements [store.Resetter]. What other processes bring from the former
// shard meanwhile is removed as well, or kept away.
func (s *Store) Reset(ctx context.Context, r store.Request) error {
	// It is brought to its end although whoever asked for it leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetPatience)
	defer cancel()
	was := s.formerOf(r.ClientKey)
	if was != nil {
		if err := s.remove(ctx, was, &r, false); err != nil {
			return fmt.Errorf("reset at the former shard %s: %w", s.former.name(r.ClientKey), err)
		}
	}
	place := s.sharder.owner(r.ClientKey)
	if err := s.remove(ctx, s.shards[place], &r, was != nil); err != nil {
		return fmt.Errorf("reset at shard %s: %w", s.opts.Members[place].Name, err)
	}
	return nil
}

// remove removes a bucket from a shard, under whatever algorithm it is kept. If it
// had another owner, it is not brought from there for a while.
func (s *Store) remove(ctx context.Context, shard *Shard, r *store.Request, moved bool) error {
	at := s.at(ctx, shard, r.ClientKey)
	if at == nil {
		return notExecuted(errNoServers)
	}
	// One by one: while a slot moves, its keys can be on either node.
	var marks, dels []*command
	for _, limit := range rulesLike(r.Limit) {
		key := s.keyIn(shard, &store.Request{Limit: &limit, ClientKey: r.ClientKey})
		marks = append(marks, newPlain("set", s.keysIn(shard).markOf(key), "", "px", resetMark.Milliseconds()))
		del := newPlain("del", key)
		del.reads = false
		dels = append(dels, del)
	}
	if moved {
		// A server that is full takes no marks, and nothing that is brought either.
		if err := at.checks.doPlain(ctx, marks...); err != nil && !isRefusal(err) {
			return err
		}
	}
	return at.checks.doPlain(ctx, dels...)
}

// rulesLike are the limit and those of the same zone and window that count in
// another way: some processes may have a config in which the zone was, or will
// be, such a one.
func rulesLike(limit *store.Limit) (all []store.Limit) {
	like := *limit
	for _, like.Algorithm = range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA, store.Concurrency} {
		if like.Align = false; like.Algorithm == store.FixedWindow {
			aligned := like
			aligned.Align = true
			all = append(all, aligned)
		}
		all = append(all, like)
	}
	return all
}

var _ store.Resetter = (*Store)(nil)
