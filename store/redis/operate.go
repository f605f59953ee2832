package redis

import (
	"context"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis/operate"
)

// resetTimeout bounds the removal of a bucket, including the search for its servers.
const resetTimeout = 2 * time.Second

// Walk implements [store.Operable]: no bucket is in this process.
func (*Store) Walk([]store.Request, func(i int, clientKey string, st *store.State)) {}

// Len implements [store.Operable].
func (*Store) Len() int { return -1 }

// LastJump implements [store.Operable]. The clocks that decide are those of [Store.Shards].
func (*Store) LastJump() (by time.Duration, at time.Time) { return 0, time.Time{} }

// Shards implements [store.Operable].
func (s *Store) Shards() []store.Shard { return s.operator.Shards() }

// Twins returns the addresses of two servers of different shards that are the same
// server; empty if there are none.
func (s *Store) Twins() (first, second string) { return s.operator.Twins() }

// Diagnose implements [store.Operable]. It uses the options of the shards, and neither
// their connections nor what they do in the background.
func (s *Store) Diagnose(ctx context.Context) store.Diagnosis { return s.operator.Diagnose(ctx) }

// Inspect implements [store.Operable]. A bucket that has not migrated yet is at
// its previous shard only.
func (s *Store) Inspect(ctx context.Context, r store.Request) store.Inspection {
	found := s.operator.Inspect(ctx, s.shards[s.sharder.owner(r.ClientKey)], r)
	if was := s.previousOwner(r.ClientKey); was != nil {
		previous := s.operator.Inspect(ctx, *was, r)
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
		if err := s.operator.Remove(ctx, was.Shard, &r, false); err != nil {
			return fmt.Errorf("reset at the previous shard %s: %w", was.Name, err)
		}
	}
	now := &s.shards[s.sharder.owner(r.ClientKey)]
	if err := s.operator.Remove(ctx, now.Shard, &r, was != nil); err != nil {
		return fmt.Errorf("reset at shard %s: %w", now.Name, err)
	}
	return nil
}

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string { return s.asker.Keys.Client(clientKey) }

// SetOverride implements [store.Operable]. It is kept on the client's shard.
func (s *Store) SetOverride(ctx context.Context, o store.Override) error {
	var before *operate.Shard
	if was := s.previousOwner(o.ClientKey); was != nil {
		before = was.Shard
	}
	return s.operator.SetOverride(ctx, o, s.shards[s.sharder.owner(o.ClientKey)].Shard, before)
}

// RemoveOverride implements [store.Operable]. It asks all shards, because the shard of a kept
// key is not known.
func (s *Store) RemoveOverride(ctx context.Context, kind store.OverrideKind, zone, clientKey string) (bool, error) {
	return s.operator.RemoveOverride(ctx, kind, zone, clientKey)
}

// Overrides implements [store.Operable].
func (s *Store) Overrides(ctx context.Context) ([]store.Override, error) {
	return s.operator.Overrides(ctx)
}
