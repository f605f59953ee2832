package shardlimit_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// byStatus answers with the status that X-Status names: with a response, with an
// error or, whatever it names, with a panic.
const byStatus = `
@error path */error
error @error "as told" {header.X-Status}
@panic path */panic
test_answer @panic panic
respond "" {header.X-Status}
`

// settlement is a request and whether it costs something.
type settlement struct {
	how    string // what comes after the zone in the path
	status int
	free   bool
}

// settlements are the options that say what is free, and what they make of
// requests. The first one costs something, so that there is something to keep.
var settlements = map[string]struct {
	option string
	steps  []settlement
}{
	"default": {"", []settlement{
		{"", 200, false},
		{"", 304, true},
		{"/error", 304, true},
		{"", 304, true},
		{"/panic", 500, false},
		{"", 304, true},
		{"", 404, false},
		{"/error", 503, false},
		{"", 503, false},
	}},
	"free": {"free_status 5xx", []settlement{
		{"", 200, false},
		{"/error", 503, true},
		{"/panic", 500, true},
		{"", 304, false},
		{"", 503, true},
		{"/error", 404, false},
	}},
	"count": {"count_status 401 403", []settlement{
		{"", 401, false},
		{"", 200, true},
		{"/error", 403, false},
		{"/panic", 500, true},
		{"/error", 503, true},
		{"", 304, true},
		{"", 403, false},
	}},
	"none": {"free_status none", []settlement{
		{"", 304, false},
		{"/panic", 500, false},
		{"/error", 503, false},
	}},
}

func TestRefundOn304(t *testing.T) {
	const events = 70
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, algorithm := range counting {
		for name, s := range settlements {
			options := []string{"algorithm " + algorithm, "charge before", fmt.Sprint("events ", events)}
			if s.option != "" {
				options = append(options, s.option)
			}
			zones += pathZone(algorithm+"."+name, options...)
		}
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, byStatus)
			left := map[string]caddytest.Content{}
			for _, algorithm := range counting {
				for name, s := range settlements {
					zone := algorithm + "." + name
					left[zone] = settleEach(t, c, servers, zone, events, s.steps, store != "")
				}
			}
			// Once Caddy has ended no other charge or refund is on its way.
			c.Stop()
			for zone, b := range left {
				if store != "" {
					must(t, "at the end", want(zone, servers.Content(t, zone, "alice").Spent, b.Spent))
				}
			}
		})
	}
}

// settleEach makes the requests and checks what they are told and, in Redis,
// what the bucket holds before and after. It returns the last content.
func settleEach(t *testing.T, c *caddytest.Caddy, servers caddytest.Shards, zone string, events int64, steps []settlement, redis bool) caddytest.Content {
	t.Helper()
	used := int64(0)
	before := caddytest.Content{}
	for i, step := range steps {
		what := fmt.Sprintf("%s%s, step %d, status %d", zone, step.how, i, step.status)
		if !step.free {
			used++
		}
		if step.how == "/panic" {
			// On a connection that was used before, the client would try again.
			caddytest.Client.CloseIdleConnections()
		}
		a, err := c.TryProbe(t.Context(), "/"+zone+step.how, "X-Key: alice", fmt.Sprint("X-Status: ", step.status))
		if step.how == "/panic" {
			// Nobody answers; the next request shows what became of it.
			must(t, what, want("being answered", err == nil, false))
		} else {
			must(t, what, err)
			must(t, what, a.Shows(step.status, events, used))
		}
		if !redis {
			continue
		}
		if !step.free && step.how != "/panic" {
			// It was taken before there was a response.
			must(t, what, want("used in Redis", servers.Content(t, zone, "alice").Used, used))
		}
		servers.AwaitUsed(t, zone, "alice", used)
		after := servers.Content(t, zone, "alice")
		must(t, what, want("being as before", after.Spent == before.Spent, step.free))
		before = after
	}
	return before
}

// TestRefundOfTheFirstRequest: with nothing else in the bucket there is nothing
// left of it.
func TestRefundOfTheFirstRequest(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, algorithm := range counting {
		zones += pathZone(algorithm, "algorithm "+algorithm, "charge before")
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, byStatus)
			for _, algorithm := range counting {
				must(t, algorithm, c.Probe("/"+algorithm, "X-Key: bob", "X-Status: 304").Shows(http.StatusNotModified, 100, 0))
				if store != "" {
					servers.AwaitUsed(t, algorithm, "bob", 0)
				}
				must(t, algorithm, c.Probe("/"+algorithm, "X-Key: bob", "X-Status: 200").Shows(http.StatusOK, 100, 1))
			}
		})
	}
}
