// Package scaling computes the figures of docs/evidence/scaling.md, and the example of
// docs/capacity.md: the calls to Redis of requests with many Caddys and shards, and the
// hardware for them. It simulates from a fixed seed, without Redis and without a clock,
// and takes the cost of single calls from the tables of the other documents. A client is
// simulated under a setting; a curve is the cost of its requests by its rate; a scenario
// is all curves and placements of the documents.
package scaling

import (
	"context"
	"errors"
	"flag"
	"path/filepath"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
)

var (
	flags     = flag.NewFlagSet("scaling", flag.ExitOnError)
	documents = flags.String("documents", "../docs", "directory of the documents: what was measured, and what is written between the marks")
)

// The documents in their directory: those that are read, those that are written, and the
// pictures.
const (
	benchmarksDocument = "evidence/benchmarks.md"
	designDocument     = "design.md"
	callsDocument      = "evidence/calls.md"

	scalingDocument  = "evidence/scaling.md"
	capacityDocument = "capacity.md"
	clientPicture    = "img/scaling-client.svg"
	shardPicture     = "img/scaling-shard.svg"
)

// Run simulates, and writes the documents and their pictures.
func Run(_ context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	read := map[string]measured{}
	for _, name := range []string{benchmarksDocument, designDocument, callsDocument} {
		m, err := readMeasured(filepath.Join(*documents, name))
		if err != nil {
			return err
		}
		read[name] = m
	}
	sc, err := newScenario(read[benchmarksDocument], read[designDocument], read[callsDocument])
	if err != nil {
		return err
	}
	for name, p := range map[string]*picture.Plot{clientPicture: drawClient(sc), shardPicture: drawShard(sc)} {
		if err := p.Write(filepath.Join(*documents, name)); err != nil {
			return err
		}
	}
	return errors.Join(
		report.Rewrite(filepath.Join(*documents, scalingDocument), "scaling", map[string]string{
			report.Result: resultText(sc), "costs": costTable(&sc.costs), "requests": requestTable(sc), "shards": shardTable(sc),
			"example": exampleText(&sc.costs, million, sc.curves), "anchors": anchorTable(sc.anchors),
		}),
		report.Rewrite(filepath.Join(*documents, capacityDocument), "scaling", map[string]string{
			"traffic": trafficTable(sc), "example": exampleText(&sc.costs, usual, sc.usual), "hand": handText(sc),
		}))
}

const (
	seed         = 2026 // of all random numbers
	caddys       = 16
	wide, tight  = 1_000_000, 1_000 // limits that no client reaches, and that popular ones reach
	windowLength = 10 * second
	fixedBatch   = 1_000 // a batch without auto
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

// The traffic of the tables.
const (
	tableClients, tableRate = 100_000, 100_000
	exampleS                = 1.0 // the exponent of Zipf's law where only one is shown
	draws                   = 5   // of clients' names, where shards are compared
)

// example is traffic for which the hardware is computed.
type example struct {
	clients, caddys int
	rate            float64 // requests a second
}

// The examples of docs/evidence/scaling.md and docs/capacity.md.
var (
	million = example{clients: 1_000_000, caddys: caddys, rate: 1_000_000}
	usual   = example{clients: 100_000, caddys: 4, rate: 50_000}
)

var (
	exponents = []float64{0, 0.8, exampleS, 1.2}
	counts    = []int{1, 2, 4, 8, 16, 32, 64}
)

// scenario is all simulations for the document.
type scenario struct {
	costs    costs
	requests []requestCost // by kind of traffic
	anchors  []anchor
	curves   []*curve       // with as many Caddys as in the tables
	usual    []*curve       // with as many as in the example of the same name
	popular  []*popularity  // by exponent
	spreads  [][]*placement // by number of shards, one for each draw
}

func newScenario(benchmarks, design, ledger measured) (_ *scenario, err error) {
	var sc scenario
	if sc.costs, err = readCosts(benchmarks, design); err != nil {
		return nil, err
	}
	if sc.requests, err = readRequestCosts(benchmarks); err != nil {
		return nil, err
	}
	if sc.anchors, err = anchors(ledger); err != nil {
		return nil, err
	}
	sc.curves, sc.usual = million.curves(), usual.curves()
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

// curves simulates all settings, up to the rate of the hottest client.
func (e example) curves() []*curve {
	highest := e.popularity().rates[0]
	settings := []setting{afterSticky, afterAny, afterTight, beforeAny, beforeTight, batchAuto, batchFixed}
	all := make([]*curve, len(settings))
	_ = traffic.Together(len(settings), func(i int) error {
		s := settings[i]
		s.processes, s.window = e.caddys, windowLength
		all[i] = newCurve(&s, highest, seed)
		return nil
	})
	return all
}

func (e example) popularity() *popularity { return newPopularity(exampleS, e.clients, e.rate) }

func (sc *scenario) curve(of setting) *curve {
	return sc.curves[slices.IndexFunc(sc.curves, func(v *curve) bool { return v.name == of.name })]
}

func (sc *scenario) zipf(s float64) *popularity {
	return sc.popular[slices.Index(exponents, s)]
}

// hottest returns the median and the highest value of a measure over all draws of a number
// of shards.
func (sc *scenario) hottest(place int, p *popularity, v *curve, measure func([]calls) float64) (median, highest float64) {
	var all []float64
	each := p.each(v)
	for _, pl := range sc.spreads[place] {
		all = append(all, measure(pl.spread(each)))
	}
	slices.Sort(all)
	return all[len(all)/2], all[len(all)-1]
}

var shardCounts = []int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}

// hardware is the hardware that a setting needs for the requests of an example.
type hardware struct {
	*curve
	sum              calls   // of all requests of a second
	hot              float64 // the part of a processor for the hottest client, in its primary
	shards, replicas int     // of each shard; no number of shards is enough if it is 0
	primary, replica float64 // the parts of a processor that the busiest need
}

// maxReplicas bounds the search of need.
const maxReplicas = 16

// need finds the fewest shards of which no primary is busier than it should be, and the
// fewest replicas, at least one.
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

// hardware is what each of some curves needs for the example.
func (e example) hardware(c *costs, curves []*curve) (all []*hardware) {
	p, placed := e.popularity(), map[int]*placement{}
	place := func(shards int) *placement {
		if placed[shards] == nil {
			placed[shards] = newPlacement(shards, e.clients, 0)
		}
		return placed[shards]
	}
	for _, v := range curves {
		all = append(all, need(c, v, p, place))
	}
	return all
}
