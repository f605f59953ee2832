package e2e

import (
	"net"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// counting are the algorithms that count events, and so support free requests.
var counting = []string{"fixed_window", "sliding_window", "sliding_log", "gcra"}

// modes are the values of charge.
var modes = []string{"after", "before"}

// ways yields each algorithm that counts with each mode.
func ways(yield func(algorithm, mode string) bool) {
	for _, algorithm := range counting {
		for _, mode := range modes {
			if !yield(algorithm, mode) {
				return
			}
		}
	}
}

// usual are the default options of zones. Their window is longer than any test.
var usual = []string{"key {header.X-Key}", "events 100", "window 10000h"}

// way is one of [ways].
type way struct{ algorithm, mode string }

// allWays returns all ways, for samples.
func allWays() (all []way) {
	for algorithm, mode := range ways {
		all = append(all, way{algorithm, mode})
	}
	return all
}

// zoneWith returns a zone whose options are lines.
func zoneWith(name string, options ...string) string {
	text := "zone " + name + " {\n"
	given := map[string]bool{}
	for _, option := range append(options[:len(options):len(options)], usual...) {
		word, _, _ := strings.Cut(option, " ")
		if !given[word] || word == "reserve" {
			text += option + "\n"
		}
		given[word] = true
	}
	return text + "}\n"
}

// pathZone is zoneWith for requests of the path that is the zone's name.
func pathZone(name string, options ...string) string {
	return zoneWith(name, append(options[:len(options):len(options)], "match {\npath /"+name+" /"+name+"/*\n}")...)
}

// zonesPerAlgorithm returns pathZones named like the algorithms that count.
func zonesPerAlgorithm(options ...string) (zones string) {
	for _, algorithm := range counting {
		zones += pathZone(algorithm, append(options[:len(options):len(options)], "algorithm "+algorithm)...)
	}
	return zones
}

// zonesPerWay returns pathZones named like an algorithm that counts and a mode, such as gcra.after.
func zonesPerWay(options ...string) (names []string, zones string) {
	for algorithm, mode := range ways {
		name := algorithm + "." + mode
		names = append(names, name)
		zones += pathZone(name, append(options[:len(options):len(options)], "algorithm "+algorithm, "charge "+mode)...)
	}
	return names, zones
}

// zonesSite returns a site with zones in front of answers, directives of a route.
func zonesSite(store, zones, answers string) string {
	return caddytest.Site(store, "route {\nrate_limit {\n"+zones+"}\n"+answers+"\n}")
}

// bothStores returns the global options for memory, which is the default, and for
// Redis, whose options are lines.
func bothStores(servers caddytest.Shards, options ...string) map[string]string {
	return map[string]string{"memory": "", "redis": servers.Store(options...)}
}

// forStores runs a test for each of the stores.
func forStores(t *testing.T, stores map[string]string, test func(t *testing.T, store string)) {
	t.Helper()
	for name, store := range stores {
		t.Run(name, func(t *testing.T) { test(t, store) })
	}
}

// startWith runs Caddy with zones in front of answers.
func startWith(t *testing.T, store, zones, answers string) *caddytest.Caddy {
	t.Helper()
	return caddytest.Start(t, zonesSite(store, zones, answers))
}

// proxyTo hands requests to a backend at an address, which a path may precede, with more
// options. However busy the machine is, a connection to the backend does not time out. No
// connection is kept: Caddy closes idle ones at a reload, and a request that has just picked one
// gets a 502 ("CloseIdleConnections called").
func proxyTo(backend string, options ...string) string {
	return "reverse_proxy " + backend + " {\ntransport http {\ndial_timeout 10m\nkeepalive off\n}\n" + strings.Join(options, "\n") + "\n}"
}

// proxySite returns apiSite with a backend.
func proxySite(store string, events int, backend string) string {
	return limitedSite(store, events, "1h", proxyTo(backend))
}

// awaitUsed waits until Redis and its replicas have counted that much. The memory
// store, whose option is empty, counts before the response ends.
func awaitUsed(t *testing.T, servers caddytest.Shards, store, zone, client string, used int64) {
	t.Helper()
	if store != "" {
		servers.AwaitUsed(t, zone, client, used)
		servers.AwaitReplicas(t)
	}
}

// occupiedSite is a site whose address is taken: the http app starts all servers of
// a config, then fails because of this one.
func occupiedSite(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	t.Cleanup(func() { _ = listener.Close() })
	return "\nhttp://" + listener.Addr().String() + " {\n\trespond never\n}\n"
}

// flush empties the primaries.
func flush(t *testing.T, servers caddytest.Shards) {
	t.Helper()
	for _, s := range servers {
		must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
	}
}
