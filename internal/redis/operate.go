package redis

import (
	"context"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Walk implements [store.Operable]: no bucket is in this process.
func (*Store) Walk([]store.Request, func(i int, r *store.Request) bool, func(i int, clientKey string, st *store.State)) {
}

// Len implements [store.Operable].
func (*Store) Len() int { return -1 }

// LastJump implements [store.Operable]. The clocks that decide are those of [Store.Shards].
func (*Store) LastJump() (by time.Duration, at time.Time) { return 0, time.Time{} }

// Inspect implements [store.Operable].
func (s *Store) Inspect(ctx context.Context, r store.Request) (found store.Inspection) {
	at := s.memberOf(&r)
	found = s.operator.Inspect(ctx, *at, r)
	for _, other := range s.ownersOf(&r) {
		if other != at {
			found.Previous = append(found.Previous, s.operator.Inspect(ctx, *other, r))
		}
	}
	return found
}

// Recall implements [store.Operable]: the ledger recalls.
func (*Store) Recall(*store.Request) bool { return false }

// Reset implements [store.Store].
func (s *Store) Reset(ctx context.Context, r store.Request) error {
	return s.operator.Reset(ctx, r, s.ownersOf(&r))
}

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string { return s.asker.Keys.Client(clientKey) }

// recordsStay is how long records are still made at the shard before a resharding, because Caddys with the
// config before look only there. Afterwards they are made at the new one, so that none is left once that
// config has lost the shard before.
const recordsStay = 10 * time.Minute

// keepers returns the member at which the record of an ID is made, and the one at which it may be too, or nil.
func (s *Store) keepers(id string) (at, other *Member) {
	owner, was := s.owner(id), s.previousOwner(id)
	switch {
	case was == nil:
		return owner, nil
	case s.opts.Now().Sub(s.opened) < recordsStay:
		return was, owner
	}
	return owner, was
}

// Record implements [store.Records].
func (s *Store) Record(ctx context.Context, id string) (store.Record, error) {
	at, other := s.keepers(id)
	r, err := s.operator.Record(ctx, at.Shard, id)
	switch {
	case other == nil || err != nil:
		return r, err
	case r.Version != "":
		return s.foundAt(at, r), nil
	}
	r, err = s.operator.Record(ctx, other.Shard, id)
	return s.foundAt(other, r), err
}

// PutRecord implements [store.Records].
func (s *Store) PutRecord(ctx context.Context, r store.Record) (store.Record, error) {
	if r.Shard != "" {
		m := s.all[r.Shard]
		if m == nil {
			return store.Record{}, fmt.Errorf("%w: shard %s is not in the config any more", store.ErrFinal, r.Shard)
		}
		return s.operator.PutRecord(ctx, m.Shard, r)
	}
	at, other := s.keepers(r.ID)
	if other == nil {
		return s.operator.PutRecord(ctx, at.Shard, r)
	}
	there, err := s.operator.Record(ctx, other.Shard, r.ID)
	switch there = s.foundAt(other, there); {
	case err != nil:
		return store.Record{}, wire.NotExecuted(err)
	case there.Version == "":
		is, err := s.operator.PutRecord(ctx, at.Shard, r)
		return s.foundAt(at, is), err
	case there.Version != r.Version:
		return there, fmt.Errorf("%w: %w", store.ErrNotExecuted, store.ErrChanged)
	}
	r.ID, r.Shard = there.ID, there.Shard
	return s.operator.PutRecord(ctx, other.Shard, r)
}

// foundAt returns a record that was found at a member so that it is put there again.
func (s *Store) foundAt(m *Member, r store.Record) store.Record {
	if r.Version != "" {
		r.ID, r.Shard = s.asker.Keys.Client(r.ID), m.Name
	}
	return r
}
