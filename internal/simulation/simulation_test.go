//go:build check

package simulation

import (
	"bytes"
	"flag"
	"io"
	"os"
	"runtime"
	"testing"
	"testing/synctest"
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
func TestSimulation(t *testing.T) { simulate(t, Scripts(simredis.NewInterpreter()), 70, 10_000) }

// TestSimulationOfArithmetic goes through histories without scripts, which is quicker.
func TestSimulationOfArithmetic(t *testing.T) { simulate(t, Arithmetic(), 100, 40_000) }

func simulate(t *testing.T, at Servers, sample, all int) {
	n := *seeds
	if n == 0 {
		n = sweep.Size(sample, all)
	}
	requests, length := 0, time.Duration(0)
	for i := range n {
		var steps io.ReadWriter
		if *trace {
			steps = new(bytes.Buffer)
		}
		run, failure := history(t, *first+uint64(i), at, steps, nil)
		if steps != nil {
			_, _ = io.Copy(os.Stderr, steps)
		}
		if failure != "" {
			t.Fatal(failure)
		}
		requests, length = requests+run.requests, length+run.Length()
	}
	t.Logf("%d requests in %.0f hours", requests, length.Hours())
}

// history runs the history of a seed, and writes its steps, if that is asked for. They are kept in memory: a write to
// a file lets other goroutines run first. plant, if it is not nil, plants a fault.
func history(t *testing.T, seed uint64, at Servers, steps io.Writer, plant func(s *Run)) (run *Run, failure string) {
	// On one processor, goroutines of one instant mostly run in the same order each time.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, func(t *testing.T) {
		run = NewRun(seed, at)
		run.Trace = steps
		if plant != nil {
			plant(run)
		}
		failure = run.Do()
		run.mu.Lock()
		defer run.mu.Unlock()
		if run.unanswered > 0 {
			// The bubble is about to panic, because a goroutine waits for ever.
			t.Log(failure)
		}
	})
	return run, failure
}

// TestHistoriesRepeat requires that a seed mostly has one history, by which a failure can be found again. On a busy
// machine some differ, because a goroutine is stopped and others of its instant run first. A random number that the seed
// does not decide makes nearly all differ.
func TestHistoriesRepeat(t *testing.T) {
	n, differ := sweep.Size(20, 400), 0
	for seed := range uint64(n) {
		var steps [2]bytes.Buffer
		for i := range steps {
			if _, failure := history(t, seed, Arithmetic(), &steps[i], nil); failure != "" {
				t.Fatal(failure)
			}
		}
		if steps[0].Len() == 0 || !bytes.Equal(steps[0].Bytes(), steps[1].Bytes()) {
			differ++
		}
	}
	if t.Logf("%d of %d histories differ when they run again", differ, n); differ > n/2 {
		t.Error("most do")
	}
}
