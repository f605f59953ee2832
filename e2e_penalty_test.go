package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"
)

// TestPenalty: who was refused stays refused although there is room again, for as
// long as it was told the first time.
func TestPenalty(t *testing.T) {
	for _, algorithm := range []string{"fixed_window", "sliding_window", "gcra"} {
		for _, mode := range modes {
			t.Run(algorithm+", "+mode, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := startShards(t, 1, 1)
				site := zonesSite(servers.store(), zoneWith("strict", "algorithm "+algorithm, "charge "+mode, "events 2", "window 1s", "penalty 6s"), "respond ok")
				caddys := startCaddys(t, 2, site)
				// On a busy machine the window may end before it is used up.
				var first answer
				eventually(t, "a request is refused", func() error {
					first = caddys[0].probe("/", "X-Key: alice")
					return want("status", first.status, http.StatusTooManyRequests)
				})
				var until int64
				eventually(t, "the penalty is stored", func() error {
					until = servers.content(t, "strict", "alice").penalty
					return want("there being one", until > 0, true)
				})
				servers.awaitReplicas(t)
				over := time.UnixMicro(until)
				must(t, "first refusal", errors.Join(first.refuses("strict"), want("reset", first.reset, ceilSeconds(until)),
					want("Retry-After", first.retryAfter, 6)))

				// The window is over, twice over for what weighs the last one,
				// and the two events have drained.
				room := first.received.Add(2 * time.Second)
				for i, asked := 0, false; ; i++ {
					a := caddys[i%2].probe("/", "X-Key: alice")
					if a.status == http.StatusOK {
						must(t, "first admitted request", errors.Join(
							want("coming before the penalty is over", a.received.Before(over), false),
							want("used", a.used, 1)))
						break
					}
					must(t, "refusal", errors.Join(a.refuses("strict"), a.penalized(over)))
					// A refusal by a penalty does not make it longer.
					if now := servers.content(t, "strict", "alice").penalty; now != until && servers.now(t) < until {
						t.Fatalf("the penalty ends at %d, and ended at %d", now, until)
					}
					must(t, "refusal", want("coming long after the penalty was over", a.sent.After(over.Add(5*time.Second)), false))
					if asked = asked || a.sent.After(room); asked {
						time.Sleep(50 * time.Millisecond)
					}
				}
				must(t, "another client", caddys[1].probe("/", "X-Key: bob").shows(http.StatusOK, 2, 1))
			})
		}
	}
}

// penalized tells how a refusal differs from one that tells when the penalty is
// over.
func (a answer) penalized(over time.Time) error {
	// The client's clock is that of the server.
	least, most := over.Sub(a.received), over.Sub(a.sent)
	wait := time.Duration(a.retryAfter) * time.Second
	return errors.Join(want("reset", a.reset, ceilSeconds(over.UnixMicro())),
		want(fmt.Sprintf("Retry-After %s being from %s to %s, rounded up", wait, least, most), wait >= least && wait < max(most, 0)+time.Second+time.Millisecond, true))
}
