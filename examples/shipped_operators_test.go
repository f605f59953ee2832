package examples

import (
	"crypto/rand"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// edit changes a shipped config before it is loaded.
type edit = func(config map[string]any)

// editZone returns an edit of the zones of that name.
func editZone(name string, change func(zone map[string]any)) edit {
	return func(config map[string]any) {
		within(config, func(object map[string]any) {
			if _, isZone := object["events"]; isZone && object["name"] == name {
				change(object)
			}
		})
	}
}

// operatedStores are those in which shipped configs count when operators change something: the memory that they have,
// and the Redis that several Caddys need.
func operatedStores(shards caddytest.Shards) map[string]edit {
	return map[string]edit{"memory": func(map[string]any) {}, "redis": func(config map[string]any) {
		store := map[string]any{
			"module": "redis", "key_prefix": rand.Text(), "check_timeout": caddytest.WaitLimit, "charge_timeout": caddytest.WaitLimit,
			"shards": []any{map[string]any{"name": "a", "primary": shards[0].Primary.Addr()}},
		}
		config["apps"].(map[string]any)["rate_limit"] = map[string]any{"stores": map[string]any{"default": store}}
	}}
}

// client returns the name of a client of a zone, as operators write it, and a request of it each time.
func (z shippedZone) client(t *testing.T, a shippedAsk) (name string, next func() rawRequest) {
	t.Helper()
	if a.line == "" {
		a.line = "GET /"
	}
	key, n := z.Key[0], 0
	switch {
	case isAddress(key):
		return "192.0.2.1", func() rawRequest { return rawRequest{source: []string{"192.0.2.1"}, line: a.line, headers: a.headers} }
	case !strings.Contains(key, "{"):
		return key, func() rawRequest {
			n++ // zones by address do not refuse it
			return rawRequest{source: []string{fmt.Sprintf("198.18.%d.%d", n/250, 1+n%250)}, line: a.line, headers: a.headers}
		}
	}
	t.Fatalf("say here how clients of zone %s differ, whose key is %s", z.Name, key)
	return "", nil
}

// grant grants a client so many events.
func (s *shippedSite) grant(zone, client string, events int) {
	s.c.T.Helper()
	status, text := s.c.AdminCall(http.MethodPost, fmt.Sprintf("/rate_limit/grants/%s?key=%s&events=%d", zone, url.QueryEscape(client), events), "", "")
	must(s.c.T, "grant "+text, want("status", status, http.StatusOK))
}

// raise returns an edit by which so many more fit into a zone at once.
func (z shippedZone) raise(events int) edit {
	return editZone(z.Name, func(zone map[string]any) {
		name := "events"
		if zone["burst"] != nil {
			name = "burst"
		}
		zone[name] = zone[name].(float64) + float64(events)
	})
}

// respondLine is the line of a shipped config that answers without a backend.
var respondLine = regexp.MustCompile(`(?m)^\trespond ".*"$`)

// TestShippedLogs checks that zones of shipped configs which remember each event forget none of them when a
// request ends that began under a lower limit, before a grant or a reload: whether requests count at their
// beginning or, as for who leaves out that line, at their end. No window ends meanwhile.
func TestShippedLogs(t *testing.T) {
	t.Parallel()
	shards := caddytest.StartShards(t, 1, 0)
	zones, texts := shippedZones(t, func(z shippedZone) bool { return z.Algorithm == "sliding_log" })
	for _, name := range swept(t, maps.Keys(zones), "examples/migrating/caddy_ratelimit_after.caddyfile each") {
		z := zones[name]
		a, ok := shippedAsks[strings.TrimSuffix(name, " "+z.Name)][z.Name]
		if !ok {
			a = shippedAsks[strings.TrimSuffix(name, " "+z.Name)][""]
		}
		for store, inStore := range operatedStores(shards) {
			for _, charge := range []string{"before", "after"} {
				if !sweepsAll && (store == "redis") != (charge == "before") {
					continue
				}
				t.Run(strings.ReplaceAll(fmt.Sprintf("%s %s %s", name, store, charge), "/", "."), func(t *testing.T) {
					t.Parallel()
					remembers(t, texts[name], z, a, charge, inStore)
				})
			}
		}
	}
}

// remembers checks what TestShippedLogs says of a zone.
func remembers(t *testing.T, text string, z shippedZone, a shippedAsk, charge string, inStore edit) {
	t.Helper()
	arrived, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	backend := startBackend(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Long") == "" {
			return
		}
		for _, step := range []chan struct{}{arrived, end} {
			select {
			case step <- struct{}{}:
			case <-ended:
			}
		}
	})
	t.Cleanup(func() { close(ended) })
	s := startShipped(t, respondLine.ReplaceAllString(text, "\treverse_proxy backend:80"), backend, nil, inStore,
		editZone(z.Name, func(zone map[string]any) { zone["charge"], zone["window"] = charge, 100*time.Hour }))
	client, next := z.client(t, a)
	served, running := 0, 0
	answers := make(chan int, 2)
	for range cap(answers) {
		r := next()
		r.headers = append(slices.Clone(r.headers), "X-Long: yes")
		go func() {
			status := 0
			if resp, err := s.send(r); err == nil {
				status = resp.StatusCode
			}
			answers <- status
		}()
		select {
		case <-arrived:
		case status := <-answers:
			t.Fatalf("%v: status %d", r, status)
		}
		served++
		running++
	}
	// holds checks that the limit is served, and no more once one of those has ended that began before.
	holds := func(what string, limit int) {
		t.Helper()
		for served <= limit && s.must(next()).StatusCode == http.StatusOK {
			served++
		}
		must(t, what, want("served", served, limit))
		<-end
		must(t, what, want("status of one that ran", <-answers, http.StatusOK))
		running--
		counted := served
		if charge == "after" {
			counted -= running
		}
		eventually(t, what+" is followed by the charge", func() error {
			return want("used", s.used(z.Name, client), int64(counted))
		})
		must(t, what, want("status once the charge counts", s.must(next()).StatusCode, http.StatusTooManyRequests))
	}
	limit := z.capacity(a) + 3
	s.grant(z.Name, client, 3)
	holds("a grant", limit)
	s.load(z.raise(5))
	holds("a reload", limit+5)
}

// TestShippedLinesAreWoken checks that those who wait in shipped configs are served once a reset, a grant or a
// reload makes room for them, as many as fit, and that others then do not wait behind them. Time alone makes
// none.
func TestShippedLinesAreWoken(t *testing.T) {
	t.Parallel()
	shards := caddytest.StartShards(t, 1, 0)
	zones, texts := shippedZones(t, func(z shippedZone) bool { return z.MaxWait > 0 })
	for _, name := range swept(t, maps.Keys(zones), "examples/outgoing.caddyfile partner") {
		z := zones[name]
		for store, inStore := range operatedStores(shards) {
			t.Run(strings.ReplaceAll(name+" "+store, "/", "."), func(t *testing.T) {
				t.Parallel()
				path, ok := shippedLines[name]
				must(t, "shippedLines", want("having its row", ok, true))
				s := startShipped(t, texts[name], startBackend(t, func(http.ResponseWriter, *http.Request) {}), nil, inStore,
					editZone(z.Name, func(zone map[string]any) { zone["window"], zone["max_wait"] = 100*time.Hour, 1000*time.Hour }))
				s.wakesLine(t, z, "GET "+path)
			})
		}
	}
}

// wakesLine checks what TestShippedLinesAreWoken says of a zone in which requests wait for hours.
func (s *shippedSite) wakesLine(t *testing.T, z shippedZone, line string) {
	t.Helper()
	client, next := z.client(t, shippedAsk{line: line})
	fits, waiting := z.capacity(shippedAsk{}), 0
	answers := make(chan error, 100)
	// fill makes so many requests wait.
	fill := func(n int) {
		t.Helper()
		for ; waiting < n; waiting++ {
			r := next()
			go func() {
				resp, err := s.send(r)
				if err == nil {
					err = want("status", resp.StatusCode, http.StatusOK)
				}
				answers <- err
			}()
		}
		eventually(t, "they wait", func() error { return want("requests that wait", s.inLimiter(), waiting) })
	}
	// wakes checks that so many are served now, and the others wait on.
	wakes := func(what string, n int) {
		t.Helper()
		for range n {
			must(t, "one that waits, after "+what, <-answers)
			waiting--
		}
		fill(max(waiting, 1))
	}
	for range fits {
		must(t, "the first", want("status", s.must(next()).StatusCode, http.StatusOK))
	}
	fill(fits + 1)
	s.forget(map[string]string{z.Name: client})
	wakes("a reset", fits)
	fill(2)
	s.grant(z.Name, client, 2)
	wakes("a grant", 2)
	fill(2)
	s.load(z.raise(3))
	for range 2 {
		must(t, "one that waits, after a reload", <-answers)
		waiting--
	}
	must(t, "a new one", want("status", s.must(next()).StatusCode, http.StatusOK))
	fill(1) // no more fit
	s.forget(map[string]string{z.Name: client})
	must(t, "the last", <-answers)
}
