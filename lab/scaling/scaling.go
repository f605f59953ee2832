// Package scaling computes the servers that traffic needs, for docs/capacity.md and
// scaling.md, from measured costs of requests, and how unequal shards become, by the
// store's own placement of clients.
package scaling

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

var (
	flags    = flag.NewFlagSet("scaling", flag.ExitOnError)
	out      = report.Out(flags)
	figures  = flags.String("figures", "../docs/evidence.md", "document with the measured costs, such as ../dist/evidence/benchmarks.md")
	capacity = flags.String("capacity", "../docs/capacity.md", "document to write the costs and the example to, between the marks; none if empty")
)

//go:embed scaling.md
var template string

// Run computes, and writes the documents.
func Run(_ context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	c, err := readCosts(*figures)
	if err != nil {
		return err
	}
	traffic, hand := trafficTable(c), handText(c)
	err = report.Write(*out, "scaling.md", template, map[string]string{
		"machine": report.Machine(), "costs": costTable(c), "traffic": traffic, "million": millionTable(c), "shards": shardTable(c),
	}, nil)
	if *capacity != "" {
		err = errors.Join(err, report.Rewrite(*capacity, "scaling", map[string]string{"traffic": traffic, "hand": hand}))
	}
	return err
}

// The traffic of the table of shards, whose popularity follows Zipf's law.
const (
	tableClients, tableRate = 20_000, 100_000
	draws                   = 5 // of clients' names
)

var (
	exponents = []float64{0, 0.8, 1, 1.2}
	counts    = []int{1, 2, 4, 8, 16, 32, 64}
)

// popularity is the share of the requests that each client sends, the most popular first:
// the share of the i-th is that of the first divided by i to the power s.
func popularity(s float64, clients int) []float64 {
	shares, sum := make([]float64, clients), 0.0
	for i := range shares {
		shares[i] = math.Pow(float64(i+1), -s)
		sum += shares[i]
	}
	for i := range shares {
		shares[i] /= sum
	}
	return shares
}

// place assigns clients to shards as the Redis store does, and returns the places of the
// shards.
func place(shards, clients, draw int) []int {
	// All shards have the same server, which is never dialled.
	unused := redis.NewShard(redis.ShardOptions{Primary: "127.0.0.1:0"})
	defer unused.Close(context.Background())
	var members []redis.Member
	places := map[string]int{}
	for i := range shards {
		name := "shard" + strconv.Itoa(i+1)
		members = append(members, redis.Member{Name: name, Shard: unused})
		places[name] = i
	}
	s := redis.New(redis.Options{Members: members})
	owners := make([]int, clients)
	for i := range owners {
		owners[i] = places[s.Owner(fmt.Sprintf("draw%d-client%d", draw, i))]
	}
	return owners
}

// hottest is the largest share of the requests that a shard gets.
func hottest(shards int, owners []int, shares []float64) float64 {
	loads := make([]float64, shards)
	for i, owner := range owners {
		loads[owner] += shares[i]
	}
	return slices.Max(loads)
}

// shardTable has the load of the hottest shard for several numbers of shards.
func shardTable(c *costs) string {
	columns := []string{"shards"}
	var popular [][]float64
	for _, s := range exponents {
		columns = append(columns, fmt.Sprintf("s = %g", s))
		popular = append(popular, popularity(s, tableClients))
	}
	t := report.NewTable(append(columns, "alone, s = 1", "busiest primary %, `charge before`, s = 1")...)
	for _, n := range counts {
		all := make([][]float64, len(exponents))
		for draw := range draws {
			owners := place(n, tableClients, draw)
			for i, shares := range popular {
				all[i] = append(all[i], hottest(n, owners, shares))
			}
		}
		row := []string{strconv.Itoa(n)}
		for _, shares := range all {
			s := report.SpreadOf(shares)
			row = append(row, fmt.Sprintf("%.2f (%.2f)", s.Median*float64(n), s.Most*float64(n)))
		}
		zipf := slices.Index(exponents, 1)
		busiest := report.SpreadOf(all[zipf]).Median * tableRate * c.of(taking).primary / 1e6
		t.Row(append(row, fmt.Sprintf("%.2f", popular[zipf][0]*float64(n)), fmt.Sprintf("%.0f", 100*busiest))...)
	}
	return fmt.Sprintf("%s requests/s of %s clients.\n\n%s", report.Grouped(tableRate), report.Grouped(tableClients), t)
}
