package scaling

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// measured is a document with measurements.
type measured struct{ name, text string }

// figure returns the number, or the median of several rounds, in a column of the row that
// begins with a cell, in the table whose head begins with another. Of columns with the
// same name the first counts.
func (m measured) figure(table, column, row string) (float64, error) {
	where := fmt.Sprintf("%s, table %q, row %q, column %q", m.name, table, row, column)
	place, isTable := -1, false
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
		if place < 0 || all[0] != row {
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

// The rows of the table of cases from which several figures follow. Each request of the
// clients of rarely, which come every few seconds, costs a charge.
const (
	rarely  = "redis store, 50,000 clients"
	taking  = "redis store, charge before"
	refused = "redis store, one refused key"
)

// traffics are kinds of requests, with the rows of their measurements.
var traffics = []struct {
	what, row string
	perSecond bool // set if they cost calls by the client and the second, not by the request
}{
	{"`charge after`, a client comes many times a second, to one Caddy", "redis store", false},
	{"`charge after`, a client comes every few seconds, to one Caddy", rarely, false},
	{"`charge after`, a client comes for the first time", "redis store, clients never seen before", false},
	{"`charge before`", taking, false},
	{"`charge before` with `batch auto`, one client", "redis store, batch auto", true},
	{"one client over its limit, refused", refused, true},
}

// request is what one kind of requests was measured to cost: calls, and CPU time in
// microseconds.
type request struct{ calls, caddy, primary, replica float64 }

type costs struct {
	requests []request // in the order of traffics
	limiter  float64   // its part of a request of rarely, in microseconds
	check    float64   // in a replica, in microseconds
	// The bytes of a bucket: the most in each server of Redis and in Caddy, and those in
	// the memory store.
	redisBytes, ledgerBytes, memoryBytes float64
}

func (c *costs) of(row string) request {
	for i, t := range traffics {
		if t.row == row {
			return c.requests[i]
		}
	}
	return request{}
}

func readCosts(document string) (*costs, error) {
	text, err := os.ReadFile(document)
	if err != nil {
		return nil, fmt.Errorf("read the measurements: %w", err)
	}
	m, c := measured{document, string(text)}, &costs{requests: make([]request, len(traffics))}
	for i, t := range traffics {
		for column, v := range map[string]*float64{
			"calls per request": &c.requests[i].calls, "Caddy µs": &c.requests[i].caddy,
			"primary µs": &c.requests[i].primary, "replica µs": &c.requests[i].replica,
		} {
			if *v, err = m.figure("case", column, t.row); err != nil {
				return nil, err
			}
		}
	}
	rare := c.of(rarely)
	ratio, err := m.figure("case", "Caddy ÷ floor", rarely)
	if err != nil {
		return nil, err
	}
	// A request of the base of the sweep costs a check beside its charge.
	both, err := m.figure("factor", "Redis µs", "base")
	if err != nil {
		return nil, err
	}
	c.limiter, c.check = rare.caddy-rare.caddy/ratio, both-rare.primary-rare.replica
	for expression, v := range map[string]*float64{
		`\d+ to (\d+) bytes of .used_memory. in each server`: &c.redisBytes,
		`less than (\d+) bytes in each Caddy`:                &c.ledgerBytes,
		`(\d+) bytes in the memory store`:                    &c.memoryBytes,
	} {
		if *v, err = m.stated(expression); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// busy is the part of a processor's time that may be used on average.
const busy = 0.5

// perSecond is how many requests of so many microseconds a processor serves in a second
// without being busier.
func perSecond(micros float64) float64 { return busy * 1e6 / micros }

// needed is the number of processors, none of them busier, for the requests of a second.
func needed(requests, micros float64) float64 { return math.Ceil(requests / perSecond(micros)) }

func costTable(c *costs) string {
	rare, take := c.of(rarely), c.of(taking).primary
	t := report.NewTable("what", "µs", fmt.Sprintf("so many a second on %.0f %% of a processor", 100*busy))
	for _, row := range []struct {
		what   string
		micros float64
	}{
		{"a request in Caddy, without TLS and with nothing behind it", rare.caddy}, {"of that the limiter", c.limiter},
		{"a charge, in the primary", rare.primary}, {"a take, in the primary", take},
		{"a check, in a replica", c.check}, {"following a charge, in each replica", rare.replica},
	} {
		t.Rowf("%s | %.1f | %s", row.what, row.micros, report.Rounded(perSecond(row.micros)))
	}
	return t.String()
}

// trafficTable lists what requests cost by the kind of traffic, and what buckets take.
func trafficTable(c *costs) string {
	t := report.NewTable("requests", "calls to Redis per request", "Caddy µs", "primary µs", "replica µs", fmt.Sprintf("requests/s that one primary serves at %.0f %% of a processor", 100*busy))
	for i, r := range c.requests {
		most, calls := "bounded by Caddy", report.Number(r.calls)
		if !traffics[i].perSecond {
			most = report.Rounded(perSecond(r.primary))
		}
		if traffics[i].row == refused {
			// The benchmark measures between these calls.
			calls += ", and one a second from each Caddy"
		}
		t.Rowf("%s | %s | %.1f | %.1f | %.1f | %s", traffics[i].what, calls, r.caddy, r.primary, r.replica, most)
	}
	return t.String() + fmt.Sprintf("\nA bucket takes at most %.0f bytes in each server of its shard, less than %.0f bytes in each Caddy that it comes to, and %.0f bytes in the memory store.\n",
		c.redisBytes, c.ledgerBytes, c.memoryBytes)
}

// The example of docs/capacity.md.
const exampleRate, exampleClients = 50_000, 100_000

// handText computes the processors and shards of the example from the table of traffic.
func handText(c *costs) string {
	var b strings.Builder
	rate, clients := report.Grouped(exampleRate), float64(exampleClients)
	caddy := c.of(rarely).caddy
	fmt.Fprintf(&b, "- Caddy: %s × %.1f ÷ %s is %.1f, so %.0f processors.\n", rate, caddy, report.Grouped(busy*1e6), exampleRate/perSecond(caddy), needed(exampleRate, caddy))
	for i, r := range c.requests {
		if !traffics[i].perSecond {
			fmt.Fprintf(&b, "- %s: %s ÷ %s is %.2f, so shards: %.0f.\n", traffics[i].what, rate, report.Rounded(perSecond(r.primary)), exampleRate/perSecond(r.primary), needed(exampleRate, r.primary))
		}
	}
	megabytes := func(bytes float64) string { return report.Grouped(clients*bytes/1e6) + " MB" }
	fmt.Fprintf(&b, "- Memory: %s × %.0f bytes are %s in each server of a single shard, and less than %s in each Caddy that all clients come to.\n",
		report.Grouped(clients), c.redisBytes, megabytes(c.redisBytes), megabytes(c.ledgerBytes))
	return b.String()
}

// millionTable has the servers for a million requests a second.
func millionTable(c *costs) string {
	const million = 1e6
	t := report.NewTable("requests", "processors for Caddy", "shards (a primary each)", "replicas, one a shard at least")
	for i, r := range c.requests {
		shards := needed(million, r.primary)
		t.Rowf("%s | %.0f | %.0f | %.0f", traffics[i].what, needed(million, r.caddy), shards, max(shards, needed(million, r.replica)))
	}
	return t.String()
}
