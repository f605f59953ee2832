package shardlimit_test

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestReloadsLeaveNothingBehind of zones that no config has any more.
func TestReloadsLeaveNothingBehind(t *testing.T) {
	const reloads = 60
	occupied, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	defer occupied.Close()
	cannotListen := "\nhttp://" + occupied.Addr().String() + " {\n\trespond never\n}\n"
	site := func(zone string) string {
		return zonesSite("", zoneWith(zone, "events 1", "max_wait 1ms"), "respond ok")
	}
	c := caddytest.Start(t, site("first"))
	n := 0
	reload := func(times int) {
		for range times {
			n++
			if status, body := c.Load(site(fmt.Sprint("rejected-", n)) + cannotListen); status == http.StatusOK {
				t.Fatalf("a config that cannot listen was accepted: %s", body)
			}
			c.MustLoad(site(fmt.Sprint("zone-", n)))
			for _, status := range []int{http.StatusOK, http.StatusTooManyRequests} {
				must(t, "a request", want("status", c.Probe("/", "X-Key: alice").Status, status))
			}
		}
	}
	reload(20) // what Caddy itself keeps
	goroutines, heap := footprint(c)
	reload(reloads)
	const most = 16 << 10 // of bytes a zone, with which a cache or a sketch does not go
	var moreGoroutines, moreHeap int64
	eventually(t, "the caches of zones are gone", func() error {
		g, h := footprint(c)
		moreGoroutines, moreHeap = g-goroutines, h-heap
		if moreGoroutines > reloads/2 || moreHeap > reloads*most {
			return fmt.Errorf("%d goroutines and %d bytes more after %d reloads", moreGoroutines, moreHeap, reloads)
		}
		return nil
	})
	_, metrics := c.AdminCall(http.MethodGet, "/metrics", "", "")
	must(t, "metrics", want("those of zones that are gone", strings.Count(metrics, `requests_total{zone="`), 2))
	t.Logf("after %d reloads and as many rejected: %d goroutines and %d bytes more", reloads, moreGoroutines, moreHeap)
}

// footprint is how many goroutines Caddy has, and bytes on its heap.
func footprint(c *caddytest.Caddy) (goroutines, heap int64) {
	c.T.Helper()
	number := func(text, before string) int64 {
		_, rest, _ := strings.Cut(text, before)
		digits, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseInt(digits, 10, 64)
		must(c.T, before, err)
		return n
	}
	_, text := c.AdminCall(http.MethodGet, "/debug/pprof/heap?gc=1&debug=1", "", "")
	heap = number(text, "# HeapAlloc = ")
	_, text = c.AdminCall(http.MethodGet, "/debug/pprof/goroutine?debug=1", "", "")
	return number(text, "goroutine profile: total "), heap
}
