//go:build check

package simulation

import (
	"flag"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

var (
	seeds = flag.Int("simulation.seeds", 0, "how many histories TestSimulation goes through; 0 for a sample")
	first = flag.Uint64("simulation.seed", 1, "the first of them")
	trace = flag.Bool("simulation.trace", false, "print each step")
)

// TestSimulation goes through a history for each seed, by the store's scripts. To repeat one that
// fails:
//
//	go test -tags check ./internal/simulation -run TestSimulation -simulation.seed N -simulation.seeds 1 -simulation.trace
func TestSimulation(t *testing.T) { simulate(t, Scripts(simredis.NewInterpreter()), 100) }

// TestSimulationOfArithmetic goes through more histories, without scripts.
func TestSimulationOfArithmetic(t *testing.T) { simulate(t, Arithmetic(), 400) }

func simulate(t *testing.T, at Servers, sample int) {
	n := *seeds
	if n == 0 {
		n = sweep.Size(sample, 100*sample)
	}
	requests, length := 0, time.Duration(0)
	for i := range n {
		run := NewRun(*first+uint64(i), at)
		if *trace {
			run.Trace = os.Stderr
		}
		made, failure := run.Do()
		if requests, length = requests+made, length+run.Length(); failure != "" {
			t.Fatal(failure)
		}
	}
	t.Logf("%d requests in %.0f hours", requests, length.Hours())
}

// BenchmarkSimulation reports how many hours are simulated in a minute.
func BenchmarkSimulation(b *testing.B) {
	length, at := time.Duration(0), Scripts(simredis.NewInterpreter())
	for seed := uint64(1); b.Loop(); seed++ {
		run := NewRun(seed, at)
		if _, failure := run.Do(); failure != "" {
			b.Fatal(failure)
		}
		length += run.Length()
	}
	b.ReportMetric(length.Hours()/b.Elapsed().Minutes(), "hours/min")
}
