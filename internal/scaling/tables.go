package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// number writes a figure with about as many digits as mean something.
func number(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 100:
		return grouped(v)
	case v >= 0.995:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 1, 64), 64)
	return strconv.FormatFloat(rounded, 'f', -1, 64)
}

// grouped writes a whole number with commas.
func grouped(v float64) string {
	text := strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

// rounded is a large number in three digits.
func rounded(v float64) string {
	if v < 1000 {
		return grouped(v)
	}
	unit := math.Pow10(int(math.Log10(v)) - 2)
	return grouped(math.Round(v/unit) * unit)
}

func percent(v float64) string { return strconv.FormatFloat(100*v, 'f', 0, 64) }

func head(b *strings.Builder, columns ...string) {
	fmt.Fprintf(b, "| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
}

func row(b *strings.Builder, all ...string) { fmt.Fprintf(b, "| %s |\n", strings.Join(all, " | ")) }

const benchmarksLink = "[benchmarks](benchmarks.md#the-limiter-in-caddy)"

// costTable is what was measured, and what follows for one processor.
func costTable(c *costs) string {
	var b strings.Builder
	perSecond := func(micros float64) string { return rounded(busy * float64(second) / micros) }
	micros := func(v float64) string { return fmt.Sprintf("%.1f µs", v) }
	head(&b, "what", "costs", fmt.Sprintf("so many a second on %s %% of a processor", percent(busy)), "taken from")
	row(&b, "a request in Caddy, without TLS and with nothing behind it", micros(c.caddy), perSecond(c.caddy), benchmarksLink+", `"+rarely+"`")
	row(&b, "of that the limiter", micros(c.limiter), "", "less `"+floor+"`")
	row(&b, "a charge, in the primary", micros(c.charge), perSecond(c.charge), "`"+rarely+"`: each request there costs one")
	row(&b, "a take, in the primary", micros(c.take), perSecond(c.take), "`"+taking+"`")
	row(&b, "a check, in a replica", micros(c.check), perSecond(c.check), "`"+rarely+"` less `"+own+"`, which has hardly any")
	row(&b, "following a charge, in each replica", micros(c.replicated), perSecond(c.replicated), "`"+own+"`")
	row(&b, "a client, in each server of its shard", fmt.Sprintf("%.0f bytes at most", c.redisBytes), "", benchmarksLink)
	row(&b, "a client, in each Caddy it comes to", fmt.Sprintf("less than %.0f bytes", c.ledgerBytes), "", "[the ledger](design.md#7-the-ledger-storeledger)")
	row(&b, "a client, in the memory store", fmt.Sprintf("%.0f bytes", c.memoryBytes), "", benchmarksLink)
	return b.String()
}

// requestTable is what a request costs, by how popular clients are.
func requestTable(sc *scenario) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s requests/s of %s clients, %d Caddys, windows of %d s, limits of %s or %s, seed %d. The first columns are for s = %g.\n\n",
		grouped(tableRate), grouped(tableClients), caddys, windowLength/second, grouped(wide), grouped(tight), seed, exampleS)
	columns := []string{"calls per request"}
	columns = append(columns, kindNames[:]...)
	columns = append(columns, "requests that wait for Redis %", "admitted %")
	for _, p := range sc.popular {
		columns = append(columns, fmt.Sprintf("all calls, s = %g", p.s))
	}
	head(&b, columns...)
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
		row(&b, line...)
	}
	return b.String()
}

func requestsOf(c calls) float64 { return c.requests }

// shardTable is what comes to the hottest shard.
func shardTable(sc *scenario) string {
	var b strings.Builder
	fmt.Fprintf(&b, "The hottest shard's requests, relative to the mean: the median of %d draws of the clients' names, and in parentheses the worst. *Alone* is what the hottest client makes of that at s = %g, wherever it is. Then the hottest primary, in %% of a processor, at s = %g.\n\n",
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
	head(&b, columns...)
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
		row(&b, line...)
	}
	return b.String()
}

// busiest is which part of a processor the busiest primary needs.
func (sc *scenario) busiest(loads []calls) (most float64) {
	for _, l := range loads {
		most = max(most, sc.costs.primary(l))
	}
	return most
}

// anchorTable is what was measured and simulated.
func anchorTable(all []anchor) string {
	var b strings.Builder
	head(&b, "calls per request", "measured", "simulated")
	for _, a := range all {
		row(&b, a.name, number(a.measured), number(a.simulated))
	}
	return b.String()
}

// exampleText is the worked example.
func exampleText(sc *scenario) string {
	var b strings.Builder
	all, p := sc.example()
	c := &sc.costs
	processors := math.Ceil(exampleRate * c.caddy / float64(second) / busy)
	fmt.Fprintf(&b, "%s requests/s of %s clients at s = %g: the hottest sends %s a second, which is %.1f %%. Caddy needs %s processors (%s × %.1f µs on %s %% of each): %d Caddys of %.0f processors each. What they remember is less than %.1f GB each if every client comes to each of them (`ledger_max_buckets`, %s by default, bounds it); in Redis all buckets together take %.2f GB in primaries and as much in replicas if each shard has one.\n\n",
		grouped(exampleRate), grouped(exampleClients), exampleS, rounded(p.rates[0]), 100*p.hottest(),
		grouped(processors), grouped(exampleRate), c.caddy, percent(busy), caddys, math.Ceil(processors/caddys),
		exampleClients*c.ledgerBytes/1e9, grouped(exampleClients), exampleClients*c.redisBytes/1e9)
	head(&b, "setting", "checks/s", "calls/s to primaries", "the hottest client's share of a processor %", "shards", "replicas each", "busiest primary %", "busiest replica %", "servers of Redis")
	for _, h := range all {
		line := []string{h.name, rounded(h.sum.made[check]), rounded(h.sum.primary()), fmt.Sprintf("%.1f", 100*h.hot)}
		if h.shards == 0 {
			line = append(line, "no number is enough", "", "", "", "")
		} else {
			line = append(line, strconv.Itoa(h.shards), strconv.Itoa(h.replicas), percent(h.primary), percent(h.replica), strconv.Itoa(h.shards*(1+h.replicas)))
		}
		row(&b, line...)
	}
	return b.String()
}
