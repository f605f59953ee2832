package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// scriptsRun returns how many scripts the primaries have run: one for each bucket, or for several
// of one algorithm and operation in the same call.
func scriptsRun(t *testing.T, s caddytest.Shards) (total int) {
	t.Helper()
	for _, shard := range s {
		stats, err := shard.Primary.Info("commandstats")
		must(t, "statistics", err)
		total += int(ran(t, stats, "evalsha"))
	}
	return total
}

// awaitNothingHeld waits until what takes held has ended, for which no request waits.
func awaitNothingHeld(t *testing.T, s caddytest.Shards) {
	t.Helper()
	eventually(t, "nothing is held", func() error {
		held := 0
		for _, shard := range s {
			keys, err := shard.Primary.Client().Keys(t.Context(), "* held").Result()
			must(t, "keys", err)
			held += len(keys)
		}
		return want("what is held", held, 0)
	})
}

// scriptsOnly puts a proxy that refuses plain commands before each of these servers in the global
// option for a store, which then calls a script for every charge and every check.
func scriptsOnly(t *testing.T, store string, servers ...string) string {
	t.Helper()
	for _, addr := range servers {
		filter := redistest.StartFilter(t, addr, redistest.Refusing("-ERR unknown command", "hincrby", "hmget", "pexpire"))
		store = strings.ReplaceAll(store, "primary "+addr+"\n", "primary "+filter.Addr()+"\n")
	}
	return store
}

// trusting is the global option for a store, with scripts alone unless it has the usual trust: then
// their number is known beforehand.
func trusting(t *testing.T, servers caddytest.Shards, store, trust string) string {
	t.Helper()
	if trust == byDefault {
		return store
	}
	for _, shard := range servers {
		store = scriptsOnly(t, store, shard.Primary.Addr())
	}
	return store
}

// trusts are the options of stores in which Caddy trusts for the whole test that a bucket is full,
// or not at all, or by default.
var trusts = map[string][]string{
	trusted:    {"ledger_trust 1h"},
	"no trust": {"ledger_trust 0"},
	byDefault:  nil,
}

const (
	trusted   = "trusted"
	byDefault = "by default"
)

func TestRefusalBySecondZoneLeavesTheFirstUntouched(t *testing.T) {
	t.Parallel()
	type place struct {
		algorithm string
		shards    int
		group     string // what the second zone counts by
		both      int    // how many scripts ask both zones the same
	}
	type refusal struct {
		first, second, trust string
		place
	}
	var all []refusal
	for _, first := range modes {
		for _, second := range modes {
			for _, p := range []place{
				{"fixed_window", 1, "X-Key", 1},
				{"gcra", 1, "X-Key", 2},
				{"sliding_log", 2, "X-Group", 2},
			} {
				for _, trust := range slices.Sorted(maps.Keys(trusts)) {
					all = append(all, refusal{first, second, trust, p})
				}
			}
		}
	}
	for _, r := range sweep.Of(t, all, 5) {
		t.Run(fmt.Sprint(r), func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, r.shards, 0)
			c := startWith(t, trusting(t, servers, servers.Store(trusts[r.trust]...), r.trust), zoneWith("first", "algorithm "+r.algorithm, "charge "+r.first)+
				zoneWith("second", "key {header."+r.group+"}", "events 2", "charge "+r.second), "respond ok")
			secondZoneRefuses(t, c, servers, r.first, r.second, r.group, r.both, r.trust)
		})
	}
}

// secondZoneRefuses uses up the second zone and checks its refusals. Both is how many scripts ask both zones the same,
// and trust is one of trusts.
func secondZoneRefuses(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, first, second, group string, both int, trust string) {
	const refusals = 5
	if first != second {
		both = 2
	}
	key := keyApart(t, servers, c, group)
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

	awaitNothingHeld(t, servers)
	before := scriptsRun(t, servers)
	must(t, "first request too many", ask().Refuses("second"))
	// Checks come first and prevent takes. If both zones take, the one that is known to be full
	// does so alone.
	asked := both
	switch {
	case trust == trusted:
		// The reply to its last charge, or take, reported a full bucket.
		asked = 0
	case first == "before":
		asked = 1
	}
	scripts := func(asked int) error {
		if trust == byDefault {
			return nil
		}
		return want("number of scripts", scriptsRun(t, servers)-before, asked)
	}
	eventually(t, "the request is settled", func() error {
		return errors.Join(scripts(asked), want("what was spent in the first zone", servers.Content(t, "first", key).Spent, was))
	})

	// From now on the second zone is known to be full: Caddy asks no zone, or only this one, or
	// both if it checks the first.
	before = scriptsRun(t, servers)
	for range refusals {
		a := ask()
		must(t, "request too many", errors.Join(a.Refuses("second"), a.Shows(http.StatusTooManyRequests, 2, 2)))
	}
	switch {
	case trust == trusted:
		asked = 0
	case first == "after":
		// A check writes nothing.
		asked = both * refusals
	default:
		asked = refusals
	}
	c.Unload()
	must(t, "at the end", errors.Join(
		scripts(asked),
		want("what was spent in the first zone", servers.Content(t, "first", key).Spent, was),
		want("count of the second zone", servers.Content(t, "second", group).Used, 2)))
}

// keyApart sends one request each of some clients, and returns the first whose buckets of the two zones are on
// different shards, if there are several.
func keyApart(t *testing.T, s caddytest.Shards, c *caddytest.Caddy, group string) (key string) {
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
		if len(s) == 1 || holderOf(t, s, "first", key) != holderOf(t, s, "second", member) {
			return key
		}
	}
	t.Fatal("no client has its buckets on different shards")
	return ""
}

// findHolder returns the index of the shard that holds the client's bucket, or -1.
func findHolder(t *testing.T, s caddytest.Shards, zone, client string) int {
	t.Helper()
	for i := range s {
		if s[i:i+1].Content(t, zone, client).Spent != "" {
			return i
		}
	}
	return -1
}

// holderOf is findHolder of a bucket that is there.
func holderOf(t *testing.T, s caddytest.Shards, zone, client string) int {
	t.Helper()
	i := findHolder(t, s, zone, client)
	if i < 0 {
		t.Fatalf("no shard has client %s of zone %s", client, zone)
	}
	return i
}

// TestRefusalRefundsWhatWasTaken with every algorithm, if another zone or an inner handler refuses.
func TestRefusalRefundsWhatWasTaken(t *testing.T) {
	t.Parallel()
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
				flush(t, servers)
				c := startWith(t, store, zones[0], zones[1]+"respond \"{http.rate_limit.fixed_window.used} {http.rate_limit.sliding_window.used} "+
					"{http.rate_limit.sliding_log.used} {http.rate_limit.gcra.used} {http.rate_limit.concurrency.used}\"")
				used := 0
				for _, mode := range modes {
					zone := "full." + mode
					used++
					must(t, "request that fits", c.Probe("/"+zone, "X-Key: alice").Shows(http.StatusOK, 1, 1))
					awaitSettled(t, servers, store, int64(used), zone)
					for range 4 {
						must(t, "request too many", c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
					}
					awaitSettled(t, servers, store, int64(used), zone)
					used++
					a := c.Probe("/", "X-Key: alice")
					must(t, "what the others count", want("body", a.Body, fmt.Sprintf("%d %[1]d %[1]d %[1]d 1", used)))
				}
				c.Unload()
				awaitSettled(t, servers, store, int64(used), "full.after")
			})
		}
	}
}

// awaitSettled waits until that much is used of the zones that count, nothing of the concurrency
// zone, and one event of the full zone.
func awaitSettled(t *testing.T, s caddytest.Shards, store string, used int64, full string) {
	t.Helper()
	for _, algorithm := range counting {
		awaitUsed(t, s, store, algorithm, "alice", used)
	}
	awaitUsed(t, s, store, "concurrency", "alice", 0)
	awaitUsed(t, s, store, full, "*", 1)
}

// wiretap is a proxy to a server that counts the round trips about buckets.
type wiretap struct {
	addr string
	// trips counts round trips, commands what they carried.
	trips, commands atomic.Int64
}

func startWiretap(t *testing.T, server string) *wiretap {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	w := &wiretap{addr: listener.Addr().String()}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { w.relay(client, server) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		running.Wait()
	})
	return w
}

// relay passes bytes on until either side has closed its connection.
func (w *wiretap) relay(client net.Conn, server string) {
	defer client.Close()
	upstream, err := net.Dial("tcp", server)
	if err != nil {
		return
	}
	defer upstream.Close()
	// A trip lasts until there is a reply.
	var counted atomic.Bool
	var replies sync.WaitGroup
	replies.Go(func() {
		passOn(client, upstream, func([]byte) { counted.Store(false) })
		_ = client.Close()
	})
	passOn(upstream, client, func(b []byte) {
		// The trip counts first, as tests wait for the commands.
		n := bytes.Count(b, []byte("rl:3:"))
		if n > 0 && !counted.Swap(true) {
			w.trips.Add(1)
		}
		w.commands.Add(int64(n))
	})
	_ = upstream.Close()
	replies.Wait()
}

// passOn copies from one connection to another, and first shows each part to look.
func passOn(to io.Writer, from io.Reader, look func([]byte)) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		look(buffer[:n])
		if _, writeErr := to.Write(buffer[:n]); err != nil || writeErr != nil {
			return
		}
	}
}

// took returns the round trips and commands since its last call.
func (w *wiretap) took() [2]int64 { return [2]int64{w.trips.Swap(0), w.commands.Swap(0)} }

// tappedShard is a shard with a wiretap before each of its servers, and the
// global option for it.
func tappedShard(t *testing.T, replicas int, options ...string) (servers caddytest.Shards, primary, replica *wiretap, store string) {
	t.Helper()
	servers = caddytest.StartShards(t, 1, replicas)
	primary = startWiretap(t, servers[0].Primary.Addr())
	store = strings.Replace(servers.Store(options...), servers[0].Primary.Addr(), primary.addr, 1)
	if replicas > 0 {
		replica = startWiretap(t, servers[0].Replicas[0].Addr())
		store = strings.Replace(store, servers[0].Replicas[0].Addr(), replica.addr, 1)
	}
	return servers, primary, replica, store
}

// TestThreeZonesOneRoundTrip checks that one call asks about all zones of a client on a shard.
func TestThreeZonesOneRoundTrip(t *testing.T) {
	t.Parallel()
	for _, w := range sweep.Of(t, allWays(), 4) {
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			algorithm, mode := w.algorithm, w.mode
			// Until ledger_trust is over, no request of a sole writer is admitted without a check.
			servers, primary, _, store := tappedShard(t, 0, "charge_delay 0", "ledger_trust 1h")
			store = scriptsOnly(t, store, primary.addr)
			options := func(events int, window string) []string {
				return []string{fmt.Sprint("events ", events), "window " + window, "algorithm " + algorithm, "charge " + mode}
			}
			// With gcra the count of a year's bucket falls by one in ten minutes.
			// The fewest events are so many that nothing is held.
			c := startWith(t, store, zoneWith("second", options(100, "1s")...)+
				zoneWith("hour", options(5000, "1h")...)+zoneWith("year", options(50000, "8760h")...), byStatus)
			// The first request may have to load the scripts.
			c.Probe("/", "X-Key: bob", "X-Status: 200")
			servers.AwaitUsed(t, "year", "bob", 1)
			primary.took()

			charged := int64(0)
			for range 5 {
				// One is charged and one is free.
				a := c.Probe("/", "X-Key: alice", "X-Status: 200")
				must(t, "request", errors.Join(want("status", a.Status, http.StatusOK), want("zone", a.Resource, "second")))
				charged++
				servers.AwaitUsed(t, "year", "alice", charged)
				trips := [2]int64{2, 6} // a check and a charge
				if mode == "before" {
					trips = [2]int64{1, 3} // a take
				}
				must(t, "request", want("round trips and commands", primary.took(), trips))

				must(t, "free request", want("status", c.Probe("/", "X-Key: alice", "X-Status: 304").Status, http.StatusNotModified))
				trips = [2]int64{1, 3} // a check
				if mode == "before" {
					trips = [2]int64{2, 6} // a take and a refund
				}
				eventually(t, "the free request is settled", func() error {
					return want("number of commands", primary.commands.Load(), trips[1])
				})
				must(t, "free request", want("round trips and commands", primary.took(), trips))
			}
		})
	}
}

// TestThreeZonesOneRoundTripToAReplica checks that a Caddy asks a replica once about an unknown
// client. It asks the primary once to confirm a refusal, and again when that reply is old; in
// between it refuses without a call.
func TestThreeZonesOneRoundTripToAReplica(t *testing.T) {
	t.Parallel()
	const (
		refusals = 10
		trust    = 3 * time.Second
	)
	for _, algorithm := range sweep.Of(t, counting, 2) {
		t.Run(algorithm, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers, primary, replica, store := tappedShard(t, 1, fmt.Sprint("ledger_trust ", trust))
			caddys := caddytest.StartMany(t, 2, zonesSite(store, zoneWith("one", "algorithm "+algorithm)+
				zoneWith("two", "algorithm "+algorithm, "events 2")+zoneWith("three", "algorithm "+algorithm), "respond ok"))
			charged := func(key string, used int64) {
				servers.AwaitUsed(t, "three", key, used)
				servers.AwaitReplicas(t)
			}
			c := caddys[1]
			// Caddy asks a replica only after the primary has reported its time.
			must(t, "request of another client", c.Probe("/", "X-Key: bob").Shows(http.StatusOK, 2, 1))
			charged("bob", 1)

			nothing, once := [2]int64{}, [2]int64{1, 3}
			// If the requests take longer than trust, another client repeats them.
			for try, inTime := 0, false; !inTime; try++ {
				key := fmt.Sprint("alice-", try)
				for used := range int64(2) {
					must(t, "request that fits", caddys[0].Probe("/", "X-Key: "+key).Shows(http.StatusOK, 2, used+1))
					charged(key, used+1)
				}
				inTime = true
				primary.took()
				replica.took()
				var asked time.Time // before the last question to a server
				refused := func(what string, times int, atReplica, atPrimary [2]int64) {
					t.Helper()
					if atReplica != nothing || atPrimary != nothing {
						asked = time.Now()
					}
					for range times {
						must(t, what, c.Probe("/", "X-Key: "+key).Refuses("two"))
					}
					difference := errors.Join(want("round trips and commands at the replica", replica.took(), atReplica),
						want("round trips and commands at the primary", primary.took(), atPrimary))
					if inTime = inTime && time.Since(asked) < trust; inTime {
						must(t, what, difference)
					}
				}
				refused("first request too many", 1, once, nothing)
				refused("second request too many", 1, nothing, once)
				refused("request of a client that is known to be full", refusals, nothing, nothing)
				time.Sleep(trust) // until known states are too old
				refused("first request when trust has run out", 1, nothing, once)
				refused("request of a client that is still full", refusals, nothing, nothing)
			}
			for _, c := range caddys {
				c.Unload()
			}
			must(t, "at the end", errors.Join(want("round trips and commands at the replica", replica.took(), nothing),
				want("round trips and commands at the primary", primary.took(), nothing)))
		})
	}
}

// TestLongestWaitIsReported, whatever the order of the zones.
func TestLongestWaitIsReported(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	for name, store := range bothStores(servers) {
		for _, mode := range modes {
			t.Run(name+", "+mode, func(t *testing.T) {
				zones := ""
				for _, zone := range []struct{ name, keys, events, window string }{
					{"hour", "/hour /all /hour-and-week", "2", "1h"},
					{"week", "/all /hour-and-week", "2", "168h"},
					{"large", "/hour /all /hour-and-week /roomy", "1000", "10000h"},
					{"day", "/all /roomy", "2", "24h"},
				} {
					// Each path has buckets of its own.
					zones += zoneWith(name+"."+mode+"."+zone.name, "key {path}", "events "+zone.events, "window "+zone.window, "charge "+mode,
						"match {\npath "+zone.keys+"\n}")
				}
				c := startWith(t, store, zones, "respond ok")
				for path, longest := range map[string]string{"/hour": "hour", "/all": "week", "/hour-and-week": "week", "/roomy": "day"} {
					zone := name + "." + mode + "." + longest
					for used := range int64(2) {
						must(t, path, c.Probe(path).Shows(http.StatusOK, 2, used+1))
						awaitUsed(t, servers, store, zone, path, used+1)
					}
					window := map[string]int64{"hour": 3600, "day": 24 * 3600, "week": 168 * 3600}
					for range 3 {
						a := c.Probe(path)
						must(t, path, errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, 2, 2),
							want("Retry-After being that of the zone", a.RetryAfter > window[longest]-600 && a.RetryAfter <= window[longest], true)))
					}
				}
			})
		}
	}
}

// twoHandlersSite passes requests through two handlers, each with its own
// store and zones.
func twoHandlersSite(stores, outer, inner string) string {
	return "{\n\t{{global}}\n\t" + stores + "\n}\n{{site}} {\nroute {\n" +
		"rate_limit {\n" + outer + "}\n" + "rate_limit {\n" + inner + "}\n" + "respond ok\n}\n}\n"
}

func TestTwoHandlersChargeTogetherOrNotAtAll(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	// The options of two stores in one global option.
	both := strings.Replace(servers.Store(), "store redis {", "store local memory\n\t\tstore redis {", 1)
	for name, test := range map[string]struct {
		stores       string
		outer, inner string // the option store
	}{
		"one in memory":       {},
		"one in redis":        {stores: servers.Store()},
		"redis around memory": {stores: both, inner: "store local\n"},
		"memory around redis": {stores: both, outer: "store local\n"},
	} {
		t.Run(name, func(t *testing.T) {
			flush(t, servers)
			c := caddytest.Start(t, twoHandlersSite(test.stores, test.outer+zoneWith("wide", "events 5"), test.inner+zoneWith("narrow", "events 2")))
			settled := func(key string, used int64) {
				t.Helper()
				if test.stores != "" && test.outer == "" {
					servers.AwaitCount(t, "wide", key, used)
				}
				if test.stores != "" && test.inner == "" {
					servers.AwaitCount(t, "narrow", key, used)
				}
			}
			// The inner handler refuses: its zone has the least left.
			for used := range int64(2) {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request that fits", errors.Join(a.Is(http.StatusOK, used+1), want("zone", a.Resource, "narrow"), want("limit", a.Limit, 2)))
				settled("alice", used+1)
			}
			for range 4 {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request too many", errors.Join(a.Is(http.StatusTooManyRequests, 2), want("zone", a.Resource, "narrow"), want("limit", a.Limit, 2)))
			}
			// The outer handler was not charged for what was refused.
			c.MustLoad(twoHandlersSite(test.stores, test.outer+zoneWith("wide", "events 3"), test.inner+zoneWith("narrow", "events 50")))
			a := c.Ask("/", "X-Key: alice")
			must(t, "request that fits again", errors.Join(a.Is(http.StatusOK, 3), want("zone", a.Resource, "wide"), want("limit", a.Limit, 3)))
			settled("alice", 3)

			// The outer handler refuses, and the inner one is not even asked.
			asked := c.Metric(`caddy_rate_limit_requests_total{zone="narrow"}`)
			for range 4 {
				a := c.Ask("/", "X-Key: alice")
				must(t, "request too many", errors.Join(a.Is(http.StatusTooManyRequests, 3), want("zone", a.Resource, "wide"), want("limit", a.Limit, 3)))
			}
			must(t, "metric", want("requests of the inner zone", c.Metric(`caddy_rate_limit_requests_total{zone="narrow"}`), asked))
			c.MustLoad(twoHandlersSite(test.stores, test.outer+zoneWith("wide", "events 50"), test.inner+zoneWith("narrow", "events 4")))
			a = c.Ask("/", "X-Key: alice")
			must(t, "the inner zone's count", errors.Join(a.Is(http.StatusOK, 4), want("zone", a.Resource, "narrow")))
			settled("alice", 4)
		})
	}
}

func TestZoneInTwoHandlersIsChargedOnce(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := caddytest.Start(t, twoHandlersSite(store, zoneWith("api", "events 3"), zoneWith("api", "events 3")+zoneWith("other", "events 9")))
		for used := range int64(3) {
			a := c.Ask("/", "X-Key: alice")
			must(t, "request that fits", errors.Join(a.Is(http.StatusOK, used+1), want("zone", a.Resource, "api")))
			if store != "" {
				servers.AwaitCounts(t, "api", map[string]int64{"alice": used + 1})
				servers.AwaitCounts(t, "other", map[string]int64{"alice": used + 1})
			}
		}
		must(t, "request too many", c.Ask("/", "X-Key: alice").Is(http.StatusTooManyRequests, 3))
	})
}

func TestLimiterInErrorRoutes(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, "{\n\t{{global}}\n}\n{{site}} {\nroute {\n"+
		"rate_limit {\n"+zoneWith("api", "events 3")+"}\n"+
		"error /missing 404\nrespond ok\n}\n"+
		"handle_errors {\nroute {\n"+
		"rate_limit {\n"+zoneWith("api", "events 3")+zoneWith("errors", "events 2")+"}\n"+
		"respond \"{http.error.status_code} of {http.rate_limit.errors.used}\"\n}\n}\n}\n")

	// A refusal passes the limiter of its error route untouched.
	for range 3 {
		c.Ask("/", "X-Key: alice")
	}
	for range 4 {
		a := c.Ask("/", "X-Key: alice")
		must(t, "refusal", errors.Join(a.Is(http.StatusTooManyRequests, 3), want("zone", a.Resource, "api"), want("body", a.Body, "429 of ")))
	}
	must(t, "metric", want("requests of the zone in the error route", c.Metric(`caddy_rate_limit_requests_total{zone="errors"}`), "0"))

	// Other errors count there, and once in a zone that counted them already.
	for used := range int64(2) {
		a := c.Ask("/missing", "X-Key: bob")
		must(t, "error", errors.Join(a.Is(http.StatusNotFound, used+1), want("zone", a.Resource, "errors"),
			want("body", a.Body, fmt.Sprintf("404 of %d", used))))
	}
	// What an error route refuses, Caddy answers with the error's own status.
	a := c.Ask("/missing", "X-Key: bob")
	must(t, "error too many", errors.Join(a.Is(http.StatusNotFound, 2), want("zone", a.Resource, "errors"),
		want("body", a.Body, ""), want("having Retry-After", a.RetryAfter >= 1, true)))
	must(t, "request after three errors", c.Ask("/", "X-Key: bob").Is(http.StatusTooManyRequests, 3))
}
