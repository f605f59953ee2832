package examples

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// shippedCost is what responses cost in the zones of a shipped config.
type shippedCost struct {
	// line is method and path, to which a slash and the name of a response is added.
	line    string
	headers []string
	// clients are those of the zones, as operators name them.
	clients map[string]string
	// costs are those of the responses that [answer] names, in the order of the zones' names.
	costs map[string][]int64
	// most is how many requests of one client get to the backend, if it leaves each of them, 0 if that is not asked.
	most int
}

// shippedCosts has the configs with zones that charge by the response, brute_force apart, whose responses are
// basic_auth's.
var shippedCosts = map[string]shippedCost{
	"examples/llm_gateway.caddyfile": {
		line: "POST /v1", headers: []string{"Authorization: Bearer client"}, most: 2,
		clients: map[string]string{"tokens_per_minute": "Bearer client"},
		costs: map[string][]int64{
			"plain": {900}, "late": {900}, "gzip": {900}, "events": {900}, "gzip-events": {900}, "fraction": {901}, "silent": {1500}, "text": {1500},
			"cut": {1500}, "refused": {0}, "broken": {0}, "leave": {1500}, "leave-stream": {1500},
		},
	},
	"docs/llm-gateway.md user team provider": {
		line: "POST /v1", headers: []string{"Authorization: Bearer key-of-alice"}, most: 12,
		clients: map[string]string{"team": "research", "user": "alice"},
		costs: map[string][]int64{
			"plain": {7140, 900}, "late": {7140, 900}, "gzip": {7140, 900}, "events": {7140, 900}, "gzip-events": {7140, 900}, "silent": {163840, 32768}, "dearest": {163840, 32768},
			"cut": {163840, 32768}, "refused": {0, 0}, "broken": {0, 0}, "leave": {163840, 32768}, "leave-stream": {163840, 32768},
		},
	},
	"examples/graphql_cost.caddyfile": {
		line: "POST /graphql", headers: []string{"X-Api-Key: client"}, most: 3,
		clients: map[string]string{"address": "192.0.2.1", "points": "client"},
		costs: map[string][]int64{
			"plain": {7, 7}, "gzip": {7, 7}, "refused": {7, 7}, "silent": {7, 7}, "broken": {7, 7}, "cut": {7, 7}, "leave": {7, 7}, "leave-stream": {7, 7},
		},
	},
	"docs/grpc.md calls streams address": {
		line: "POST /shop.Orders", headers: []string{"X-Api-Key: client", "Content-Type: application/grpc-web"},
		clients: map[string]string{"calls": "client"},
		costs:   map[string][]int64{"plain": {1}, "refused": {1}, "unauthenticated": {0}, "broken": {1}, "leave": {1}, "leave-stream": {1}},
	},
	"docs/choosing.md login api": {
		line: "POST /login", most: 5,
		clients: map[string]string{"api": "192.0.2.1", "login": "192.0.2.1"},
		costs:   map[string][]int64{"plain": {1, 1}, "refused": {1, 1}, "broken": {1, 1}, "leave": {1, 1}},
	},
}

const usage = `"usage": {"prompt_tokens": 10, "completion_tokens": 890, "total_tokens": 900}`

// answer answers the request of shippedCosts with that name.
func answer(w http.ResponseWriter, r *http.Request, arrived chan<- struct{}) {
	var out io.Writer = w
	name, long := path.Base(r.URL.Path), strings.Repeat("word ", 90_000)
	w.Header().Set("X-Cost", "7")
	w.Header().Set("Content-Type", "application/json")
	if strings.Contains(name, "events") || name == "leave-stream" {
		w.Header().Set("Content-Type", "text/event-stream")
	}
	if strings.HasPrefix(name, "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		zipped := gzip.NewWriter(w)
		defer zipped.Close()
		out = zipped
	}
	switch name {
	case "plain", "gzip":
		_, _ = io.WriteString(out, "{"+usage+"}")
	case "dearest":
		_, _ = io.WriteString(out, `{"usage": {"prompt_tokens": 16384, "completion_tokens": 16384, "total_tokens": 32768}}`)
	case "late":
		_, _ = io.WriteString(out, `{"choices": "`+long+`", `+usage+"}")
	case "events", "gzip-events":
		_, _ = io.WriteString(out, "data: {\"choices\": \""+long+"\"}\r\rdata: {"+usage+"}\r\rdata: [DONE]\r\r")
	case "fraction":
		_, _ = io.WriteString(out, `{"usage": {"total_tokens": 900.5}}`)
	case "silent":
		w.Header().Del("X-Cost")
	case "text":
		_, _ = io.WriteString(out, usage)
	case "cut":
		w.Header().Set("Content-Length", "1000000")
		_, _ = io.WriteString(out, `{"choices": "`+long)
	case "refused":
		w.WriteHeader(http.StatusForbidden)
	case "unauthenticated":
		w.Header().Set("Content-Type", "application/grpc-web")
		w.Header().Set("Grpc-Status", "16")
	case "broken":
		panic(http.ErrAbortHandler)
	case "leave-stream":
		_, _ = io.WriteString(out, "data: {\"choices\": \"word\"}\n\n")
		_ = http.NewResponseController(w).Flush()
		fallthrough
	case "leave":
		select {
		case arrived <- struct{}{}:
			<-r.Context().Done()
		case <-r.Context().Done():
		}
	}
}

// TestShippedConfigsChargeWhatIsDone checks what hostile responses, and clients that leave, cost in the shipped
// configs that charge by the response.
func TestShippedConfigsChargeWhatIsDone(t *testing.T) {
	t.Parallel()
	shards := caddytest.StartShards(t, 1, 0)
	left, tried := maps.Clone(shippedCosts), swept(t, maps.Keys(shippedCosts), "examples/llm_gateway.caddyfile")
	for key, text := range shippedConfigs(t) {
		zones := slices.Concat(zonesOf(t, key, text)...)
		name := shippedName(key, zones)
		row, ok := shippedCosts[name]
		delete(left, name)
		if !ok {
			if i := slices.IndexFunc(zones, shippedZone.chargesByResponse); i >= 0 && name != bruteForce {
				t.Errorf("shippedCosts has no row %q, whose zone %s charges by the response", name, zones[i].Name)
			}
			continue
		}
		if !slices.Contains(tried, name) {
			continue
		}
		t.Run(strings.ReplaceAll(name, "/", "."), func(t *testing.T) {
			t.Parallel()
			arrived := make(chan struct{}, 1)
			backend := startBackend(t, func(w http.ResponseWriter, r *http.Request) { answer(w, r, arrived) })
			s := startShipped(t, text, backend, shards, func(config map[string]any) {
				within(config, func(object map[string]any) {
					if object["dial"] != nil {
						object["dial"] = backend // in place of a stand-in too
					}
				})
			})
			for _, name := range slices.Sorted(maps.Keys(row.costs)) {
				s.forget(row.clients)
				s.provoke(t, row, name, arrived)
				s.settle(t)
				for i, zone := range slices.Sorted(maps.Keys(row.clients)) {
					eventually(t, name+" is charged", func() error {
						return want("used in "+zone, s.used(zone, row.clients[zone]), row.costs[name][i])
					})
				}
			}
			s.forget(row.clients)
			begun := 0
			for row.most > 0 && s.provoke(t, row, "leave", arrived) {
				begun++
				must(t, name, want(fmt.Sprint("more than ", row.most, " that its client leaves being at the backend"), begun > row.most, false))
			}
			must(t, name, want("requests that their client leaves", begun, row.most))
		})
	}
	for name := range left {
		t.Errorf("no shipped config is %q", name)
	}
}

// chargesByResponse reports whether the response decides what a request costs.
func (z shippedZone) chargesByResponse() bool {
	cost, _ := z.Cost.(string)
	return strings.Contains(cost, "response") || z.ResetStatus != nil || z.CountStatus != nil && !slices.Equal(z.CountStatus, []string{"all"})
}

// provoke sends the request of that name, and reports whether it is admitted.
func (s *shippedSite) provoke(t *testing.T, row shippedCost, name string, arrived <-chan struct{}) bool {
	t.Helper()
	r := rawRequest{source: []string{"192.0.2.1"}, line: row.line + "/" + name, headers: row.headers}
	if !strings.HasPrefix(name, "leave") {
		resp, err := s.send(r)
		if name != "cut" {
			must(t, name, errors.Join(err, want("being limited", isLimited(resp), true)))
		}
		return true
	}
	conn, err := s.dial(r)
	must(t, name, err)
	defer conn.Close()
	answered := make(chan error, 1)
	go func() {
		resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{URL: new(url.URL)})
		if err == nil && resp.StatusCode != http.StatusTooManyRequests && name == "leave" {
			err = fmt.Errorf("status %d %v", resp.StatusCode, resp.Header)
		}
		answered <- err
	}()
	if name == "leave-stream" {
		<-arrived
		must(t, name, <-answered)
		return true
	}
	select {
	case <-arrived:
		return true
	case err := <-answered:
		must(t, name, err)
		return false
	}
}

// forget empties the buckets of clients.
func (s *shippedSite) forget(clients map[string]string) {
	s.c.T.Helper()
	for zone, client := range clients {
		status, text := s.c.AdminCall(http.MethodDelete, "/rate_limit/buckets/"+zone+"?key="+url.QueryEscape(client), "", "")
		must(s.c.T, "reset "+text, want("status", status, http.StatusOK))
	}
}

// used returns what a client has used in a zone.
func (s *shippedSite) used(zone, client string) int64 {
	s.c.T.Helper()
	var found adminapi.Buckets
	s.c.AdminJSON(http.MethodGet, "/rate_limit/buckets/"+zone+"?key="+url.QueryEscape(client), "", &found)
	if len(found.Buckets) == 0 || len(found.Buckets[0].Servers) == 0 || found.Buckets[0].Servers[0].State == nil {
		return 0
	}
	return *found.Buckets[0].Servers[0].State.Used
}

// settle waits until no request runs.
func (s *shippedSite) settle(t *testing.T) {
	t.Helper()
	eventually(t, "no request runs", func() error { return want("requests in the limiter", s.inLimiter(), 0) })
}

// inLimiter returns how many requests run or wait.
func (s *shippedSite) inLimiter() int {
	s.c.T.Helper()
	return inLimiter(s.c)
}

func inLimiter(c *caddytest.Caddy) int {
	return len(c.Stacks("internal/limiter.(*Limiter).ServeHTTP("))
}

const bruteForce = "examples/brute_force.caddyfile"

// TestShippedLogins: guesses that their client leaves count, a login that succeeds empties only failures, and a
// full bucket stays full while others are made up.
func TestShippedLogins(t *testing.T) {
	t.Parallel()
	s := startShipped(t, shippedConfigs(t)[bruteForce], "", nil, func(config map[string]any) {
		config["apps"].(map[string]any)["rate_limit"] = map[string]any{"stores": map[string]any{"default": map[string]any{"module": "memory", "max_buckets": 16}}}
	})
	login := func(source, password string) rawRequest {
		return rawRequest{source: []string{source}, line: "GET /login", headers: []string{loginAs("alice", password)}}
	}
	const leaver = "192.0.2.1"
	for i := range int64(5) {
		conn, err := s.dial(login(leaver, "guess"))
		must(t, "a guess", err)
		eventually(t, "the guess is counted", func() error { return want("used", s.used("login", leaver), i+1) })
		must(t, "leave", conn.Close())
	}
	s.settle(t)
	must(t, "a guess after five that were left", want("status", s.must(login(leaver, "guess")).StatusCode, http.StatusTooManyRequests))
	must(t, "the password after five that were left", want("status", s.must(login(leaver, "secret")).StatusCode, http.StatusTooManyRequests))

	const guesser = "192.0.2.2"
	for range 4 {
		must(t, "a guess", want("status", s.must(login(guesser, "guess")).StatusCode, http.StatusUnauthorized))
	}
	must(t, "the password", want("status", s.must(login(guesser, "secret")).StatusCode, http.StatusOK))
	eventually(t, "it forgives", func() error {
		return errors.Join(want("used", s.used("login", guesser), 0), want("used by the hour", s.used("login_by_hour", guesser), 4))
	})
	for i := range 20 {
		must(t, "a guess of another", want("status", s.must(login(fmt.Sprint("198.18.0.", i+1), "guess")).StatusCode, http.StatusUnauthorized))
	}
	must(t, "a guess after those of others", want("status", s.must(login(leaver, "guess")).StatusCode, http.StatusTooManyRequests))
}
