package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestAlignedWindows: they end on the clock, for all clients at once.
func TestAlignedWindows(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 1)
	windows := []int64{7, 3600, 24 * 3600}
	zones := ""
	for _, window := range windows {
		for _, mode := range modes {
			zones += pathZone(fmt.Sprint("aligned.", window, ".", mode), "align", fmt.Sprintf("window %ds", window), "charge "+mode, "events 2")
		}
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			caddys := caddytest.StartMany(t, 2, zonesSite(store, zones, "respond ok"))
			for _, window := range windows {
				for _, mode := range modes {
					zone := fmt.Sprint("aligned.", window, ".", mode)
					alignedWindow(t, caddys, servers, zone, window, store != "")
				}
			}
		})
	}
}

// alignedWindow asks for two clients, each at a Caddy of its own, until the
// answers fall into one window, and compares their resets.
func alignedWindow(t *testing.T, caddys []*caddytest.Caddy, servers caddytest.Shards, zone string, window int64, redis bool) {
	t.Helper()
	end := func(at time.Time) int64 { return (at.Unix()/window + 1) * window }
	for try := 0; ; try++ {
		clients := []string{fmt.Sprint("alice-", try), fmt.Sprint("bob-", try)}
		first := caddys[0].Probe("/"+zone, "X-Key: "+clients[0])
		answers := []caddytest.Answer{first}
		for used := range int64(2) {
			answers = append(answers, caddys[1].Probe("/"+zone, "X-Key: "+clients[1]))
			if redis && used == 0 {
				eventually(t, "the requests are charged", func() error {
					stored := servers.Buckets(t, zone)
					return want("buckets being there", stored[clients[0]].Count*stored[clients[1]].Count > 0, true)
				})
			}
		}
		// What Caddy knows of the primary's time may be a little behind.
		reset := end(first.Sent.Add(-time.Second))
		if last := answers[len(answers)-1]; end(last.Received) != reset {
			continue // they may be of two windows
		}
		for i, a := range answers {
			must(t, fmt.Sprintf("%s, answer %d", zone, i), errors.Join(want("status", a.Status, http.StatusOK), want("reset", a.Reset, reset)))
		}
		if !redis {
			return
		}
		for _, key := range clients {
			b := servers.Buckets(t, zone)[key]
			if b.Count == 0 && time.Now().Unix() >= reset {
				continue // it has expired since
			}
			must(t, zone+", "+key, want("reset in Redis", b.Reset, reset*1_000_000))
		}
		return
	}
}

// TestAlignedWindowEndsOnTheClock for who is refused until then, long before it
// would be over had it begun with the client's first request.
func TestAlignedWindowEndsOnTheClock(t *testing.T) {
	t.Parallel() // it spends its time waiting
	const window = 4
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("aligned."+mode, "align", fmt.Sprintf("window %ds", window), "events 1", "charge "+mode)
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, "respond ok")
			for _, mode := range modes {
				t.Run(mode, func(t *testing.T) {
					t.Parallel()
					var refused caddytest.Answer
					eventually(t, "a request is refused", func() error {
						refused = c.Probe("/aligned."+mode, "X-Key: alice")
						return want("status", refused.Status, http.StatusTooManyRequests)
					})
					must(t, "refusal", errors.Join(refused.Refuses("aligned."+mode), want("reset being a multiple of the window", refused.Reset%window, 0),
						want("reset being no more than a window away", refused.Reset <= refused.Received.Unix()+window, true),
						want("Retry-After being no longer than the window, rounded up", refused.RetryAfter <= window+1, true)))
					eventually(t, "a request is admitted", func() error {
						a := c.Probe("/aligned."+mode, "X-Key: alice")
						if a.Status == http.StatusOK {
							must(t, "admitted request", errors.Join(want("coming before the reset", a.Received.Before(time.Unix(refused.Reset, 0)), false),
								want("reset being a multiple of the window", a.Reset%window, 0)))
							return nil
						}
						must(t, "refusal", want("reset", a.Reset, refused.Reset))
						return errors.New("it is refused")
					})
				})
			}
		})
	}
}
