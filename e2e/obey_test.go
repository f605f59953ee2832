package e2e

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// refusingBackend answers what the header X-Answer says: a status, and headers.
func refusingBackend(t *testing.T) (addr string, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		lines := strings.Split(r.Header.Get("X-Answer"), "|")
		for _, line := range lines[1:] {
			name, value, _ := strings.Cut(line, ": ")
			w.Header().Set(name, value)
		}
		status, _ := strconv.Atoi(lines[0])
		w.WriteHeader(max(status, http.StatusOK))
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String(), asked
}

// TestUpstreamIsObeyedByAll: what a provider says to one Caddy, another one obeys, and what it says
// again changes nothing.
func TestUpstreamIsObeyedByAll(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	backend, asked := refusingBackend(t)
	zones := ""
	var names []string
	for algorithm, mode := range ways {
		if algorithm == "sliding_log" {
			continue
		}
		names = append(names, algorithm+"."+mode)
		zones += pathZone(names[len(names)-1], "algorithm "+algorithm, "charge "+mode, "obey_upstream")
	}
	caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store(), zones, proxyTo(backend)))
	for i, answer := range []string{"429|Retry-After: 600", `503|RateLimit: "minute";r=0;t=600`} {
		for _, zone := range names {
			client := "provider" + strconv.Itoa(i)
			key := "X-Key: " + client
			first := caddys[0].Get("/"+zone, key, "X-Answer: "+answer)
			status, _ := strconv.Atoi(answer[:3])
			must(t, zone, errors.Join(want("status", first.StatusCode, status), want("remaining", caddytest.Remaining(first), "0")))
			var until int64
			eventually(t, "the penalty is stored", func() error {
				until = servers.Content(t, zone, client).Penalty
				return want("penalty stored", until > 0, true)
			})
			servers.AwaitReplicas(t)
			before := asked.Load()
			for _, c := range caddys {
				eventually(t, "it is refused", func() error {
					return want("status", c.Get("/"+zone, key, "X-Answer: 429|Retry-After: 3000").StatusCode, http.StatusTooManyRequests)
				})
				refused := c.Get("/"+zone, key)
				wait, _ := strconv.Atoi(refused.Header.Get("Retry-After"))
				must(t, zone, errors.Join(want("status", refused.StatusCode, http.StatusTooManyRequests), want("wait "+strconv.Itoa(wait), wait > 500 && wait <= 601, true)))
			}
			must(t, zone, errors.Join(want("requests that reached the provider", asked.Load(), before), want("the end of the penalty", servers.Content(t, zone, client).Penalty, until)))
		}
	}
}

// TestWhatClosesAZone: responses of the handlers behind do, with a status and a field that say so; those
// of the limiter do not.
func TestWhatClosesAZone(t *testing.T) {
	t.Parallel()
	backend, _ := refusingBackend(t)
	obeying := func(name string, more ...string) string {
		return "rate_limit /" + name + " {\n" + zoneWith(name, append(more, "obey_upstream")...) + "}\n"
	}
	c := caddytest.Start(t, caddytest.Site("", "route {\n"+
		obeying("plain")+obeying("first")+obeying("observed", "enforce 0")+
		obeying("replaced")+obeying("copied")+obeying("strict", "events 1", "window 300ms")+obeying("free", "charge before", "count_status not 429")+
		obeying("costly", "cost {http.rate_limit.response.size} 0")+
		"rate_limit /first {\n"+zoneWith("second")+"}\n"+
		"rate_limit /inner {\n"+zoneWith("outer", "obey_upstream")+"}\nrate_limit /inner {\n"+zoneWith("tight", "events 1", "window 300ms")+"}\n"+
		"route /replaced {\n"+proxyTo(backend, "@refused status 429\nhandle_response @refused {\nrespond 503\n}")+"\n}\n"+
		"route /copied {\n"+proxyTo(backend, "@refused status 429\nhandle_response @refused {\ncopy_response\n}")+"\n}\n"+
		"respond /own 429\n"+proxyTo(backend)+"\n}\nhandle_errors {\nheader Retry-After 600\nrespond 503\n}"))
	const busy = "429|Retry-After: 600"
	for _, test := range []struct {
		path, answer string
		status       int
		closes       bool
	}{
		{"plain", busy, 429, true},
		{"plain", "503|Retry-After: 600", 503, true},
		{"plain", "500|Retry-After: 600", 500, false},
		{"plain", "429", 429, false},
		{"plain", "429|Retry-After: soon", 429, false},
		{"plain", "429|Retry-After: 0", 429, false},
		{"plain", `429|RateLimit: "minute";r=5;t=600`, 429, false},
		{"plain", "429|X-RateLimit-Remaining: 0|X-RateLimit-Reset: 600", 429, true},
		{"plain", "200|Retry-After: 600", 200, false},
		{"plain", "529|Retry-After-Ms: 600000", 529, true},
		{"plain", "403|Retry-After: 600", 403, true},
		{"plain", "403|X-RateLimit-Remaining: 7|X-RateLimit-Reset: 600", 403, false},
		{"first", busy, 429, true},
		{"observed", busy, 429, false},
		{"replaced", busy, 503, false},
		{"copied", busy, 429, true},
		{"free", busy, 429, true},
		{"costly", busy, 429, true},
	} {
		key := "X-Key: " + test.path + test.answer
		what := test.path + " " + test.answer
		must(t, what, want("status", c.Get("/"+test.path, key, "X-Answer: "+test.answer).StatusCode, test.status))
		next, others := http.StatusOK, http.StatusOK
		if test.closes {
			next = http.StatusServiceUnavailable // by handle_errors
		}
		must(t, what, errors.Join(want("the next one's status", c.Get("/"+test.path, key).StatusCode, next),
			want("another client's status", c.Get("/"+test.path, key+" 2").StatusCode, others)))
	}
	must(t, "log", want("lines about it", strings.Count(c.Logs.String(), "upstream asks for fewer requests") > 0, true))
	// What the limiter answers, here with a longer Retry-After, closes no zone, not even an outer one.
	for _, path := range []string{"/strict", "/inner"} {
		eventually(t, "it is refused", func() error {
			return want("status", c.Get(path, "X-Key: alice").StatusCode, http.StatusServiceUnavailable)
		})
		eventually(t, "it passes again", func() error { return want("status", c.Get(path, "X-Key: alice").StatusCode, http.StatusOK) })
	}
}
