package wire

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestGuessOfAnEarlierTryIsForgotten: a charge that was refused by itself, with a guess of the
// time, may be sent in a bundle later.
func TestGuessOfAnEarlierTryIsForgotten(t *testing.T) {
	script := NewScript("single", "bundle")
	charges := make([]*Command, 2)
	for i := range charges {
		c := new(ScriptCall)
		c.Begin(script, "charge", false, fmt.Sprint("k", i))
		c.Clock, c.MayGuess = newClock(), true
		c.Add(0, 3600)
		c.Ready()
		charges[i] = &c.Command
	}
	charges[1].Clock = charges[0].Clock
	charges[1].stamp(12345)
	charges[1].Outcome = store.NotExecuted(errors.New("LOADING"))
	charges[1].Ready()
	bundles, others := newBundles(charges)
	if len(bundles) != 1 || len(others) != 0 || slices.Contains(bundles[0].Cmd.Args(), wordEach) || charges[1].ints[placeOfNow] != 0 {
		t.Errorf("%d bundles, %d others, numbers %v", len(bundles), len(others), charges[1].ints)
	}
}
