package redis

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// owner returns the member that owns a client key now.
func (s *Store) owner(clientKey string) *Member { return &s.opts.Members[s.sharder.owner(clientKey)] }

// previousOwner returns the member that owned a client key before the latest step of a resharding, or
// nil if its shard owns the key now.
func (s *Store) previousOwner(clientKey string) *Member {
	if len(s.previous) == 0 {
		return nil
	}
	was := &s.opts.Previous[0][s.previous[0].owner(clientKey)]
	if was.Shard == s.owner(clientKey).Shard {
		return nil
	}
	return was
}

// Owner implements [store.Remote].
func (s *Store) Owner(clientKey string) string { return s.owner(clientKey).Name }

// Owners implements [store.Remote]: the owner, and those before each step of a resharding.
func (s *Store) Owners(clientKey string) []string {
	now := s.sharder.owner(clientKey)
	owners := s.names[now]
	for i, before := range s.previous {
		was := s.opts.Previous[i][before.owner(clientKey)].Name
		if at, isThere := slices.BinarySearch(owners, was); !isThere {
			owners = slices.Insert(slices.Clone(owners), at, was)
		}
	}
	return owners
}

// ownersOf returns the members that a request concerns.
func (s *Store) ownersOf(r *store.Request) (owners []*Member) {
	if m := s.all[r.Shard()]; m != nil {
		return []*Member{m}
	}
	for _, name := range s.Owners(r.ClientKey) {
		owners = append(owners, s.all[name])
	}
	return owners
}

// memberOf returns the member whose bucket a request is about. A shard that is not in the config any
// more has left its clients to their present owners.
func (s *Store) memberOf(r *store.Request) *Member {
	if r.At != nil {
		if m := s.all[r.At.Shard]; m != nil {
			return m
		}
	}
	return s.owner(r.ClientKey)
}

// isGone reports whether an operation is about a shard that is not in the config any more, and about no other one.
func (s *Store) isGone(op algorithm.Operation, r *store.Request) bool {
	return r.At != nil && s.all[r.At.Shard] == nil && (op == algorithm.Refund || op == algorithm.Charge && r.Shared)
}

// serversOf returns the servers that hold the bucket of a request, or nil while none are known.
func (s *Store) serversOf(r *store.Request) *wire.Servers {
	return s.asker.Keys.Servers(s.memberOf(r).Shard.Shard, r.ClientKey)
}

// onlyServers returns the servers of n requests if they all have the same.
func (s *Store) onlyServers(n int, request func(i int) *store.Request) (only *wire.Servers, ok bool) {
	if n == 0 {
		return nil, false
	}
	first := request(0)
	only = s.serversOf(first)
	for i := 1; i < n; i++ {
		r := request(i)
		if (r.ClientKey != first.ClientKey || r.Shard() != first.Shard()) && s.serversOf(r) != only {
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

// perServers calls f concurrently, once for all of n requests whose buckets the same servers hold, and waits.
func (s *Store) perServers(n int, request func(i int) *store.Request, f func(at *wire.Servers, places []int)) {
	owned := map[*wire.Servers][]int{}
	for i := range n {
		at := s.serversOf(request(i))
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
		shard := s.memberOf(&a.Request).Shard
		if shard.IsFound() {
			continue
		}
		ctx, cancel := context.WithDeadline(ctx, deadline)
		shard.Await(ctx)
		cancel()
	}
}
