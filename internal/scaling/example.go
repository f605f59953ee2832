package main

// shardCounts are the numbers of shards that the example tries.
var shardCounts = []int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}

// hardware is what a setting needs for the requests of the example.
type hardware struct {
	*curve
	// sum is what all requests of a second cost, hot what the primary of the
	// hottest client's shard needs for that client alone, of a processor.
	sum calls
	hot float64
	// shards and replicas of each are how many are needed; 0 shards if no number
	// is enough.
	shards, replicas int
	// primary and replica are which part of a processor the busiest need.
	primary, replica float64
}

// need finds the fewest shards of which no primary is busier than it should be,
// and the fewest replicas, at least one.
func need(c *costs, v *curve, p *popularity, place func(shards int) *placement) *hardware {
	each := p.each(v)
	h := &hardware{curve: v, sum: total(each), hot: c.primary(each[0])}
	if h.hot > busy {
		return h
	}
	for _, n := range shardCounts {
		if c.primary(h.sum) > busy*float64(n) {
			continue
		}
		loads := place(n).spread(each)
		h.primary = 0
		for _, l := range loads {
			h.primary = max(h.primary, c.primary(l))
		}
		if h.primary > busy {
			continue
		}
		h.shards = n
		for h.replicas = 1; ; h.replicas++ {
			h.replica = 0
			for _, l := range loads {
				h.replica = max(h.replica, c.replicas(l, h.replicas)/float64(h.replicas))
			}
			if h.replica <= busy || h.replicas == maxReplicas {
				return h
			}
		}
	}
	return h
}

// maxReplicas bounds the search.
const maxReplicas = 16

// example is what each setting needs.
func (sc *scenario) example() (all []*hardware, p *popularity) {
	p = newPopularity(exampleS, exampleClients, exampleRate)
	placed := map[int]*placement{}
	place := func(shards int) *placement {
		if placed[shards] == nil {
			placed[shards] = newPlacement(shards, exampleClients, 0)
		}
		return placed[shards]
	}
	for _, v := range sc.curves {
		all = append(all, need(&sc.costs, v, p, place))
	}
	return all, p
}
