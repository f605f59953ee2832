package redis

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// owner returns the member that owns a client key.
func (s *Store) owner(clientKey string) *Member { return &s.opts.Members[s.sharder.owner(clientKey)] }

// serversOf returns the servers that hold a client's buckets, or nil while none are known.
func (s *Store) serversOf(clientKey string) *wire.Servers {
	return s.asker.Keys.Servers(s.owner(clientKey).Shard.Shard, clientKey)
}

// onlyServers returns the servers of n clients if they all have the same.
func (s *Store) onlyServers(n int, keyOf func(i int) string) (only *wire.Servers, ok bool) {
	if n == 0 {
		return nil, false
	}
	only = s.serversOf(keyOf(0))
	for i := 1; i < n; i++ {
		if keyOf(i) != keyOf(0) && s.serversOf(keyOf(i)) != only {
			return nil, false
		}
	}
	return only, true
}

// rendezvous chooses a member for a client key by weighted rendezvous hashing:
// every member gets a score for the key, and the highest wins. A new member takes
// over only the keys that it wins.
type rendezvous struct {
	seeds   []uint64
	weights []float64
	equal   bool
}

// newRendezvous depends on the members' names and weights, not on their order.
func newRendezvous(members []Member) *rendezvous {
	r := &rendezvous{equal: true}
	for _, m := range members {
		r.seeds = append(r.seeds, xxhash.Sum64String(m.Name))
		r.weights = append(r.weights, float64(max(m.Weight, 1)))
		r.equal = r.equal && r.weights[len(r.weights)-1] == r.weights[0]
	}
	return r
}

// owner returns the place of the member that owns key.
func (r *rendezvous) owner(key string) int {
	if len(r.seeds) == 1 {
		return 0
	}
	hash := xxhash.Sum64String(key)
	best, bestScore := 0, math.Inf(-1)
	for i, seed := range r.seeds {
		// A float64 holds 53 bits exactly.
		u := float64(mix(hash^seed)>>11) + 0.5
		score := u
		if !r.equal {
			score = -r.weights[i] / math.Log(u/(1<<53))
		}
		if score > bestScore {
			best, bestScore = i, score
		}
	}
	return best
}

// mix is the finalizer of SplitMix64: every bit of x changes half of the
// result's bits.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// perServers calls f concurrently, once for all of n clients whose buckets the same servers hold, and waits.
func (s *Store) perServers(n int, keyOf func(i int) string, f func(at *wire.Servers, places []int)) {
	owned := map[*wire.Servers][]int{}
	for i := range n {
		at := s.serversOf(keyOf(i))
		owned[at] = append(owned[at], i)
	}
	var wg sync.WaitGroup
	for at, places := range owned {
		wg.Go(func() { f(at, places) })
	}
	wg.Wait()
}

// awaitServers waits until the servers of all buckets have been found, or the
// deadline passes.
func (s *Store) awaitServers(ctx context.Context, asks []*store.Ask, deadline time.Time) {
	if s.static {
		return
	}
	for _, a := range asks {
		shard := s.owner(a.ClientKey).Shard
		if shard.IsFound() {
			continue
		}
		ctx, cancel := context.WithDeadline(ctx, deadline)
		shard.Await(ctx)
		cancel()
	}
}
