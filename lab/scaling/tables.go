package scaling

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

func number(v float64) string {
	switch {
	case v >= 100:
		return report.Grouped(v)
	case v >= 0.995:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return report.Digits(v)
}

func percent(v float64) string { return strconv.FormatFloat(100*v, 'f', 0, 64) }

const benchmarksLink = "[benchmarks](benchmarks.md#the-limiter-in-caddy)"

func costTable(c *costs) string {
	perSecond := func(micros float64) string { return report.Rounded(busy * float64(second) / micros) }
	micros := func(v float64) string { return fmt.Sprintf("%.1f µs", v) }
	t := report.NewTable("what", "costs", fmt.Sprintf("so many a second on %s %% of a processor", percent(busy)), "taken from")
	t.Row("a request in Caddy, without TLS and with nothing behind it", micros(c.caddy), perSecond(c.caddy), benchmarksLink+", `"+rarely+"`")
	t.Row("of that the limiter", micros(c.limiter), "", "its ratio to the floor")
	t.Row("a charge, in the primary", micros(c.charge), perSecond(c.charge), "`"+rarely+"`: each request there costs one")
	t.Row("a take, in the primary", micros(c.take), perSecond(c.take), "`"+taking+"`")
	t.Row("a check, in a replica", micros(c.check), perSecond(c.check), "`base` of [one factor at a time](benchmarks.md#one-factor-at-a-time), less a charge and its replication")
	t.Row("following a charge, in each replica", micros(c.replicated), perSecond(c.replicated), "`"+rarely+"`")
	t.Row("a client, in each server of its shard", fmt.Sprintf("%.0f bytes at most", c.redisBytes), "", benchmarksLink)
	t.Row("a client, in each Caddy it comes to", fmt.Sprintf("less than %.0f bytes", c.ledgerBytes), "", "[the ledger](../design.md#7-the-ledger-storeledger)")
	t.Row("a client, in the memory store", fmt.Sprintf("%.0f bytes", c.memoryBytes), "", benchmarksLink)
	return t.String()
}

// trafficTable lists what requests cost by the kind of traffic, and what buckets take.
func trafficTable(sc *scenario) string {
	t := report.NewTable("requests", "calls to Redis per request", "Caddy µs", "primary µs", "replica µs", fmt.Sprintf("requests/s that one primary serves at %s %% of a processor", percent(busy)))
	for i, c := range sc.requests {
		most := "bounded by Caddy"
		if !traffics[i].perSecond {
			most = report.Rounded(busy * float64(second) / c.primary)
		}
		calls := number(c.calls)
		if traffics[i].row == refused {
			// The benchmark measures between these calls.
			calls += ", and one a second from each Caddy"
		}
		t.Rowf("%s | %s | %.1f | %.1f | %.1f | %s", traffics[i].what, calls, c.caddy, c.primary, c.replica, most)
	}
	return t.String() + fmt.Sprintf("\nA bucket takes at most %.0f bytes in each server of its shard, less than %.0f bytes in each Caddy that it comes to, and %.0f bytes in the memory store.\n",
		sc.costs.redisBytes, sc.costs.ledgerBytes, sc.costs.memoryBytes)
}

// handText computes the processors and shards of the usual example from trafficTable.
func handText(sc *scenario) string {
	var b strings.Builder
	rate := report.Grouped(usual.rate)
	fmt.Fprintf(&b, "- Caddy: %s × %.1f ÷ %s is %.1f, so %.0f processors.\n", rate, sc.costs.caddy,
		report.Grouped(busy*float64(second)), usual.rate*sc.costs.caddy/(busy*float64(second)), math.Ceil(usual.rate*sc.costs.caddy/(busy*float64(second))))
	for i, c := range sc.requests {
		if traffics[i].perSecond {
			continue
		}
		shards := usual.rate * c.primary / (busy * float64(second))
		fmt.Fprintf(&b, "- %s: %s ÷ %s is %.2f, so shards: %.0f.\n", traffics[i].what, rate, report.Rounded(busy*float64(second)/c.primary), shards, math.Ceil(shards))
	}
	clients := float64(usual.clients)
	fmt.Fprintf(&b, "- Memory: %s × %.0f bytes are %s in each server of a single shard.\n", report.Grouped(clients), sc.costs.redisBytes, megabytes(clients*sc.costs.redisBytes))
	return b.String()
}

func requestTable(sc *scenario) string {
	head := fmt.Sprintf("%s requests/s of %s clients, %d Caddys, windows of %d s, limits of %s or %s, seed %d. The first columns are for s = %g.\n\n",
		report.Grouped(tableRate), report.Grouped(tableClients), caddys, windowLength/second, report.Grouped(wide), report.Grouped(tight), seed, exampleS)
	columns := []string{"calls per request"}
	columns = append(columns, kindNames[:]...)
	columns = append(columns, "requests that wait for Redis %", "admitted %")
	for _, p := range sc.popular {
		columns = append(columns, fmt.Sprintf("all calls, s = %g", p.s))
	}
	t := report.NewTable(columns...)
	for _, v := range sc.curves {
		one := total(sc.zipf(exampleS).each(v)).perRequest()
		line := []string{v.name}
		for _, n := range one.made {
			line = append(line, number(n))
		}
		line = append(line, percent(one.waited), percent(one.admitted))
		for _, p := range sc.popular {
			line = append(line, number(total(p.each(v)).perRequest().sum()))
		}
		t.Row(line...)
	}
	return head + t.String()
}

func requestsOf(c calls) float64 { return c.requests }

func shardTable(sc *scenario) string {
	head := fmt.Sprintf("The hottest shard's requests, relative to the mean: the median of %d draws of the clients' names, and in parentheses the worst. *Alone* is what the hottest client makes of that at s = %g, wherever it is. Then the hottest primary, in %% of a processor, at s = %g.\n\n",
		draws, exampleS, exampleS)
	columns := []string{"shards"}
	for _, p := range sc.popular {
		columns = append(columns, fmt.Sprintf("s = %g", p.s))
	}
	shown := []setting{afterAny, afterTight, beforeAny, batchFixed}
	columns = append(columns, "alone")
	for _, s := range shown {
		columns = append(columns, s.name)
	}
	t := report.NewTable(columns...)
	zipf := sc.zipf(exampleS)
	for i, n := range counts {
		line := []string{strconv.Itoa(n)}
		for _, p := range sc.popular {
			median, worst := sc.hottest(i, p, sc.curve(afterAny), func(l []calls) float64 { return hottest(l, requestsOf) })
			line = append(line, fmt.Sprintf("%.2f (%.2f)", median, worst))
		}
		line = append(line, fmt.Sprintf("%.2f", zipf.hottest()*float64(n)))
		for _, s := range shown {
			median, _ := sc.hottest(i, zipf, sc.curve(s), sc.busiest)
			line = append(line, percent(median))
		}
		t.Row(line...)
	}
	return head + t.String()
}

func (sc *scenario) busiest(loads []calls) (most float64) {
	for _, l := range loads {
		most = max(most, sc.costs.primary(l))
	}
	return most
}

func anchorTable(all []anchor) string {
	t := report.NewTable("calls per request", "measured", "simulated")
	for _, a := range all {
		t.Row(a.name, number(a.measured), number(a.simulated))
	}
	return t.String()
}

func exampleText(c *costs, e example, curves []*curve) string {
	p := e.popularity()
	processors := math.Ceil(e.rate * c.caddy / float64(second) / busy)
	clients := float64(e.clients)
	head := fmt.Sprintf("%s requests/s of %s clients at s = %g: the hottest sends %s a second, which is %.1f %%. With `charge after`, and if each client comes to one Caddy, Caddy needs %s processors (%s × %.1f µs on %s %% of each): %d Caddys with at least %.0f each. Checks, takes and new clients cost Caddy more. What each Caddy remembers is less than %s if every client comes to each of them (`max_buckets`, 1,000,000 by default, bounds it); in Redis all buckets together take %s in primaries and as much in replicas if each shard has one.\n\n",
		report.Grouped(e.rate), report.Grouped(clients), exampleS, report.Rounded(p.rates[0]), 100*p.hottest(),
		report.Grouped(processors), report.Grouped(e.rate), c.caddy, percent(busy), e.caddys, math.Ceil(processors/float64(e.caddys)),
		megabytes(clients*c.ledgerBytes), megabytes(clients*c.redisBytes))
	t := report.NewTable("setting", "checks/s", "calls/s to primaries", "the hottest client's share of a processor %", "shards", "replicas each", "busiest primary %", "busiest replica %", "servers of Redis")
	for _, h := range e.hardware(c, curves) {
		line := []string{h.name, report.Rounded(h.sum.made[check]), report.Rounded(h.sum.primary()), fmt.Sprintf("%.1f", 100*h.hot)}
		if h.shards == 0 {
			line = append(line, "no number is enough", "", "", "", "")
		} else {
			line = append(line, strconv.Itoa(h.shards), strconv.Itoa(h.replicas), percent(h.primary), percent(h.replica), strconv.Itoa(h.shards*(1+h.replicas)))
		}
		t.Row(line...)
	}
	return head + t.String()
}

func megabytes(bytes float64) string { return report.Grouped(bytes/1e6) + " MB" }

// resultText is the summary of the document.
func resultText(sc *scenario) string {
	c := &sc.costs
	one := total(sc.zipf(exampleS).each(sc.curve(afterAny))).perRequest()
	return fmt.Sprintf("**Result.** A primary that is busy for %s %% of its time serves %s charges or %s takes a second. With `charge after`, clients that come to any of %d Caddys cost %s calls per request, of which %s are checks at replicas. Shards divide the clients, but not the requests of one client.\n",
		percent(busy), report.Rounded(busy*float64(second)/c.charge), report.Rounded(busy*float64(second)/c.take), caddys, number(one.sum()), number(one.made[check]))
}

var styles = []struct {
	setting
	colour string
	dashed bool
}{
	{afterAny, picture.Blue, false}, {afterSticky, picture.Blue, true},
	{beforeAny, picture.Orange, false}, {beforeTight, picture.Orange, true},
	{batchFixed, picture.Green, false}, {batchAuto, picture.Green, true},
}

func drawClient(sc *scenario) *picture.Plot {
	p := picture.NewPlot(picture.Powers("the client's requests a second", 10, -2, 5), picture.Powers("", 10, -2, 5),
		"Calls to Redis a second for one client, by the requests it makes",
		fmt.Sprintf("Calls to Redis a second for one client, %d Caddys", caddys))
	for _, style := range styles {
		s := picture.Series{Name: style.name, Colour: style.colour, Dashed: style.dashed}
		for _, at := range sc.curve(style.setting).points {
			if at.rate >= 0.01 {
				s.Append(at.rate, at.rate*at.sum())
			}
		}
		p.Draw(s)
	}
	return p
}

func drawShard(sc *scenario) *picture.Plot {
	const most = 6
	p := picture.NewPlot(picture.Powers("shards", 2, 0, most), picture.Powers("", 2, -6, 1),
		"How busy the busiest primary is, by the number of shards",
		fmt.Sprintf("The busiest primary, in processors; %s requests/s, s = %g", report.Grouped(tableRate), exampleS))
	zipf := sc.zipf(exampleS)
	for _, style := range styles {
		s := picture.Series{Name: style.name, Colour: style.colour, Dashed: style.dashed}
		for i, n := range counts {
			median, _ := sc.hottest(i, zipf, sc.curve(style.setting), sc.busiest)
			s.Append(float64(n), median)
		}
		p.Draw(s)
	}
	// With equal shards, the line would halve whenever their number doubles.
	alike := picture.Series{Name: "if shards were alike", Colour: picture.Gray, Dashed: true}
	alike.Append(1, 2)
	alike.Append(1<<most, 2.0/(1<<most))
	p.Draw(alike)
	return p
}
