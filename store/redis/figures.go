package redis

import (
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

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
