package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// TestEveryAlgorithmThroughCaddy admits three events and refuses the fourth.
func TestEveryAlgorithmThroughCaddy(t *testing.T) {
	t.Parallel()
	const events, window = 3, 10000 * 3600
	servers := caddytest.StartShards(t, 1, 1)
	backend := caddytest.StartSlowBackend(t)
	_, zones := zonesPerWay("events 3")
	zones += pathZone("concurrency", "algorithm concurrency", "events 3")
	answers := proxyTo("/concurrency "+backend.Server.Listener.Addr().String()) + "\nrespond ok"
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, answers)
		for algorithm, mode := range ways {
			zone := algorithm + "." + mode
			for used := range int64(events) {
				a := c.Probe("/"+zone, "X-Key: alice")
				must(t, zone, errors.Join(a.Shows(http.StatusOK, events, used+1), want("zone", a.Resource, zone),
					want("Retry-After", a.RetryAfter, -1), want("having a reset", a.Reset >= a.Sent.Unix(), true)))
				awaitUsed(t, servers, store, zone, "alice", used+1)
			}
			for range 2 {
				a := c.Probe("/"+zone, "X-Key: alice")
				must(t, zone, errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, events, events),
					want("Retry-After being no more than two windows", a.RetryAfter <= 2*window, true),
					want("having a reset", a.Reset > a.Sent.Unix(), true)))
			}
			must(t, zone+", another client", c.Probe("/"+zone, "X-Key: bob").Shows(http.StatusOK, events, 1))
		}

		// Requests at the same time are counted while they run.
		var held []caddytest.Running
		for range events {
			held = append(held, backend.Hold(t, c, "/concurrency", "X-Key: alice"))
		}
		a := c.Probe("/concurrency", "X-Key: alice")
		must(t, "concurrency", errors.Join(a.Refuses("concurrency"), a.Shows(http.StatusTooManyRequests, events, events),
			want("having a reset ahead", a.Reset > a.Sent.Unix(), true)))
		other := backend.Hold(t, c, "/concurrency", "X-Key: bob")
		for i, a := range backend.Finish(t, append(held, other)...) {
			used := int64(i)%events + 1
			must(t, "concurrency", errors.Join(a.Shows(http.StatusOK, events, used), want("reset", a.Reset, -1), want("Retry-After", a.RetryAfter, -1)))
		}
	})
}

// TestCostThatNeverFits checks that the refusal has no Retry-After.
func TestCostThatNeverFits(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("burst."+mode, "algorithm gcra", "events 100", "burst 2", "cost {header.X-Cost}", "charge "+mode)
		zones += pathZone("window."+mode, "events 2", "cost {header.X-Cost}", "charge "+mode)
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		for _, mode := range modes {
			for _, zone := range []string{"burst." + mode, "window." + mode} {
				for range 2 {
					a := probeNever(c, "/"+zone, "X-Key: alice", "X-Cost: 3")
					must(t, zone, errors.Join(a.Shows(http.StatusTooManyRequests, 2, 0), want("zone", a.Resource, zone)))
				}
				must(t, zone, c.Probe("/"+zone, "X-Key: alice", "X-Cost: 2").Shows(http.StatusOK, 2, 2))
				lines := c.AwaitLines(t, 1, "costs more than its zone ever admits", `"zone":"`+zone+`"`)
				for _, text := range []string{`"cost":3`, `"capacity":2`, `"hint":"raise events or, with gcra, burst`} {
					must(t, zone, want("the log having "+text, strings.Contains(lines[0], text), true))
				}
			}
		}
	})
}

// probeNever is Probe for a request that never fits.
func probeNever(c *caddytest.Caddy, path string, headers ...string) caddytest.Answer {
	c.T.Helper()
	a := c.Probe(path, headers...)
	must(c.T, path, errors.Join(want("status", a.Status, http.StatusTooManyRequests), want("having Retry-After", a.Header.Values("Retry-After") != nil, false)))
	return a
}

// TestAlignedWindows checks that aligned windows end on the clock, for all clients at once.
func TestAlignedWindows(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	windows := []int64{7, 3600, 24 * 3600}
	zones := ""
	for _, window := range windows {
		for _, mode := range modes {
			zones += pathZone(fmt.Sprint("aligned.", window, ".", mode), fmt.Sprintf("window %ds aligned", window), "charge "+mode, "events 2")
		}
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		caddys := caddytest.StartMany(t, 2, zonesSite(store, zones, "respond ok"))
		for _, window := range windows {
			for _, mode := range modes {
				zone := fmt.Sprint("aligned.", window, ".", mode)
				alignedWindow(t, caddys, servers, zone, func(at time.Time) int64 { return (at.Unix()/window + 1) * window }, store != "")
			}
		}
	})
}

// TestCalendarWindows checks that windows of the calendar end at midnight in their time zone, for
// all clients, in all Caddys and on the command line.
func TestCalendarWindows(t *testing.T) {
	t.Parallel()
	const city = "America/New_York"
	in, err := time.LoadLocation(city)
	must(t, "time zone", err)
	units := map[string]func(at time.Time) time.Time{
		"day": func(at time.Time) time.Time {
			return time.Date(at.Year(), at.Month(), at.Day()+1, 0, 0, 0, 0, in)
		},
		"week": func(at time.Time) time.Time {
			return time.Date(at.Year(), at.Month(), at.Day()+7-int(at.Weekday()), 0, 0, 0, 0, in)
		},
		"month": func(at time.Time) time.Time { return time.Date(at.Year(), at.Month()+1, 1, 0, 0, 0, 0, in) },
		"year":  func(at time.Time) time.Time { return time.Date(at.Year()+1, 1, 1, 0, 0, 0, 0, in) },
	}
	longest := map[string]int{"day": 86400, "week": 7 * 86400, "month": 31 * 86400, "year": 366 * 86400}
	servers := caddytest.StartShards(t, 2, 1)
	zones := "headers both\n"
	for unit := range units {
		starts := ""
		if unit == "week" {
			starts = " from sunday"
		}
		for _, mode := range modes {
			zones += pathZone(unit+"."+mode, "window "+unit+starts+" in "+city, "charge "+mode, "events 2")
		}
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		caddys := caddytest.StartMany(t, 2, zonesSite(store, zones, "respond ok"))
		for unit, after := range units {
			for _, mode := range modes {
				zone := unit + "." + mode
				bob := alignedWindow(t, caddys, servers, zone, func(at time.Time) int64 { return after(at.In(in)).Unix() }, store != "")
				if store != "" {
					servers.AwaitCount(t, zone, bob, 2)
				}
				a := caddys[1].Probe("/"+zone, "X-Key: "+bob)
				if a.Received.In(in).Hour() == 0 {
					continue // the window may be over
				}
				retry, err := strconv.ParseInt(a.Header.Get("Retry-After"), 10, 64)
				must(t, zone, errors.Join(err, want("status", a.Status, http.StatusTooManyRequests),
					want("policy", a.Header.Get("RateLimit-Policy"), fmt.Sprintf(`"%s";q=2;w=%d`, zone, longest[unit])),
					want("Retry-After until the end", a.Reset-retry >= a.Sent.Unix()-2 && a.Reset-retry <= a.Received.Unix()+2, true)))
			}
		}
	})
}

// alignedWindow sends requests of two clients, each to its own Caddy, until all answers fall into
// one window, and compares their resets. It returns the client that has used up the zone.
func alignedWindow(t *testing.T, caddys []*caddytest.Caddy, servers caddytest.Shards, zone string, end func(at time.Time) int64, redis bool) (full string) {
	t.Helper()
	for try := 0; ; try++ {
		clients := []string{fmt.Sprint("alice-", try), fmt.Sprint("bob-", try)}
		first := caddys[0].Probe("/"+zone, "X-Key: "+clients[0])
		// Caddy's estimate of the primary's time may lag a little.
		reset := end(first.Sent.Add(-time.Second))
		answers := []caddytest.Answer{first}
		for used := range int64(2) {
			answers = append(answers, caddys[1].Probe("/"+zone, "X-Key: "+clients[1]))
			if redis && used == 0 {
				eventually(t, "the requests are charged", func() error {
					if time.Now().Unix() >= reset {
						return nil // the first one's bucket may have expired
					}
					stored := servers.Buckets(t, zone)
					return want("buckets stored", stored[clients[0]].Count*stored[clients[1]].Count > 0, true)
				})
			}
		}
		if last := answers[len(answers)-1]; end(last.Received) != reset {
			continue // they may span two windows
		}
		for i, a := range answers {
			must(t, fmt.Sprintf("%s, answer %d", zone, i), errors.Join(want("status", a.Status, http.StatusOK), want("reset", a.Reset, reset)))
		}
		if !redis {
			return clients[1]
		}
		for _, key := range clients {
			b := servers.Buckets(t, zone)[key]
			if time.Now().Unix() >= reset {
				continue // it has expired since, or a late charge has opened the next window
			}
			must(t, zone+", "+key, want("reset in Redis", b.Reset, reset*1_000_000))
		}
		return clients[1]
	}
}

// TestAlignedWindowEndsOnTheClock admits a refused client when the clock's window ends, long before
// a window opened by the client's first request would end.
func TestAlignedWindowEndsOnTheClock(t *testing.T) {
	t.Parallel() // it spends its time waiting
	const window = 4
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("aligned."+mode, fmt.Sprintf("window %ds aligned", window), "events 1", "charge "+mode)
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		for _, mode := range modes {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				isRefusal := func(a caddytest.Answer) error {
					return errors.Join(want("reset being a multiple of the window", a.Reset%window, 0),
						want("reset being no more than a window away", a.Reset <= a.Received.Unix()+window, true),
						want("Retry-After being no longer than the window, rounded up", a.RetryAfter <= window+1, true))
				}
				var refused caddytest.Answer
				// What is in flight refuses for a second, which may go beyond the window.
				eventually(t, "a request is refused until the window ends", func() error {
					refused = c.Probe("/aligned."+mode, "X-Key: alice")
					if err := want("status", refused.Status, http.StatusTooManyRequests); err != nil {
						return err
					}
					must(t, "refusal", refused.Refuses("aligned."+mode))
					return isRefusal(refused)
				})
				wasLate := false
				eventually(t, "a request is admitted", func() error {
					a := c.Probe("/aligned."+mode, "X-Key: alice")
					if a.Status == http.StatusOK {
						must(t, "admitted request", errors.Join(want("coming before the reset", a.Received.Before(time.Unix(refused.Reset, 0)), false),
							want("reset being a multiple of the window", a.Reset%window, 0)))
						return nil
					}
					must(t, "refusal", errors.Join(a.Refuses("aligned."+mode), isRefusal(a)))
					if mode == "after" && a.Reset > refused.Reset {
						// The charge of the admitted request, in flight at the first refusal, was
						// executed in a later window.
						must(t, "refusal", want("a second late charge", wasLate, false))
						refused, wasLate = a, true
						return errors.New("it is refused in a later window")
					}
					must(t, "refusal", want("reset", a.Reset, refused.Reset))
					return errors.New("it is refused")
				})
			})
		}
	})
}

// TestPlanUpgradeKeepsTheCount checks that a change of the limit keeps the bucket.
func TestPlanUpgradeKeepsTheCount(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	names, zones := zonesPerWay("events {header.X-Plan-Limit} 10")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		for _, zone := range names {
			used := int64(0)
			// charges makes n requests that fit into a plan; "" is none.
			charges := func(n int, plan string, limit int64) {
				t.Helper()
				for range n {
					used++
					what := fmt.Sprintf("%s, plan %q, request %d", zone, plan, used)
					must(t, what, c.Probe("/"+zone, "X-Key: alice", "X-Plan-Limit: "+plan).Shows(http.StatusOK, limit, used))
					awaitUsed(t, servers, store, zone, "alice", used)
				}
			}
			refused := func(plan string, limit int64) {
				t.Helper()
				a := c.Probe("/"+zone, "X-Key: alice", "X-Plan-Limit: "+plan)
				must(t, fmt.Sprintf("%s, plan %q, a request too many", zone, plan), errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, limit, used)))
				if store != "" {
					must(t, zone, want("used in Redis", servers.Content(t, zone, "alice").Used, used))
				}
			}
			charges(9, "", 10)
			charges(1, "10", 10)
			refused("10", 10)
			// Up: what is used stays used.
			charges(3, "15", 15)
			charges(1, "1000", 1000)
			charges(1, "15", 15)
			refused("15", 15)
			// Down: the count stays, although it exceeds the plan.
			refused("12", 12)
			refused("", 10)
			refused("1", 1)
			charges(2, "17", 17)
			refused("17", 17)
		}
	})
}

// TestSlowRequestsOccupyLaterWindows with charge after, where a request counts until its response
// begins. With charge before it counts only in the window of its arrival.
func TestSlowRequestsOccupyLaterWindows(t *testing.T) {
	t.Parallel()
	const window = 300 * time.Millisecond
	servers := caddytest.StartShards(t, 1, 1)
	for name, store := range bothStores(servers) {
		for _, w := range sweep.Of(t, allWays(), 4) {
			t.Run(fmt.Sprint(name, ", ", w), func(t *testing.T) {
				t.Parallel() // it spends its time waiting
				algorithm, mode := w.algorithm, w.mode
				backend := caddytest.StartSlowBackend(t)
				c := startWith(t, store, zoneWith(mode+"."+algorithm, "algorithm "+algorithm, "events 2", "window "+window.String(), "charge "+mode),
					proxyTo(backend.Server.Listener.Addr().String()))
				slow := []caddytest.Running{backend.Hold(t, c, "/", "X-Key: alice"), backend.Hold(t, c, "/", "X-Key: alice")}
				// No request has ended yet, so they are taken to be charged within a second. The
				// window of that charge and half of the next one have to go by.
				wait := map[string]int64{"sliding_window": 2}
				for range 2 {
					time.Sleep(2 * window) // until their windows are over
					if mode == "before" {
						slow = append(slow, backend.Hold(t, c, "/", "X-Key: alice"))
						continue
					}
					a := c.Probe("/", "X-Key: alice")
					must(t, "request while slow ones run", errors.Join(a.Refuses(mode+"."+algorithm), want("Retry-After", a.RetryAfter, max(wait[algorithm], 1))))
				}
				for _, a := range backend.Finish(t, slow...) {
					must(t, "slow request", want("status", a.Status, http.StatusOK))
				}
			})
		}
	}
}

const (
	badLogin  = "X-Status: 401"
	goodLogin = "X-Status: 200"
	forbidden = "X-Status: 403"
)

// TestBruteForceZone checks that a zone that counts only failures stops a client that guesses
// passwords.
func TestBruteForceZone(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("logins."+mode, "events 3", "count_status 401 403", "charge "+mode)
	}
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zones, byStatus)
		for _, mode := range modes {
			zone := "logins." + mode
			log := func(login, key string, status int, failures int64) {
				t.Helper()
				must(t, zone+", "+login, c.Probe("/"+zone, "X-Key: "+key, login).Shows(status, 3, failures))
				awaitUsed(t, servers, store, zone, key, failures)
			}
			for range 5 {
				log(goodLogin, "alice", http.StatusOK, 0)
			}
			log(badLogin, "alice", http.StatusUnauthorized, 1)
			log(goodLogin, "alice", http.StatusOK, 1)
			log("X-Status: 500", "alice", http.StatusInternalServerError, 1)
			log("X-Status: 304", "alice", http.StatusNotModified, 1)
			log(forbidden, "alice", http.StatusForbidden, 2)
			log(badLogin, "alice", http.StatusUnauthorized, 3)
			// A correct password is refused as well.
			for _, login := range []string{badLogin, goodLogin, forbidden, goodLogin} {
				a := c.Probe("/"+zone, "X-Key: alice", login)
				must(t, zone+", too many failures, "+login, errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, 3, 3)))
			}
			for range 5 {
				log(goodLogin, "bob", http.StatusOK, 0)
			}
			log(badLogin, "bob", http.StatusUnauthorized, 1)
		}
		c.Unload()
		if store == "" {
			return
		}
		for _, mode := range modes {
			must(t, mode, errors.Join(want("alice's count", servers.Content(t, "logins."+mode, "alice").Used, 3),
				want("bob's count", servers.Content(t, "logins."+mode, "bob").Used, 1)))
		}
	})
}

// TestBruteForceZoneOpensAgain when the window ends, and not before.
func TestBruteForceZoneOpensAgain(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("logins."+mode, "events 3", "window 3s", "count_status 401 403", "charge "+mode)
	}
	c := startWith(t, servers.Store(), zones, byStatus)
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			zone := "logins." + mode
			key, over := "", time.Time{}
			// On a busy machine a window may end in between.
			for try := 0; ; try++ {
				key = fmt.Sprint("client-", try)
				for range 3 {
					c.Probe("/"+zone, "X-Key: "+key, badLogin)
				}
				eventually(t, "the failures have settled", func() error {
					n := servers.Content(t, zone, key).Used
					return want("their number being 3, or 0 because the window is over", n == 3 || n == 0, true)
				})
				b := servers.Buckets(t, zone)[key]
				if over = time.UnixMicro(b.Reset); b.Count == 3 && time.Until(over) > time.Second {
					break
				}
			}
			eventually(t, "a good login passes", func() error {
				a := c.Probe("/"+zone, "X-Key: "+key, goodLogin)
				if a.Status == http.StatusOK {
					must(t, "good login", errors.Join(want("coming before the window was over", a.Received.Before(over), false), want("used", a.Used, 0)))
					return nil
				}
				must(t, "good login", errors.Join(a.Refuses(zone), want("reset", a.Reset, ceilSeconds(over.UnixMicro()))))
				return errors.New("it is refused")
			})
		})
	}
}

// TestPenalty checks that a client stays refused for as long as its first refusal said, although
// its bucket has room again.
func TestPenalty(t *testing.T) {
	t.Parallel()
	const penalty = 6 * time.Second
	some := slices.DeleteFunc(allWays(), func(w way) bool { return w.algorithm == "sliding_log" })
	for _, w := range sweep.Of(t, some, 3) {
		algorithm, mode := w.algorithm, w.mode
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 1, 1)
			site := zonesSite(servers.Store(), zoneWith("strict", "algorithm "+algorithm, "charge "+mode, "events 2", "window 1s", "penalty "+penalty.String()), "respond ok")
			caddys := caddytest.StartMany(t, 2, site)
			key, first := "", caddytest.Answer{}
			for try, admitted := 0, 9; admitted > 4; try++ {
				key, admitted = fmt.Sprint("client-", try), 0
				eventually(t, "a request is refused", func() error {
					first = caddys[0].Probe("/", "X-Key: "+key)
					admitted++
					return want("status", first.Status, http.StatusTooManyRequests)
				})
				// On a busy machine late charges admit too many, which take long to drain.
			}
			var until int64
			eventually(t, "the penalty is stored", func() error {
				until = servers.Content(t, "strict", key).Penalty
				return want("penalty stored", until > 0, true)
			})
			servers.AwaitReplicas(t)
			over := time.UnixMicro(until)
			// The penalty begins between the request and its answer.
			least, most := over.Sub(first.Received)-time.Second, over.Sub(first.Sent)+time.Second
			must(t, "first refusal", errors.Join(first.Refuses("strict"), penalized(first, over),
				want(fmt.Sprintf("a penalty of %v, which is between %v and %v,", penalty, least, most), penalty >= least && penalty <= most, true)))

			// By then the events have drained and the window is over, also for sliding_window,
			// which weighs the previous one.
			room := first.Received.Add(3 * time.Second).UnixMicro()
			eventually(t, "there is room again", func() error { return want("server clock past that", servers.Now(t) > room, true) })
			for i := range 4 {
				a := caddys[i%2].Probe("/", "X-Key: "+key)
				if !a.Received.Before(over) {
					break // the machine was busy
				}
				must(t, "refusal", errors.Join(a.Refuses("strict"), penalized(a, over)))
			}
			// Later refusals do not extend it.
			stored := servers.Content(t, "strict", key).Penalty
			must(t, "Redis", want(fmt.Sprintf("the end of the penalty being %d or, because it is over, 0", until),
				stored == until || stored == 0 && servers.Now(t) > until, true))

			almost := over.Add(-300 * time.Millisecond).UnixMicro()
			eventually(t, "the penalty is almost over", func() error { return want("server clock past that", servers.Now(t) > almost, true) })
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

// penalized returns how a refusal differs from one that reports the end of the penalty.
func penalized(a caddytest.Answer, over time.Time) error {
	wait := time.Duration(a.RetryAfter) * time.Second
	// All processes share a clock, but the test receives an answer later than Caddy sends it.
	least, most := over.Sub(a.Received), max(over.Sub(a.Sent), 0)+3*time.Second
	return errors.Join(want("reset", a.Reset, ceilSeconds(over.UnixMicro())),
		want(fmt.Sprintf("Retry-After %s being from %s to %s", wait, least, most), wait >= least && wait <= most, true))
}
