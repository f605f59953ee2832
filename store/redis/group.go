package redis

import (
	"sync"

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

// unanswered returns the members that failed, or whose window has to be opened.
func (g group) unanswered() (members []int) {
	for _, i := range g.members {
		if st := &g.states[i]; st.Err != nil || isUnopened(&g.reqs[i], st) {
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

// onlyShard returns the shard that owns all of reqs, if there is one.
func (s *Store) onlyShard(reqs []store.Request) (shard int, ok bool) {
	if len(reqs) == 0 {
		return 0, false
	}
	shard = s.sharder.owner(reqs[0].ClientKey)
	for i := 1; i < len(reqs); i++ {
		if reqs[i].ClientKey != reqs[0].ClientKey && s.sharder.owner(reqs[i].ClientKey) != shard {
			return 0, false
		}
	}
	return shard, true
}

// perShard calls f for each shard that owns some of reqs, at the same time,
// and waits.
func (s *Store) perShard(reqs []store.Request, states []store.State, f func(shard int, g group)) {
	owned := make([][]int, len(s.shards))
	for i := range reqs {
		shard := s.sharder.owner(reqs[i].ClientKey)
		owned[shard] = append(owned[shard], i)
	}
	var wg sync.WaitGroup
	for shard, members := range owned {
		if len(members) > 0 {
			wg.Go(func() { f(shard, group{reqs, states, members}) })
		}
	}
	wg.Wait()
}
