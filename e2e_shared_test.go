package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// apiSite is a site with one zone, api, that counts by the header X-Key.
func apiSite(store string, events int, window string) string {
	return limitedSite(store, events, window, "respond ok")
}

// limitedSite is a site whose zone, api, counts by the header X-Key what answer
// then answers.
func limitedSite(store string, events int, window, answer string) string {
	return fmt.Sprintf(`
{
	{{global}}
	%s
}
{{site}} {
	rate_limit {
		zone api {
			key {header.X-Key}
			events %d
			window %s
		}
	}
	%s
}
`, store, events, window, answer)
}

func TestTwoCaddysShareALimit(t *testing.T) {
	t.Parallel()
	const events = 10
	servers := caddytest.StartShards(t, 2, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "1h"))

	// Where every charge is waited for, each Caddy sees all that the other
	// one admitted.
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

// courses are the answers to each client's requests, in one Caddy, that were
// admitted, and that were refused because of what was in flight.
type courses struct {
	mu                 sync.Mutex
	admitted, inFlight map[string][]caddytest.Answer
}

func newCourses() *courses {
	return &courses{admitted: map[string][]caddytest.Answer{}, inFlight: map[string][]caddytest.Answer{}}
}

func (c *courses) add(answers map[string][]caddytest.Answer, key string, a caddytest.Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	answers[key] = append(answers[key], a)
}

// check fails the test unless each refusal because of what is in flight came
// while a request that was admitted was, and no client was admitted more often
// than that.
func (c *courses) check(t *testing.T, most int) (refusals int) {
	t.Helper()
	for key, answers := range c.inFlight {
		for _, refused := range answers {
			refusals++
			if !slices.ContainsFunc(c.admitted[key], func(a caddytest.Answer) bool {
				return a.Sent.Before(refused.Received) && refused.Sent.Before(a.Received)
			}) {
				t.Errorf("%s is told to come back after a second, though nothing is in flight: %v", key, refused.Header)
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
	const (
		events  = 20
		clients = 40
		workers = 8
		rounds  = 4
	)
	servers := caddytest.StartShards(t, 2, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "1h"))

	var admitted, refused caddytest.Tally
	each := []*courses{newCourses(), newCourses()}
	caddytest.Together(t, workers, func(worker int) error {
		course := each[worker%2]
		for i := range rounds * clients {
			key := fmt.Sprintf("client-%d", i%clients)
			a, err := caddys[worker%2].TryAsk("/", "X-Key: "+key)
			switch {
			case errors.Is(err, caddytest.ErrTooEarly) && a.RetryAfter == 1:
				refused.Add(key)
				course.add(course.inFlight, key, a)
			case err != nil:
				return err
			case a.Status == http.StatusOK && a.IsLimited():
				admitted.Add(key)
				course.add(course.admitted, key, a)
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
			// For a while a Caddy relies on what it was told last, which may
			// lack what the other one admitted since.
			eventually(t, fmt.Sprintf("Caddy %d asks about %s again", i, key), func() error {
				return c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, n)
			})
		}
	}
	for i, shard := range servers {
		if n := len(caddytest.Find(t, shard.Primary, "api")); n < clients/4 {
			t.Errorf("shard %s has %d of %d clients", caddytest.ShardName(i), n, clients)
		}
	}
	// Nothing is still on its way that would make the counts wrong later.
	for _, c := range caddys {
		c.Stop()
	}
	servers.AwaitCounts(t, "api", admitted.N)
	t.Logf("%d requests admitted (%d above the limits, in flight in two Caddys at the same time), %d refused, %d of them because of what was in flight",
		admitted.Total(), excess, refused.Total(), inFlight)
}
