package operate

import (
	"slices"
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
	if f.Found {
		f.NoQuorum = wire.QuorumFault(standing.Sources, s.InCluster)
	}
	for _, at := range s.Servers() {
		primary := s.serverFigures(store.RolePrimary, at.Checks, at.Charges)
		primary.Jump, primary.JumpedAt = at.Clock.LastJump()
		f.Servers = append(f.Servers, primary)
		for _, replica := range at.Replicas {
			f.Servers = append(f.Servers, s.serverFigures(store.RoleReplica, replica))
		}
	}
	for _, absent := range s.Absent() {
		role := store.RoleReplica
		if absent.HasSlots {
			role = store.RolePrimary
		}
		f.Servers = append(f.Servers, store.ServerFigures{Address: absent.Addr, Role: role, State: store.ServerLeftOut, Fault: absent.Fault})
	}
	for i := range standing.Sources {
		source := sourceFigures(&standing.Sources[i], s.InCluster)
		isListed := slices.ContainsFunc(f.Servers, func(other store.ServerFigures) bool { return other.Address == source.Address })
		if !isListed || source.State == store.ServerForeign {
			f.Servers = append(f.Servers, source)
		}
	}
	return f
}

// sourceFigures describes a given sentinel or node.
func sourceFigures(source *wire.Source, inCluster bool) store.ServerFigures {
	f := store.ServerFigures{Address: source.Addr, Role: store.RoleSentinel, State: store.ServerUp}
	if inCluster {
		f.Role = store.RoleNode
	}
	switch {
	case source.IsForeign:
		f.State, f.Fault = store.ServerForeign, source.Fault()
	case source.IsSilent:
		f.State, f.Fault = store.ServerLeftOut, source.Err
	}
	return f
}

func (s *Shard) serverFigures(role store.Role, lanes ...*wire.Lane) store.ServerFigures {
	addr := lanes[0].Addr
	s.mu.Lock()
	seen, met := s.met[addr]
	s.mu.Unlock()
	f := store.ServerFigures{Address: addr, ID: seen.id, Role: role, State: store.ServerUp}
	for what, fault := range seen.faults {
		switch {
		case fault == nil:
		case what == faultIdentity:
			f.Unidentified = fault.Error()
		default:
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
