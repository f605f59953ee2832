package operate

import (
	"fmt"
	"testing"
	"time"
)

// server returns what INFO says of one with that history, and of the one before up to an offset.
func server(role, id, before string, end, offset int64) info {
	return info{
		"role": role, "master_replid": id, "master_replid2": before, "second_repl_offset": fmt.Sprint(end),
		"master_repl_offset": fmt.Sprint(offset), "slave_repl_offset": fmt.Sprint(offset),
	}
}

// TestHistoriesPartWhereAServerWasPromoted, so that offsets beyond that say nothing of each other.
func TestHistoriesPartWhereAServerWasPromoted(t *testing.T) {
	const a, b, c = "a", "b", "c"
	start := time.Unix(1_800_000_000, 0)
	primary := server("master", a, noHistory, -1, 100)
	for name, test := range map[string]struct {
		// then is the primary a second later; nil if it does not answer.
		then, replica info
		lag           time.Duration
		isKnown       bool
	}{
		"a replica":                            {primary, server("slave", a, noHistory, -1, 100), 0, true},
		"of another primary":                   {primary, server("slave", b, noHistory, -1, 100), foreign, true},
		"promoted":                             {primary, server("master", b, a, 101, 100), 0, true},
		"promoted, and written to":             {primary, server("master", b, a, 101, 101), foreign, true},
		"below one that was promoted":          {primary, server("slave", b, a, 101, 200), foreign, true},
		"of the next primary, not yet known":   {nil, server("slave", b, a, 101, 200), 0, false},
		"of the next primary":                  {server("master", b, a, 101, 200), server("slave", b, a, 101, 200), 0, true},
		"the next primary under its own name":  {server("master", b, a, 101, 200), server("master", b, a, 101, 200), 0, true},
		"not yet of the next primary":          {server("master", b, a, 101, 200), server("slave", a, noHistory, -1, 100), time.Second, true},
		"ahead of the next primary, forgiven":  {server("master", b, a, 91, 200), server("slave", a, noHistory, -1, 100), 0, false},
		"two that were promoted from the same": {server("master", b, a, 101, 200), server("master", c, a, 101, 200), foreign, true},
	} {
		var o offsets
		o.note(primary, start, time.Minute)
		if test.then == nil {
			o.leave()
		} else {
			o.note(test.then, start.Add(time.Second), time.Minute)
		}
		if lag, ok := o.lagOf(test.replica); ok != test.isKnown || ok && lag != test.lag {
			t.Errorf("%s: %v, %t, want %v, %t", name, lag, ok, test.lag, test.isKnown)
		}
	}
}
