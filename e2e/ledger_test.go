package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// callsTo returns how many calls about buckets the servers have counted: scripts on primaries,
// reading commands and scripts on replicas. Commands of scripts on primaries do not count.
func callsTo(t *testing.T, s caddytest.Shards) (total int64) {
	t.Helper()
	for _, shard := range s {
		stats, err := shard.Primary.Info("commandstats")
		must(t, "statistics", err)
		total += ran(t, stats, "evalsha", "evalsha_ro")
	}
	for _, replica := range s.Replicas() {
		stats, err := replica.Info("commandstats")
		must(t, "statistics", err)
		total += ran(t, stats, "hmget", "mget", "evalsha_ro")
	}
	return total
}

// ran returns how often commands ran, without scripts that the server did not know yet.
func ran(t *testing.T, stats map[string]string, commands ...string) (total int64) {
	t.Helper()
	for _, command := range commands {
		for field := range strings.SplitSeq(stats["cmdstat_"+command], ",") {
			name, value, _ := strings.Cut(field, "=")
			sign := map[string]int64{"calls": 1, "failed_calls": -1}[name]
			if sign == 0 {
				continue
			}
			n, err := strconv.ParseInt(value, 10, 64)
			must(t, "statistics", err)
			total += sign * n
		}
	}
	return total
}

// TestKnownFullBucketCostsOneCallASecond per process, however many requests its client sends.
func TestKnownFullBucketCostsOneCallASecond(t *testing.T) {
	t.Parallel()
	const lasts = 1500 * time.Millisecond
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			zones := zonesPerAlgorithm("charge "+mode, "events 5")
			// A call that a stalled machine answers too late would be made again, elsewhere.
			caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store("check_timeout 1m"), zones, "respond ok"))
			for _, algorithm := range sweep.Of(t, counting, 2) {
				t.Run(algorithm, func(t *testing.T) {
					used := askForAlice(t, caddys, algorithm, len(caddys), 0, 0).Total()
					servers.AwaitUsed(t, algorithm, "alice", used)
					awaitNothingHeld(t, servers)
					before, start, refused := callsTo(t, servers), time.Now(), new(caddytest.Tally)
					caddytest.Together(t, len(caddys), func(i int) error {
						result, err := loadgen.Run(t.Context(), loadgen.Options{
							Addr: caddys[i].Addr, Path: "/" + algorithm, Header: "X-Key", Key: func(int64) string { return "alice" },
							Connections: 4, Rate: 60, Duration: lasts,
						})
						for range result.Status[http.StatusTooManyRequests] {
							refused.Add(algorithm)
						}
						return errors.Join(err, want("number of requests that were not refused", result.Requests-result.Status[http.StatusTooManyRequests], 0))
					})
					// A call that a stalled machine answers too late to go on refusing is made once more.
					most := 2 * int64(len(caddys)) * (int64(time.Since(start)/time.Second) + 1)
					made := callsTo(t, servers) - before
					must(t, "servers", want(fmt.Sprintf("having got %d calls, which is more than %d,", made, most), made > most, false))
					// A bucket that is known to be full forever would hide a reset.
					eventually(t, "every Caddy has asked", func() error {
						for _, c := range caddys {
							must(t, "request too many", c.Probe("/"+algorithm, "X-Key: alice").Refuses(algorithm))
						}
						return want("too few calls", callsTo(t, servers)-before < int64(len(caddys)), false)
					})
					must(t, "Redis", want("count", servers.Content(t, algorithm, "alice").Used, used))
					t.Logf("%d requests refused by %d Caddys in %v cost %d calls", refused.Total(), len(caddys), time.Since(start).Round(time.Millisecond), made)
				})
			}
		})
	}
}

// TestOperatorsResetIsSeen deletes a client's bucket in Redis. The client is admitted once the
// primary's last reply is no longer trusted.
func TestOperatorsResetIsSeen(t *testing.T) {
	t.Parallel()
	const trust = 500 * time.Millisecond
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 1, 1)
			zones := zonesPerAlgorithm("charge "+mode, "events 3")
			c := startWith(t, servers.Store("ledger_trust "+trust.String()), zones, "respond ok")
			primary := servers[0].Primary.Client()
			for _, algorithm := range sweep.Of(t, counting, 2) {
				t.Run(algorithm, func(t *testing.T) {
					usesUp(t, c, servers, algorithm, 3)
					for round := range 2 {
						if round == 1 {
							before := callsTo(t, servers)
							eventually(t, "Caddy confirms that the bucket is full", func() error {
								must(t, "request too many", c.Probe("/"+algorithm, "X-Key: alice").Refuses(algorithm))
								return want("having asked", callsTo(t, servers) > before, true)
							})
						}
						keys, err := primary.Keys(t.Context(), "rl:3:"+algorithm+":*:alice").Result()
						must(t, "find the bucket", errors.Join(err, want("number of buckets", len(keys), 1)))
						must(t, "delete the bucket", primary.Del(context.Background(), keys...).Err())
						known := time.Now().Add(trust)
						eventually(t, "the client is admitted", func() error {
							a := c.Probe("/"+algorithm, "X-Key: alice")
							must(t, "reset", seesReset(a, known))
							return a.Shows(http.StatusOK, 3, 1)
						})
						usesUp(t, c, servers, algorithm, 2)
					}
				})
			}
		})
	}
}

// usesUp sends alice's last n requests of three, and one too many.
func usesUp(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, zone string, n int) {
	t.Helper()
	for range n {
		must(t, zone, want("status", c.Probe("/"+zone, "X-Key: alice").Status, http.StatusOK))
	}
	servers.AwaitUsed(t, zone, "alice", 3)
	must(t, zone, c.Probe("/"+zone, "X-Key: alice").Refuses(zone))
}

// TestNoChargeDelayHoldsNoCharge checks that with charge_delay 0 the first charge of each client is on
// its way to a primary that hangs, and the second waits to be sent. One that charge_delay held would
// take the second with it, and count as none that waits.
func TestNoChargeDelayHoldsNoCharge(t *testing.T) {
	t.Parallel()
	const clients = 20
	servers := caddytest.StartShards(t, 1, 1)
	store := servers.Store("charge_delay 0", "ledger_trust 1h", "check_timeout 1h", "charge_timeout 1h")
	c := startWith(t, store, zoneWith("api"), byStatus)
	each := func(f func(key string)) {
		for i := range clients {
			f(fmt.Sprint("client-", i))
		}
	}
	// A free request opens the client's window, and leaves no charge on its way.
	each(func(key string) { c.Probe("/", "X-Key: "+key, "X-Status: 304") })
	servers.AwaitReplicas(t)
	primary := servers[0].Primary
	must(t, "hang", primary.Pause())
	each(func(key string) {
		for used := range int64(2) {
			must(t, key, c.Probe("/", "X-Key: "+key, "X-Status: 200").Shows(http.StatusOK, 100, used+1))
		}
	})
	awaitUnsent(c, clients)
	must(t, "resume", primary.Resume())
	each(func(key string) { servers.AwaitUsed(t, "api", key, 2) })
}

// TestKilledCaddyLosesWhatItHolds kills a Caddy whose charges wait for charge_delay. They are lost,
// those before them are counted once, and another Caddy goes on from there.
func TestKilledCaddyLosesWhatItHolds(t *testing.T) {
	t.Parallel()
	const (
		delay         = time.Second // the longest that there is
		counted, lost = 5, 2
	)
	servers := caddytest.StartShards(t, 1, 0)
	site := apiSite(servers.Store(fmt.Sprint("charge_delay ", delay)), 100, "1h")
	other := caddytest.Start(t, site)
	// If a busy machine needs longer than the delay, another client and Caddy repeat it.
	try := 0
	eventually(t, "a Caddy is killed within the delay", func() error {
		try++
		key := fmt.Sprint("alice-", try)
		c := caddytest.Start(t, site)
		ask := func(from, to int64) {
			t.Helper()
			for used := from; used < to; used++ {
				must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, used+1))
			}
		}
		ask(0, counted)
		servers.AwaitCount(t, "api", key, counted)
		start := time.Now()
		ask(counted, counted+lost)
		// Charges that are not held arrive.
		time.Sleep(delay / 4)
		took := c.Kill().Sub(start)
		n := servers.Counts(t, "api")[key]
		must(t, "after the kill", want(fmt.Sprintf("a count of %d being one of some of the charges", n), n >= counted && n <= counted+lost, true))
		if took >= delay {
			return fmt.Errorf("it took %v", took)
		}
		must(t, "after the kill", want("count", n, counted))
		must(t, "another Caddy", other.Ask("/", "X-Key: "+key).Is(http.StatusOK, counted+1))
		servers.AwaitCount(t, "api", key, counted+1)
		return nil
	})
}

// TestLaggingReplicaKeepsLimitsExact checks that a client that sends one request at a time is
// refused exactly at its limit, although the replica misses its requests for seconds, also if they
// are so slow that the primary's last reply is no longer trusted in between.
func TestLaggingReplicaKeepsLimitsExact(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		trust  string
		events int
		apart  time.Duration
		// early is how many requests reach the replica.
		early int
	}{
		{"1s", 60, 0, 15},
		{"1s", 13, 400 * time.Millisecond, 0},
		{"100ms", 13, 400 * time.Millisecond, 3},
		{"1s", 4, 1500 * time.Millisecond, 1},
	} {
		t.Run(fmt.Sprintf("trust %s, %d events %v apart, %d early", test.trust, test.events, test.apart, test.early), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartShards(t, 1, 1)
			c := startWith(t, servers.Store("ledger_trust "+test.trust), zonesPerAlgorithm(fmt.Sprint("events ", test.events)), "respond ok")
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
					time.Sleep(max(test.apart, 100*time.Millisecond)) // the requests have to last, not to be many
				}
				return nil
			})
			for _, algorithm := range counting {
				servers.AwaitUsed(t, algorithm, "alice", int64(test.events))
			}
			t.Logf("the replica was behind for %v, while %d each were served and %v refused", time.Since(start), test.events-test.early, refusals.N)

			must(t, "resume replication", replica.ResumeReplication())
			refuses := func(when string) {
				t.Helper()
				for _, algorithm := range counting {
					must(t, when, c.Probe("/"+algorithm, "X-Key: alice").Refuses(algorithm))
				}
			}
			refuses("while the replica catches up")
			servers.AwaitReplicas(t)
			refuses("after the replica has caught up")
			for _, algorithm := range counting {
				must(t, "Redis, at the end", want("count of "+algorithm, servers.Content(t, algorithm, "alice").Used, int64(test.events)))
			}
		})
	}
}

// spends sends alice's requests number from+1 to to, one after the other, and returns how an answer
// differs from one that admits.
func spends(t *testing.T, c *caddytest.Caddy, zone string, from, to, events int, apart time.Duration) error {
	for used := from; used < to; used++ {
		a, err := c.TryProbe(t.Context(), "/"+zone, "X-Key: alice")
		if err := errors.Join(err, a.Shows(http.StatusOK, int64(events), int64(used+1))); err != nil {
			return fmt.Errorf("request %d: %w", used+1, err)
		}
		time.Sleep(apart) // so that known states are older than ledger_trust when requests come
	}
	return nil
}

// TestExcessOfSeveralCaddys measures what Caddys together admit of one client with charge after. No
// Caddy alone admits more than the limit, but none sees what the others have in flight.
func TestExcessOfSeveralCaddys(t *testing.T) {
	t.Parallel()
	loads := []struct {
		name, what  string
		connections int // 0: one for each Caddy
		apart       time.Duration
		lasts       time.Duration // 0: until all are refused
	}{
		// The backend is slow.
		{"flood", "all at once", floodSize, 0, time.Nanosecond},
		{"waves", "refused clients retry", floodSize, 0, 5 * floodTakes},
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
	caddys := caddytest.StartMany(t, 4, zonesSite(servers.Store(), zones, "@quick path /lines* /paced*\nrespond @quick ok\n"+proxyTo(backend.addr)))
	for i, load := range loads {
		// Each load comes to two or to four of them, and to both with make check.
		for _, n := range sweep.Of(t, [][]int{{2, 4}, {4, 2}}[i%2], 1) {
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

// askForAlice sends requests on several connections, spread over Caddys, and pauses for apart after
// each answer. It goes on for lasts or, if that is 0, until each connection has been refused thrice
// in a row. It returns the number of requests served, by the Caddys' addresses.
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
				// An immediate retry would only take processor time.
				time.Sleep(50 * time.Millisecond)
			}
			time.Sleep(apart) // the client's pace
		}
	})
	return served
}

// excess logs what Caddys have served together, and checks it against the bound and the charges.
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

// A flood is floodSize concurrent requests of one client, each on its own connection. One limit
// admits floodEvents of them.
const (
	floodSize   = 64
	floodEvents = 25
	// floodTakes is how long the backend takes for each.
	floodTakes = 200 * time.Millisecond
)

// lateBackend is a server that answers after floodTakes.
type lateBackend struct {
	addr string
	// arrived is how many requests it has seen.
	arrived atomic.Int64
}

func startLateBackend(t *testing.T) *lateBackend {
	t.Helper()
	b := new(lateBackend)
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		b.arrived.Add(1)
		time.Sleep(floodTakes) // the requests are in flight together
	}))
	t.Cleanup(server.Close)
	b.addr = server.Listener.Addr().String()
	return b
}

// flood sends a flood, spread over Caddys, and returns the answers.
func flood(t *testing.T, caddys []*caddytest.Caddy, path string) (served, refused []caddytest.Answer) {
	t.Helper()
	var mu sync.Mutex
	caddytest.Together(t, floodSize, func(i int) error {
		a, err := caddys[i%len(caddys)].TryProbe(t.Context(), path, "X-Key: alice")
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		switch {
		case a.Status == http.StatusOK && a.IsLimited():
			served = append(served, a)
		case a.Status == http.StatusTooManyRequests:
			refused = append(refused, a)
		default:
			return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
		}
		return nil
	})
	return served, refused
}

// TestOneCaddyNeverAdmitsMoreThanTheLimit although it charges after the responses: requests in
// flight count.
func TestOneCaddyNeverAdmitsMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	backend := startLateBackend(t)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := startWith(t, store, zonesPerAlgorithm(fmt.Sprint("events ", floodEvents), "charge after"), proxyTo(backend.addr))
		for _, algorithm := range counting {
			t.Run(algorithm, func(t *testing.T) {
				backend.arrived.Store(0)
				served, refused := flood(t, []*caddytest.Caddy{c}, "/"+algorithm)
				must(t, "flood", errors.Join(want("number of requests served", len(served), floodEvents),
					want("number of those that reached the backend", backend.arrived.Load(), floodEvents)))
				for _, a := range refused {
					// What is in flight will be charged, so it is in the way for as long as what was.
					must(t, "refusal", errors.Join(a.Refuses(algorithm), want("waiting for long", a.RetryAfter > 1000, true)))
				}
				awaitUsed(t, servers, store, algorithm, "alice", floodEvents)
				eventually(t, "refusals report how long the bucket takes to drain", func() error {
					a := c.Probe("/"+algorithm, "X-Key: alice")
					return errors.Join(a.Refuses(algorithm), want("waiting for long", a.RetryAfter > 1000, true))
				})
			})
		}
		if store == "" {
			return
		}
		c.Unload()
		for _, algorithm := range counting {
			must(t, "Redis, at the end", want("count of "+algorithm, servers.Content(t, algorithm, "alice").Used, floodEvents))
		}
	})
}

// TestRequestsInFlightRefuseOthersForASecond while none of them ends. A request that turns out to
// be free makes room for another.
func TestRequestsInFlightRefuseOthersForASecond(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		backend := caddytest.StartSlowBackend(t)
		c := startWith(t, store, zonesPerAlgorithm(fmt.Sprint("events ", floodEvents), "charge after", "count_status not 200"), proxyTo(backend.Server.Listener.Addr().String()))
		for _, algorithm := range counting {
			t.Run(algorithm, func(t *testing.T) {
				answers := make(chan caddytest.Answer, floodSize)
				var ended sync.WaitGroup
				for range floodSize {
					ended.Go(func() {
						a, err := c.TryProbe(t.Context(), "/"+algorithm, "X-Key: alice")
						if err != nil {
							a = caddytest.Answer{Body: err.Error()}
						}
						answers <- a
					})
				}
				next := func() caddytest.Answer {
					select {
					case a := <-answers:
						return a
					case <-time.After(caddytest.Patience):
						t.Fatalf("no answer, while %d requests are at the backend", len(backend.Arrived))
						return caddytest.Answer{}
					}
				}
				for i := range floodSize - floodEvents {
					a := next()
					must(t, fmt.Sprint("refusal ", i, " ", a.Body), errors.Join(a.Refuses(algorithm), want("Retry-After", a.RetryAfter, 1)))
				}
				for range floodEvents {
					close(backend.Await(t).End)
				}
				for range floodEvents {
					must(t, "request that is served", want("status", next().Status, http.StatusOK))
				}
				ended.Wait()
				// Nothing was charged.
				again := backend.Hold(t, c, "/"+algorithm, "X-Key: alice")
				must(t, "request after all were free", backend.Finish(t, again)[0].Shows(http.StatusOK, floodEvents, 0))
			})
		}
	})
}

// TestLocalCountsAreHandedOver checks that a Caddy counts on, up to the same limit, while its shard
// is down, and charges the shard afterwards for all but free requests.
func TestLocalCountsAreHandedOver(t *testing.T) {
	t.Parallel()
	const before, events = 3, 10
	some := slices.DeleteFunc(allWays(), func(w way) bool { return w.algorithm == "sliding_log" })
	for _, w := range sweep.Of(t, some, 3) {
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			algorithm, charge := w.algorithm, w.mode
			servers := caddytest.StartLastingShards(t, 1, 0)
			zone := zoneWith("api", fmt.Sprint("events ", events), "algorithm "+algorithm, "charge "+charge, "on_error local")
			// No request passes on what the shard said before.
			c := caddytest.Start(t, zonesSite(servers.Store("ledger_trust 0"), zone,
				"@unchanged path /unchanged\nrespond @unchanged 304\nrespond ok"))
			key := "X-Key: alice"
			for range before {
				must(t, "a request", want("status", c.Probe("/", key).Status, http.StatusOK))
			}
			servers.AwaitUsed(t, "api", "alice", before)
			servers.Kill(t)
			served := 0
			for range 2 * events {
				if c.Probe("/unchanged", key).Status == http.StatusNotModified && before+served >= events {
					t.Error("a request passed beyond the limit")
				}
				switch a := c.Probe("/", key); a.Status {
				case http.StatusOK:
					served++
				case http.StatusTooManyRequests:
				default:
					t.Errorf("status %d while the shard is down", a.Status)
				}
			}
			if served != events-before {
				t.Errorf("%d were served while the shard was down, want %d", served, events-before)
			}
			servers.Restart(t)
			servers.AwaitUsed(t, "api", "alice", events)
		})
	}
}

// TestResetToldInAnOutageHolds: a client that is told when it may come again while the shard is away passes then, also
// if the shard has its charges by then.
func TestResetToldInAnOutageHolds(t *testing.T) {
	t.Parallel()
	for _, algorithm := range []string{"fixed_window", "sliding_window", "sliding_log"} {
		t.Run(algorithm, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			servers := caddytest.StartLastingShards(t, 1, 0)
			c := caddytest.Start(t, zonesSite(servers.Store(), zoneWith("api", "events 3", "window 5s", "algorithm "+algorithm, "on_error local"), "respond ok"))
			must(t, "a request", want("status", c.Probe("/", "X-Key: other").Status, http.StatusOK))
			servers.Kill(t)
			began := time.Now()
			for range 3 {
				must(t, "a request in the outage", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
			}
			// Caddy knows the shard's clock up to a round trip; it takes many until the shard is left out.
			c.AwaitLog("server is left out")
			refused := c.Get("/", "X-Key: alice")
			must(t, "one too many", want("status", refused.StatusCode, http.StatusTooManyRequests))
			seconds, err := strconv.Atoi(refused.Header.Get("Retry-After"))
			must(t, "when to come again", err)
			told := time.Now().Add(time.Duration(seconds) * time.Second)
			// The charges come late by this much.
			time.Sleep(time.Until(began.Add(2 * time.Second)))
			servers.Restart(t)
			awaitUnsent(c, 0)
			// The client obeys.
			time.Sleep(time.Until(told))
			must(t, "when it was told to come", want("status", c.Probe("/", "X-Key: alice").Status, http.StatusOK))
		})
	}
}

// gate is a backend that holds requests until it is opened, except those to /open.
type gate struct {
	server *httptest.Server
	inside atomic.Int64
	opened chan struct{}
	open   func()
}

func startGate(t *testing.T) *gate {
	t.Helper()
	g := &gate{opened: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.opened) })
	g.server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/open" {
			g.inside.Add(1)
			<-g.opened
		}
	}))
	t.Cleanup(func() {
		g.open()
		g.server.Close()
	})
	return g
}

// TestLocalCountsAdmitNoMoreThanTheLimit at once, and requests in flight count in the restarted
// shard.
func TestLocalCountsAdmitNoMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	const limit, requests = 25, 64
	for _, w := range sweep.Of(t, allWays(), 4) {
		t.Run(fmt.Sprint(w), func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			algorithm, charge := w.algorithm, w.mode
			servers := caddytest.StartLastingShards(t, 1, 0)
			g := startGate(t)
			zone := zoneWith("api", fmt.Sprint("events ", limit), "algorithm "+algorithm, "charge "+charge, "on_error local")
			c := caddytest.Start(t, zonesSite(servers.Store("check_timeout 20s"), zone, proxyTo(g.server.Listener.Addr().String())))
			// This opens a window and the connections.
			must(t, "a request", want("status", c.Probe("/open", "X-Key: alice").Status, http.StatusOK))
			servers.AwaitUsed(t, "api", "alice", 1)
			servers.Kill(t)

			var refused, served atomic.Int64
			var all sync.WaitGroup
			for range requests {
				all.Go(func() {
					switch a, _ := c.TryProbe(context.Background(), "/", "X-Key: alice"); a.Status {
					case http.StatusOK:
						served.Add(1)
					case http.StatusTooManyRequests:
						refused.Add(1)
					}
				})
			}
			t.Cleanup(func() {
				g.open()
				all.Wait()
			})
			eventually(t, "all are refused or at the backend", func() error {
				return want("number of them", g.inside.Load()+refused.Load(), requests)
			})
			must(t, "while the shard is down", want("number of requests that were admitted", g.inside.Load(), limit-1))

			servers.Restart(t)
			others := 0
			eventually(t, "the shard answers", func() error {
				before := c.MetricSum("caddy_rate_limit_store_errors_total")
				others++ // about a known client the limiter may not ask
				c.Probe("/open", fmt.Sprint("X-Key: other-", others))
				return want("failed calls", c.MetricSum("caddy_rate_limit_store_errors_total"), before)
			})
			if charge == "after" {
				a := c.Probe("/open", "X-Key: alice")
				must(t, "a request to the restarted shard", a.Shows(http.StatusTooManyRequests, limit, limit))
			}
			g.open()
			all.Wait()
			must(t, "in the end", want("number of requests that were served", served.Load(), limit-1))
			servers.AwaitUsed(t, "api", "alice", limit)
		})
	}
}
