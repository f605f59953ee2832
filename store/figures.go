package store

import "time"

// Role is what a server is to its shard.
type Role string

// The roles.
const (
	RolePrimary Role = "primary"
	RoleReplica Role = "replica"
	// RoleSentinel is the role of a sentinel.
	RoleSentinel Role = "sentinel"
	// RoleNode is the role of a node of a cluster whose other role is not known.
	RoleNode Role = "node"
)

// IsSource reports whether a server of that role only names servers, and keeps no counts.
func (r Role) IsSource() bool { return r == RoleSentinel || r == RoleNode }

// ShardFigures are the state of a shard.
type ShardFigures struct {
	// Name is the shard's, Kind how its servers are found: static, sentinel or
	// cluster.
	Name, Kind string
	// Retired is set if it owns nothing any more.
	Retired bool
	// Found is set if its servers are known, and SearchFault is why the last search for them failed, or nil.
	Found       bool
	SearchFault error
	// Unowned is how many slots of a Redis Cluster have no primary.
	Unowned int
	// NoQuorum is why no majority of the given sentinels or nodes leads to the servers that were found, or nil.
	NoQuorum error
	// ReplacedAt is the time of the last change to servers that share no data with the former ones; zero if there was none.
	ReplacedAt time.Time
	// Servers are the given servers and those named in accepted answers, including absent ones. Sources are
	// the given sentinels, and the given nodes that are not among these, or lead elsewhere.
	Servers, Sources []ServerFigures
}

// Twin is a server of one shard that is that of another one before it too.
type Twin struct {
	Shard, Address           string
	OtherShard, OtherAddress string
}

// Twins returns the servers that are those of two shards.
func Twins(shards []ShardFigures) (all []Twin) {
	owners := map[string]Twin{}
	for i := range shards {
		for j := range shards[i].Servers {
			name, server := shards[i].Name, &shards[i].Servers[j]
			switch owner, isOwned := owners[server.ID]; {
			case server.ID == "" || shards[i].Retired:
			case !isOwned:
				owners[server.ID] = Twin{OtherShard: name, OtherAddress: server.Address}
			case owner.OtherShard != name:
				owner.Shard, owner.Address = name, server.Address
				all = append(all, owner)
			}
		}
	}
	return all
}

// ServerState says whether calls of a server are made.
type ServerState string

// The states of servers.
const (
	// ServerUp: it is used.
	ServerUp ServerState = "up"
	// ServerUnmet: it has not been reached yet.
	ServerUnmet ServerState = "unmet"
	// ServerLeftOut: calls of it failed, so none are made for a while, for one
	// purpose at least; or it is down, or no longer named.
	ServerLeftOut ServerState = "left_out"
	// ServerLagging: it is a replica that is too far behind to be asked.
	ServerLagging ServerState = "lagging"
	// ServerForeign: it is the replica of another primary than the shard's, or a sentinel or node that leads to one.
	ServerForeign ServerState = "foreign"
)

// ServerStates are all of them.
var ServerStates = []ServerState{ServerUp, ServerUnmet, ServerLeftOut, ServerLagging, ServerForeign}

// ServerFigures are the state of a server.
type ServerFigures struct {
	Address string
	// ID is that of the server's process, whatever its address; empty if it is not known.
	ID    string
	Role  Role
	State ServerState
	// Lag is how far a replica is behind; it means nothing unless LagKnown is
	// set.
	Lag      time.Duration
	LagKnown bool
	// Jump is by how much a primary's clock was last set, at JumpedAt; zero if it was not.
	Jump     time.Duration
	JumpedAt time.Time
	// Fault is why a server without lanes is not used, or nil.
	Fault error
	// Faults are what is set up wrongly there, each with the remedy.
	Faults []string
	// Unidentified is why a replacement of the server would go unnoticed, with the remedy; empty if it would not.
	Unidentified string
	// Lanes are the ways to it, one for each purpose.
	Lanes []LaneFigures
}

// What calls of a server are for.
const (
	// PurposeChecks is for checks and takes.
	PurposeChecks = "checks"
	// PurposeCharges is for charges, refunds and penalties.
	PurposeCharges = "charges"
)

// LaneFigures are the state of the connections to a server for one purpose.
type LaneFigures struct {
	// Purpose is PurposeChecks or PurposeCharges.
	Purpose string
	// Breaker is BreakerClosed, open, half-open or BreakerUnfit.
	Breaker string
	// Fault is the last error that spoke against the server, or nil; it means nothing while calls
	// are made.
	Fault error
	// Latency is the recent average of how long a pipeline takes; 0 if there was
	// none.
	Latency time.Duration
	Queued  int
	Pool    PoolFigures
}

// BreakerClosed is the Breaker of a lane that is used.
const BreakerClosed = "closed"

// BreakerUnfit is the Breaker of a lane to a server that answers, and is of a kind that cannot keep
// buckets.
const BreakerUnfit = "unfit"

// IsUp reports whether calls are made.
func (l *LaneFigures) IsUp() bool { return l.Breaker == BreakerClosed }

// PoolFigures are the state of a pool of connections.
type PoolFigures struct {
	// Connections is their number, and Idle how many of them are not in use.
	Connections, Idle int64
	// Hits counts the calls that found an idle connection, Misses those that made
	// one, and Timeouts those that got none in time. Stale counts the broken
	// connections that were found.
	Hits, Misses, Timeouts, Stale int64
}
