package store

import (
	"context"
	"time"
)

// Operable is a Store that operators may ask, and whose state programs show. No bucket
// changes by it.
type Operable interface {
	Store

	// Inspect returns all copies of a bucket. The request says what the states are about; its
	// cost should be 0.
	Inspect(ctx context.Context, r Request) Inspection
	// Recall makes r, which is about a bucket that is in this process, ask for the Events and
	// Burst of the last request, and reports whether that is known. It is not if the store is
	// [Remote], whose ledger recalls.
	Recall(r *Request) bool
	// Walk visits the buckets of the limits of reqs that are in this process, without a call
	// and in no order: none if the store is [Remote], whose ledger walks. It
	// calls visit with the index of the request, the client key, and what the bucket's last
	// request, or one like that of reqs where that is not known, would see. It leaves out those
	// of which neither says how many Events there are. A lock may be held during visit. Where
	// buckets come or go meanwhile, some may be left out, or visited twice.
	Walk(reqs []Request, visit func(i int, clientKey string, st *State))
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

	// SetOverride begins an override, in place of one of the same kind, zone and client. It
	// is kept beside the buckets and as durably. Beyond MaxOverrides it is an error.
	SetOverride(ctx context.Context, o Override) error
	// RemoveOverride ends one, and reports whether there was one. The client key may be a kept
	// one.
	RemoveOverride(ctx context.Context, kind OverrideKind, zone, clientKey string) (removed bool, err error)
	// Overrides returns those that have not ended, in no order. What cannot be read is
	// an error; the others are returned with it.
	Overrides(ctx context.Context) ([]Override, error)
	// KeptKey returns the form by which a client key, or its kept form, is known to the
	// store. It may hide the client key.
	KeptKey(clientKey string) string
}
