package store

import "time"

// Role is what a server is to its shard.
type Role string

// The roles.
const (
	RolePrimary Role = "primary"
	RoleReplica Role = "replica"
)

// Sharded is a Store that can describe its shards.
type Sharded interface {
	// Shards describes them by what has been observed, without a call.
	Shards() []Shard
}

// Shard is how a shard is.
type Shard struct {
	// Name is the shard's, Kind how its servers are found: static, sentinel or
	// cluster.
	Name, Kind string
	// Retired is set if it owns nothing any more.
	Retired bool
	// Found is set if its servers are known.
	Found bool
	// Servers are those that are known.
	Servers []Server
}

// ServerState says whether a server is used.
type ServerState string

// The states of servers.
const (
	// ServerUp: it is used.
	ServerUp ServerState = "up"
	// ServerUnmet: it has not been reached yet.
	ServerUnmet ServerState = "unmet"
	// ServerLeftOut: calls of it failed, so none are made for a while, for one
	// purpose at least.
	ServerLeftOut ServerState = "left_out"
	// ServerLagging: it is a replica that is too far behind to be asked.
	ServerLagging ServerState = "lagging"
	// ServerForeign: it is the replica of another primary than the shard's.
	ServerForeign ServerState = "foreign"
)

// ServerStates are all of them.
var ServerStates = []ServerState{ServerUp, ServerUnmet, ServerLeftOut, ServerLagging, ServerForeign}

// Server is how a server is.
type Server struct {
	// Address is where it is reached.
	Address string
	// Role is what it is to its shard.
	Role Role
	// State says whether the server is used.
	State ServerState
	// Lag is how far a replica is behind; it means nothing unless LagKnown is
	// set.
	Lag      time.Duration
	LagKnown bool
	// Lanes are the ways to it, one for each purpose.
	Lanes []Lane
}

// Lane is how the way to a server for one purpose is.
type Lane struct {
	// Purpose is what it is for: checks or charges.
	Purpose string
	// Breaker is BreakerClosed, open or half-open.
	Breaker string
	// Latency is the recent average of how long a pipeline takes; 0 if there was
	// none.
	Latency time.Duration
	// Queued is how many calls wait.
	Queued int
	// Pool are the connections.
	Pool Pool
}

// BreakerClosed is the Breaker of a lane that is used.
const BreakerClosed = "closed"

// IsUp reports whether calls are made.
func (l *Lane) IsUp() bool { return l.Breaker == BreakerClosed }

// Pool is how connections are used.
type Pool struct {
	// Connections and Idle are how many there are, and how many of these wait
	// for use.
	Connections, Idle int64
	// Hits and Misses are how often one was there that was wanted, or had to be
	// made. Timeouts are how often none became free in time. Stale are those
	// that were found broken.
	Hits, Misses, Timeouts, Stale int64
}
