package examples

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// slotsOf is what a zone of a shipped config lets run at the same time.
type slotsOf struct {
	line string
	// header says who the client is, "" if its network does.
	header string
	// slots are those of a client or, where all share them, of all who have no reserve.
	slots int
	// others may have slots when these are taken.
	others []othersSlots
}

type othersSlots struct {
	slots int
	r     rawRequest
}

// shippedSlots has the zones of shipped configs that limit what runs.
var shippedSlots = map[string]slotsOf{
	"docs/configuration.md downloads": {line: "GET /files/x", slots: 3, others: []othersSlots{
		{3, rawRequest{source: []string{"192.0.2.1"}, line: "GET /files/x"}},
	}},
	"docs/grpc.md streams": {line: "POST /shop.Orders/Watch", header: "X-Api-Key: client", slots: 5, others: []othersSlots{
		{5, rawRequest{source: []string{"192.0.2.1"}, line: "POST /shop.Orders/Watch", headers: []string{"X-Api-Key: another"}}},
	}},
	// Percentages of 200 are kept for these.
	"docs/configuration.md capacity": {line: "GET /", slots: 140, others: []othersSlots{
		{40, rawRequest{source: []string{"192.0.2.1"}, line: "GET /checkout"}},
		{20, rawRequest{source: []string{"10.0.0.1"}, line: "GET /"}},
	}},
}

// shippedLines has the zones of shipped configs in which requests wait, with the path that leads there.
var shippedLines = map[string]string{
	"examples/outgoing.caddyfile partner":            "/zen",
	"examples/migrating/nginx_after.caddyfile queue": "/queue",
	"examples/migrating/nginx_after.caddyfile both":  "/both",
}

// shippedZones returns the zones of the shipped configs that f finds, and the texts of their configs, by file and
// name.
func shippedZones(t *testing.T, f func(z shippedZone) bool) (zones map[string]shippedZone, texts map[string]string) {
	t.Helper()
	zones, texts = map[string]shippedZone{}, map[string]string{}
	for key, text := range shippedConfigs(t) {
		file, _, _ := strings.Cut(key, ": ")
		for _, z := range slices.Concat(zonesOf(t, key, text)...) {
			if f(z) {
				zones[file+" "+z.Name], texts[file+" "+z.Name] = z, text
			}
		}
	}
	return zones, texts
}

// holdingSite is a site whose backend keeps requests, even if their client leaves.
type holdingSite struct {
	*shippedSite
	// arrived has a value for each request at the backend, which answers one for each in end.
	arrived, end chan struct{}
	// answers are the statuses of requests that were kept.
	answers chan int
}

func startHolding(t *testing.T, text string) *holdingSite {
	t.Helper()
	h := &holdingSite{arrived: make(chan struct{}, 1), end: make(chan struct{}), answers: make(chan int, 1000)}
	ended := make(chan struct{})
	backend := startBackend(t, func(http.ResponseWriter, *http.Request) {
		select {
		case h.arrived <- struct{}{}:
		case <-ended:
		}
		select {
		case <-h.end:
		case <-ended:
		}
	})
	t.Cleanup(func() { close(ended) })
	h.shippedSite = startShipped(t, text, backend, nil)
	return h
}

// hold sends a request, and returns its connection if it gets to the backend, nil if it is refused.
func (h *holdingSite) hold(t *testing.T, r rawRequest) net.Conn {
	t.Helper()
	conn, err := h.dial(r)
	must(t, r.String(), err)
	t.Cleanup(func() { _ = conn.Close() })
	refused, isHeld := make(chan int), make(chan struct{})
	go func() {
		status := 0
		if resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{URL: new(url.URL)}); err == nil {
			status = resp.StatusCode
		}
		select {
		case refused <- status:
		case <-isHeld:
			h.answers <- status
		}
	}()
	select {
	case <-h.arrived:
		close(isHeld)
		return conn
	case status := <-refused:
		must(t, r.String(), want("status", status, http.StatusTooManyRequests))
		return nil
	}
}

// requests returns a function that returns another request of one client each time.
func (row slotsOf) requests() func() rawRequest {
	n := 0
	return func() rawRequest {
		n++
		r := rawRequest{source: []string{fmt.Sprintf("2001:db8::%x", n)}, line: row.line, headers: []string{"X-Forwarded-For: 10.0.0.1"}}
		if row.header != "" {
			r.source = []string{fmt.Sprintf("198.18.%d.%d", n/250, n%250)}
			r.headers = append(r.headers, spelled(row.header)[n%2]...)
		}
		return r
	}
}

// TestShippedSlots checks that no client has more slots than a shipped config says, whatever it sends; that it
// takes none of another's; that it is not refused while it has one left; and that leaving gets it no more than
// twice as many.
func TestShippedSlots(t *testing.T) {
	t.Parallel()
	zones, texts := shippedZones(t, func(z shippedZone) bool { return z.Algorithm == "concurrency" })
	must(t, "shippedSlots", want("its rows", fmt.Sprint(slices.Sorted(maps.Keys(shippedSlots))), fmt.Sprint(slices.Sorted(maps.Keys(zones)))))
	for _, name := range swept(t, maps.Keys(shippedSlots), "docs/configuration.md downloads") {
		row := shippedSlots[name]
		t.Run(strings.ReplaceAll(name, "/", "."), func(t *testing.T) {
			t.Parallel()
			h, next := startHolding(t, texts[name]), row.requests()
			take := func(slots int, next func() rawRequest) {
				t.Helper()
				for range slots {
					r := next()
					must(t, r.String(), want("being admitted", h.hold(t, r) != nil, true))
				}
			}
			take(row.slots, next)
			for range 10 {
				h.end <- struct{}{}
				must(t, "a request that runs", want("status", <-h.answers, http.StatusOK))
				take(1, next)
				must(t, "one more", want("being admitted", h.hold(t, next()) != nil, false))
			}
			for _, other := range row.others {
				r := func() rawRequest { return other.r }
				take(other.slots, r)
				must(t, other.r.String(), want("more being admitted", h.hold(t, r()) != nil, false))
			}
		})
		if row.slots > mostLeft {
			continue
		}
		t.Run(strings.ReplaceAll(name, "/", ".")+" that are left", func(t *testing.T) {
			t.Parallel()
			h, next := startHolding(t, texts[name]), row.requests()
			begun, running := time.Now(), 0
			for range 5 * row.slots {
				if conn := h.hold(t, next()); conn != nil {
					running++
					must(t, "leave", conn.Close())
				}
				h.settle(t)
			}
			// What was left is remembered for ten seconds, while none has ended.
			if most := 2 * row.slots; running > most && time.Since(begun) < 10*time.Second {
				t.Errorf("%d requests run, at most %d should", running, most)
			}
		})
	}
}

// mostLeft is for how many slots it is tried what clients get by leaving.
const mostLeft = 10

// TestShippedLines checks that requests which wait stop no others: those of another client, where a client has a
// line of its own, and none once their client has left. Windows are so long that time alone lets none pass.
func TestShippedLines(t *testing.T) {
	t.Parallel()
	zones, texts := shippedZones(t, func(z shippedZone) bool { return z.MaxWait > 0 })
	must(t, "shippedLines", want("its rows", fmt.Sprint(slices.Sorted(maps.Keys(shippedLines))), fmt.Sprint(slices.Sorted(maps.Keys(zones)))))
	for _, name := range swept(t, maps.Keys(shippedLines), "examples/outgoing.caddyfile partner", "examples/migrating/nginx_after.caddyfile queue") {
		t.Run(strings.ReplaceAll(name, "/", "."), func(t *testing.T) {
			t.Parallel()
			const window = 100 * time.Hour
			z, path := zones[name], shippedLines[name]
			var served atomic.Int64
			s := startShipped(t, texts[name], startBackend(t, func(http.ResponseWriter, *http.Request) { served.Add(1) }), nil, editZone(z.Name, func(zone map[string]any) {
				zone["window"], zone["max_wait"] = window, z.MaxWait*(window/z.Window)
			}))
			s.fillsLine(t, z, "GET "+path, &served)
		})
	}
}

// fillsLine checks what TestShippedLines says of a zone.
func (s *shippedSite) fillsLine(t *testing.T, z shippedZone, line string, served *atomic.Int64) {
	t.Helper()
	const mostWaiting = 20
	fit, hasOwnLine := z.capacity(shippedAsk{}), isAddress(z.Key[0])
	room := int(z.MaxWait.Seconds() * z.Events.(float64) / z.Window.Seconds())
	waiting, refused := room, 2
	if room > mostWaiting {
		waiting, refused = mostWaiting, 0
	}
	answers := make(chan int, fit+refused)
	var conns []net.Conn
	for i := range fit + waiting + refused {
		conn, err := s.dial(rawRequest{source: []string{fmt.Sprintf("2001:db8::%x", i+1)}, line: line})
		must(t, "send", err)
		conns = append(conns, conn)
		go func() {
			if resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{URL: new(url.URL)}); err == nil {
				answers <- resp.StatusCode
			}
		}()
	}
	statuses := map[int]int{}
	for n := range fit + refused {
		select {
		case status := <-answers:
			statuses[status]++
		case <-time.After(caddytest.Patience):
			t.Fatalf("%s: %d of %d answers came: %v", line, n, fit+refused, statuses)
		}
	}
	must(t, line, errors.Join(want("served", statuses[http.StatusOK], fit), want("refused", statuses[http.StatusTooManyRequests], refused)))
	eventually(t, "the others wait", func() error { return want("requests that wait", s.inLimiter(), waiting) })
	another := func() {
		t.Helper()
		must(t, "another client", want("status", s.must(rawRequest{source: []string{"192.0.2.1"}, line: line}).StatusCode, http.StatusOK))
	}
	if hasOwnLine {
		another()
	}
	before := served.Load()
	for _, conn := range conns {
		must(t, "leave", conn.Close())
	}
	s.settle(t)
	must(t, "those that left", want("served", served.Load(), before))
	if !hasOwnLine {
		s.forget(map[string]string{z.Name: z.Key[0]})
		another()
	}
}
