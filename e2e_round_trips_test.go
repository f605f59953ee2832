package shardlimit_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// wiretap is a way to a server on which the round trips are counted that are
// about buckets.
type wiretap struct {
	addr string
	// trips, and the commands that they carried.
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
		n := bytes.Count(b, []byte("rl:1:"))
		w.commands.Add(int64(n))
		if n > 0 && !counted.Swap(true) {
			w.trips.Add(1)
		}
	})
	_ = upstream.Close()
	replies.Wait()
}

// passOn copies from one connection to another what look has seen.
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

// took returns the round trips and commands since it was called last.
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

// TestThreeZonesOneRoundTrip: all zones of a client are on one shard, and are
// asked about together.
func TestThreeZonesOneRoundTrip(t *testing.T) {
	for _, algorithm := range counting {
		for _, mode := range modes {
			t.Run(algorithm+", "+mode, func(t *testing.T) {
				servers, primary, _, store := tappedShard(t, 0)
				options := func(events int, window string) []string {
					return []string{fmt.Sprint("events ", events), "window " + window, "algorithm " + algorithm, "charge " + mode}
				}
				c := startWith(t, store, zoneWith("second", options(10, "1s")...)+
					zoneWith("hour", options(5000, "1h")...)+zoneWith("day", options(50000, "24h")...), byStatus)
				// The scripts may still be on their way to the server.
				c.Probe("/", "X-Key: bob", "X-Status: 200")
				servers.AwaitUsed(t, "day", "bob", 1)
				primary.took()

				day := int64(0)
				for range 5 {
					// One is charged and one is free.
					a := c.Probe("/", "X-Key: alice", "X-Status: 200")
					must(t, "request", errors.Join(want("status", a.Status, http.StatusOK), want("zone", a.Resource, "second")))
					day++
					servers.AwaitUsed(t, "day", "alice", day)
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
}

// TestThreeZonesOneRoundTripToAReplica: what a Caddy does not know yet it asks a
// replica, once. The primary is asked once whether a refusal is still true, and
// again when its word is old; in between a refusal asks nobody.
func TestThreeZonesOneRoundTripToAReplica(t *testing.T) {
	const (
		refusals = 10
		trust    = 3 * time.Second
	)
	for _, algorithm := range counting {
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
			// A replica is asked once the primary has told its time.
			must(t, "request of another client", c.Probe("/", "X-Key: bob").Shows(http.StatusOK, 2, 1))
			charged("bob", 1)

			nothing, once := [2]int64{}, [2]int64{1, 3}
			// Where the requests took longer than trust lasts, another client makes them
			// again.
			for try, inTime := 0, false; !inTime; try++ {
				key := fmt.Sprint("alice-", try)
				for used := range int64(2) {
					must(t, "request that fits", caddys[0].Probe("/", "X-Key: "+key).Shows(http.StatusOK, 2, used+1))
					charged(key, used+1)
				}
				inTime = true
				primary.took()
				replica.took()
				refused := func(what string, times int, atReplica, atPrimary [2]int64) {
					t.Helper()
					begun := time.Now()
					for range times {
						must(t, what, c.Probe("/", "X-Key: "+key).Refuses("two"))
					}
					told := errors.Join(want("round trips and commands at the replica", replica.took(), atReplica),
						want("round trips and commands at the primary", primary.took(), atPrimary))
					if inTime = inTime && time.Since(begun) < trust/3; inTime {
						must(t, what, told)
					}
				}
				refused("first request too many", 1, once, nothing)
				refused("second request too many", 1, nothing, once)
				refused("request of a client that is known to be full", refusals, nothing, nothing)
				time.Sleep(trust)
				refused("first request when trust has run out", 1, nothing, once)
				refused("request of a client that is still full", refusals, nothing, nothing)
			}
			for _, c := range caddys {
				c.Stop()
			}
			must(t, "at the end", errors.Join(want("round trips and commands at the replica", replica.took(), nothing),
				want("round trips and commands at the primary", primary.took(), nothing)))
		})
	}
}

// TestLongestWaitIsReported, whatever the order of the zones.
func TestLongestWaitIsReported(t *testing.T) {
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
						if store != "" {
							servers.AwaitUsed(t, zone, path, used+1)
							servers.AwaitReplicas(t)
						}
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
