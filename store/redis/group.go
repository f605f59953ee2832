package redis

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// group is those of some requests that are asked together.
type group struct {
	reqs    []store.Request
	states  []store.State
	members []int
}

// first holds 0, 1, 2 ... for groups of all requests, which most are.
var first = func() (n [16]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

func whole(reqs []store.Request, states []store.State) group {
	if len(reqs) <= len(first) {
		return group{reqs, states, first[:len(reqs):len(reqs)]}
	}
	members := make([]int, len(reqs))
	for i := range members {
		members[i] = i
	}
	return group{reqs, states, members}
}

// unanswered returns the members that failed, or whose window has to be opened,
// or of which replicas of these servers know nothing.
func (g group) unanswered(of *servers) (members []int) {
	for _, i := range g.members {
		if st := &g.states[i]; st.Err != nil || isUnopened(&g.reqs[i], st) || of.mayMiss(st) {
			members = append(members, i)
		}
	}
	return members
}

// asksPrimary tells whether some member is about the primary's word.
func (g group) asksPrimary() bool {
	for _, i := range g.members {
		if g.reqs[i].Primary {
			return true
		}
	}
	return false
}

// owner is who holds a bucket: a shard, by its place, and servers of it, nil
// while none are known.
type owner struct {
	shard   int
	servers *servers
}

func (s *Store) ownerOf(clientKey string) owner {
	shard := s.sharder.owner(clientKey)
	if s.shards[shard].cluster == nil {
		return owner{shard, s.shards[shard].owner(0)}
	}
	return owner{shard, s.shards[shard].owner(s.keys.slot(clientKey))}
}

// onlyOwner returns the owner of all of reqs' buckets, if there is one.
func (s *Store) onlyOwner(reqs []store.Request) (only owner, ok bool) {
	if len(reqs) == 0 {
		return owner{}, false
	}
	only = s.ownerOf(reqs[0].ClientKey)
	for i := 1; i < len(reqs); i++ {
		if reqs[i].ClientKey != reqs[0].ClientKey && s.ownerOf(reqs[i].ClientKey) != only {
			return owner{}, false
		}
	}
	return only, true
}

// perOwner calls f for each owner of some of reqs' buckets, at the same time,
// and waits.
func (s *Store) perOwner(reqs []store.Request, states []store.State, f func(at owner, g group)) {
	owned := map[owner][]int{}
	for i := range reqs {
		at := s.ownerOf(reqs[i].ClientKey)
		owned[at] = append(owned[at], i)
	}
	var wg sync.WaitGroup
	for at, members := range owned {
		wg.Go(func() { f(at, group{reqs, states, members}) })
	}
	wg.Wait()
}

// fail sets an error as the answer to all.
func (g group) fail(err error) {
	for _, i := range g.members {
		g.states[i] = store.State{Err: err}
	}
}

// awaitServers waits, for as long as there is time, until it is known who the
// servers of the buckets are.
func (s *Store) awaitServers(ctx context.Context, reqs []store.Request, deadline time.Time) {
	if s.fixed {
		return
	}
	var patient context.Context
	for i := range reqs {
		shard := s.shards[s.sharder.owner(reqs[i].ClientKey)]
		if shard.isFound() {
			continue
		}
		if patient == nil {
			var cancel context.CancelFunc
			patient, cancel = context.WithDeadline(ctx, deadline)
			defer cancel()
		}
		shard.await(patient)
	}
}
