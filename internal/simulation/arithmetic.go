package simulation

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Arithmetic makes servers that run package algorithm, which is quicker than scripts.
func Arithmetic() Servers {
	return func(time.Duration) servers { return newArithmetic() }
}

// arithmetic are servers that run package algorithm.
type arithmetic struct {
	primary, replica map[string]algorithm.Bucket
	// held is what takes hold at the primary.
	held map[string]*algorithm.Held
	// effects have not reached the replica.
	effects []effect
}

type effect struct {
	at     int64
	happen func(buckets map[string]algorithm.Bucket)
}

func newArithmetic() *arithmetic {
	return &arithmetic{primary: map[string]algorithm.Bucket{}, replica: map[string]algorithm.Bucket{}, held: map[string]*algorithm.Held{}}
}

func keyOf(r *store.Request) string { return r.Limit.Zone + "/" + r.ClientKey }

func bucketIn(m map[string]algorithm.Bucket, r *store.Request) algorithm.Bucket {
	key := keyOf(r)
	b, ok := m[key]
	if !ok {
		b = algorithm.New(r.Limit)
		m[key] = b
	}
	return b
}

func (s *arithmetic) run(op algorithm.Operation, r store.Request, now int64) store.State {
	s.effects = append(s.effects, effect{now, func(b map[string]algorithm.Bucket) { op.Run(bucketIn(b, &r), &r, now) }})
	st := op.Run(bucketIn(s.primary, &r), &r, now)
	s.held[keyOf(&r)] = s.held[keyOf(&r)].After(op, &r, &st)
	return st
}

func (s *arithmetic) look(r store.Request, now int64, replica bool) store.State {
	if replica {
		return bucketIn(s.replica, &r).View(&r, now, false)
	}
	st := bucketIn(s.primary, &r).View(&r, now, false)
	s.held[keyOf(&r)].After(algorithm.Peek, &r, &st)
	return st
}

func (s *arithmetic) empty(r store.Request, now int64) {
	key := keyOf(&r)
	delete(s.primary, key)
	delete(s.held, key)
	s.effects = append(s.effects, effect{now, func(b map[string]algorithm.Bucket) { delete(b, key) }})
}

func (s *arithmetic) replicate(until int64) {
	for len(s.effects) > 0 && s.effects[0].at <= until {
		s.effects[0].happen(s.replica)
		s.effects = s.effects[1:]
	}
}
