package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// scriptsRun is how often the primaries have run scripts: once for each bucket that
// was asked about or written, but once for several of one algorithm and operation
// that are asked about or written together.
func scriptsRun(t *testing.T, s caddytest.Shards) (total int) {
	t.Helper()
	for _, shard := range s {
		stats, err := shard.Primary.Info("commandstats")
		must(t, "statistics", err)
		total += int(ran(t, stats, "evalsha"))
	}
	return total
}

func TestSecondZoneRefusesLeavesTheFirstUntouched(t *testing.T) {
	for _, first := range modes {
		for _, second := range modes {
			for _, place := range []struct {
				algorithm string
				shards    int
				group     string // what the second zone counts by
				both      int    // how many scripts ask both zones the same
			}{
				{"fixed_window", 1, "X-Key", 1},
				{"gcra", 1, "X-Key", 2},
				{"sliding_log", 2, "X-Group", 2},
			} {
				// What is known of a full bucket is relied upon for as long as the
				// test runs, or not at all.
				for _, trust := range []string{"1h", "1us"} {
					t.Run(fmt.Sprintf("%s, %s, %s on %d shards, trust %s", first, second, place.algorithm, place.shards, trust), func(t *testing.T) {
						t.Parallel()
						servers := caddytest.StartShards(t, place.shards, 0)
						c := startWith(t, servers.Store("ledger_trust "+trust), zoneWith("first", "algorithm "+place.algorithm, "charge "+first)+
							zoneWith("second", "key {header."+place.group+"}", "events 2", "charge "+second), "respond ok")
						secondZoneRefuses(t, c, servers, first, second, place.group, 0, place.both, trust == "1h")
					})
				}
			}
		}
	}
}

// secondZoneRefuses uses up the second zone and looks at what happens then. The
// bucket of the first one is on the shard at, and so many scripts ask both the same.
func secondZoneRefuses(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, first, second, group string, at, both int, trusted bool) {
	const refusals = 10
	if first != second {
		both = 2
	}
	key := keyApart(t, servers, c, group, at)
	ask := func() caddytest.Answer { return c.Probe("/", "X-Key: "+key, "X-Group: group-"+key) }
	if group == "X-Group" {
		group = "group-" + key
	} else {
		group = key
	}
	a := ask()
	must(t, "request that fits", errors.Join(a.Shows(http.StatusOK, 2, 2), want("zone", a.Resource, "second")))
	servers.AwaitUsed(t, "first", key, 2)
	servers.AwaitUsed(t, "second", group, 2)
	was := servers.Content(t, "first", key).Spent

	before := scriptsRun(t, servers)
	must(t, "first request too many", ask().Refuses("second"))
	// Checks come first and stop takes. Where both take, they do so together,
	// and what the first zone lost is refunded.
	asked := both
	switch {
	case trusted && second == "after":
		// The reply to its last charge told that it is full.
		asked = 0
	case first == "before" && second == "before":
		asked = both + 1
	case first == "before":
		asked = 1
	}
	eventually(t, "the request is settled", func() error {
		return want("number of scripts", scriptsRun(t, servers)-before, asked)
	})
	must(t, "first zone", want("what was spent", servers.Content(t, "first", key).Spent, was))

	// From now on the second zone is known to be full: nobody is asked, or it
	// alone, or where the first zone is checked, that as well.
	before = scriptsRun(t, servers)
	for range refusals {
		a := ask()
		must(t, "request too many", errors.Join(a.Refuses("second"), a.Shows(http.StatusTooManyRequests, 2, 2)))
	}
	switch {
	case trusted:
		asked = 0
	case first == "after":
		// A check writes nothing.
		asked = both * refusals
	default:
		asked = refusals
	}
	c.Stop()
	must(t, "at the end", errors.Join(
		want("number of scripts", scriptsRun(t, servers)-before, asked),
		want("what was spent in the first zone", servers.Content(t, "first", key).Spent, was),
		want("count of the second zone", servers.Content(t, "second", group).Used, 2)))
}

// keyApart makes one request each for some clients, until there is one whose bucket
// of the first zone is on the shard at, and that of the second one on another,
// if there are several.
func keyApart(t *testing.T, s caddytest.Shards, c *caddytest.Caddy, group string, at int) (key string) {
	t.Helper()
	for i := range 100 {
		key = fmt.Sprint("client-", i)
		member := key
		if group == "X-Group" {
			member = "group-" + key
		}
		must(t, key, want("status", c.Probe("/", "X-Key: "+key, "X-Group: group-"+key).Status, http.StatusOK))
		s.AwaitUsed(t, "first", key, 1)
		s.AwaitUsed(t, "second", member, 1)
		if holderOf(t, s, "first", key) == at && (len(s) == 1 || holderOf(t, s, "second", member) != at) {
			return key
		}
	}
	t.Fatal("no client has its buckets on different shards")
	return ""
}

// holderOf returns the index of the shard that holds the client's bucket.
func holderOf(t *testing.T, s caddytest.Shards, zone, client string) int {
	t.Helper()
	for i := range s {
		if s[i:i+1].Content(t, zone, client).Spent != "" {
			return i
		}
	}
	t.Fatalf("no shard has client %s of zone %s", client, zone)
	return -1
}

// TestRefusalRefundsWhatWasTaken: by another zone or by an inner handler, of
// every algorithm.
func TestRefusalRefundsWhatWasTaken(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	outer, inner := "", ""
	for _, algorithm := range append(counting, "concurrency") {
		outer += zoneWith(algorithm, "algorithm "+algorithm, "charge before", "match {\nnot path /ok\n}")
	}
	for _, mode := range modes {
		inner += pathZone("full."+mode, "key static", "events 1", "charge "+mode)
	}
	for name, store := range bothStores(servers) {
		for place, zones := range map[string][2]string{"in one handler": {outer + inner, ""}, "in the inner handler": {outer, "rate_limit {\n" + inner + "}\n"}} {
			t.Run(name+", "+place, func(t *testing.T) {
				must(t, "flush", servers[0].Primary.Client().FlushAll(t.Context()).Err())
				c := startWith(t, store, zones[0], zones[1]+"respond \"{http.rate_limit.fixed_window.used} {http.rate_limit.sliding_window.used} "+
					"{http.rate_limit.sliding_log.used} {http.rate_limit.gcra.used} {http.rate_limit.concurrency.used}\"")
				used := 0
				for _, mode := range modes {
					zone := "full." + mode
					used++
					must(t, "request that fits", c.Probe("/"+zone, "X-Key: alice").Shows(http.StatusOK, 1, 1))
					if store != "" {
						awaitSettled(t, servers, int64(used), zone)
					}
					for range 4 {
						must(t, "request too many", c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
					}
					if store != "" {
						awaitSettled(t, servers, int64(used), zone)
					}
					used++
					a := c.Probe("/", "X-Key: alice")
					must(t, "what the others count", want("body", a.Body, fmt.Sprintf("%d %[1]d %[1]d %[1]d 1", used)))
				}
				c.Stop()
				if store != "" {
					awaitSettled(t, servers, int64(used), "full.after")
				}
			})
		}
	}
}

// awaitSettled waits until that much is used of the zones that count, nothing
// of that which counts what runs, and one event of the full one.
func awaitSettled(t *testing.T, s caddytest.Shards, used int64, full string) {
	t.Helper()
	for _, algorithm := range counting {
		s.AwaitUsed(t, algorithm, "alice", used)
	}
	s.AwaitUsed(t, "concurrency", "alice", 0)
	s.AwaitUsed(t, full, "*", 1)
}
