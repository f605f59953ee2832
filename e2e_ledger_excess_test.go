package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestExcessOfSeveralCaddys measures what Caddys admit together of one client
// with charge after. No Caddy admits more than the limit by itself; what the
// others have in flight it cannot see.
func TestExcessOfSeveralCaddys(t *testing.T) {
	loads := []struct {
		name, what  string
		connections int // 0: one for each Caddy
		apart       time.Duration
		lasts       time.Duration // 0: until all are refused
	}{
		// The backend takes its time.
		{"flood", "all at once", floodSize, 0, time.Nanosecond},
		{"waves", "who is refused comes back", floodSize, 0, 5 * floodTakes},
		// The response comes at once.
		{"lines", "one after the other", 0, 0, 0},
		{"paced", "one after the other, 20 ms apart", 0, 20 * time.Millisecond, 0},
	}
	servers := caddytest.StartShards(t, 2, 1)
	backend := startLateBackend(t)
	zones := ""
	for _, load := range loads {
		for _, n := range []int{2, 4} {
			zones += pathZone(fmt.Sprint(load.name, n), "charge after", fmt.Sprint("events ", floodEvents))
		}
	}
	caddys := caddytest.StartMany(t, 4, zonesSite(servers.Store(), zones, "@quick path /lines* /paced*\nrespond @quick ok\nreverse_proxy "+backend.addr))
	for _, n := range []int{2, 4} {
		for _, load := range loads {
			t.Run(fmt.Sprint(n, " Caddys, ", load.what), func(t *testing.T) {
				zone, connections := fmt.Sprint(load.name, n), load.connections
				if connections == 0 {
					connections = n
				}
				served := askForAlice(t, caddys[:n], zone, connections, load.apart, load.lasts)
				excess(t, servers, caddys[:n], zone, served)
			})
		}
	}
}

// askForAlice makes requests on so many connections, spread over Caddys, so long
// between an answer and the next request. It goes on for as long as lasts says
// or, if that is 0, until each connection has been refused thrice in a row. It
// counts what was served by the Caddys' addresses.
func askForAlice(t *testing.T, caddys []*caddytest.Caddy, zone string, connections int, apart, lasts time.Duration) *caddytest.Tally {
	t.Helper()
	served, start := new(caddytest.Tally), time.Now()
	caddytest.Together(t, connections, func(worker int) error {
		c := caddys[worker%len(caddys)]
		for refusals := 0; ; {
			a, err := c.TryProbe(t.Context(), "/"+zone, "X-Key: alice")
			if err != nil {
				return err
			}
			if a.Status == http.StatusOK && a.IsLimited() {
				served.Add(c.Addr)
				refusals = 0
			} else if err := a.Refuses(zone); err != nil {
				return fmt.Errorf("refusal: %w", err)
			} else {
				refusals++
			}
			if lasts == 0 && refusals >= 3 || lasts > 0 && time.Since(start) > lasts {
				return nil
			}
			if refusals > 0 {
				// Who comes back at once would only take processor time.
				time.Sleep(20 * time.Millisecond)
			}
			time.Sleep(apart)
		}
	})
	return served
}

// excess logs what Caddys have served together, and looks at the bound and at
// what was charged.
func excess(t *testing.T, servers caddytest.Shards, caddys []*caddytest.Caddy, zone string, served *caddytest.Tally) {
	t.Helper()
	for site, n := range served.N {
		must(t, "Caddy "+site, want(fmt.Sprintf("having served %d, more than the limit,", n), n > floodEvents, false))
	}
	total, bound := served.Total(), int64(len(caddys)*floodEvents)
	must(t, "all Caddys", want(fmt.Sprintf("having served %d, less than the limit or more than the limits of all,", total), total < floodEvents || total > bound, false))
	servers.AwaitUsed(t, zone, "alice", total)
	eventually(t, "all Caddys refuse", func() error {
		for _, c := range caddys {
			if err := c.Probe("/"+zone, "X-Key: alice").Refuses(zone); err != nil {
				return err
			}
		}
		return nil
	})
	must(t, "Redis, after more refusals", want("count", servers.Content(t, zone, "alice").Used, total))
	t.Logf("%d served by %d Caddys with a limit of %d: %d beyond it", total, len(caddys), floodEvents, total-floodEvents)
}
