package main

import "math"

// popularity is how often each of some clients comes, the most popular first:
// by Zipf's law the i-th as often as the first divided by i to the power s.
type popularity struct {
	s       float64
	clients int
	// rate is how many requests come in a second, of all clients.
	rate  float64
	rates []float64
}

func newPopularity(s float64, clients int, rate float64) *popularity {
	p := &popularity{s: s, clients: clients, rate: rate, rates: make([]float64, clients)}
	sum := 0.0
	for i := range p.rates {
		p.rates[i] = math.Pow(float64(i+1), -s)
		sum += p.rates[i]
	}
	for i := range p.rates {
		p.rates[i] *= rate / sum
	}
	return p
}

// hottest is the most popular client's share.
func (p *popularity) hottest() float64 { return p.rates[0] / p.rate }

// each is what the requests of a second cost of each client.
func (p *popularity) each(v *curve) []calls {
	all := make([]calls, p.clients)
	for i, r := range p.rates {
		all[i].add(v.at(r), r)
	}
	return all
}

// total is the sum of what some clients, or shards, cost.
func total(all []calls) (sum calls) {
	for _, c := range all {
		sum.add(c, 1)
	}
	return sum
}
