package shardlimit_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// longKey is the n-th of header values as long as a header may hardly be, which
// differ at their ends only.
func longKey(n int) string { return strings.Repeat("k", 19_000) + strconv.Itoa(n) }

// heapOf is how many bytes of memory are in use that cannot be collected.
func heapOf(c *caddytest.Caddy) int64 {
	c.T.Helper()
	// What is in pools survives one collection.
	for range 3 {
		c.AdminCall(http.MethodGet, "/debug/pprof/heap?gc=1", "", "")
	}
	bytes, err := strconv.ParseFloat(c.Metric("go_memstats_heap_alloc_bytes"), 64)
	must(c.T, "read the size of the heap", err)
	return int64(bytes)
}

// TestLongKeysTakeLittleMemory in all that is kept of clients: that their buckets
// are full, that they have one, that their refusal was logged, what was taken for
// them in advance, and charges that wait while the shard is down.
func TestLongKeysTakeLittleMemory(t *testing.T) {
	const clients, mostEach = 1000, 8 << 10
	servers := caddytest.StartLastingShards(t, 1, 0)
	zones := zoneWith("full", "events 1", "charge before") + zoneWith("after", "events 100", "charge after") +
		zoneWith("batched", "events 100", "charge before", "batch 10", "penalty 1h")
	c := caddytest.Start(t, strings.Replace(zonesSite(servers.Store("max_new_buckets 1000000", "charge_timeout 300ms"), zones, "respond ok"),
		"rate_limit {\nzone", "rate_limit {\nlog_key\nlog_refusals all\nzone", 1))
	c.Get("/", "X-Key: first")
	// askAll asks for so many clients from the first on.
	askAll := func(first, status int) {
		t.Helper()
		const workers = 8
		caddytest.Together(t, workers, func(worker int) error {
			for n := first + worker; n < first+clients; n += workers {
				a, err := c.TryProbe(t.Context(), "/", "X-Key: "+longKey(n))
				if err != nil {
					return err
				}
				if err := want("status", a.Status, status); err != nil {
					return err
				}
			}
			return nil
		})
	}
	before := heapOf(c)
	wantSmall := func(when string) {
		t.Helper()
		now := heapOf(c)
		each := (now - before) / clients
		before = now
		t.Logf("%s a client takes %d bytes", when, each)
		if each > mostEach {
			t.Errorf("%s a client with a key of 19 kB takes %d bytes, want at most %d", when, each, mostEach)
		}
	}
	askAll(0, http.StatusOK)
	askAll(0, http.StatusTooManyRequests)
	wantSmall("refused,")
	// A line has the key with its quotes, and little else.
	for line := range strings.Lines(c.Logs.String()) {
		if len(line) > 2000 {
			t.Errorf("a line of the log has %d bytes: %.200s", len(line), line)
			break
		}
	}
	servers.Kill(t)
	eventually(t, "the outage is noticed", func() error {
		a, err := c.TryProbe(t.Context(), "/", "X-Key: second")
		if err != nil {
			return err
		}
		return want("status", a.Status, http.StatusOK)
	})
	askAll(clients, http.StatusOK)
	unsent := func() float64 {
		n, err := strconv.ParseFloat(c.Metric(`caddy_rate_limit_ledger_unsent{store="default"}`), 64)
		must(t, "read how much waits", err)
		return n
	}
	eventually(t, "charges wait", func() error { return want("having them", unsent() >= clients, true) })
	wantSmall("while the shard is down,")
	servers.Restart(t)
	eventually(t, "what waits is delivered", func() error { return want("charges that wait", unsent(), 0) })
}

// TestLongKeyIsFound by its value and by the client key that is shown, in the
// API and by the commands, and is not confused with another.
func TestLongKeyIsFound(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 1)
	for name, store := range bothStores(servers, "key_secret secret") {
		t.Run(name, func(t *testing.T) {
			c := caddytest.Start(t, strings.Replace(zonesSite(store, zoneWith("api", "events 3"), "respond {http.rate_limit.key}"),
				"rate_limit {\nzone", "rate_limit {\nlog_key\nzone", 1))
			long, other := longKey(1), longKey(2)
			shownKey := c.Probe("/", "X-Key: "+long).Body
			tag, _, _ := strings.Cut(shownKey, ":")
			for range 4 {
				c.Get("/", "X-Key: "+long)
			}
			c.Get("/", "X-Key: "+other)
			find := map[string]string{
				"value": "key=" + long, "client key that is shown": "client_key=" + url.QueryEscape(shownKey),
				"client key in full": "client_key=" + tag + ":" + long,
			}
			for how, query := range find {
				eventually(t, "the bucket is found by its "+how, func() error {
					b := bucketsOf(c, http.MethodGet, "api?"+query)
					if err := want("used", b.primaryUsed(), 3); err != nil {
						return err
					}
					return want("client key", b.Buckets[0].ClientKey, shownKey)
				})
			}
			eventually(t, "the other bucket is counted", func() error {
				return want("used", bucketsOf(c, http.MethodGet, "api?key="+other).primaryUsed(), 1)
			})
			var top topAnswer
			c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
			if len(top.Refused) != 1 || top.Refused[0].ClientKey != shownKey || top.Refused[0].Count != 2 {
				t.Errorf("top is %v, want %s with 2", top, shownKey)
			}
			s := simulate(c, "/", "X-Key: "+long)
			if len(s.Zones) != 1 || s.Zones[0].ClientKey != shownKey {
				t.Errorf("simulated are %v, want %s", s.Zones, shownKey)
			}
			if !strings.Contains(c.Logs.String(), `"key":"`+shownKey+`"`) {
				t.Errorf("the log does not show %s", shownKey)
			}
			prints(t, 0, []string{shownKey}, "get", "api", long, "--address", c.Admin)
			prints(t, 0, []string{shownKey}, "get", "api", "--client-key", shownKey, "--address", c.Admin)
			for _, query := range find {
				c.Get("/", "X-Key: "+long)
				if b := bucketsOf(c, http.MethodDelete, "api?"+query); len(b.Buckets) != 1 || !b.Buckets[0].Deleted {
					t.Errorf("reset answers %v", b)
				}
				if used := bucketsOf(c, http.MethodGet, "api?key="+long).primaryUsed(); used > 0 {
					t.Errorf("%d are used after a reset", used)
				}
			}
			if used := bucketsOf(c, http.MethodGet, "api?key="+other).primaryUsed(); used != 1 {
				t.Errorf("another client has used %d after the reset, want 1", used)
			}
			prints(t, 0, []string{fmt.Sprint("nothing to delete: ", shownKey)}, "reset", "api", long, "--address", c.Admin)
		})
	}
}
