package libraries

import (
	"slices"
	"strings"
	"testing"
)

// TestTablesTellOfAllRounds: each figure has its least and most, and what is the
// same in all rounds stands alone.
func TestTablesTellOfAllRounds(t *testing.T) {
	first := sample{rate: 1e6, client: 3, server: 5, allocations: 7, bytes: 9, calls: 2, p50: 1, p99: 4}
	second := sample{rate: 2e6, client: 5, server: 7, allocations: 8, bytes: 19, calls: 2, p50: 2, p99: 6}
	peer := sample{rate: 1e6}
	c := &comparison{
		scene:    scene{goroutines: detailedWith},
		limiters: []*limiter{{kind: &kind{name: "peer"}, pool: 8}, {kind: takeFixedWindow, pool: 4}},
		samples:  [][]sample{{peer, peer}, {first, second}},
		ceiling:  []ceiling{{rate: 4e6, server: 1}, {rate: 4e6, server: 2}},
	}
	refused := *c
	refused.scene.refused, refused.samples = true, [][]sample{{peer, peer}, {first, first}}
	r := &Result{opts: Options{Goroutines: []int{detailedWith}}, shared: []*comparison{c}, apart: []*comparison{&refused, c}}
	var b strings.Builder
	c.write(&b)
	r.writeMemory(&b)
	r.writeCeiling(&b)
	lines := slices.Collect(strings.Lines(b.String()))
	const name = "| Take, fixed window | "
	for _, want := range []string{
		name + "4 | 1500000 (1000000 to 2000000) | 1.50 (1.00 to 2.00) | 4.0 (3.0 to 5.0) | 6.0 (5.0 to 7.0) | 2.00 | 7.5 (7.0 to 8.0) | 14 (9 to 19) | 1.50 (1.00 to 2.00) | 5.00 (4.00 to 6.00) |\n",
		name + "1.50 (1.00 to 2.00) | 1.00 |\n",
		name + "1.50 (1.00 to 2.00) | 4.00 (3.00 to 5.00) | 7.5 (7.0 to 8.0) | 14 (9 to 19) |\n",
		"| redis-benchmark, 50 connections, 30 calls in a pipeline | 4000000 |  | 1.5 (1.0 to 2.0) |\n",
		name + "1500000 (1000000 to 2000000) | 0.38 (0.25 to 0.50) | 6.0 (5.0 to 7.0) |\n",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in\n%s", want, &b)
		}
	}
}
