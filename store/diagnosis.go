package store

import (
	"context"
	"time"
)

// Diagnoser is a Store that can report whether its servers are fit for it.
type Diagnoser interface {
	// Diagnose calls every server, through connections of its own, until ctx ends. It
	// needs no call before and changes no bucket.
	Diagnose(ctx context.Context) Diagnosis
}

// Diagnosis is the report of a [Diagnoser].
type Diagnosis struct {
	// Shards are empty if the store has no servers.
	Shards   []ShardDiagnosis
	Findings []Finding
}

// ShardDiagnosis is the report on a shard.
type ShardDiagnosis struct {
	// Name is the shard's, Kind how its servers are found: static, sentinel or
	// cluster.
	Name, Kind string
	// Retired is set if it owns nothing any more.
	Retired bool
	Servers []ServerDiagnosis
}

// The roles of servers that only a diagnosis shows.
const (
	// RoleSentinel is that of a sentinel.
	RoleSentinel Role = "sentinel"
	// RoleNode is that of a configured node of a cluster which does not name it.
	RoleNode Role = "node"
)

// ServerDiagnosis is the report on a server. What is empty is unknown.
type ServerDiagnosis struct {
	Address string
	// Role is the one for which the store takes the server.
	Role Role
	// Reachable is set if it answers, with an error at least.
	Reachable bool
	// Version begins with the name of the server if that is not Redis.
	Version string
	// RoundTrip is the shortest one.
	RoundTrip time.Duration
	// Lag is how far a replica is behind; at least that much if LagsOn is set, because
	// the replica did not catch up during the diagnosis. It means nothing unless LagKnown
	// is set.
	Lag              time.Duration
	LagKnown, LagsOn bool
	// EvictionPolicy is what the server does when its memory is full.
	EvictionPolicy string
	// Persistence is appendonly, snapshots or off.
	Persistence string
	// RightsKnown is set if the rights were examined; MissingRights are the commands that
	// the store sends and the configured user may not run.
	RightsKnown   bool
	MissingRights []string
	// Skew is the lead of the server's clock over this machine's. It means nothing unless
	// SkewKnown is set.
	Skew      time.Duration
	SkewKnown bool
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
	Severity Severity
	// Code names the kind of the finding, for programs.
	Code string
	// Shard and Address say where; they are empty if it is everywhere.
	Shard, Address string
	// Problem says what is wrong, and Remedy what to do about it.
	Problem, Remedy string
}
