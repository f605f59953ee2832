package scaling

import (
	"math"
	"testing"
)

// TestHottestShardIsWithinTheBound requires of the store's own hashing what a
// random placement does in 99 of 100 cases, for all of the shards.
func TestHottestShardIsWithinTheBound(t *testing.T) {
	const clients, chance = 20_000, 0.01
	for _, s := range exponents {
		p := newPopularity(s, clients, 1)
		each := requestsEach(p)
		for _, n := range []int{2, 8, 32} {
			share := hottest(newPlacement(n, clients, 1).spread(each), requestsOf) / float64(n)
			if most := bound(p, n, chance); share > most {
				t.Errorf("s = %v: the hottest of %d shards has %.3f of the requests, want at most %.3f", s, n, share, most)
			}
		}
	}
}

// requestsEach is the clients' requests alone.
func requestsEach(p *popularity) []calls {
	each := make([]calls, p.clients)
	for i, r := range p.rates {
		each[i].requests = r
	}
	return each
}

// TestMoreShardsDoNotDivideAClient: the hottest shard has the hottest client, and
// all of it, however many shards there are, while the mean falls.
func TestMoreShardsDoNotDivideAClient(t *testing.T) {
	const clients = 20_000
	p := newPopularity(exampleS, clients, 1)
	each := requestsEach(p)
	before := 1.0
	for _, n := range []int{4, 64} {
		share := hottest(newPlacement(n, clients, 1).spread(each), requestsOf) / float64(n)
		if share < p.hottest() || share >= before {
			t.Errorf("%d shards: the hottest has %.3f of the requests, the hottest client %.3f", n, share, p.hottest())
		}
		before = share
	}
}

// TestEvenClientsNeedNoMoreThanTheMean is why shards help where no client is hot.
func TestEvenClientsNeedNoMoreThanTheMean(t *testing.T) {
	const clients = 20_000
	p := newPopularity(0, clients, 1)
	if h := hottest(newPlacement(8, clients, 1).spread(requestsEach(p)), requestsOf); h > 1.06 {
		t.Errorf("the hottest of 8 shards has %.2f times the mean", h)
	}
}

// TestHardwareIsEnough requires that what is said to be needed is, that fewer
// shards are not enough, and that none are where one client is too much.
func TestHardwareIsEnough(t *testing.T) {
	const clients = 20_000
	c := costs{charge: 10, take: 15, check: 5, replicated: 2}
	place := func(shards int) *placement { return newPlacement(shards, clients, 0) }
	hot := newPopularity(1.2, clients, 300_000)
	flat := newPopularity(0.5, clients, 300_000)
	v := &curve{points: []point{{1, calls{requests: 1, made: [kinds]float64{check: 1, charge: 1}}}}}
	if h := need(&c, v, hot, place); h.shards != 0 || h.hot < busy {
		t.Errorf("%d shards for a client that needs %.2f of a processor", h.shards, h.hot)
	}
	h := need(&c, v, flat, place)
	if h.shards < 6 || h.primary > busy || h.replicas < 1 || h.replica > busy {
		t.Errorf("%+v", h)
	}
	v.points[0].made[check] = 10
	if more := need(&c, v, flat, place); more.replicas <= h.replicas || more.shards != h.shards {
		t.Errorf("ten times as many checks need %d shards of %d replicas, once as many %d of %d", more.shards, more.replicas, h.shards, h.replicas)
	}
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
