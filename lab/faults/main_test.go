package faults

import (
	"flag"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// patient are settings whose timeouts a busy machine keeps, so that what happens
// is due to the fault.
var patient = settings{
	checkTimeout: time.Second,
	before:       500 * time.Millisecond, during: 2 * time.Second, after: 300 * time.Millisecond,
}

var turn = flag.Int("faults.turn", 0, "the policy, from 0 to 5, under which TestFaults tries the first fault")

// TestFaults tries every fault once, with policies in turn, and by calls those that are tried so; make faults
// tries all.
func TestFaults(t *testing.T) {
	set := patient
	set.caddy = buildCaddy(t)
	for i, f := range faults() {
		mine := func(isCalled bool) []cell {
			return traffic.Those(cells(), func(c cell) bool { return c.fault == f && (c.charge == called) == isCalled })
		}
		for _, some := range [][]cell{mine(false), mine(true)} {
			if len(some) == 0 {
				continue
			}
			c := some[(i+*turn)%len(some)]
			t.Run(c.String(), func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				o, err := c.run(t.Context(), set)
				redistest.Must(t, err)
				if unknown := o.unknown(); len(unknown) > 0 {
					t.Error(o)
				} else {
					t.Log(o)
				}
			})
		}
	}
}

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// buildCaddy returns a Caddy with the race detector if the test has it.
func buildCaddy(t *testing.T) string {
	t.Helper()
	var flags []string
	if withRace {
		flags = append(flags, "-race")
	}
	path, err := caddyproc.Build(t.TempDir(), flags...)
	redistest.Must(t, err)
	return path
}
