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
				key, first := "", answer{}
				for try, admitted := 0, 9; admitted > 4; try++ {
					key, admitted = fmt.Sprint("client-", try), 0
					eventually(t, "a request is refused", func() error {
						first = caddys[0].probe("/", "X-Key: "+key)
						admitted++
						return want("status", first.status, http.StatusTooManyRequests)
					})
					// On a busy machine charges come so late that too many are
					// admitted, which would take long to drain.
				}
				var until int64
				eventually(t, "the penalty is stored", func() error {
					until = servers.content(t, "strict", key).penalty
					return want("there being one", until > 0, true)
				})
				servers.awaitReplicas(t)
				over := time.UnixMicro(until)
				must(t, "first refusal", errors.Join(first.refuses("strict"), want("reset", first.reset, ceilSeconds(until)),
					want("Retry-After", first.retryAfter, 6)))

				// By then the window is over, also for what still weighs the one
				// before, and the events have drained.
				room := first.received.Add(3 * time.Second).UnixMicro()
				eventually(t, "there is room again", func() error { return want("it being so", servers.now(t) > room, true) })
				for i := range 4 {
					a := caddys[i%2].probe("/", "X-Key: "+key)
					if !a.received.Before(over) {
						break // the machine was busy
					}
					must(t, "refusal", errors.Join(a.refuses("strict"), a.penalized(over)))
				}
				// Nobody made it longer.
				stored := servers.content(t, "strict", key).penalty
				must(t, "Redis", want(fmt.Sprintf("the end of the penalty being %d or, because it is over, 0", until),
					stored == until || stored == 0 && servers.now(t) > until, true))

				almost := over.Add(-300 * time.Millisecond).UnixMicro()
				eventually(t, "the penalty is almost over", func() error { return want("it being so", servers.now(t) > almost, true) })
				eventually(t, "a request is admitted", func() error {
					a := caddys[1].probe("/", "X-Key: "+key)
					if a.status == http.StatusOK {
						must(t, "admitted request", want("coming before the penalty was over", a.received.Before(over), false))
						return nil
					}
					must(t, "refusal", errors.Join(a.refuses("strict"), a.penalized(over)))
					return errors.New("it is refused")
				})
				must(t, "another client", caddys[1].probe("/", "X-Key: bob").shows(http.StatusOK, 2, 1))
			})
		}
	}
}

// penalized tells how a refusal differs from one that tells when the penalty is
// over.
func (a answer) penalized(over time.Time) error {
	wait := time.Duration(a.retryAfter) * time.Second
	// All processes share a clock; the test's is later to see the answer.
	least, most := over.Sub(a.received), max(over.Sub(a.sent), 0)+3*time.Second
	return errors.Join(want("reset", a.reset, ceilSeconds(over.UnixMicro())),
		want(fmt.Sprintf("Retry-After %s being from %s to %s", wait, least, most), wait >= least && wait <= most, true))
}
