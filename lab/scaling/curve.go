package scaling

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

const (
	// acquaintance is how long a client sends requests before calls are counted. By then
	// a process knows that it is the sole writer.
	acquaintance   = 5 * second / 2
	batchedWindows = 10 // within which batches find their size
	// leastRequests of leastClients are counted for each rate: the end of a window is
	// random, and decides how soon a process knows again that it is the sole writer.
	leastRequests, leastClients = 4_000, 8
	fewClients                  = 2 // enough at rates above coarseFrom
	// fineSteps and coarseSteps are the ratios of rates below and above coarseFrom.
	fineSteps, coarseSteps = 1.5, 2.5
	coarseFrom             = 1_000.0
	leastRate              = 0.005 // so low that no client sends twice in a window
)

// random returns the pauses between requests at random instants, at a rate per second.
func random(r *rand.Rand, rate float64) func() int64 {
	return func() int64 { return int64(r.ExpFloat64() / rate * float64(second)) }
}

func regular(rate float64) func() int64 {
	at := 0.0
	return func() int64 {
		before := int64(at)
		at += float64(second) / rate
		return int64(at) - before
	}
}

// point is the cost of a request, by the rate of its client.
type point struct {
	rate float64
	calls
}

// curve is the cost of requests by the rate of their client.
type curve struct {
	*setting
	points []point
}

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

func newCurve(s *setting, highest float64, seed uint64) *curve {
	v := &curve{setting: s}
	for _, r := range rates(highest) {
		v.points = append(v.points, point{r, simulate(s, r, seed).perRequest()})
	}
	return v
}

// at returns the cost of a request at a rate, interpolated between the two nearest points.
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

// popularity is the request rate of each client, the most popular first: by Zipf's law
// the rate of the i-th is that of the first divided by i to the power s.
type popularity struct {
	s       float64
	clients int
	rate    float64 // requests a second of all clients
	rates   []float64
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

func (p *popularity) hottest() float64 { return p.rates[0] / p.rate }

func (p *popularity) each(v *curve) []calls {
	all := make([]calls, p.clients)
	for i, r := range p.rates {
		all[i].add(v.at(r), r)
	}
	return all
}

func total(all []calls) (sum calls) {
	for _, c := range all {
		sum.add(c, 1)
	}
	return sum
}

// placement is the assignment of clients to shards, by the store itself.
type placement struct {
	shards int
	owners []int
}

func shardName(i int) string { return "shard" + strconv.Itoa(i+1) }

func newPlacement(shards, clients, draw int) *placement {
	// All shards have the same server, which is never dialled.
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

// measured is a document with measurements.
type measured struct{ name, text string }

func readMeasured(name string) (measured, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return measured{}, fmt.Errorf("read the measurements: %w", err)
	}
	return measured{name, string(text)}, nil
}

// figure returns the number, or the median of several rounds, in a column of the row that
// begins with the given cells, in the table whose head begins with the given cell. Of
// columns with the same name the first counts.
func (m measured) figure(table, column string, row ...string) (float64, error) {
	where := fmt.Sprintf("%s, table %q, row %q, column %q", m.name, table, row, column)
	place := -1
	isTable := false
	for text := range strings.Lines(m.text) {
		if !strings.HasPrefix(text, "|") {
			isTable = false
			continue
		}
		all := strings.Split(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(text), "| "), " |"), " | ")
		if !isTable {
			isTable, place = true, -1
			if all[0] == table {
				place = slices.Index(all, column)
			}
			continue
		}
		if place < 0 || len(all) < len(row) || strings.Join(all[:len(row)], "|") != strings.Join(row, "|") {
			continue
		}
		v, err := report.Figure([]byte(all[place]), cellOf)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", where, err)
		}
		return v, nil
	}
	return 0, fmt.Errorf("%s: there is none", where)
}

// cellOf matches the median in a cell: median (min to max), or the median alone.
var cellOf = regexp.MustCompile(`^(\S+)(?: \(\S+ to \S+\))?$`)

func (m measured) stated(expression string) (float64, error) {
	v, err := report.Figure([]byte(m.text), regexp.MustCompile(expression))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.name, err)
	}
	return v, nil
}

// The tables and the rows of docs/evidence/benchmarks.md from which the costs follow. Each request of
// the clients of rarely, which come every few seconds, costs a charge; the base of the sweep costs a
// check too.
const (
	cases  = "case"
	sweep  = "factor"
	rarely = "redis store, 50,000 clients"
	own    = "redis store"
	taking = "redis store, charge before"
	// The last kind of traffic.
	refused = "redis store, one refused key"
)

// costs are the measured costs of calls, requests and clients. Times are CPU times in
// microseconds.
type costs struct {
	caddy, limiter          float64 // a request in Caddy, and the limiter's part of that
	charge, take            float64 // in the primary
	check, replicated       float64 // in a replica: a check, and the replication of a charge
	ledgerBytes, redisBytes float64 // the most for a bucket in Caddy, and in each server
	memoryBytes             float64 // for a bucket in the memory store
}

// busy is the part of a processor's time that may be used on average.
const busy = 0.5

func readCosts(benchmarks, design measured) (c costs, err error) {
	var ratio, both float64
	for _, f := range []struct {
		v           *float64
		column, row string
	}{
		{&c.caddy, "Caddy µs", rarely}, {&ratio, "Caddy ÷ floor", rarely},
		{&c.charge, "primary µs", rarely}, {&c.take, "primary µs", taking},
		{&c.replicated, "replica µs", rarely},
	} {
		if *f.v, err = benchmarks.figure(cases, f.column, f.row); err != nil {
			return c, err
		}
	}
	if both, err = benchmarks.figure(sweep, "Redis µs", "base"); err != nil {
		return c, err
	}
	// The floor of its own rounds: these clients are measured apart from the other cases.
	c.limiter, c.check = c.caddy-c.caddy/ratio, both-c.charge-c.replicated
	if c.memoryBytes, err = benchmarks.stated(`takes (\d+) bytes of Caddy's heap`); err != nil {
		return c, err
	}
	if c.redisBytes, err = benchmarks.stated(`\d+ to (\d+) bytes of .used_memory. in Redis`); err != nil {
		return c, err
	}
	c.ledgerBytes, err = design.stated(`less than (\d+) bytes each with a client key of 30`)
	return c, err
}

// traffics are the kinds of requests that docs/capacity.md lists, with the rows of their
// measurements.
var traffics = []struct {
	what, row string
	perSecond bool // set if they cost calls by the client and the second, not by the request
}{
	{"`charge after`, a client comes many times a second, to one Caddy", own, false},
	{"`charge after`, a client comes every few seconds, to one Caddy", rarely, false},
	{"`charge after`, a client comes for the first time", "redis store, clients never seen before", false},
	{"`charge before`", taking, false},
	{"`charge before` with `batch auto`, one client", "redis store, batch auto", true},
	{"one client over its limit, refused", refused, true},
}

// requestCost is what one kind of requests was measured to cost: calls, and CPU time in
// microseconds.
type requestCost struct{ calls, caddy, primary, replica float64 }

func readRequestCosts(benchmarks measured) ([]requestCost, error) {
	all := make([]requestCost, len(traffics))
	for i, t := range traffics {
		c := &all[i]
		for column, v := range map[string]*float64{
			"calls per request": &c.calls, "Caddy µs": &c.caddy, "primary µs": &c.primary, "replica µs": &c.replica,
		} {
			var err error
			if *v, err = benchmarks.figure(cases, column, t.row); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// primary is the part of a processor that a shard's primary needs for the calls of a
// second. Opening a window and refunding are assumed to cost as much as a charge.
func (c *costs) primary(load calls) float64 {
	m := &load.made
	return (c.charge*(m[open]+m[charge]+m[refund]) + c.take*m[take]) / float64(second)
}

// replicas is the same for all replicas together: each follows the primary, and they
// share the checks.
func (c *costs) replicas(load calls, replicas int) float64 {
	return (c.check*load.made[check] + float64(replicas)*c.replicated*load.primary()) / float64(second)
}

const (
	hour  = 3600 * second
	roomy = 1_000_000_000
	// acquainted is how often each client comes before its calls are counted, and
	// countedPauses how often at least while they are.
	acquainted, countedPauses = 4, 20
	// measuredWindow and steadyShare are those of the second table of docs/evidence/calls.md.
	measuredWindow = 8 * second
	steadyShare    = 0.8
)

// anchor is a figure that is measured as well as simulated.
type anchor struct {
	name                string
	measured, simulated float64
}

// singles are the rows of the first table: requests of some clients in turn.
var singles = []struct {
	name    string
	setting setting
	clients float64 // 0 if none comes twice
}{
	{"charge after, no client comes twice", setting{processes: 1, strangers: true}, 0},
	{"charge after, 200 clients, each 50 times a second", setting{processes: 1}, 200},
	{"charge after, 200 clients, each 50 times a second, `charge_delay 0`", setting{processes: 1, atOnce: true}, 200},
	{"charge after, 200 clients, each 50 times a second, at two Caddys", setting{processes: 2, route: inTurn}, 200},
	{"charge after, 5,000 clients, each every two seconds", setting{processes: 1}, 5_000},
	{"charge after, 5,000 clients, each every two seconds, `ledger_trust 900ms`", setting{processes: 1, checked: true}, 5_000},
	{"charge after, one client, 1 at a time", setting{processes: 1, lone: true}, 1},
	{"charge after, one client, 16 at a time", setting{processes: 1, lone: true}, 1},
	{"charge after, one client, 64 at a time", setting{processes: 1, lone: true}, 1},
	{"charge after, one client, 64 at a time, `charge_delay 0`", setting{processes: 1, lone: true, atOnce: true}, 1},
	{"charge after, one client, refused", setting{processes: 1, limit: 1}, 1},
	{"charge before, 200 clients in turn", setting{processes: 1, before: true}, 200},
	{"charge before, one client, 64 at a time", setting{processes: 1, before: true}, 1},
	{"charge before, one client, refused", setting{processes: 1, before: true, limit: 1}, 1},
}

func anchors(ledger measured) (all []anchor, err error) {
	for _, s := range singles {
		rate, err := ledger.figure("traffic", "requests/s", s.name)
		if err != nil {
			return nil, err
		}
		a := anchor{name: s.name}
		if a.measured, err = ledger.figure("traffic", "calls per request", s.name); err != nil {
			return nil, err
		}
		a.simulated = s.setting.callsOf(s.clients, rate)
		all = append(all, a)
	}
	for _, limit := range []int64{1_000, 10_000, 100_000} {
		for _, processes := range []int{1, 4, 16} {
			for _, auto := range []bool{true, false} {
				a, err := batchAnchor(ledger, limit, processes, auto)
				if err != nil {
					return nil, err
				}
				all = append(all, a)
			}
		}
	}
	return all, nil
}

// callsOf simulates the calls per request of clients in turn, by their common rate.
func (s setting) callsOf(clients, rate float64) float64 {
	s.window, s.limit = hour, cmp.Or(s.limit, roomy)
	c := newClient(&s, seed, 0)
	if clients > 0 {
		pause := int64(clients / rate * float64(second))
		from := max(acquaintance, acquainted*pause)
		return c.run(regular(rate/clients), from, from+max(5*second, countedPauses*pause)).perRequest().sum()
	}
	pause := int64(0)
	once := func() (p int64) {
		p, pause = pause, hour
		return p
	}
	return c.run(once, 0, second).perRequest().sum()
}

func batchAnchor(ledger measured, limit int64, processes int, auto bool) (a anchor, err error) {
	s := setting{processes: processes, route: anyCaddy, before: true, batch: limit / 100, limit: limit, window: measuredWindow, align: true}
	column, name := "`limit/100`: calls per request", "batch limit/100"
	leases := 0.0
	if auto {
		s.batch, column, name = store.BatchAuto, "`auto`: calls per request", "batch auto"
		leases = float64(processes) * float64(measuredWindow/second)
	}
	a.name = fmt.Sprintf("%s, limit %d, %d processes", name, limit, processes)
	if a.measured, err = ledger.figure("limit", column, strconv.FormatInt(limit, 10), strconv.Itoa(processes)); err != nil {
		return a, err
	}
	c := newClient(&s, seed, 0)
	r := rand.New(rand.NewPCG(seed, uint64(limit)))
	rate := steadyShare * float64(limit) / float64(measuredWindow/second)
	counts := c.run(random(r, rate), measuredWindow, 2*measuredWindow)
	a.simulated = (counts.sum() + leases) / counts.requests
	return a, nil
}
