package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestPenalty: who was refused stays refused although there is room again, for as
// long as it was told the first time.
func TestPenalty(t *testing.T) {
	for _, algorithm := range []string{"fixed_window", "sliding_window", "gcra"} {
		for _, mode := range modes {
			t.Run(algorithm+", "+mode, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				servers := caddytest.StartShards(t, 1, 1)
				site := zonesSite(servers.Store(), zoneWith("strict", "algorithm "+algorithm, "charge "+mode, "events 2", "window 1s", "penalty 6s"), "respond ok")
				caddys := caddytest.StartMany(t, 2, site)
				key, first := "", caddytest.Answer{}
				for try, admitted := 0, 9; admitted > 4; try++ {
					key, admitted = fmt.Sprint("client-", try), 0
					eventually(t, "a request is refused", func() error {
						first = caddys[0].Probe("/", "X-Key: "+key)
						admitted++
						return want("status", first.Status, http.StatusTooManyRequests)
					})
					// On a busy machine charges come so late that too many are
					// admitted, which would take long to drain.
				}
				var until int64
				eventually(t, "the penalty is stored", func() error {
					until = servers.Content(t, "strict", key).Penalty
					return want("there being one", until > 0, true)
				})
				servers.AwaitReplicas(t)
				over := time.UnixMicro(until)
				must(t, "first refusal", errors.Join(first.Refuses("strict"), want("reset", first.Reset, ceilSeconds(until)),
					want("Retry-After", first.RetryAfter, 6)))

				// By then the window is over, also for what still weighs the one
				// before, and the events have drained.
				room := first.Received.Add(3 * time.Second).UnixMicro()
				eventually(t, "there is room again", func() error { return want("it being so", servers.Now(t) > room, true) })
				for i := range 4 {
					a := caddys[i%2].Probe("/", "X-Key: "+key)
					if !a.Received.Before(over) {
						break // the machine was busy
					}
					must(t, "refusal", errors.Join(a.Refuses("strict"), penalized(a, over)))
				}
				// Nobody made it longer.
				stored := servers.Content(t, "strict", key).Penalty
				must(t, "Redis", want(fmt.Sprintf("the end of the penalty being %d or, because it is over, 0", until),
					stored == until || stored == 0 && servers.Now(t) > until, true))

				almost := over.Add(-300 * time.Millisecond).UnixMicro()
				eventually(t, "the penalty is almost over", func() error { return want("it being so", servers.Now(t) > almost, true) })
				eventually(t, "a request is admitted", func() error {
					a := caddys[1].Probe("/", "X-Key: "+key)
					if a.Status == http.StatusOK {
						must(t, "admitted request", want("coming before the penalty was over", a.Received.Before(over), false))
						return nil
					}
					must(t, "refusal", errors.Join(a.Refuses("strict"), penalized(a, over)))
					return errors.New("it is refused")
				})
				must(t, "another client", caddys[1].Probe("/", "X-Key: bob").Shows(http.StatusOK, 2, 1))
			})
		}
	}
}

// penalized tells how a refusal differs from one that tells when the penalty is
// over.
func penalized(a caddytest.Answer, over time.Time) error {
	wait := time.Duration(a.RetryAfter) * time.Second
	// All processes share a clock; the test's is later to see the answer.
	least, most := over.Sub(a.Received), max(over.Sub(a.Sent), 0)+3*time.Second
	return errors.Join(want("reset", a.Reset, ceilSeconds(over.UnixMicro())),
		want(fmt.Sprintf("Retry-After %s being from %s to %s", wait, least, most), wait >= least && wait <= most, true))
}
