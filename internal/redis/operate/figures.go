package operate

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Shards describes the shards of the store, those that own nothing any more at the end.
func (p *Operator) Shards() []store.ShardFigures {
	var all []store.ShardFigures
	for _, m := range p.members {
		all = append(all, m.Shard.figures(m.Name))
	}
	for _, m := range p.retired() {
		retired := m.Shard.figures(m.Name)
		retired.Retired = true
		all = append(all, retired)
	}
	return all
}

// figures describes the shard, which a store knows by this name.
func (s *Shard) figures(name string) store.ShardFigures {
	standing := s.Standing()
	f := store.ShardFigures{Name: name, Kind: s.Kind, Found: s.IsFound(), SearchFault: s.SearchFault(), Unowned: s.Unowned(), ReplacedAt: standing.Replaced}
	for i := range standing.Foreign {
		f.Foreign = append(f.Foreign, store.ForeignSource{Address: standing.Foreign[i].Source, Fault: standing.Foreign[i].Fault().Error()})
	}
	for _, at := range s.Servers() {
		primary := s.serverFigures(store.RolePrimary, at.Checks, at.Charges)
		primary.Jump, primary.JumpedAt = at.Clock.LastJump()
		f.Servers = append(f.Servers, primary)
		for _, replica := range at.Replicas {
			f.Servers = append(f.Servers, s.serverFigures(store.RoleReplica, replica))
		}
	}
	return f
}

func (s *Shard) serverFigures(role store.Role, lanes ...*wire.Lane) store.ServerFigures {
	addr := lanes[0].Addr
	s.mu.Lock()
	seen, met := s.met[addr]
	s.mu.Unlock()
	f := store.ServerFigures{Address: addr, ID: seen.id, Role: role, State: store.ServerUp}
	for _, fault := range seen.faults {
		if fault != nil {
			f.Faults = append(f.Faults, fault.Error())
		}
	}
	if !met {
		f.State = store.ServerUnmet
	}
	if role == store.RoleReplica {
		switch lag := time.Duration(lanes[0].Lag.Load()); {
		case lag == foreign:
			f.State = store.ServerForeign
		case lag == unsynced:
			f.State = store.ServerLagging
		case lag != wire.UnknownLag:
			f.Lag, f.LagKnown = lag, true
			if s.lags(lag) {
				f.State = store.ServerLagging
			}
		}
	}
	for _, l := range lanes {
		if !l.IsUp() {
			f.State = store.ServerLeftOut
		}
		f.Lanes = append(f.Lanes, l.Figures())
	}
	return f
}
