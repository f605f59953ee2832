package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// clientOf returns a client that speaks HTTP/1.1, or HTTP/2 without TLS.
func clientOf(t *testing.T, isHTTP2 bool) *http.Client {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!isHTTP2)
	protocols.SetUnencryptedHTTP2(isHTTP2)
	transport := &http.Transport{Protocols: protocols}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: caddytest.Patience}
}

// TestAbortedRequestsAreCharged, whatever the zone says of statuses, when their client closes its
// connection or resets its stream before the backend has answered.
func TestAbortedRequestsAreCharged(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	backend := caddytest.StartSlowBackend(t)
	zones := pathZone("login", "events 3", "count_status 401", "reset_status 2xx", "charge before") +
		pathZone("after", "events 3", "count_status not 4xx 5xx") +
		pathZone("llm", "events 3", "cost {http.rate_limit.response.json.usage} 1")
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		site := zonesSite(store, zones, proxyTo(backend.Server.Listener.Addr().String()))
		c := caddytest.Start(t, strings.Replace(site, "{{global}}", "{{global}}\nservers {\nprotocols h1 h2c\n}", 1))
		for _, isHTTP2 := range []bool{false, true} {
			c.Client = clientOf(t, isHTTP2)
			for _, name := range []string{"login", "after", "llm"} {
				key := fmt.Sprint("X-Key: ", name, isHTTP2)
				for n := range int64(3) {
					ctx, leave := context.WithCancel(t.Context())
					gone := c.Begin(ctx, "/"+name, key)
					backend.Await(t)
					leave()
					gone.Leaves(t)
					eventually(t, "the request has settled", func() error {
						return want("used", bucketUsed(c, name, fmt.Sprint(name, isHTTP2)), n+1)
					})
				}
				must(t, name, c.Probe("/"+name, key).Refuses(name))
			}
		}
	})
}

// TestSequentialRequestsOfOneSlot, or of one event that each of them gives back, are not refused.
func TestSequentialRequestsOfOneSlot(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	zones := pathZone("slot", "events 1", "algorithm concurrency") +
		pathZone("free", "events 1", "count_status 401", "charge before") +
		pathZone("login", "events 1", "count_status 401", "reset_status 2xx", "charge before")
	forStores(t, bothStores(servers, "check_timeout 1m"), func(t *testing.T, store string) {
		c := startWith(t, store, zones, "respond ok")
		for _, path := range []string{"/slot", "/free", "/login"} {
			for n := range 20 {
				must(t, fmt.Sprint(path, ", request ", n), want("status", c.Probe(path, "X-Key: alice").Status, http.StatusOK))
			}
		}
	})
}
