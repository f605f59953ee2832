package endtoend

import (
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestTablesTellOfAllRounds: each figure has its least and most, and what is the
// same in all rounds stands alone.
func TestTablesTellOfAllRounds(t *testing.T) {
	s := samples{
		Floor:       {{caddy: 10, rate: 10}, {caddy: 20, rate: 10}},
		memoryStore: {{caddy: 20, primary: 1, replica: 3, calls: 0.001, rate: 4}, {caddy: 60, primary: 2, replica: 4, calls: 0.002, rate: 6}},
	}
	s[SweepBase] = s[memoryStore]
	r := &Result{
		baseCases: []*endpoint{{name: Floor}, {name: memoryStore, floor: Floor, limit: 2}},
		cases:     s, sweep: s,
		latency: map[string]rounds{SweepBase: {
			{rate: 7, floor: quantiles{p50: 1, p99: 2}, limiter: quantiles{p50: 2, p99: 4, p999: 8, sent99: 1, lag99: 1}},
			{rate: 7, floor: quantiles{p50: 1, p99: 3}, limiter: quantiles{p50: 4, p99: 6, p999: 9, sent99: 2, lag99: 2}},
		}},
		memory: memory{redis: []float64{176, 176.1}, store: []float64{110, 130}, ledger: []float64{270, 290}},
	}
	for range len(roundTrips) + 1 {
		r.pings = append(r.pings, report.Spread{Median: 2, Least: 1, Most: 3})
	}
	var b strings.Builder
	r.writeCases(&b)
	r.writeSweep(&b)
	r.writeLatency(&b)
	r.writeMemory(&b)
	lines := slices.Collect(strings.Lines(b.String()))
	for _, want := range []string{
		"| respond, five headers | 15.0 (10.0 to 20.0) | 0.0 | 0.0 |  |  | 10 | 0 |\n",
		"| memory store | 40.0 (20.0 to 60.0) | 1.5 (1.0 to 2.0) | 3.5 (3.0 to 4.0) | 2.50 (2.00 to 3.00) | ≤ 2.00 | 5 (4 to 6) | 0.0015 (0.0010 to 0.0020) |\n",
		"| base | 1 shard, 1 replica, 1 zone, 30,000 keys | 2.00 (1.00 to 3.00) | 5 (4 to 6) | 40.0 (20.0 to 60.0) | 5.0 (4.0 to 6.0) | 0.0 | 0.0015 (0.0010 to 0.0020) | 2.50 (2.00 to 3.00) |\n",
		"| base | 7 | 1.00 | 2.50 (2.00 to 3.00) | 2.00 (1.00 to 3.00) | 2.50 (2.00 to 3.00) | 8.50 (8.00 to 9.00) | 1.50 (1.00 to 2.00) | 1.50 (1.00 to 2.00) |\n",
		"| each server of Redis | 176 |\n",
		"| Caddy, memory store | 120 (110 to 130) |\n",
		"| Caddy, what it knows of a bucket in Redis | 280 (270 to 290) |\n",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in\n%s", want, &b)
		}
	}
}
