package redis

import (
	"context"
	"fmt"
	"slices"
	"time"

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

// recordOwners returns the member at which the record of an ID is made, and those at which it may be too.
func (s *Store) recordOwners(id string) []*Member {
	at := s.owner(id)
	if was := s.previousOwner(id); was != nil && s.opts.Now().Sub(s.opened) < recordsStay {
		at = was
	}
	others := slices.DeleteFunc(s.ownersOf(&store.Request{ClientKey: id}), func(m *Member) bool { return m.Shard == at.Shard })
	return append([]*Member{at}, others...)
}

// Record implements [store.Records].
func (s *Store) Record(ctx context.Context, id string) (r store.Record, err error) {
	owners := s.recordOwners(id)
	for _, m := range owners {
		if r, err = s.operator.Record(ctx, m.Shard, id); err != nil {
			return r, err
		}
		if r.Version != "" {
			return s.foundAt(m, owners, r), nil
		}
	}
	return r, nil
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
	owners := s.recordOwners(r.ID)
	for _, other := range owners[1:] {
		there, err := s.operator.Record(ctx, other.Shard, r.ID)
		switch there = s.foundAt(other, owners, there); {
		case err != nil:
			return store.Record{}, store.NotExecuted(err)
		case there.Version == "":
			continue
		case there.Version != r.Version:
			return there, store.NotExecuted(store.ErrChanged)
		}
		r.ID, r.Shard = there.ID, there.Shard
		return s.operator.PutRecord(ctx, other.Shard, r)
	}
	is, err := s.operator.PutRecord(ctx, owners[0].Shard, r)
	return s.foundAt(owners[0], owners, is), err
}

// foundAt returns a record that was found at one of several members so that it is put there again.
func (s *Store) foundAt(m *Member, owners []*Member, r store.Record) store.Record {
	if r.Version != "" && len(owners) > 1 {
		r.ID, r.Shard = s.asker.Keys.Record(r.ID), m.Name
	}
	return r
}
