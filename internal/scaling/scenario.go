package main

import (
	"slices"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// seed is that of all that is random.
	seed = 2026
	// caddys share the requests.
	caddys = 16
	// wide is a limit that no client reaches, tight one that popular ones do, in
	// every window of the length.
	wide, tight  = 1_000_000, 1_000
	windowLength = 10 * second
	// fixedBatch is a batch without auto.
	fixedBatch = 1_000
)

// The settings of the document.
var (
	afterSticky = setting{name: "charge after, a client comes to one Caddy", limit: wide}
	afterAny    = setting{name: "charge after, to any Caddy", limit: wide, route: anyCaddy}
	afterTight  = setting{name: "charge after, to any Caddy, limit 1,000", limit: tight, route: anyCaddy}
	beforeAny   = setting{name: "charge before", limit: wide, route: anyCaddy, before: true}
	beforeTight = setting{name: "charge before, limit 1,000", limit: tight, route: anyCaddy, before: true}
	batchAuto   = setting{name: "charge before, batch auto", limit: wide, route: anyCaddy, before: true, batch: store.BatchAuto}
	batchFixed  = setting{name: "charge before, batch 1000", limit: wide, route: anyCaddy, before: true, batch: fixedBatch}
)

// The traffic of the tables, and that of the example.
const (
	tableClients, tableRate     = 100_000, 100_000
	exampleClients, exampleRate = 1_000_000, 1_000_000
	// exampleS is the exponent of Zipf's law where only one is shown.
	exampleS = 1.0
	// draws is how many names each client had in turn, where the shards are
	// compared.
	draws = 5
)

var (
	exponents = []float64{0, 0.8, exampleS, 1.2}
	counts    = []int{1, 2, 4, 8, 16, 32, 64}
)

// scenario is all that is simulated for the document.
type scenario struct {
	costs   costs
	anchors []anchor
	curves  []*curve
	// popular are the popularities of the tables, by exponent.
	popular []*popularity
	// spreads are the placements of the tables: of each number of shards, as many
	// as there are draws.
	spreads [][]*placement
}

func newScenario(benchmarks, design, ledger measured) (_ *scenario, err error) {
	var sc scenario
	if sc.costs, err = readCosts(benchmarks, design); err != nil {
		return nil, err
	}
	if sc.anchors, err = anchors(ledger); err != nil {
		return nil, err
	}
	highest := newPopularity(exampleS, exampleClients, exampleRate).rates[0]
	settings := []setting{afterSticky, afterAny, afterTight, beforeAny, beforeTight, batchAuto, batchFixed}
	sc.curves = make([]*curve, len(settings))
	var wg sync.WaitGroup
	for i, s := range settings {
		s.processes, s.window = caddys, windowLength
		wg.Go(func() { sc.curves[i] = newCurve(&s, highest, seed) })
	}
	wg.Wait()
	for _, s := range exponents {
		sc.popular = append(sc.popular, newPopularity(s, tableClients, tableRate))
	}
	for _, n := range counts {
		var list []*placement
		for draw := range draws {
			list = append(list, newPlacement(n, tableClients, draw))
		}
		sc.spreads = append(sc.spreads, list)
	}
	return &sc, nil
}

// curve is that of a setting.
func (sc *scenario) curve(of setting) *curve {
	return sc.curves[slices.IndexFunc(sc.curves, func(v *curve) bool { return v.name == of.name })]
}

// zipf is the popularity of an exponent.
func (sc *scenario) zipf(s float64) *popularity {
	return sc.popular[slices.Index(exponents, s)]
}

// hottest returns the median and the highest of what a measure says of the draws
// of a number of shards.
func (sc *scenario) hottest(place int, p *popularity, v *curve, measure func([]calls) float64) (median, highest float64) {
	var all []float64
	each := p.each(v)
	for _, pl := range sc.spreads[place] {
		all = append(all, measure(pl.spread(each)))
	}
	slices.Sort(all)
	return all[len(all)/2], all[len(all)-1]
}
