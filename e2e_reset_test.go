package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// ceilSeconds is how the headers round an instant in microseconds.
func ceilSeconds(microseconds int64) int64 { return (microseconds + 999_999) / 1_000_000 }

// resets are the distinct resets that clients were told.
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

func (r *resets) enough(start time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.requests >= 2000 && len(r.seconds) >= 5 && time.Since(start) > 3500*time.Millisecond
}

func TestResetIsTheSameOnAllResponsesOfAWindow(t *testing.T) {
	t.Parallel()
	const events = 200
	servers := caddytest.StartShards(t, 2, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store(), events, "1h"))
	seen := &resets{byClient: map[string]map[int64]int{}, seconds: map[int64]bool{}}
	ask := func(worker int, key string) error {
		a, err := caddys[worker%2].TryAsk("/", "X-Key: "+key)
		// Whoever is refused because of requests in flight may come back sooner.
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

	// These windows are opened, likewise, while no replica hears of it.
	late := []string{"eve", "fay"}
	var keys atomic.Pointer[[]string]
	keys.Store(&early)

	start := time.Now()
	caddytest.Together(t, 5, func(worker int) error {
		if worker == 4 {
			return pauseInTheMiddle(servers, start, func() {
				all := append(early[:len(early):len(early)], late...)
				keys.Store(&all)
			})
		}
		for i := worker; !seen.enough(start); i++ {
			keys := *keys.Load()
			if err := ask(worker, keys[i%len(keys)]); err != nil {
				return err
			}
		}
		return nil
	})

	stored := servers.Buckets(t, "api")
	for _, key := range append(early, late...) {
		told := seen.byClient[key]
		must(t, key, errors.Join(
			want("number of distinct resets", len(told), 1),
			want("responses with the reset in Redis, rounded up,", told[ceilSeconds(stored[key].Reset)] > 0, true)))
	}
	t.Logf("%d requests, %d of them refused, in %d different seconds from 2 Caddys: 1 reset for each of %d clients",
		seen.requests, seen.refused, len(seen.seconds), len(seen.byClient))
}

// pauseInTheMiddle pauses the replication of all shards a second after start,
// for at least a second.
func pauseInTheMiddle(servers caddytest.Shards, start time.Time, paused func()) error {
	time.Sleep(time.Until(start.Add(time.Second)))
	for _, r := range servers.Replicas() {
		if err := r.PauseReplication(); err != nil {
			return err
		}
	}
	paused()
	time.Sleep(time.Second)
	for _, r := range servers.Replicas() {
		if err := r.ResumeReplication(); err != nil {
			return err
		}
	}
	return nil
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

	// Use a window up, and keep a replica that shows it.
	var key string
	var old caddytest.Bucket
	for try := 0; ; try++ {
		key = fmt.Sprintf("client-%d", try)
		begun := time.Now()
		for i := range events {
			caddys[i%2].Ask("/", "X-Key: "+key)
		}
		eventually(t, "the replica has the count", func() error {
			if old = caddytest.Find(t, replica, "api")[key]; old.Count < events && time.Since(begun) < window {
				return fmt.Errorf("it has %+v", old)
			}
			return nil
		})
		must(t, "pause replication", replica.PauseReplication())
		old = caddytest.Find(t, replica, "api")[key]
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
		if view := caddytest.Find(t, replica, "api")[key]; view != old && time.Since(over) < time.Second {
			t.Fatalf("the replica, which Caddy %d asked, has %+v, want the old window %+v", i, view, old)
		}
	}

	// The replica shows nothing of the new window, but its reset is the one
	// that both Caddys tell.
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

// awaitAdmission asks until the client is admitted, which must not be before its
// window is over.
func awaitAdmission(t *testing.T, c *caddytest.Caddy, key string, over time.Time) {
	t.Helper()
	oldReset, i := ceilSeconds(over.UnixMicro()), 0
	eventually(t, "the client is admitted", func() error {
		i++
		// What Caddy knows of the primary's time is as exact as the fastest of
		// the primary's replies, of which these requests make many.
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
