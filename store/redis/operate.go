package redis

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Walk implements [store.Operable]: no bucket is in this process.
func (*Store) Walk([]store.Request, func(i int, clientKey string, st *store.State)) {}

// Len implements [store.Operable].
func (*Store) Len() int { return -1 }

// LastJump implements [store.Operable]. The clocks that decide are those of [Store.Shards].
func (*Store) LastJump() (by time.Duration, at time.Time) { return 0, time.Time{} }

// Inspect implements [store.Operable]. A bucket that has not migrated yet is at
// its previous shard only.
func (s *Store) Inspect(ctx context.Context, r store.Request) store.Inspection {
	found := s.operator.Inspect(ctx, *s.owner(r.ClientKey), r)
	if was := s.previousOwner(r.ClientKey); was != nil {
		previous := s.operator.Inspect(ctx, *was, r)
		found.Previous = &previous
	}
	return found
}

// Recall implements [store.Operable]: the ledger recalls.
func (*Store) Recall(*store.Request) bool { return false }

// Reset implements [store.Store].
func (s *Store) Reset(ctx context.Context, r store.Request) error {
	return s.operator.Reset(ctx, r, s.owner(r.ClientKey), s.previousOwner(r.ClientKey))
}

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string { return s.asker.Keys.Client(clientKey) }

// SetOverride implements [store.Operable]. It is kept on the client's shard.
func (s *Store) SetOverride(ctx context.Context, o store.Override) error {
	var before *Shard
	if was := s.previousOwner(o.ClientKey); was != nil {
		before = was.Shard
	}
	return s.operator.SetOverride(ctx, o, s.owner(o.ClientKey).Shard, before)
}
