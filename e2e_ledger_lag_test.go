package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestReplicaHeldBehind: a client that sends one request at a time is refused
// exactly at its limit, although the replica that is asked knows nothing of its
// requests for seconds, be they quick or so slow that what the primary said is
// no longer relied upon in between.
func TestReplicaHeldBehind(t *testing.T) {
	for _, test := range []struct {
		trust  string
		events int
		apart  time.Duration
		// early is how many requests the replica has heard of.
		early int
	}{
		{"1s", 200, 0, 50},
		{"1s", 13, 400 * time.Millisecond, 0},
		{"100ms", 13, 400 * time.Millisecond, 3},
		{"1s", 4, 1500 * time.Millisecond, 1},
	} {
		t.Run(fmt.Sprintf("trust %s, %d events %v apart, %d early", test.trust, test.events, test.apart, test.early), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 1, 1)
			c := startWith(t, servers.Store("ledger_trust "+test.trust), sequentialZones(test.events), "respond ok")
			each := func(f func(algorithm string) error) {
				t.Helper()
				caddytest.Together(t, len(counting), func(i int) error {
					if err := f(counting[i]); err != nil {
						return fmt.Errorf("%s: %w", counting[i], err)
					}
					return nil
				})
			}
			each(func(algorithm string) error { return spends(t, c, algorithm, 0, test.early, test.events, 0) })
			for _, algorithm := range counting {
				servers.AwaitUsed(t, algorithm, "alice", int64(test.early))
			}
			servers.AwaitReplicas(t)

			replica := servers[0].Replicas[0]
			must(t, "pause replication", replica.PauseReplication())
			start, refusals := time.Now(), new(caddytest.Tally)
			each(func(algorithm string) error {
				if err := spends(t, c, algorithm, test.early, test.events, test.events, test.apart); err != nil {
					return err
				}
				for i := 0; i < 3 || time.Since(start) < 4*time.Second; i++ {
					a, err := c.TryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
					if err := errors.Join(err, a.Refuses(algorithm), want("used", a.Used, int64(test.events))); err != nil {
						return fmt.Errorf("refusal %d: %w", i+1, err)
					}
					refusals.Add(algorithm)
					time.Sleep(max(test.apart, 5*time.Millisecond))
				}
				return nil
			})
			for _, algorithm := range counting {
				servers.AwaitUsed(t, algorithm, "alice", int64(test.events))
			}
			t.Logf("the replica was behind for %v, while %d each were served and %v refused", time.Since(start), test.events-test.early, refusals.N)

			must(t, "resume replication", replica.ResumeReplication())
			for range 5 {
				for _, algorithm := range counting {
					must(t, "after the replica has caught up", c.Probe("/"+algorithm, "X-Key: alice").Refuses(algorithm))
				}
				time.Sleep(50 * time.Millisecond)
			}
			for _, algorithm := range counting {
				must(t, "Redis, at the end", want("count of "+algorithm, servers.Content(t, algorithm, "alice").Used, int64(test.events)))
			}
		})
	}
}

// spends makes alice's requests up to a number, of which so many are served
// already, one after the other, and tells how the answers differ from those of
// requests that are served.
func spends(t *testing.T, c *caddytest.Caddy, zone string, from, to, events int, apart time.Duration) error {
	for used := from; used < to; used++ {
		a, err := c.TryProbe(t.Context(), "/"+zone, "X-Key: alice")
		if err := errors.Join(err, a.Shows(http.StatusOK, int64(events), int64(used+1))); err != nil {
			return fmt.Errorf("request %d: %w", used+1, err)
		}
		time.Sleep(apart)
	}
	return nil
}
