package simulation

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/internal/simstore"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// scripts are servers that run the store's scripts, by the commands that the store sends.
type scripts struct {
	skew        time.Duration
	primary     *simstore.Server
	replica     *simstore.Server
	replication *simredis.Server
}

// Scripts makes servers of the store's scripts, which the interpreter runs. It serves any number
// of histories, one after the other.
func Scripts(in *simredis.Interpreter) Servers {
	return func(skew time.Duration) servers {
		primary, replica := simredis.New(time.Now, in), simredis.New(time.Now, in)
		primary.Ahead, replica.Ahead = skew, skew
		replica.ReplicaOf(primary)
		return &scripts{skew, simstore.New(primary.Do), simstore.New(replica.Do), replica}
	}
}

func (s *scripts) run(op algorithm.Operation, r store.Request, _ int64) store.State {
	return s.primary.Run(op, r)
}

func (s *scripts) look(r store.Request, now int64, replica bool) store.State {
	if replica {
		st := s.replica.Look(r, store.RoleReplica, now)
		st.Replica = false
		return st
	}
	return s.primary.Look(r, store.RolePrimary, now)
}

func (s *scripts) empty(r store.Request, _ int64) { _ = s.primary.Empty(r) }

func (s *scripts) replicate(until int64) {
	s.replication.Apply(time.UnixMicro(until).Add(-s.skew))
}
