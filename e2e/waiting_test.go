package e2e

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// arrivals are the requests that a backend has seen, by their header X-Name.
type arrivals struct {
	mu   sync.Mutex
	seen []arrival
	addr string
}

type arrival struct {
	name string
	left int64 // when Caddy passed it on, in milliseconds; requests of a line leave it at least a reply of Redis apart
}

func startArrivals(t *testing.T) *arrivals {
	t.Helper()
	a := &arrivals{}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		left, err := strconv.ParseInt(r.Header.Get("X-Left"), 10, 64)
		if err != nil {
			t.Error(err)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.seen = append(a.seen, arrival{r.Header.Get("X-Name"), left})
	}))
	t.Cleanup(server.Close)
	a.addr = server.Listener.Addr().String()
	return a
}

// proxy makes Caddy hand requests to the backend, with the time.
func (a *arrivals) proxy() string { return proxyTo(a.addr, "header_up X-Left {time.now.unix_ms}") }

// all returns the names in the order in which Caddy passed the requests on, because one request may
// overtake another on its way to the backend.
func (a *arrivals) all() (names []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	slices.SortStableFunc(a.seen, func(a, b arrival) int { return cmp.Compare(a.left, b.left) })
	for _, r := range a.seen {
		names = append(names, r.name)
	}
	return names
}

// heldBy returns how many requests wait in Caddy, without those that still decide whether to wait.
func heldBy(c *caddytest.Caddy) (n int) {
	c.T.Helper()
	const waiting = "limiter.(*tracker).awaitTurn("
	for _, stack := range c.Stacks(waiting) {
		state, frames, _ := strings.Cut(stack, "\n")
		function, _, _ := strings.Cut(frames, "\n")
		if strings.Contains(state, "[select") && strings.Contains(function, waiting) {
			n++
		}
	}
	return n
}

func awaitHeld(t *testing.T, c *caddytest.Caddy, n int) {
	t.Helper()
	eventually(t, "requests wait", func() error { return want("their number", heldBy(c), n) })
}

// waitInLine begins a request of alice and returns when it waits.
func waitInLine(ctx context.Context, t *testing.T, c *caddytest.Caddy, name string, headers ...string) caddytest.Running {
	t.Helper()
	before := heldBy(c)
	r := c.Begin(ctx, "/", append(headers, "X-Key: alice", "X-Name: "+name)...)
	awaitHeld(t, c, before+1)
	return r
}

// waitInLineUntil is waitInLine, and reports whether the request waits before the bucket has room
// again.
func waitInLineUntil(ctx context.Context, t *testing.T, c *caddytest.Caddy, room time.Time, name string, headers ...string) (r caddytest.Running, inTime bool) {
	t.Helper()
	before := heldBy(c)
	r = c.Begin(ctx, "/", append(headers, "X-Key: alice", "X-Name: "+name)...)
	eventually(t, "the request waits", func() error {
		held := heldBy(c)
		if inTime = isBefore(room); !inTime {
			return nil
		}
		return want("number of requests that wait", held, before+1)
	})
	return r, inTime
}

// isBefore reports whether an instant is more than a second away.
func isBefore(at time.Time) bool { return time.Until(at) > time.Second }

// whileFull calls f, which fills a bucket for this time and reports whether its checks were done
// before the bucket had room again. If a busy machine was too slow, it calls f again with a longer
// time.
func whileFull(t *testing.T, full time.Duration, f func(full time.Duration) (inTime bool)) {
	t.Helper()
	for ; !f(full); full *= 2 {
		if full > caddytest.Patience {
			t.Fatalf("requests do not line up within %v", full)
		}
	}
}

// farShard is a shard with delayed replies: requests leave a line one after the other, at least one
// reply apart.
func farShard(t *testing.T, options ...string) (caddytest.Shards, string) {
	t.Helper()
	servers := caddytest.StartShards(t, 1, 0)
	proxy := redistest.StartProxy(t, servers[0].Primary.Addr())
	must(t, "delay replies", proxy.Delay(200*time.Millisecond))
	return servers, strings.Replace(servers.Store(options...), servers[0].Primary.Addr(), proxy.Addr(), 1)
}

// awaitScripts waits until that many have run.
func awaitScripts(t *testing.T, s caddytest.Shards, n int) {
	t.Helper()
	eventually(t, "scripts have run", func() error { return want("their number", scriptsRun(t, s), n) })
}

// scriptsOfRequest is how many scripts an admitted request runs: a take and, because that leaves little, the end of what
// it holds; or a check and a charge.
const scriptsOfRequest = 2

// keepFull fills alice's bucket of the zone slow, gcra of that many events per second, for the time
// d, and returns when it has room.
func keepFull(t *testing.T, s caddytest.Shards, events int, d time.Duration) time.Time {
	t.Helper()
	now := s.Now(t)
	until := now + d.Microseconds()
	// The instant at which it is empty, its rest, the events, the beginning of the
	// busy time, what was spent in it, their span, and the end of the penalty.
	spent := math.Ceil(d.Seconds() * float64(events))
	content := packed(float64(until), 0, float64(events), float64(now), spent, 1e6, 0)
	tag := sha256.Sum256([]byte("{http.request.header.X-Key}"))
	key := "rl:3:slow:gcra1s:" + base64.RawURLEncoding.EncodeToString(tag[:3])[:3] + ":alice"
	must(t, "fill the bucket", s[0].Primary.Client().Set(t.Context(), key, content, d+time.Minute).Err())
	return time.UnixMicro(until)
}

// packed returns numbers as the scripts keep them.
func packed(numbers ...float64) (b []byte) {
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(n))
	}
	return b
}

func TestHeldRequestsLeaveInOrder(t *testing.T) {
	t.Parallel()
	const requests = 6
	for _, test := range []struct {
		mode   string
		events int
	}{
		// A request that is charged after its response leaves the line before
		// that, so that the next one may leave when it has asked.
		{"after", 20},
		{"before", 20},
		// Taking holds the next one back for a quarter of a second.
		{"before", 4},
	} {
		t.Run(fmt.Sprintf("%s, %d per second", test.mode, test.events), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 6*time.Second, func(full time.Duration) bool {
				servers, store := farShard(t)
				backend := startArrivals(t)
				c := startWith(t, store, zoneWith("slow", "algorithm gcra", fmt.Sprint("events ", test.events), "window 1s", "burst 1",
					"max_wait 10m", "charge "+test.mode), backend.proxy())
				must(t, "first request", want("status", c.Probe("/", "X-Key: alice", "X-Name: before").Status, http.StatusOK))
				before := scriptsOfRequest
				awaitScripts(t, servers, before)
				free := keepFull(t, servers, test.events, full)
				all, names := []caddytest.Running{}, []string{"before"}
				for i := range requests {
					names = append(names, fmt.Sprint("request ", i))
					r, inTime := waitInLineUntil(t.Context(), t, c, free, names[i+1])
					if !inTime {
						return false
					}
					all = append(all, r)
				}
				arrived := len(backend.all())
				if !time.Now().Before(free) {
					return false
				}
				must(t, "backend", want("number of requests", arrived, 1))
				for i, r := range all {
					a := r.Ends(t)
					must(t, names[i+1], want("status", a.Status, http.StatusOK))
					earliest := free
					if test.mode == "before" {
						earliest = free.Add(time.Duration(i) * time.Second / time.Duration(test.events))
					}
					must(t, names[i+1], want("being answered before it fits", a.Received.Before(earliest), false))
				}
				must(t, "backend", want("order", fmt.Sprintf("%q", backend.all()), fmt.Sprintf("%q", names)))

				// The first request asks, is refused, and asks again when the time has come. The
				// others decide whether to wait, for which one a second asks. They ask at their
				// turn, once more if they still have to wait, and again if Caddy's clock was ahead
				// of the server's.
				c.Unload()
				most := 4 * requests
				if test.mode == "after" {
					// Each request charges as well. A late charge makes the next request ask once
					// more.
					most += 2 * requests
				}
				asked := scriptsRun(t, servers) - before
				must(t, "Redis", want(fmt.Sprintf("%d scripts being more than %d", asked, most), asked > most, false))
				t.Logf("%d scripts for %d requests", asked, requests)
				return true
			})
		})
	}
}

// TestClientThatLeavesTheLine lets the others move up in order.
func TestClientThatLeavesTheLine(t *testing.T) {
	t.Parallel()
	type departure struct{ mode, who string }
	for _, d := range sweep.Of(t, []departure{{"after", "the first"}, {"before", "the first"}, {"after", "others"}, {"before", "others"}}, 2) {
		t.Run(fmt.Sprint(d), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			mode, who := d.mode, d.who
			whileFull(t, 8*time.Second, func(full time.Duration) bool {
				// Each request asks Redis before it leaves, so that they leave a reply apart even if
				// the bucket has room for several.
				servers, store := farShard(t, "ledger_trust 0")
				backend := startArrivals(t)
				c := startWith(t, store, zoneWith("slow", "algorithm gcra", "events 160", fmt.Sprint("window ", full), "burst 160", "max_wait 10m",
					"cost {header.X-Cost}", "charge "+mode), backend.proxy())
				first := c.Probe("/", "X-Key: alice", "X-Name: before", "X-Cost: 160")
				must(t, "request", want("status", first.Status, http.StatusOK))
				room, inTime := first.Sent.Add(full), true
				awaitScripts(t, servers, scriptsOfRequest)
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				var gone, stay []caddytest.Running
				names := []string{"before"}
				begin := func(name string, leaves bool, cost string) {
					if !inTime {
						return
					}
					var r caddytest.Running
					if leaves {
						r, inTime = waitInLineUntil(ctx, t, c, room, name, "X-Cost: "+cost)
						gone = append(gone, r)
						return
					}
					r, inTime = waitInLineUntil(t.Context(), t, c, room, name, "X-Cost: "+cost)
					stay = append(stay, r)
					names = append(names, name)
				}
				// The first request costs the whole burst, and so holds the others until it
				// fits.
				begin("expensive", who == "the first", "160")
				for i := range 3 {
					begin(fmt.Sprint("gone ", i), who == "others", "1")
					begin(fmt.Sprint("stays ", i), false, "1")
				}
				if !inTime {
					return false
				}
				arrived := len(backend.all())
				if !time.Now().Before(room) {
					return false
				}
				must(t, "backend", want("number of requests", arrived, 1))
				leave()
				for _, r := range gone {
					r.Leaves(t)
				}
				for i, r := range stay {
					must(t, names[i+1], want("status", r.Ends(t).Status, http.StatusOK))
				}
				must(t, "backend", want("order", fmt.Sprintf("%q", backend.all()), fmt.Sprintf("%q", names)))
				awaitHeld(t, c, 0)
				return true
			})
		})
	}
}

// TestWaitThatWouldBeTooLong checks that a request is refused at once if its bucket, or the
// requests before it, would hold it for longer than max_wait.
func TestWaitThatWouldBeTooLong(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, mode := range modes {
		zones += zoneWith("slow."+mode, "key {header.X-Key}", "algorithm gcra", "events 1", "window 25m", "max_wait 1h", "charge "+mode,
			"match {\nheader X-Mode "+mode+"\n}")
		zones += pathZone("slower."+mode, "algorithm gcra", "events 1", "window 61m", "burst 2", "max_wait 1h", "charge "+mode)
	}
	for name, store := range bothStores(servers, "ledger_trust 1h") {
		for _, mode := range modes {
			t.Run(name+", "+mode, func(t *testing.T) {
				flush(t, servers)
				c := startWith(t, store, zones, "respond ok")
				zone, header := "slow."+mode, "X-Mode: "+mode
				before := scriptsRun(t, servers)
				must(t, "first request", c.Probe("/", "X-Key: alice", header).Shows(http.StatusOK, 1, 1))
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				awaitUsed(t, servers, store, zone, "alice", 1)
				waitInLine(t.Context(), t, c, "second", header)
				third := waitInLine(ctx, t, c, "third", header)
				for range 3 {
					// It would have to wait for 75 minutes.
					a := c.Probe("/", "X-Key: alice", header)
					must(t, "fourth request", errors.Join(a.Refuses(zone), want(fmt.Sprintf("Retry-After, %d, being that", a.RetryAfter), a.RetryAfter > 3600 && a.RetryAfter <= 4500, true)))
				}
				must(t, "another client", c.Probe("/", "X-Key: bob", header).Shows(http.StatusOK, 1, 1))
				awaitHeld(t, c, 2)

				// A client that leaves makes room.
				leave()
				third.Leaves(t)
				awaitHeld(t, c, 1)
				ctx, leave = context.WithCancel(t.Context())
				defer leave()
				again := waitInLine(ctx, t, c, "again", header)
				if store != "" {
					servers.AwaitUsed(t, zone, "bob", 1)
					// Two requests passed. The reply to a charge or a take reported a full bucket, or that to the
					// end of what the take held, and six later requests decided without a call.
					awaitScripts(t, servers, before+2*scriptsOfRequest)
				}

				// No other request waits in this zone.
				for used := range int64(2) {
					must(t, "request", c.Probe("/slower."+mode, "X-Key: alice").Shows(http.StatusOK, 2, used+1))
					awaitUsed(t, servers, store, "slower."+mode, "alice", used+1)
				}
				must(t, "third request", c.Probe("/slower."+mode, "X-Key: alice").Refuses("slower."+mode))
				leave()
				again.Leaves(t)
			})
		}
	}
}

// TestFullQueue checks that no more requests of a zone wait than max_wait says.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range bothStores(servers) {
		for _, w := range sweep.Of(t, allWays(), 3) {
			t.Run(fmt.Sprint(name, ", ", w), func(t *testing.T) {
				flush(t, servers)
				algorithm, mode := w.algorithm, w.mode
				c := startWith(t, store, zoneWith("slow", "algorithm "+algorithm, "events 1", "max_wait 100000h 2", "charge "+mode), "respond ok")
				for _, key := range []string{"alice", "bob"} {
					must(t, key, c.Probe("/", "X-Key: "+key).Shows(http.StatusOK, 1, 1))
					awaitUsed(t, servers, store, "slow", key, 1)
				}
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				waitInLine(t.Context(), t, c, "second")
				third := waitInLine(ctx, t, c, "third")
				for range 3 {
					must(t, "alice", c.Probe("/", "X-Key: alice").Refuses("slow"))
				}
				must(t, "a client that need not wait", c.Probe("/", "X-Key: carol").Shows(http.StatusOK, 1, 1))
				leave()
				third.Leaves(t)
				awaitHeld(t, c, 1)
				waitInLine(t.Context(), t, c, "fourth")
				must(t, "alice", c.Probe("/", "X-Key: alice").Refuses("slow"))
			})
		}
	}
}

// TestMaxWaitEndsInTheLine checks that a request waits no longer than max_wait behind others,
// although these wait for a hung Redis.
func TestMaxWaitEndsInTheLine(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 6*time.Second, func(full time.Duration) bool {
				servers := caddytest.StartShards(t, 1, 0)
				backend := startArrivals(t)
				c := startWith(t, servers.Store("check_timeout 1h"), zoneWith("slow", "algorithm gcra", "events 20", "window 1s", "burst 1",
					fmt.Sprint("max_wait ", full+2*time.Second), "charge "+mode), backend.proxy())
				// Another client sends it: a Caddy that knows alice's bucket to be full would not
				// ask until when.
				must(t, "first request", want("status", c.Probe("/", "X-Key: bob", "X-Name: before").Status, http.StatusOK))
				before := scriptsOfRequest
				awaitScripts(t, servers, before)
				room := keepFull(t, servers, 20, full)
				first, inTime := waitInLineUntil(t.Context(), t, c, room, "first")
				if !inTime {
					return false
				}
				second, inTime := waitInLineUntil(t.Context(), t, c, room, "second")
				if !inTime {
					return false
				}
				// The second one asks Redis as well if the ledger's figure is too old by then.
				eventually(t, "alice is asked about", func() error {
					return want("more scripts having run", scriptsRun(t, servers) > before, true)
				})
				must(t, "hang", servers[0].Primary.Pause())
				if !isBefore(room) {
					must(t, "resume", servers[0].Primary.Resume())
					return false
				}
				a := second.Ends(t)
				must(t, "second request", errors.Join(a.Refuses("slow"),
					want("waiting for less than max_wait", a.Received.Sub(a.Sent) < full+2*time.Second, false)))
				must(t, "resume", servers[0].Primary.Resume())
				must(t, "first request", want("status", first.Ends(t).Status, http.StatusOK))
				must(t, "backend", want("order", fmt.Sprintf("%q", backend.all()), fmt.Sprintf("%q", []string{"before", "first"})))
				return true
			})
		})
	}
}

// TestHeldRequestIsCountedOnce: a request is refunded what it took when it begins to wait. If it
// takes that again at once, the refund must not cover the second take.
func TestHeldRequestIsCountedOnce(t *testing.T) {
	t.Parallel()
	const before, workers, requests = 20, 4, 30
	servers := caddytest.StartShards(t, 1, 0)
	zones := zoneWith("pace", "algorithm gcra", "events 1000", "window 1s", "burst 1", "max_wait 100s", "charge before")
	for _, algorithm := range counting {
		zones += zoneWith(algorithm, "algorithm "+algorithm, "events 1000", "charge before")
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond \"{http.rate_limit.fixed_window.used} {http.rate_limit.sliding_window.used} "+
			"{http.rate_limit.sliding_log.used} {http.rate_limit.gcra.used}\"")
		// Refunds of gcra may come in another order than their takes, except for that of the first
		// take in the bucket.
		for range before {
			must(t, "request", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
		}
		caddytest.Together(t, workers, func(int) error {
			for range requests {
				a, err := c.TryProbe(t.Context(), "/", "X-Key: alice")
				if err = errors.Join(err, want("status", a.Status, http.StatusOK)); err != nil {
					return err
				}
			}
			return nil
		})
		const all = before + workers*requests
		if store == "" {
			must(t, "next request", want("body", c.Probe("/", "X-Key: alice").Body, fmt.Sprintf("%d %[1]d %[1]d %[1]d", all+1)))
			return
		}
		c.Unload()
		for _, algorithm := range counting {
			must(t, "Redis", want("used of "+algorithm, servers.Content(t, algorithm, "alice").Used, all))
		}
	})
}

// TestLineCostsOneCallASecond checks that a Caddy asks about a client's bucket once a second while
// requests wait for it, however many more are refused because of max_wait.
func TestLineCostsOneCallASecond(t *testing.T) {
	t.Parallel()
	const requests = 40
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for algorithm, mode := range ways {
		zones += pathZone("long."+mode+"."+algorithm, "max_wait 25000h", "algorithm "+algorithm, "events 1", "charge "+mode)
		zones += pathZone("full."+mode+"."+algorithm, "max_wait 100000h 3", "algorithm "+algorithm, "events 1", "charge "+mode)
	}
	c := startWith(t, servers.Store(), zones, "respond ok")
	for algorithm, mode := range ways {
		for _, why := range []string{"long", "full"} {
			zone := strings.Join([]string{why, mode, algorithm}, ".")
			t.Run(zone, func(t *testing.T) {
				must(t, "first request", c.Probe("/"+zone, "X-Key: alice").Shows(http.StatusOK, 1, 1))
				servers.AwaitUsed(t, zone, "alice", 1)
				servers.AwaitReplicas(t)
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				awaitNothingHeld(t, servers)
				held := fillLine(ctx, t, c, "/"+zone, "X-Key: alice")
				before, start := callsTo(t, servers), time.Now()
				for range requests {
					must(t, "request too many", c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
				}
				took, made := time.Since(start), callsTo(t, servers)-before
				// A call that a stalled machine answers too late to go on refusing is made once more.
				most := 2 * (int64(took/time.Second) + 1)
				must(t, "servers", want(fmt.Sprintf("having got %d calls for %d requests in %v, which is more than %d,", made, requests, took, most), made > most, false))
				leave()
				for _, r := range held {
					r.Leaves(t)
				}
				awaitHeld(t, c, 0)
			})
		}
	}
}

// fillLine begins requests until one is refused, and returns those that are held.
func fillLine(ctx context.Context, t *testing.T, c *caddytest.Caddy, path string, headers ...string) (held []caddytest.Running) {
	t.Helper()
	for refused := false; !refused; {
		r := c.Begin(ctx, path, headers...)
		eventually(t, "a request is held or refused", func() error {
			select {
			case a := <-r.Answer:
				refused = true
				return want("status", a.Status, http.StatusTooManyRequests)
			case err := <-r.Err:
				return err
			default:
			}
			if refused {
				return nil
			}
			return want("number of requests that are held", heldBy(c), len(held)+1)
		})
		if !refused {
			held = append(held, r)
		}
	}
	return held
}

// TestClientThatLeavesDuringTheTake checks that the rest of the chain does not run, and that the
// take is refunded.
func TestClientThatLeavesDuringTheTake(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	proxy := redistest.StartProxy(t, servers[0].Primary.Addr())
	backend := startArrivals(t)
	zones := ""
	algorithms := append([]string{"concurrency"}, counting...)
	for _, algorithm := range algorithms {
		zones += pathZone(algorithm, "algorithm "+algorithm, "charge before")
	}
	c := startWith(t, strings.Replace(servers.Store("check_timeout 100s"), servers[0].Primary.Addr(), proxy.Addr(), 1), zones, backend.proxy())
	for _, algorithm := range algorithms {
		t.Run(algorithm, func(t *testing.T) {
			c.Probe("/"+algorithm, "X-Key: alice", "X-Name: "+algorithm)
			used := int64(1)
			if algorithm == "concurrency" {
				used = 0
			}
			servers.AwaitUsed(t, algorithm, "alice", used)
			arrived := len(backend.all())
			// A reply that is delayed would hold the connection of the take.
			eventually(t, "all replies are read", func() error { return want("calls", len(c.Stacks("go-redis/v9.(*baseClient).")), 0) })

			// Redis runs the take at once, but its reply is delayed.
			must(t, "delay", proxy.Delay(time.Minute))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			gone := c.Begin(ctx, "/"+algorithm, "X-Key: alice", "X-Name: gone")
			servers.AwaitUsed(t, algorithm, "alice", used+1)
			leave()
			must(t, "request", want("its client having left", errors.Is(<-gone.Err, context.Canceled), true))
			awaitLeaving(t, c)
			must(t, "end the delay", proxy.Delay(0))
			servers.AwaitUsed(t, algorithm, "alice", used)
			must(t, "next request", want("status", c.Probe("/"+algorithm, "X-Key: alice", "X-Name: "+algorithm).Status, http.StatusOK))
			must(t, "backend", want("number of requests", len(backend.all()), arrived+1))
		})
	}
	c.Unload()
	for _, algorithm := range algorithms {
		used := int64(2)
		if algorithm == "concurrency" {
			used = 0
		}
		must(t, "at the end", want("used of "+algorithm, servers.Content(t, algorithm, "alice").Used, used))
	}
}

// awaitLeaving waits until Caddy has noticed that the only client of a running
// request has left. Until then it tries to read from its connection.
func awaitLeaving(t *testing.T, c *caddytest.Caddy) {
	t.Helper()
	eventually(t, "caddy notices that the client has left", func() error {
		// A goroutine that has not begun to run has no frame of backgroundRead yet.
		readers := c.Stacks("created by net/http.(*connReader).startBackgroundRead in ")
		return want("number of clients", len(readers)-1, 0) // but for this one
	})
}
