package store

// Diagnosis is the report of [Operable.Diagnose].
type Diagnosis struct {
	// Shards are empty if the store has no servers.
	Shards   []ShardDiagnosis `json:"shards,omitempty"`
	Findings []Finding        `json:"findings"`
}

// ShardDiagnosis is the report on a shard.
type ShardDiagnosis struct {
	Name string `json:"name"`
	// Kind is how its servers are found: static, sentinel or cluster.
	Kind string `json:"kind"`
	// Retired is set if it owns nothing any more.
	Retired bool              `json:"retired"`
	Servers []ServerDiagnosis `json:"servers"`
	// Keyspace is what its keys have in common: equal keyspaces of one server have the
	// same buckets.
	Keyspace string `json:"-"`
}

// ServerDiagnosis is the report on a server. What is empty is unknown.
type ServerDiagnosis struct {
	Address string `json:"address"`
	// ID is that of the server's process, whatever its address.
	ID string `json:"-"`
	// Role is the one for which the store takes the server.
	Role Role `json:"role"`
	// Reachable is set if it answers, with an error at least.
	Reachable bool `json:"reachable"`
	// Version begins with the name of the server if that is not Redis.
	Version string `json:"version,omitempty"`
	// RoundTrip is the shortest one, in seconds.
	RoundTrip float64 `json:"round_trip_seconds,omitempty"`
	// Lag is how many seconds a replica is behind, at least.
	Lag *float64 `json:"lag_seconds,omitempty"`
	// EvictionPolicy is what the server does when its memory is full.
	EvictionPolicy string `json:"maxmemory_policy,omitempty"`
	// Persistence is appendonly, snapshots or off.
	Persistence string `json:"persistence,omitempty"`
	// MissingRights are the commands that the store sends and the configured user may not
	// run; nil if that is unknown.
	MissingRights []string `json:"missing_rights,omitzero"`
	// ClockSkew is the lead of the server's clock over this machine's, in seconds.
	ClockSkew *float64 `json:"clock_skew_seconds,omitempty"`
}

// Severity says how bad a [Finding] is.
type Severity string

// The severities.
const (
	// SeverityError: requests would not be limited as configured.
	SeverityError Severity = "error"
	// SeverityWarning: the store works, and is less safe than it could be.
	SeverityWarning Severity = "warning"
	// SeverityNote: nothing is wrong.
	SeverityNote Severity = "note"
)

// Finding is something that an operator should know of.
type Finding struct {
	Severity Severity `json:"severity"`
	// Code names the kind of the finding, for programs.
	Code string `json:"code"`
	// Shard and Address say where; they are empty if it is everywhere.
	Shard   string `json:"shard,omitempty"`
	Address string `json:"address,omitempty"`
	// Problem says what is wrong, and Remedy what to do about it.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}
