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

const (
	// inspectTimeout bounds a look at one bucket. No request waits for it.
	inspectTimeout = 500 * time.Millisecond
	// resetTimeout bounds the removal of a bucket, including the search for its
	// servers.
	resetTimeout = 2 * time.Second
	// resetMark is how long a bucket cannot migrate after its reset. Other processes
	// may have read it before; by then their restores have ended.
	resetMark = time.Minute
)

// Walk implements [store.Operable]: no bucket is in this process.
func (*Store) Walk([]store.Request, func(i int, clientKey string, st *store.State)) {}

// Len implements [store.Operable].
func (*Store) Len() int { return -1 }

// LastJump implements [store.Operable]. The clocks that decide are those of [Store.Shards].
func (*Store) LastJump() (by time.Duration, at time.Time) { return 0, time.Time{} }

// Shards implements [store.Operable].
func (s *Store) Shards() []store.Shard {
	var all []store.Shard
	for _, m := range s.opts.Members {
		all = append(all, m.Shard.figures(m.Name))
	}
	for _, m := range s.retired() {
		retired := m.Shard.figures(m.Name)
		retired.Retired = true
		all = append(all, retired)
	}
	return all
}

// retired returns the shards that own nothing any more.
func (s *Store) retired() []Member {
	return slices.DeleteFunc(slices.Clone(s.opts.Previous), func(p Member) bool {
		return slices.ContainsFunc(s.opts.Members, func(m Member) bool { return m.Name == p.Name })
	})
}

// figures describes the shard, which a store knows by this name.
func (s *Shard) figures(name string) store.Shard {
	t := s.topology.Load()
	f := store.Shard{Name: name, Kind: s.kind, Found: t != nil}
	if t == nil {
		return f
	}
	for _, at := range t.servers {
		primary := s.serverFigures(store.RolePrimary, at.checks, at.charges)
		primary.Jump, primary.JumpedAt = at.clock.lastJump()
		f.Servers = append(f.Servers, primary)
		for _, replica := range at.replicas {
			f.Servers = append(f.Servers, s.serverFigures(store.RoleReplica, replica))
		}
	}
	return f
}

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
		switch lag := time.Duration(lanes[0].lag.Load()); {
		case lag == foreign:
			f.State = store.ServerForeign
		case lag == unsynced:
			f.State = store.ServerLagging
		case lag != unknownLag:
			f.Lag, f.LagKnown = lag, true
			if s.lags(lag) {
				f.State = store.ServerLagging
			}
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
	return store.Lane{
		Purpose: string(l.purpose()),
		Breaker: l.breaker.State().String(),
		Latency: time.Duration(l.pace.Load()),
		Queued:  l.queue.len() + int(l.awaiting.Load()),
		Pool: store.Pool{
			Connections: int64(pool.TotalConns), Idle: int64(pool.IdleConns),
			Hits: int64(pool.Hits), Misses: int64(pool.Misses), Timeouts: int64(pool.Timeouts), Stale: int64(pool.StaleConns),
		},
	}
}

// Twins returns the addresses of two servers of different shards that are the same
// server; empty if there are none.
func (s *Store) Twins() (first, second string) {
	owners := map[string]string{}
	seen := map[*Shard]bool{}
	for _, m := range s.opts.Members {
		if seen[m.Shard] {
			continue
		}
		seen[m.Shard] = true
		m.Shard.mu.Lock()
		for addr, sight := range m.Shard.met {
			if other, ok := owners[sight.id]; ok && sight.id != "" && first == "" {
				first, second = other, addr
			}
		}
		for addr, sight := range m.Shard.met {
			owners[sight.id] = addr
		}
		m.Shard.mu.Unlock()
	}
	return first, second
}

// Inspect implements [store.Operable]. A bucket that has not migrated yet is at
// its previous shard only.
func (s *Store) Inspect(ctx context.Context, r store.Request) store.Inspection {
	found := s.copies(ctx, s.opts.Members[s.sharder.owner(r.ClientKey)], r)
	if was := s.previousOwner(r.ClientKey); was != nil {
		previous := s.copies(ctx, *was, r)
		found.Previous = &previous
	}
	return found
}

func (s *Store) copies(ctx context.Context, m Member, r store.Request) store.Inspection {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	at := s.awaitServersOf(ctx, m.Shard, r.ClientKey)
	if at == nil {
		return store.Inspection{Shard: m.Name, Copies: []store.Copy{{Role: store.RolePrimary, State: store.State{Err: notExecuted(errNoServers)}}}}
	}
	now, _ := s.timeAt(at, time.Now())
	lanes := append([]*lane{at.checks}, at.replicas...)
	copies := make([]store.Copy, len(lanes))
	var wg sync.WaitGroup
	for i, l := range lanes {
		role := store.RoleReplica
		if i == 0 {
			role = store.RolePrimary
		}
		wg.Go(func() {
			st := s.askOne(ctx, l, r, time.Now().Add(inspectTimeout), reading(algorithm.Peek, role, now))
			copies[i] = store.Copy{Address: l.addr, Role: role, State: st, Exists: st.Holds(r.Limit)}
		})
	}
	wg.Wait()
	return store.Inspection{Shard: m.Name, Copies: copies}
}

// Reset implements [store.Store]. It also prevents other processes from migrating
// the bucket at the same time.
func (s *Store) Reset(ctx context.Context, r store.Request) error {
	// Half a reset is none, so it goes on when its caller leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetTimeout)
	defer cancel()
	was := s.previousOwner(r.ClientKey)
	if was != nil {
		if err := s.remove(ctx, was.Shard, &r, false); err != nil {
			return fmt.Errorf("reset at the previous shard %s: %w", was.Name, err)
		}
	}
	now := &s.opts.Members[s.sharder.owner(r.ClientKey)]
	if err := s.remove(ctx, now.Shard, &r, was != nil); err != nil {
		return fmt.Errorf("reset at shard %s: %w", now.Name, err)
	}
	return nil
}

// remove removes a bucket from a shard, under all algorithms. marked keeps it from
// migrating there for a while.
func (s *Store) remove(ctx context.Context, shard *Shard, r *store.Request, marked bool) error {
	at := s.awaitServersOf(ctx, shard, r.ClientKey)
	if at == nil {
		return notExecuted(errNoServers)
	}
	// One command for each key: while a slot moves, its keys can be on either node.
	var marks, dels []*command
	keys := s.keysIn(shard)
	for _, limit := range rulesLike(r.Limit) {
		key := keys.key(&limit, r.ClientKey)
		marks = append(marks, newPlain("set", keys.markOf(key), "", "px", resetMark.Milliseconds()))
		del := newPlain("del", key)
		del.reads = false
		dels = append(dels, del)
	}
	if marked {
		// A server that is full refuses marks, and also migrations.
		if err := at.checks.doPlain(ctx, marks...); err != nil && !isReply(err) {
			return err
		}
	}
	return at.checks.doPlain(ctx, dels...)
}

// rulesLike returns the limit and those of the same zone and window under other
// algorithms, which other processes may have in an older or newer configuration.
func rulesLike(limit *store.Limit) (all []store.Limit) {
	if limit.Calendar.Unit != "" {
		return []store.Limit{*limit}
	}
	like := *limit
	for like.Algorithm = range store.Algorithms {
		if like.Align = false; algorithm.Of(like.Algorithm).Windowed {
			aligned := like
			aligned.Align = true
			all = append(all, aligned)
		}
		all = append(all, like)
	}
	return all
}
