package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// apiSite is a site with one zone, api, that counts by the header X-Key.
func apiSite(store string, events int, window string) string {
	return limitedSite(store, events, window, "respond ok")
}

// limitedSite is a site whose zone, api, counts by the header X-Key in front of the directive
// answer.
func limitedSite(store string, events int, window, answer string) string {
	return caddytest.Site(store, "rate_limit {\n"+zoneWith("api", fmt.Sprint("events ", events), "window "+window)+"}\n"+answer)
}

func TestTwoCaddysShareALimit(t *testing.T) {
	t.Parallel()
	const events = 5
	servers := caddytest.StartShards(t, 2, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "1h"))

	// The test waits for every charge, so that each Caddy sees what the other one has admitted.
	for _, key := range []string{"alice", "bob", "carol", "dave"} {
		for i := range events {
			a := caddys[i%2].Ask("/", "X-Key: "+key)
			must(t, fmt.Sprintf("%s's request %d", key, i+1), errors.Join(
				a.Is(http.StatusOK, int64(i+1)), want("limit", a.Limit, events), want("zone", a.Resource, "api")))
			servers.AwaitCount(t, "api", key, int64(i+1))
			servers.AwaitReplicas(t)
		}
		for i, c := range caddys {
			must(t, fmt.Sprintf("%s's request too many at Caddy %d", key, i), c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, events))
		}
	}
}

// clientAnswers are one Caddy's answers to each client: admissions, and refusals because of
// requests in flight.
type clientAnswers struct {
	mu                 sync.Mutex
	admitted, inFlight map[string][]caddytest.Answer
}

func newClientAnswers() *clientAnswers {
	return &clientAnswers{admitted: map[string][]caddytest.Answer{}, inFlight: map[string][]caddytest.Answer{}}
}

func (c *clientAnswers) add(answers map[string][]caddytest.Answer, key string, a caddytest.Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	answers[key] = append(answers[key], a)
}

// check requires that an admitted request was in flight during each of these refusals, and that no
// client was admitted more than most times. It returns the number of refusals.
func (c *clientAnswers) check(t *testing.T, most int) (refusals int) {
	t.Helper()
	for key, answers := range c.inFlight {
		for _, refused := range answers {
			refusals++
			if !slices.ContainsFunc(c.admitted[key], func(a caddytest.Answer) bool {
				return a.Sent.Before(refused.Received) && refused.Sent.Before(a.Received)
			}) {
				t.Errorf("%s is refused for a second although nothing is in flight: %v", key, refused.Header)
			}
		}
	}
	for key, answers := range c.admitted {
		if len(answers) > most {
			t.Errorf("%s is admitted %d times by one Caddy, above its limit of %d", key, len(answers), most)
		}
	}
	return refusals
}

func TestConcurrentClientsAreCountedExactly(t *testing.T) {
	t.Parallel()
	const (
		events  = 10
		clients = 24
		workers = 8
		rounds  = 2
	)
	servers := caddytest.StartShards(t, 2, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "1h"))

	var admitted, refused caddytest.Tally
	each := []*clientAnswers{newClientAnswers(), newClientAnswers()}
	caddytest.Together(t, workers, func(worker int) error {
		answers := each[worker%2]
		for i := range rounds * clients {
			key := fmt.Sprintf("client-%d", i%clients)
			a, err := caddys[worker%2].TryAsk("/", "X-Key: "+key)
			switch {
			case errors.Is(err, caddytest.ErrTooEarly) && a.RetryAfter == 1:
				refused.Add(key)
				answers.add(answers.inFlight, key, a)
			case err != nil:
				return err
			case a.Status == http.StatusOK && a.IsLimited():
				admitted.Add(key)
				answers.add(answers.admitted, key, a)
			case a.Status == http.StatusTooManyRequests:
				refused.Add(key)
			default:
				return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
			}
		}
		return nil
	})
	servers.AwaitCounts(t, "api", admitted.N)

	inFlight := each[0].check(t, events) + each[1].check(t, events)
	excess := int64(0)
	for key, n := range admitted.N {
		if n < events {
			t.Errorf("%s was admitted %d times only, before its limit of %d was reached", key, n, events)
		}
		excess += n - events
	}
	servers.AwaitReplicas(t)
	for key, n := range admitted.N {
		for i, c := range caddys {
			// For a while a Caddy trusts the last reply, which may lack what the other one has
			// admitted since.
			eventually(t, fmt.Sprintf("Caddy %d asks about %s again", i, key), func() error {
				return c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, n)
			})
		}
	}
	for i, shard := range servers {
		if n := len(caddytest.BucketsOf(t, shard.Primary, "api")); n < clients/4 {
			t.Errorf("shard %s has %d of %d clients", caddytest.ShardName(i), n, clients)
		}
	}
	// No charge is still in flight that would change the counts.
	for _, c := range caddys {
		c.Unload()
	}
	servers.AwaitCounts(t, "api", admitted.N)
	t.Logf("%d requests admitted (%d above the limits, in flight in two Caddys at the same time), %d refused, %d of them because of what was in flight",
		admitted.Total(), excess, refused.Total(), inFlight)
}

// ceilSeconds rounds an instant in microseconds as the headers do.
func ceilSeconds(microseconds int64) int64 { return (microseconds + 999_999) / 1_000_000 }

// resets are the distinct resets in the answers to each client.
type resets struct {
	mu       sync.Mutex
	byClient map[string]map[int64]int
	seconds  map[int64]bool
	requests int
	refused  int
}

func (r *resets) add(client string, a caddytest.Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byClient[client] == nil {
		r.byClient[client] = map[int64]int{}
	}
	r.byClient[client][a.Reset]++
	r.seconds[a.Received.Unix()] = true
	r.requests++
	if a.Status == http.StatusTooManyRequests {
		r.refused++
	}
}

// in reports whether at least requests answers came, and in at least seconds different seconds.
func (r *resets) in(seconds, requests int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.requests >= requests && len(r.seconds) >= seconds
}

func TestResetIsTheSameOnAllResponsesOfAWindow(t *testing.T) {
	t.Parallel()
	const events = 40
	servers := caddytest.StartShards(t, 2, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "1h"))
	seen := &resets{byClient: map[string]map[int64]int{}, seconds: map[int64]bool{}}
	ask := func(worker int, key string) error {
		a, err := caddys[worker%2].TryAsk("/", "X-Key: "+key)
		// A refusal because of requests in flight has a shorter Retry-After.
		if err != nil && (!errors.Is(err, caddytest.ErrTooEarly) || a.RetryAfter != 1) {
			return err
		}
		if a.Status != http.StatusOK && a.Status != http.StatusTooManyRequests || a.Limit != events {
			return fmt.Errorf("status %d, headers %v", a.Status, a.Header)
		}
		seen.add(key, a)
		return nil
	}

	// Both Caddys open each of these windows at the same moment.
	early := []string{"ann", "ben", "cleo", "dan"}
	caddytest.Together(t, 2*len(early), func(i int) error { return ask(i, early[i/2]) })

	// They open these windows while replication is paused.
	late := []string{"eve", "fay"}
	var keys atomic.Pointer[[]string]
	keys.Store(&early)

	stop := caddytest.StartTraffic(t, 4, func(worker, i int) error {
		keys := *keys.Load()
		time.Sleep(15 * time.Millisecond) // the answers have to be of several seconds, not many
		return ask(worker, keys[(worker+i)%len(keys)])
	})
	seenIn := func(seconds, requests int) {
		t.Helper()
		eventually(t, "requests are answered", func() error { return want("their number being reached", seen.in(seconds, requests), true) })
	}
	seenIn(2, 100)
	for _, r := range servers.Replicas() {
		must(t, "pause replication", r.PauseReplication())
	}
	all := append(early[:len(early):len(early)], late...)
	keys.Store(&all)
	seenIn(4, 300)
	for _, r := range servers.Replicas() {
		must(t, "resume replication", r.ResumeReplication())
	}
	seenIn(5, 400)
	stop()

	stored := servers.Buckets(t, "api")
	for _, key := range append(early, late...) {
		counts := seen.byClient[key]
		must(t, key, errors.Join(
			want("number of distinct resets", len(counts), 1),
			want("responses with the reset in Redis, rounded up,", counts[ceilSeconds(stored[key].Reset)] > 0, true)))
	}
	t.Logf("%d requests, %d of them refused, in %d different seconds from 2 Caddys: 1 reset for each of %d clients",
		seen.requests, seen.refused, len(seen.seconds), len(seen.byClient))
}

func TestStaleReplicaNeitherRefusesNorContradicts(t *testing.T) {
	t.Parallel()
	const (
		events = 3
		window = 2 * time.Second
	)
	servers := caddytest.StartShards(t, 1, 1)
	replica := servers[0].Replicas[0]
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "2s"))

	// Use up a window, and pause the replica in that state.
	var key string
	var old caddytest.Bucket
	for try := 0; ; try++ {
		key = fmt.Sprintf("client-%d", try)
		begun := time.Now()
		for i := range events {
			caddys[i%2].Ask("/", "X-Key: "+key)
		}
		eventually(t, "the replica has the count", func() error {
			if old = caddytest.BucketsOf(t, replica, "api")[key]; old.Count < events && time.Since(begun) < window {
				return fmt.Errorf("it has %+v", old)
			}
			return nil
		})
		must(t, "pause replication", replica.PauseReplication())
		old = caddytest.BucketsOf(t, replica, "api")[key]
		a := caddys[0].Ask("/", "X-Key: "+key)
		// On a busy machine the window may be over.
		if old.Count == events && a.Received.Before(time.UnixMicro(old.Reset)) {
			must(t, "request that the replica refuses", errors.Join(
				a.Is(http.StatusTooManyRequests, events), want("reset", a.Reset, ceilSeconds(old.Reset))))
			break
		}
		must(t, "resume replication", replica.ResumeReplication())
	}
	oldReset := ceilSeconds(old.Reset)

	// Ask both Caddys until they admit again.
	over := time.UnixMicro(old.Reset)
	for i, c := range caddys {
		awaitAdmission(t, c, key, over)
		if view := caddytest.BucketsOf(t, replica, "api")[key]; view != old && time.Since(over) < time.Second {
			t.Fatalf("the replica, which Caddy %d asked, has %+v, want the old window %+v", i, view, old)
		}
	}

	// The replica does not have the new window, but both Caddys report its reset.
	for i, c := range caddys {
		eventually(t, "a response falls into one window", func() error {
			before := servers.Buckets(t, "api")[key]
			a := c.Ask("/", "X-Key: "+key)
			if after := servers.Buckets(t, "api")[key]; before.Reset != after.Reset {
				return fmt.Errorf("reset was %d, then %d", before.Reset, after.Reset)
			}
			must(t, fmt.Sprintf("Caddy %d", i), want("reset", a.Reset, ceilSeconds(before.Reset)))
			return nil
		})
	}
	eventually(t, "the new window is used up", func() error {
		a := caddys[0].Ask("/", "X-Key: "+key)
		must(t, "response", want("being of a later window", a.Reset > oldReset, true))
		return want("status", a.Status, http.StatusTooManyRequests)
	})
}

// awaitAdmission sends requests until the client is admitted, which must not happen before its
// window is over.
func awaitAdmission(t *testing.T, c *caddytest.Caddy, key string, over time.Time) {
	t.Helper()
	oldReset, i := ceilSeconds(over.UnixMicro()), 0
	eventually(t, "the client is admitted", func() error {
		i++
		// Caddy's estimate of the primary's time is as exact as the primary's fastest reply. These
		// requests make many replies.
		c.Ask("/", fmt.Sprintf("X-Key: %s-%s-%d", c.Addr, key, i))

		a := c.Ask("/", "X-Key: "+key)
		if a.Status == http.StatusOK {
			must(t, "first admitted request", errors.Join(
				want("coming before the window is over", a.Received.Before(over), false),
				want("being in a new window", a.Reset > oldReset, true)))
			return nil
		}
		must(t, "refused request", want("reset", a.Reset, oldReset))
		return errors.New("it is refused")
	})
}

// TestSwallowedReplyDoesNotCountTwice loses the reply to a charge that Redis has run: no reply
// comes before the charge is given up, or the connection breaks while there is time to send it
// again.
func TestSwallowedReplyDoesNotCountTwice(t *testing.T) {
	t.Parallel()
	for _, pipelining := range []string{"on", "off"} {
		for _, timeout := range []string{"3s", "30s"} {
			t.Run("pipelining "+pipelining+", charge_timeout "+timeout, func(t *testing.T) {
				t.Parallel()
				primary := redistest.Start(t)
				proxy := redistest.StartProxy(t, primary.Addr())
				servers := caddytest.Shards{{Primary: primary}}
				backend := caddytest.StartSlowBackend(t)
				store := servers.Store("pipelining "+pipelining, "charge_timeout "+timeout)
				store = strings.Replace(store, primary.Addr(), proxy.Addr(), 1)
				c := caddytest.Start(t, proxySite(store, 10, backend.Server.Listener.Addr().String()))

				// The connection for charges must exist before the fault: nothing arrives through a
				// later one.
				must(t, "first request", backend.Finish(t, backend.Start(t, c, "/", "X-Key: warm"))[0].Is(http.StatusOK, 1))
				servers.AwaitCount(t, "api", "warm", 1)
				eventually(t, "its reply has arrived", func() error {
					charges := c.Metric(`caddy_rate_limit_store_duration_seconds_count{operation="charge",role="primary",shard="a",store="default"}`)
					return want("number of charges", charges, "1")
				})

				before := undelivered(c, "a", "uncertain")
				// The check precedes the fault.
				request := backend.Start(t, c, "/", "X-Key: alice")
				must(t, "swallow replies", proxy.SwallowReplies())
				must(t, "alice", backend.Finish(t, request)[0].Is(http.StatusOK, 1))
				wanted := map[string]int64{"warm": 1, "alice": 1}
				servers.AwaitCounts(t, "api", wanted)
				givenUp := func() error {
					return errors.Join(want("uncertain charges", undelivered(c, "a", "uncertain"), before+1), want("lost charges", undelivered(c, "a", "lost"), 0))
				}
				if timeout == "3s" {
					eventually(t, "the charge is given up", givenUp)
				}
				// This closes the connections that were open during the fault.
				must(t, "pass", proxy.Pass())
				eventually(t, "the charge is given up", givenUp)

				// A charge that is sent again would be counted by now.
				eventually(t, "charges arrive again", func() error {
					backend.Finish(t, backend.Start(t, c, "/", "X-Key: probe"))
					return want("probe being charged", servers.Counts(t, "api")["probe"] > 0, true)
				})
				c.Unload()
				counts := servers.Counts(t, "api")
				for key, n := range wanted {
					must(t, "at the end", want("count of "+key, counts[key], n))
				}
			})
		}
	}
}
