package simulation

import (
	"flag"
	"os"
	"testing"
	"time"
)

var (
	hours = flag.Float64("simulation.hours", 20, "how many hours TestSimulation simulates")
	trace = flag.Bool("simulation.trace", false, "print each step")
	first = flag.Uint64("simulation.seed", 1, "the first seed")
)

// TestSimulation goes through one hour for each seed.
func TestSimulation(t *testing.T) {
	requests := 0
	for n := range int(*hours) {
		run := NewRun(*first+uint64(n), time.Hour, newArithmetic())
		if *trace {
			run.Trace = os.Stderr
		}
		made, failure := run.Do()
		if requests += made; failure != "" {
			t.Fatal(failure)
		}
	}
	t.Logf("%d requests", requests)
}
