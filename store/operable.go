package store

import (
	"context"
	"time"
)

// Operable is a Store that operators may ask, and whose state programs show. No bucket
// changes by it.
type Operable interface {
	Store
	Records

	// Inspect returns all copies of a bucket. The request says what the states are about; its
	// cost should be 0.
	Inspect(ctx context.Context, r Request) Inspection
	// Recall makes r, which is about a bucket that is in this process, ask for the Events and
	// Burst of the last request, and reports whether that is known. It is not if the store is
	// [Remote], whose ledger recalls.
	Recall(r *Request) bool
	// Walk visits the buckets of the limits of reqs that are in this process, without a call
	// and in no order: none if the store is [Remote], whose ledger walks. It calls about with
	// the index of the request, and a copy of it with the client key and, where that is known,
	// the Events and Burst of the last request; about may set these, or leave out the bucket.
	// It calls visit with what the copy sees. A lock may be held meanwhile. Where buckets come
	// or go, some may be left out, or visited twice.
	Walk(reqs []Request, about func(i int, r *Request) bool, visit func(i int, clientKey string, st *State))
	// Len returns the number of buckets that are in this process, or -1 if the store keeps
	// none there.
	Len() int

	// Shards returns the state of the shards, from calls made so far; it makes none. It is
	// empty if there are none.
	Shards() []ShardFigures
	// LastJump returns by how much this machine's clock was set last, and when; zero if it
	// was not, or the clock of another machine decides.
	LastJump() (by time.Duration, at time.Time)
	// Diagnose reports whether the servers are fit for the store. It calls every server,
	// through connections of its own, until ctx ends. It needs no call before.
	Diagnose(ctx context.Context) Diagnosis

	// ChangeOverrides makes changes in their order, and returns what became of each. Overrides are
	// kept beside the buckets and as durably, up to MaxOverrides. The client key of a change may be
	// a kept one.
	ChangeOverrides(ctx context.Context, changes []OverrideChange) []OverrideOutcome
	// Overrides returns the overrides that had not ended at the last change. If nothing has changed,
	// the set is the one that the last call returned. If a shard does not answer, it returns an error
	// and the overrides that are known.
	Overrides(ctx context.Context) (*OverrideSet, error)
	// Audit returns the last changes, up to MaxAudited, the latest first.
	Audit(ctx context.Context) ([]Audited, error)

	// KeptKey returns the form by which a client key, or its kept form, is known to the
	// store. It may hide the client key.
	KeptKey(clientKey string) string
}
