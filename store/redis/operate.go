package redis

import (
	"context"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// resetTimeout bounds the removal of a bucket, including the search for its servers.
const resetTimeout = 2 * time.Second

// Walk implements [store.Operable]: no bucket is in this process.
func (*Store) Walk([]store.Request, func(i int, clientKey string, st *store.State)) {}

// Len implements [store.Operable].
func (*Store) Len() int { return -1 }

// LastJump implements [store.Operable]. The clocks that decide are those of [Store.Shards].
func (*Store) LastJump() (by time.Duration, at time.Time) { return 0, time.Time{} }

// Inspect implements [store.Operable]. A bucket that has not migrated yet is at
// its previous shard only.
func (s *Store) Inspect(ctx context.Context, r store.Request) store.Inspection {
	found := s.Operator.Inspect(ctx, *s.owner(r.ClientKey), r)
	if was := s.previousOwner(r.ClientKey); was != nil {
		previous := s.Operator.Inspect(ctx, *was, r)
		found.Previous = &previous
	}
	return found
}

// Reset implements [store.Store]. It also prevents other processes from migrating
// the bucket at the same time.
func (s *Store) Reset(ctx context.Context, r store.Request) error {
	// Half a reset is none, so it goes on when its caller leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetTimeout)
	defer cancel()
	was := s.previousOwner(r.ClientKey)
	if was != nil {
		if err := s.Remove(ctx, was.Shard, &r, false); err != nil {
			return fmt.Errorf("reset at the previous shard %s: %w", was.Name, err)
		}
	}
	now := s.owner(r.ClientKey)
	if err := s.Remove(ctx, now.Shard, &r, was != nil); err != nil {
		return fmt.Errorf("reset at shard %s: %w", now.Name, err)
	}
	return nil
}

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string { return s.asker.Keys.Client(clientKey) }

// SetOverride implements [store.Operable]. It is kept on the client's shard.
func (s *Store) SetOverride(ctx context.Context, o store.Override) error {
	var before *Shard
	if was := s.previousOwner(o.ClientKey); was != nil {
		before = was.Shard
	}
	return s.Operator.SetOverride(ctx, o, s.owner(o.ClientKey).Shard, before)
}
