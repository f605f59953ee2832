package shardlimit_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// arrivals are the requests that a backend has seen, in order, by their header
// X-Name.
type arrivals struct {
	mu    sync.Mutex
	names []string
	addr  string
}

func startArrivals(t *testing.T) *arrivals {
	t.Helper()
	a := &arrivals{}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.names = append(a.names, r.Header.Get("X-Name"))
	}))
	t.Cleanup(server.Close)
	a.addr = server.Listener.Addr().String()
	return a
}

func (a *arrivals) all() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.names)
}

// heldBy is how many requests wait in Caddy; not those that look whether it pays to
// wait.
func heldBy(c *caddytest.Caddy) (n int) {
	c.T.Helper()
	_, stacks := c.AdminCall(http.MethodGet, "/debug/pprof/goroutine?debug=2", "", "")
	for stack := range strings.SplitSeq(stacks, "\n\n") {
		state, frames, _ := strings.Cut(stack, "\n")
		function, _, _ := strings.Cut(frames, "\n")
		if strings.Contains(state, "[select") && strings.Contains(function, "shardlimit.(*part).wait(") {
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

// waitInLineUntil is line, and reports whether the request waits before a bucket has
// room again.
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

// isBefore reports whether an instant is to come, and not at once.
func isBefore(at time.Time) bool { return time.Until(at) > time.Second }

// whileFull calls f, which fills a bucket for so long and reports whether what it
// looked at was before the bucket had room again. On a busy machine it is called
// again, with a longer time.
func whileFull(t *testing.T, full time.Duration, f func(full time.Duration) (inTime bool)) {
	t.Helper()
	for ; !f(full); full *= 2 {
		if full > caddytest.WaitLimit {
			t.Fatalf("requests do not line up within %v", full)
		}
	}
}

// farShard is a shard whose replies take their time: from the leaving of one
// request to that of the next it takes so long, for that one asks.
func farShard(t *testing.T) (caddytest.Shards, string) {
	t.Helper()
	servers := caddytest.StartShards(t, 1, 0)
	proxy := redistest.StartProxy(t, servers[0].Primary.Addr())
	must(t, "delay replies", proxy.Delay(200*time.Millisecond))
	return servers, strings.Replace(servers.Store(), servers[0].Primary.Addr(), proxy.Addr(), 1)
}

// awaitScripts waits until that many have run.
func awaitScripts(t *testing.T, s caddytest.Shards, n int) {
	t.Helper()
	eventually(t, "scripts have run", func() error { return want("their number", scriptsRun(t, s), n) })
}

// scriptsOf is how many a request that is admitted runs: a take, or a check and a
// charge.
func scriptsOf(mode string) int {
	if mode == "before" {
		return 1
	}
	return 2
}

// keepFull makes alice's bucket of the zone slow, gcra of that many events per
// second, stay full for a while from now on, and returns until when.
func keepFull(t *testing.T, s caddytest.Shards, events int, d time.Duration) time.Time {
	t.Helper()
	now := s.Now(t)
	until := now + d.Microseconds()
	// The instant at which it is empty, its rest, the events, the name of the
	// busy time, what was refunded, and the end of the penalty.
	var packed []byte
	for _, n := range []int64{until, 0, int64(events), now, 0, 0} {
		packed = binary.LittleEndian.AppendUint64(packed, math.Float64bits(float64(n)))
	}
	tag := sha256.Sum256([]byte("{http.request.header.X-Key}"))
	key := "rl:1:slow:gcra1s:" + base64.RawURLEncoding.EncodeToString(tag[:3])[:3] + ":alice"
	must(t, "fill the bucket", s[0].Primary.Client().Set(t.Context(), key, packed, d+time.Minute).Err())
	return time.UnixMicro(until)
}

func TestHeldRequestsLeaveInOrder(t *testing.T) {
	const requests = 10
	for _, test := range []struct {
		mode   string
		far    bool
		events int
	}{
		// A request that is charged after its response leaves the line before
		// that, so that the next one may leave when it has asked.
		{"after", true, 20},
		{"before", true, 20},
		// Taking holds the next one back for a quarter of a second.
		{"before", false, 4},
	} {
		t.Run(fmt.Sprintf("%s, %d per second", test.mode, test.events), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 6*time.Second, func(full time.Duration) bool {
				servers, store := farShard(t)
				if !test.far {
					store = servers.Store()
				}
				backend := startArrivals(t)
				c := startWith(t, store, zoneWith("slow", "algorithm gcra", fmt.Sprint("events ", test.events), "window 1s", "burst 1",
					"max_wait 10m", "charge "+test.mode), "reverse_proxy "+backend.addr)
				must(t, "first request", want("status", c.Probe("/", "X-Key: alice", "X-Name: before").Status, http.StatusOK))
				before := scriptsOf(test.mode)
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
				must(t, "backend", want("number of requests", len(backend.all()), 1))
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

				// The first request asks, is refused, and asks again when the time
				// has come. The others look whether it pays to wait, for which one a
				// second asks, and ask when it is their turn, once more if they still
				// have to wait, and again where Caddy's clock was ahead of the
				// server's.
				c.Stop()
				most := 4 * requests
				if test.mode == "after" {
					// Each charges as well. That may come too late for the answer
					// to the next one, which then has to ask once more.
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

// TestClientThatLeavesTheLine: the others move up and keep their order.
func TestClientThatLeavesTheLine(t *testing.T) {
	for _, mode := range modes {
		for _, who := range []string{"the first", "others"} {
			t.Run(mode+", "+who, func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				whileFull(t, 8*time.Second, func(full time.Duration) bool {
					servers, store := farShard(t)
					backend := startArrivals(t)
					c := startWith(t, store, zoneWith("slow", "algorithm gcra", "events 160", fmt.Sprint("window ", full), "burst 160", "max_wait 10m",
						"cost {header.X-Cost}", "charge "+mode), "reverse_proxy "+backend.addr)
					first := c.Probe("/", "X-Key: alice", "X-Name: before", "X-Cost: 160")
					must(t, "request", want("status", first.Status, http.StatusOK))
					room, inTime := first.Sent.Add(full), true
					awaitScripts(t, servers, scriptsOf(mode))
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
					// The first one costs all there is, and so keeps the others
					// where they are until there is room for it.
					begin("expensive", who == "the first", "160")
					for i := range 3 {
						begin(fmt.Sprint("gone ", i), who == "others", "1")
						begin(fmt.Sprint("stays ", i), false, "1")
					}
					if !inTime {
						return false
					}
					must(t, "backend", want("number of requests", len(backend.all()), 1))
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
}
