package memory

import (
	"context"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Peek implements [store.Peeker].
func (s *Store) Peek(_ context.Context, reqs []store.Request) []store.State {
	return s.run(algorithm.Peek, reqs)
}

// Inspect implements [store.Inspector].
func (s *Store) Inspect(_ context.Context, r store.Request) store.Inspection {
	st := s.run(algorithm.Peek, []store.Request{r})[0]
	return store.Inspection{Copies: []store.Copy{{Role: store.RolePrimary, Exists: st.Holds(r.Limit), State: st}}}
}

// Reset implements [store.Resetter].
func (s *Store) Reset(_ context.Context, r store.Request) error {
	s.buckets.forget(&r)
	return nil
}

// Len is how many buckets there are, in all views.
func (s *Store) Len() int { return s.buckets.Len() }

// forget removes the bucket that r asks about, if there is one.
func (b *Buckets) forget(r *store.Request) {
	id := identity.New(b.limits.Number(r.Limit), r.ClientKey)
	if b.shards[b.shardOf(id)].forget(id) {
		b.count.Add(-1)
	}
}

// forget removes a bucket, and tells whether there was one.
func (s *shard) forget(id identity.ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.find(id)
	if b == nil {
		return false
	}
	s.remove(b)
	s.publish()
	return true
}

// Interface guards.
var (
	_ store.Peeker    = (*Store)(nil)
	_ store.Inspector = (*Store)(nil)
	_ store.Resetter  = (*Store)(nil)
)
