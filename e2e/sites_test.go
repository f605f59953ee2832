package e2e

import (
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// counting are the algorithms that count events, and so know what is free.
var counting = []string{"fixed_window", "sliding_window", "sliding_log", "gcra"}

// modes are the values of charge.
var modes = []string{"after", "before"}

// usual are options of zones that hold where there is no other. In the window
// nothing comes back while a test runs.
var usual = []string{"key {header.X-Key}", "events 100", "window 10000h"}

// zoneWith is a zone whose options are lines.
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

// pathZone is zoneWith for requests to the path that the zone's name makes.
func pathZone(name string, options ...string) string {
	return zoneWith(name, append(options[:len(options):len(options)], "match {\npath /"+name+" /"+name+"/*\n}")...)
}

// zonesSite limits by zones what answers, directives in a route, then answer.
func zonesSite(store, zones, answers string) string {
	return "{\n\t{{global}}\n\t" + store + "\n}\n{{site}} {\nroute {\nrate_limit {\n" + zones + "}\n" + answers + "\n}\n}\n"
}

// bothStores are the global options for memory, which is the default, and for
// Redis, whose options are lines.
func bothStores(servers caddytest.Shards, options ...string) map[string]string {
	return map[string]string{"memory": "", "redis": servers.Store(options...)}
}

// startWith runs Caddy with zones in front of answers.
func startWith(t *testing.T, store, zones, answers string) *caddytest.Caddy {
	t.Helper()
	return caddytest.Start(t, zonesSite(store, zones, answers))
}

// proxySite is apiSite with a backend.
func proxySite(store string, events int, backend string) string {
	return limitedSite(store, events, "1h", "reverse_proxy "+backend)
}
