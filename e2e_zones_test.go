package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
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
func bothStores(servers shards, options ...string) map[string]string {
	return map[string]string{"memory": "", "redis": servers.store(options...)}
}

// probe is ask for zones of whatever algorithm.
func (c *caddyProcess) probe(path string, headers ...string) answer {
	c.t.Helper()
	a, err := c.tryProbe(context.Background(), path, headers...)
	must(c.t, path, err)
	return a
}

// tryProbe is probe for any goroutine. Only in a fixed window of events that
// cost 1 do all of the headers add up, as ask demands.
func (c *caddyProcess) tryProbe(ctx context.Context, path string, headers ...string) (answer, error) {
	a, err := c.askContext(ctx, path, headers...)
	if a.header == nil {
		return a, err
	}
	if a.isLimited() != (a.remaining >= 0) || a.isLimited() != (a.used >= 0) || a.isLimited() != (a.resource != "") ||
		!a.isLimited() && a.reset >= 0 {
		return a, errors.New("limit headers are incomplete")
	}
	if a.remaining > max(a.limit-a.used, 0) {
		return a, errors.New("what is used and what remains are more than the limit")
	}
	return a, nil
}

// shows tells how the answer differs from a status and from what a request that
// may use limit is told once used is used.
func (a answer) shows(status int, limit, used int64) error {
	return errors.Join(a.is(status, used), want("limit", a.limit, limit), want("remaining", a.remaining, max(limit-used, 0)))
}

// refuses tells how the answer differs from a refusal by a zone, after which it
// helps to wait.
func (a answer) refuses(zone string) error {
	return errors.Join(want("status", a.status, 429), want("zone", a.resource, zone), want("remaining", a.remaining, 0),
		want("Retry-After being at least 1", a.retryAfter >= 1, true))
}

// startWith runs Caddy with zones in front of answers.
func startWith(t *testing.T, store, zones, answers string) *caddyProcess {
	t.Helper()
	return startCaddy(t, zonesSite(store, zones, answers))
}

// awaitLines waits until n lines of the log contain all of the texts.
func (c *caddyProcess) awaitLines(t *testing.T, n int, texts ...string) (lines []string) {
	t.Helper()
	eventually(t, fmt.Sprint("Caddy logs ", texts), func() error {
		lines = nil
		for line := range strings.Lines(c.logs.String()) {
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
				lines = append(lines, line)
			}
		}
		return want("number of lines", len(lines), n)
	})
	return lines
}

// hold is start for zones of whatever algorithm.
func (b *slowBackend) hold(t *testing.T, c *caddyProcess, path string, headers ...string) running {
	t.Helper()
	r := c.begin(t.Context(), path, headers...)
	r.at = b.await(t)
	return r
}

// begin sends a request for the rest of ctx.
func (c *caddyProcess) begin(ctx context.Context, path string, headers ...string) running {
	r := running{answer: make(chan answer, 1), err: make(chan error, 1)}
	go func() {
		a, err := c.tryProbe(ctx, path, headers...)
		if err != nil {
			r.err <- fmt.Errorf("%s: %w", path, err)
			return
		}
		r.answer <- a
	}()
	return r
}
