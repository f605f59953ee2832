// Package memory is the store that keeps its buckets in this process: nothing
// is shared with other processes and nothing outlives this one.
package memory

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// DefaultMaxKeys is how many buckets there may be where [Options] do not say.
const DefaultMaxKeys = 1_000_000

// Options are the settings of one view of the buckets. The zero value is
// ready to use.
type Options struct {
	// MaxKeys bounds the number of buckets whenever this view inserts one;
	// zero or less means DefaultMaxKeys. See [Buckets] for what goes when they
	// are full, and for what happens if it is lower than a bound before it.
	MaxKeys int
	// Now is the clock that decides; nil means time.Now.
	Now func() time.Time
}

// Store is a view of buckets: they are shared and last, its settings are its
// own. It holds nothing that must be released, ignores contexts, for it never
// waits, and never fails.
type Store struct {
	buckets *Buckets
	maxKeys int64
	now     func() time.Time
}

var _ store.Store = (*Store)(nil)

// New returns a view of buckets.
func New(buckets *Buckets, opts Options) *Store {
	if opts.MaxKeys <= 0 {
		opts.MaxKeys = DefaultMaxKeys
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Store{buckets: buckets, maxKeys: int64(opts.MaxKeys), now: opts.Now}
}

// Check implements [store.Store].
func (s *Store) Check(_ context.Context, reqs []store.Request) []store.State {
	now := s.now().UnixMicro()
	states := make([]store.State, len(reqs))
	for i := range reqs {
		r := &reqs[i]
		// To spend nothing opens a window just as a charge does.
		states[i] = s.buckets.charge(r.Limit, r.ClientKey, now, 0, s.maxKeys).Check(now, r.Events, r.Cost)
	}
	return states
}

// Charge implements [store.Store].
func (s *Store) Charge(_ context.Context, reqs []store.Request) []store.State {
	now := s.now().UnixMicro()
	states := make([]store.State, len(reqs))
	for i := range reqs {
		r := &reqs[i]
		states[i] = s.buckets.charge(r.Limit, r.ClientKey, now, r.Cost, s.maxKeys).Charged(now, r.Events)
	}
	return states
}
