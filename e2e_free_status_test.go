package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// freeStatusSite answers with the status that the path names, and counts by
// three zones that differ in what is free.
const freeStatusSite = `
{
	{{global}}
	%s
}
{{site}} {
	route {
		rate_limit {
			zone default {
				match {
					path /default/*
				}
				key {header.X-Key}
				events 100
				window 1h
			}
			zone custom {
				match {
					path /custom/*
				}
				key {header.X-Key}
				events 100
				window 1h
				free_status 404 5xx
			}
			zone none {
				match {
					path /none/*
				}
				key {header.X-Key}
				events 100
				window 1h
				free_status none
			}
		}
		@fresh header If-None-Match *
		respond @fresh 304
		@404 path */404
		respond @404 404
		@502 path */502
		respond @502 502
		@503 path */503
		error @503 503
		respond ok
	}
}
`

func TestFreeStatusesLeaveTheCountAlone(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, fmt.Sprintf(freeStatusSite, servers.Store()))
	const etag = `If-None-Match: "v1"`
	used := map[string]int64{}
	for _, step := range []struct {
		path    string
		headers []string
		status  int
		free    bool
	}{
		// The first request opens a window although it is free.
		{"/default/page", []string{etag}, http.StatusNotModified, true},
		{"/default/page", nil, http.StatusOK, false},
		{"/default/page", []string{etag}, http.StatusNotModified, true},
		{"/default/page", []string{etag}, http.StatusNotModified, true},
		{"/default/404", nil, http.StatusNotFound, false},
		{"/default/502", nil, http.StatusBadGateway, false},
		{"/default/503", nil, http.StatusServiceUnavailable, false},

		{"/custom/page", []string{etag}, http.StatusNotModified, false},
		{"/custom/page", nil, http.StatusOK, false},
		{"/custom/404", nil, http.StatusNotFound, true},
		{"/custom/502", nil, http.StatusBadGateway, true},
		{"/custom/503", nil, http.StatusServiceUnavailable, true},

		{"/none/page", []string{etag}, http.StatusNotModified, false},
		{"/none/page", nil, http.StatusOK, false},
		{"/none/404", nil, http.StatusNotFound, false},
	} {
		zone, _, _ := strings.Cut(step.path[1:], "/")
		before := used[zone]
		if !step.free {
			used[zone]++
		}
		a := c.Ask(step.path, append([]string{"X-Key: alice"}, step.headers...)...)
		must(t, fmt.Sprintf("%s after %d", step.path, before), errors.Join(a.Is(step.status, used[zone]), want("zone", a.Resource, zone)))
		servers.AwaitCount(t, zone, "alice", used[zone])
		if _, open := servers.Buckets(t, zone)["alice"]; !open {
			t.Fatalf("no window of zone %s was opened", zone)
		}
	}
	// A charge that should not have been made would have arrived by now.
	c.Stop()
	for zone, n := range used {
		must(t, "at the end", want("count of zone "+zone, servers.Counts(t, zone)["alice"], n))
	}
}
