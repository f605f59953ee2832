package main

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	day = int64(24 * time.Hour / time.Microsecond)
	// epoch is when the traffic begins: a midnight.
	epoch = 1_800_057_600_000_000
)

// traffic is when the n requests of one client come within a day.
type traffic struct {
	name   string
	arrive func(random *rand.Rand, n int) []int64
}

var traffics = []traffic{
	{"Poisson", func(random *rand.Rand, n int) []int64 {
		times := make([]int64, n)
		for i := range times {
			times[i] = random.Int64N(day)
		}
		return times
	}},
	{"bursts", func(random *rand.Rand, n int) []int64 {
		// 5 requests each on average, a few seconds apart.
		times := make([]int64, 0, n)
		for at := int64(0); len(times) < n; {
			if len(times) == 0 || random.IntN(5) == 0 {
				at = random.Int64N(day)
			}
			at += int64(random.ExpFloat64() * 5e6)
			times = append(times, at)
		}
		return times
	}},
	{"day curve", func(random *rand.Rand, n int) []int64 {
		// Twice the mean at noon, next to nothing at midnight.
		times := make([]int64, 0, n)
		for len(times) < n {
			at := random.Int64N(day)
			if share := 0.5 - 0.48*math.Cos(2*math.Pi*float64(at)/float64(day)); random.Float64() < share {
				times = append(times, at)
			}
		}
		return times
	}},
}

// client is whose requests these are.
type client struct {
	traffic int
	times   []int64
}

const requestsPerClient = 100 // on average

// clients draws n requests. Some send much more
// than others; the traffics take turns.
func clients(seed uint64, n int) []client {
	random := rand.New(rand.NewPCG(seed, 0))
	list := make([]client, n/requestsPerClient)
	weights, sum := make([]float64, len(list)), 0.0
	for i := range weights {
		weights[i] = math.Exp(random.NormFloat64() * 0.75)
		sum += weights[i]
	}
	left := n
	for i := range list {
		count := min(int(weights[i]/sum*float64(n)+random.Float64()), left)
		if i == len(list)-1 {
			count = left
		}
		left -= count
		list[i].traffic = i % len(traffics)
		list[i].times = traffics[list[i].traffic].arrive(random, count)
		for j := range list[i].times {
			list[i].times[j] += epoch
		}
		slices.Sort(list[i].times)
	}
	return list
}
