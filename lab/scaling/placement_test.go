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
		shares := popularity(s, clients)
		for _, n := range []int{2, 8, 32} {
			share := hottest(n, place(n, clients, 1), shares)
			if most := bound(shares, n, chance); share > most {
				t.Errorf("s = %v: the hottest of %d shards has %.3f of the requests, want at most %.3f", s, n, share, most)
			}
		}
	}
}

// TestMoreShardsDoNotDivideAClient: the hottest shard has the hottest client, and
// all of it, however many shards there are, while the mean falls.
func TestMoreShardsDoNotDivideAClient(t *testing.T) {
	const clients = 20_000
	shares := popularity(1, clients)
	before := 1.0
	for _, n := range []int{4, 64} {
		share := hottest(n, place(n, clients, 1), shares)
		if share < shares[0] || share >= before {
			t.Errorf("%d shards: the hottest has %.3f of the requests, the hottest client %.3f", n, share, shares[0])
		}
		before = share
	}
}

// TestEvenClientsNeedNoMoreThanTheMean is why shards help where no client is hot.
func TestEvenClientsNeedNoMoreThanTheMean(t *testing.T) {
	const clients = 20_000
	if h := 8 * hottest(8, place(8, clients, 1), popularity(0, clients)); h > 1.06 {
		t.Errorf("the hottest of 8 shards has %.2f times the mean", h)
	}
}

// bound is which share of the requests no shard exceeds, but for a chance. Each
// client is on each shard with the same probability, whatever the others are, so
// that Bernstein's inequality holds for a shard, and for all of them with a
// chance that is divided by their number.
func bound(shares []float64, shards int, chance float64) float64 {
	mean := 1 / float64(shards)
	variance := 0.0
	for _, share := range shares {
		variance += share * share * mean * (1 - mean)
	}
	// That is the solution of exp(-t²/2/(variance+largest·t/3)) = chance/shards.
	l, largest := math.Log(float64(shards)/chance), shares[0]
	t := l*largest/3 + math.Sqrt(l*largest/3*l*largest/3+2*l*variance)
	return min(mean+t, 1)
}
