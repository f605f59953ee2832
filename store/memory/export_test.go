package memory

import (
	"errors"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// What is bounded by these is tested to be.
const (
	SampleSize = sampleSize
	SweepSize  = sweepSize
	TrimSize   = trimSize
)

// Has tells whether there is a bucket, and opens none.
func (b *Buckets) Has(limit *store.Limit, clientKey string) bool {
	id := identity.New(b.limits.Number(limit), clientKey)
	s := &b.shards[b.shardOf(id)]
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.find(id) != nil
}

// Verify tells where the parts of b contradict each other. Nobody else may be
// using b.
func (b *Buckets) Verify() error {
	var errs []error
	total := 0
	for i := range b.shards {
		s := &b.shards[i]
		total += len(s.queue)
		if err := s.verify(); err != nil {
			errs = append(errs, fmt.Errorf("shard %d: %w", i, err))
		}
	}
	if n := b.Len(); n != total {
		errs = append(errs, fmt.Errorf("length is %d, but there are %d buckets", n, total))
	}
	return errors.Join(errs...)
}

func (s *shard) verify() error {
	indexed := 0
	for _, x := range s.indexes {
		indexed += len(x.buckets)
		if x.peak < len(x.buckets) {
			return fmt.Errorf("index of %d buckets has a peak of %d", len(x.buckets), x.peak)
		}
	}
	if indexed != len(s.queue) {
		return fmt.Errorf("%d buckets are indexed and %d queued", indexed, len(s.queue))
	}
	if err := s.queue.verify(); err != nil {
		return err
	}
	nearest := int64(never)
	for _, b := range s.queue {
		nearest = min(nearest, b.due)
		if s.find(identity.ID{Limit: b.limit, Key: b.key}) != b {
			return fmt.Errorf("bucket of %q is not found", b.key)
		}
	}
	if n := s.nearest.Load(); n != nearest {
		return fmt.Errorf("nearest due is published as %d and is %d", n, nearest)
	}
	return nil
}

func (q queue) verify() error {
	for i, b := range q {
		if int(b.place) != i {
			return fmt.Errorf("bucket at %d believes to be at %d", i, b.place)
		}
		if parent := q[max(i-1, 0)/2]; parent.due > b.due {
			return fmt.Errorf("due %d at %d is below %d", b.due, i, parent.due)
		}
	}
	return nil
}
