package main

import (
	"math"
	"math/rand/v2"
	"sort"
)

const (
	// acquaintance is how long a client comes before anything is counted: until
	// then a process knows that it is alone. Batches need so many windows to find
	// their size.
	acquaintance   = 5 * second / 2
	batchedWindows = 10
	// leastRequests of leastClients are counted for each rate: where a window
	// ends is chance, and decides how soon a process knows again that it is alone.
	leastRequests, leastClients = 4_000, 8
	// fewClients are enough of those that come coarsely often.
	fewClients = 2
	// fineSteps and coarseSteps are how far rates are apart, the coarse ones from
	// coarseFrom on.
	fineSteps, coarseSteps = 1.5, 2.5
	coarseFrom             = 1_000.0
	// leastRate is so low that no client comes twice in a window.
	leastRate = 0.005
)

// random returns pauses of requests that come at random instants, so many in a
// second.
func random(r *rand.Rand, rate float64) func() int64 {
	return func() int64 { return int64(r.ExpFloat64() / rate * float64(second)) }
}

// regular returns equal pauses.
func regular(rate float64) func() int64 {
	at := 0.0
	return func() int64 {
		before := int64(at)
		at += float64(second) / rate
		return int64(at) - before
	}
}

// point is what one request of a client costs that comes so often.
type point struct {
	rate float64
	calls
}

// curve is what requests cost, by how often their client comes.
type curve struct {
	*setting
	points []point
}

// rates are those that curves are made of, up to the highest.
func rates(highest float64) (all []float64) {
	for r := highest; r > leastRate; {
		all = append(all, r)
		if r > coarseFrom {
			r /= coarseSteps
		} else {
			r /= fineSteps
		}
	}
	all = append(all, leastRate)
	sort.Float64s(all)
	return all
}

// simulate counts a window of some clients that come so often.
func simulate(s *setting, rate float64, seed uint64) (sum calls) {
	from := acquaintance
	if s.batch != 0 {
		from += batchedWindows * s.window
	}
	clients := max(int(leastRequests/(rate*float64(s.window)/float64(second))), leastClients)
	switch {
	case rate > coarseFrom && s.batch != 0:
		clients = 1
	case rate > coarseFrom:
		clients = fewClients
	}
	c := newClient(s, seed, math.Float64bits(rate))
	for range clients {
		c.start()
		sum.add(c.run(random(c.random, rate), from, from+s.window), 1)
	}
	return sum
}

// newCurve simulates clients of all rates.
func newCurve(s *setting, highest float64, seed uint64) *curve {
	v := &curve{setting: s}
	for _, r := range rates(highest) {
		v.points = append(v.points, point{r, simulate(s, r, seed).perRequest()})
	}
	return v
}

// at is what a request costs of a client that comes so often, by the two points
// next to that.
func (v *curve) at(rate float64) (one calls) {
	i := sort.Search(len(v.points), func(i int) bool { return v.points[i].rate >= rate })
	switch i {
	case 0:
		return v.points[0].calls
	case len(v.points):
		return v.points[i-1].calls
	}
	low, high := v.points[i-1], v.points[i]
	share := math.Log(rate/low.rate) / math.Log(high.rate/low.rate)
	one.add(low.calls, 1-share)
	one.add(high.calls, share)
	return one
}
