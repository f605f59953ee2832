package main

import (
	"context"
	"math"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// placement is which shard owns which client: the owner by the store itself.
type placement struct {
	shards int
	owners []int
}

// shardName is what a shard is called in the examples of the documents.
func shardName(i int) string { return "shard" + strconv.Itoa(i+1) }

// newPlacement places clients on shards. Another draw gives them other names.
func newPlacement(shards, clients, draw int) *placement {
	// All names lead to the same servers, of which none is ever dialled.
	unused := redis.NewShard(redis.ShardOptions{Primary: "127.0.0.1:0"})
	defer unused.Close(context.Background())
	var members []redis.Member
	places := map[string]int{}
	for i := range shards {
		members = append(members, redis.Member{Name: shardName(i), Shard: unused})
		places[shardName(i)] = i
	}
	s := redis.New(redis.Options{Members: members})
	p := &placement{shards: shards, owners: make([]int, clients)}
	prefix := "draw" + strconv.Itoa(draw) + "-client"
	for i := range p.owners {
		p.owners[i] = places[s.Owner(prefix+strconv.Itoa(i))]
	}
	return p
}

// spread is what comes to each shard, if so much is each client's.
func (p *placement) spread(each []calls) []calls {
	loads := make([]calls, p.shards)
	for i := range each {
		loads[p.owners[i]].add(each[i], 1)
	}
	return loads
}

// hottest is the highest of some loads, relative to their mean.
func hottest(loads []calls, of func(calls) float64) float64 {
	highest, sum := 0.0, 0.0
	for _, l := range loads {
		highest = max(highest, of(l))
		sum += of(l)
	}
	return highest / sum * float64(len(loads))
}

// bound is which share of the requests no shard exceeds, but for a chance. Each
// client is on each shard with the same probability, whatever the others are, so
// that Bernstein's inequality holds for a shard, and for all of them with a
// chance that is divided by their number.
func bound(clients *popularity, shards int, chance float64) float64 {
	mean := 1 / float64(shards)
	variance := 0.0
	for _, r := range clients.rates {
		share := r / clients.rate
		variance += share * share * mean * (1 - mean)
	}
	// That is the solution of exp(-t²/2/(variance+largest·t/3)) = chance/shards.
	l, largest := math.Log(float64(shards)/chance), clients.hottest()
	t := l*largest/3 + math.Sqrt(l*largest/3*l*largest/3+2*l*variance)
	return min(mean+t, 1)
}
