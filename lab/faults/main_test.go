package faults

import (
	"flag"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// patient are settings whose timeouts a busy machine keeps, so that what happens
// is due to the fault.
var patient = settings{
	checkTimeout: time.Second,
	before:       500 * time.Millisecond, during: 2 * time.Second, after: 300 * time.Millisecond,
}

var turn = flag.Int("faults.turn", 0, "the policy, from 0 to 5, under which TestFaults tries the first fault")

// TestFaults tries every fault once, with policies in turn; make faults tries all.
func TestFaults(t *testing.T) {
	set := patient
	set.caddy = buildCaddy(t)
	all := cells()
	policies := len(all) / len(faults())
	for i := range faults() {
		c := all[i*policies+(i+*turn)%policies]
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
