package limit

import "github.com/shardlimit/caddy-shardlimit/store"

// Wrap puts another store before that of the buckets.
func (s *Store) Wrap(wrap func(store.Store) store.Store) { s.buckets = wrap(s.buckets) }

// Crowd makes the store count n reservations more as open.
func (s *Store) Crowd(n int64) { s.open.Add(n) }

// MaxReservations is how many may be open.
const MaxReservations = maxReservations
