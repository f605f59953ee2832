package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

func init() {
	caddy.RegisterModule(eventPrinter{})
	caddy.RegisterModule(testTracer{})
}

// eventPrinter is an event handler that prints the events of the limiter.
type eventPrinter struct{}

func (eventPrinter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.test_print", New: func() caddy.Module { return new(eventPrinter) }}
}

func (eventPrinter) Handle(_ context.Context, e caddy.Event) error {
	fmt.Printf("event %s %s %v\n", e.Name(), e.Origin().CaddyModule().ID, e.Data)
	return nil
}

// testTracer traces requests, and prints the spans below each.
type testTracer struct{}

func (testTracer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_trace", New: func() caddy.Module { return new(testTracer) }}
}

func (testTracer) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	ctx, span := provider.Tracer("test").Start(r.Context(), "request")
	err := next.ServeHTTP(w, r.WithContext(ctx))
	span.End()
	for _, s := range spans.Ended() {
		if s.Parent().SpanID() == span.SpanContext().SpanID() {
			attributes := map[string]string{}
			for _, a := range s.Attributes() {
				attributes[string(a.Key)] = a.Value.String()
			}
			fmt.Printf("span %s %s %v\n", s.Name(), s.Status().Code, attributes)
		}
	}
	return err
}

var (
	_ caddyevents.Handler         = eventPrinter{}
	_ caddyhttp.MiddlewareHandler = testTracer{}
)

// entriesOf returns the log entries with this message.
func entriesOf(c *caddytest.Caddy, message string) (entries []map[string]any) {
	for line := range strings.Lines(c.Logs.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == message {
			entries = append(entries, entry)
		}
	}
	return entries
}

var explainedSite = caddytest.Site("", `
log
route {
	rate_limit {
		`+zoneWith("api", "events 2", "window 1h", "algorithm %s")+`
		%s
	}
	respond "{http.rate_limit.zone} {http.rate_limit.key} {http.rate_limit.limit} {http.rate_limit.used} {http.rate_limit.cost} {http.rate_limit.outcome} {http.rate_limit.api.outcome}"
}
handle_errors {
	header X-Reason {http.rate_limit.reason}
	respond "{http.rate_limit.zone} {http.rate_limit.outcome} {http.rate_limit.reason} {http.rate_limit.wait}"
}
`)

// TestRefusalsAreLogged logs the first refusal of each client and window, all, or none.
func TestRefusalsAreLogged(t *testing.T) {
	t.Parallel()
	for option, lines := range map[string]int{"": 2, "log_refusals first": 2, "log_refusals all": 6, "log_refusals none": 0} {
		for _, algorithm := range []string{"fixed_window", "gcra"} {
			t.Run(option+" "+algorithm, func(t *testing.T) {
				c := caddytest.Start(t, fmt.Sprintf(explainedSite, algorithm, option))
				for range 5 {
					c.Get("/", "X-Key: secret-alice")
					c.Get("/", "X-Key: secret-bob")
				}
				var entries []map[string]any
				eventually(t, "refusals are logged", func() error {
					entries = entriesOf(c, "rate limit exceeded")
					return want("lines", len(entries), lines)
				})
				keys := map[string]bool{}
				for _, entry := range entries {
					keys[fmt.Sprint(entry["key"])] = true
					must(t, "entry", errors.Join(want("zone", entry["zone"], any("api")), want("level", entry["level"], any("info")),
						want("reason", entry["reason"], any("over_limit")), want("remote_ip", entry["remote_ip"], any("127.0.0.1")),
						want("limit", entry["limit"], any(2.0)), want("used", entry["used"], any(2.0)),
						want("a wait", entry["wait"] != nil, true)))
				}
				must(t, "log", want("clients", len(keys), min(lines, 2)))
				for _, entry := range entries {
					text := fmt.Sprint(entry)
					must(t, text, want("shows a client key", strings.Contains(text, "secret"), false))
				}
				var top topAnswer
				c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
				digests := map[string]bool{}
				for _, client := range top.Refused {
					digests[fmt.Sprintf("%x", sha256.Sum256([]byte(client.ClientKey)))[:16]] = true
				}
				for key := range keys {
					must(t, key, want("the digest of a client key in top", digests[key], true))
				}
			})
		}
	}
}

// TestRefusalsAreLoggedAfterAReset: the bucket begins anew, and so does what is the first refusal.
func TestRefusalsAreLoggedAfterAReset(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, fmt.Sprintf(explainedSite, "fixed_window", "log_refusals first"))
	for n := range 3 {
		for range 4 {
			c.Get("/", "X-Key: alice")
		}
		eventually(t, "a refusal is logged", func() error {
			return want("lines", len(entriesOf(c, "rate limit exceeded")), n+1)
		})
		code, text := c.AdminCall(http.MethodDelete, "/rate_limit/buckets/api?key=alice", "", "")
		must(t, text, want("status", code, http.StatusOK))
	}
}

// TestDecisionsAreExplained checks that placeholders and the access log agree, in the chain and in
// error routes.
func TestDecisionsAreExplained(t *testing.T) {
	t.Parallel()
	for option, raw := range map[string]bool{"": false, "log_key": true} {
		t.Run(option, func(t *testing.T) {
			c := caddytest.Start(t, fmt.Sprintf(explainedSite, "fixed_window", option))
			var bodies []string
			for range 3 {
				bodies = append(bodies, c.Ask("/", "X-Key: alice").Body)
			}
			words := strings.Fields(bodies[0])
			must(t, bodies[0], want("raw key", strings.HasSuffix(words[1], "alice"), raw))
			words[1] = "key"
			must(t, "placeholders", errors.Join(
				want("in the chain", strings.Join(words, " "), "api key 2 0 1 allowed allowed"),
				want("in an error route", aboutAnHour(bodies[2]), "api refused over_limit 3600")))
			eventually(t, "the access log is written", func() error {
				return want("entries", len(entriesOf(c, "handled request")), 3)
			})
			entries := entriesOf(c, "handled request")
			first, last := entries[0]["rate_limit"].(map[string]any), entries[2]["rate_limit"].(map[string]any)
			must(t, fmt.Sprint(first, last), errors.Join(
				want("fields", fmt.Sprint(slices.Sorted(maps.Keys(first))), "[cost key limit outcome remaining reset used zone]"),
				want("used", first["used"], any(1.0)), want("outcome", first["outcome"], any("allowed")),
				want("outcome at last", last["outcome"], any("refused")), want("reason", last["reason"], any("over_limit")),
				want("raw key", strings.HasSuffix(fmt.Sprint(last["key"]), "alice"), raw)))
		})
	}
}

// aboutAnHour replaces what is left of a window of an hour, which a slow machine shortens, by 3600.
func aboutAnHour(text string) string {
	return regexp.MustCompile(`\b3[45]\d\d\b`).ReplaceAllString(text, "3600")
}

// startWithJSON runs Caddy with a config in JSON, in which {{admin}} and {{addr}}
// stand for the addresses of the admin API and of the site.
func startWithJSON(t *testing.T, config string) *caddytest.Caddy {
	t.Helper()
	c := caddytest.Start(t, "{\n{{global}}\n}\n{{site}} {\nrespond ok\n}\n")
	config = strings.NewReplacer("{{admin}}", c.Admin, "{{addr}}", c.Addr).Replace(config)
	status, body := c.AdminCall(http.MethodPost, "/load", "application/json", config)
	must(t, body, want("status", status, http.StatusOK))
	c.AwaitServers()
	return c
}

// TestEventsAreEmitted for each refusal, and for servers that are left out and come back.
func TestEventsAreEmitted(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	config := fmt.Sprintf(`{
	"admin": {"listen": "{{admin}}", "config": {"persist": false}},
	"apps": {
		"events": {"subscriptions": [{"events": ["rate_limit_exceeded", "rate_limit_shard_down", "rate_limit_shard_up"], "handlers": [{"handler": "test_print"}]}]},
		"rate_limit": {"stores": {"default": {"module": "redis", "shards": [{"name": "a", "primary": %q}], "check_timeout": "1m", "charge_timeout": "1m"}}},
		"http": {"servers": {"s": {"listen": ["{{addr}}"], "routes": [{"handle": [
			{"handler": "rate_limit", "zones": [{"name": "api", "key": ["static"], "events": 1, "window": "1h", "on_error": "allow"}]},
			{"handler": "static_response", "body": "ok"}]}]}}}}}`, servers[0].Primary.Addr())
	c := startWithJSON(t, config)
	for range 3 {
		c.Get("/")
	}
	eventually(t, "refusals emit events", func() error {
		return want("events", strings.Count(c.Logs.String(), "event rate_limit_exceeded http.handlers.rate_limit map[remote_ip:127.0.0.1 wait:"), 2)
	})
	must(t, "kill", servers[0].Primary.Kill())
	eventually(t, "an event reports the server down", func() error {
		_ = c.Get("/")
		return want("emitted", strings.Contains(c.Logs.String(), "event rate_limit_shard_down rate_limit.stores.redis map[address:"+servers[0].Primary.Addr()+" purpose:charges shard:a store:default]"), true)
	})
	must(t, "restart", servers[0].Primary.Restart())
	eventually(t, "an event reports the server up", func() error {
		return want("emitted", strings.Contains(c.Logs.String(), "event rate_limit_shard_up rate_limit.stores.redis map[address:"+servers[0].Primary.Addr()), true)
	})
}

// TestNearClientsAreReported once for each client and window: in the log, by the metric and as an
// event. Clients that are only observed have an event of their own.
func TestNearClientsAreReported(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	stores := map[string]string{
		"memory": `{"module": "memory"}`,
		"redis":  fmt.Sprintf(`{"module": "redis", "shards": [{"name": "a", "primary": %q}], "check_timeout": "1m", "charge_timeout": "1m"}`, servers[0].Primary.Addr()),
	}
	forStores(t, stores, func(t *testing.T, store string) {
		c := startWithJSON(t, fmt.Sprintf(`{
	"admin": {"listen": "{{admin}}", "config": {"persist": false}},
	"apps": {
		"events": {"subscriptions": [{"events": ["rate_limit_near", "rate_limit_would_refuse", "rate_limit_override"], "handlers": [{"handler": "test_print"}]}]},
		"rate_limit": {"stores": {"default": %s}},
		"http": {"metrics": {}, "servers": {"s": {"listen": ["{{addr}}"], "routes": [{"handle": [
			{"handler": "rate_limit", "zones": [
				{"name": "near", "key": "{http.request.header.X-Key}", "events": 5, "window": "1h", "warn": 60},
				{"name": "observed", "key": "{http.request.header.X-Key}", "events": 4, "window": "1h", "enforce": 0}]},
			{"handler": "static_response", "body": "ok"}]}]}}}}}`, store))
		for _, key := range []string{"alice", "bob"} {
			for range 6 {
				c.Get("/", "X-Key: "+key)
			}
		}
		eventually(t, "the events", func() error {
			logs := c.Logs.String()
			return errors.Join(
				want("events of near clients", strings.Count(logs, "event rate_limit_near http.handlers.rate_limit map[limit:5 remote_ip:127.0.0.1 used:3 zone:near]"), 2),
				want("all of them", strings.Count(logs, "event rate_limit_near "), 2),
				// The fifth request; the sixth is refused by the other zone, and no zone is asked.
				want("events of observed clients", strings.Count(logs, "event rate_limit_would_refuse http.handlers.rate_limit map[remote_ip:127.0.0.1 wait:") >= 2, true),
				want("log entries", strings.Count(logs, `"a client is near its rate limit","zone":"near"`), 2))
		})
		code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/near?key=alice&for=1h&reason=why", "", "")
		must(t, text, want("status", code, http.StatusOK))
		c.AwaitLog("event rate_limit_override http.handlers.rate_limit map[by:127.0.0.1:")
		c.AwaitLog("ended:false")
		must(t, "metric", want("near clients", c.Metric(`caddy_rate_limit_near_clients_total{zone="near"}`), "2"))
	})
}

// TestStoreCallsAreTraced checks that a traced request has a span for each call of a store.
func TestStoreCallsAreTraced(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	const zones = `{"name": "checked", "key": ["static"], "events": 1, "window": "1h"}, {"name": "taken", "key": ["static"], "events": 5, "window": "1h", "charge": "before"}`
	config := fmt.Sprintf(`{
	"admin": {"listen": "{{admin}}", "config": {"persist": false}},
	"apps": {
		"rate_limit": {"stores": {"default": {"module": "redis", "shards": [{"name": "a", "primary": %q}], "check_timeout": "1m", "charge_timeout": "1m"}}},
		"http": {"servers": {"s": {"listen": ["{{addr}}"], "routes": [{"handle": [
			{"handler": "test_trace"}, {"handler": "rate_limit", "zones": [%s]}, {"handler": "static_response", "body": "ok"}]}]}}}}}`,
		servers[0].Primary.Addr(), zones)
	c := startWithJSON(t, config)
	spans := func() []string {
		var lines []string
		for line := range strings.Lines(c.Logs.String()) {
			if strings.HasPrefix(line, "span ") {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
		return lines
	}
	c.Get("/")
	const check, take = "span rate_limit check Unset map[rate_limit.allowed:%t rate_limit.store:default rate_limit.zones:[\"checked\"]]",
		"span rate_limit take Unset map[rate_limit.allowed:true rate_limit.store:default rate_limit.zones:[\"taken\"]]"
	eventually(t, "the first request is traced", func() error {
		return want("spans", fmt.Sprint(spans()), fmt.Sprint([]string{fmt.Sprintf(check, true), take}))
	})
	eventually(t, "a refusal is traced", func() error {
		if c.Get("/").StatusCode != http.StatusTooManyRequests {
			return errors.New("not refused yet")
		}
		return want("a refusing span", slices.Contains(spans(), fmt.Sprintf(check, false)), true)
	})

	must(t, "kill the server", servers[0].Primary.Kill())
	eventually(t, "a failure is traced", func() error {
		c.Get("/")
		return want("a span of a store that does not answer", strings.Contains(strings.Join(spans(), "\n"), "check Error map[rate_limit.store:default rate_limit.zones:"), true)
	})
}

func measuredSite(store string, events int, charge string) string {
	return zonesSite(store, zoneWith("api", fmt.Sprint("events ", events), "charge "+charge), "respond /free 304\nrespond ok")
}

// seriesOf are the lines of /metrics that the limiter exports, by name and labels.
func seriesOf(c *caddytest.Caddy) map[string]string {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
	series := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && strings.HasPrefix(name, "caddy_rate_limit_") {
			series[name+"}"] = value
		}
	}
	return series
}

// TestClientsMakeNoSeries sends many client keys, 10 in each request, and a second time, when
// all are refused.
func TestClientsMakeNoSeries(t *testing.T) {
	t.Parallel()
	const zones = 10
	clients := sweep.Size(150, 10_000)
	servers := caddytest.StartShards(t, 2, 1)
	text := ""
	for n := range zones {
		text += zoneWith(fmt.Sprint("z", n), fmt.Sprint("key {header.X-Key}-", n), "events 1")
	}
	c := startWith(t, servers.Store(), text, "respond ok")
	var before map[string]string
	client := 0
	eventually(t, "both shards were asked and charged", func() error {
		client++
		c.Get("/", fmt.Sprint("X-Key: client ", client/2))
		before = seriesOf(c)
		for _, call := range []string{
			`operation="check",role="primary"`, `operation="check",role="replica"`, `operation="charge",role="primary"`,
		} {
			for _, shard := range []string{"a", "b"} {
				if series := `caddy_rate_limit_store_duration_seconds_count{` + call + `,shard="` + shard + `",store="default"}`; before[series] == "" {
					return errors.New("no series " + series)
				}
			}
		}
		return nil
	})
	for _, status := range []int{http.StatusOK, http.StatusTooManyRequests} {
		result, err := loadgen.Run(t.Context(), loadgen.Options{
			Addr: c.Addr, Connections: 16, Requests: int64(clients), Header: "X-Key", Duration: 10 * time.Minute,
			Key: func(n int64) string { return strconv.FormatInt(n, 10) },
		})
		must(t, "load", err)
		must(t, fmt.Sprint(result.Status), want("answers with the status", result.Status[status], int64(clients)))
	}
	after := seriesOf(c)
	for name := range after {
		if _, ok := before[name]; !ok {
			t.Errorf("new series: %s", name)
		}
	}
	must(t, "series", want("number", len(after), len(before)))
}

// TestMetricsAreContinuous counts requests and settled costs through four reloads, one of them
// rejected.
func TestMetricsAreContinuous(t *testing.T) {
	t.Parallel()
	for kind, store := range bothStores(caddytest.StartShards(t, 1, 1)) {
		for charge, free := range map[string]string{"after": "free", "before": "refunded"} {
			t.Run(kind+" "+charge, func(t *testing.T) {
				c := caddytest.Start(t, measuredSite(store, 1000, charge))
				for n := 1; n <= 4; n++ {
					a, b := c.Get("/", "X-Key: "+charge), c.Get("/free", "X-Key: "+charge)
					must(t, "requests", errors.Join(want("status", a.StatusCode, http.StatusOK), want("free", b.StatusCode, http.StatusNotModified)))
					if n == 3 {
						status, _ := c.Load(measuredSite(store, 0, charge))
						must(t, "load", want("accepted", status == http.StatusOK, false))
					} else {
						c.MustLoad(measuredSite(store, 1000+n, charge))
					}
					count := func(series string) string { return seriesOf(c)["caddy_rate_limit_"+series] }
					must(t, fmt.Sprintf("reload %d", n), errors.Join(
						want("requests", count(`requests_total{zone="api"}`), fmt.Sprint(2*n)),
						want("allowed", count(`decisions_total{outcome="allowed",zone="api"}`), fmt.Sprint(2*n)),
						want("charged", count(`settled_cost_total{kind="charged",zone="api"}`), fmt.Sprint(n)),
						want(free, count(`settled_cost_total{kind="`+free+`",zone="api"}`), fmt.Sprint(n))))
				}
			})
		}
	}
}

// observing is a site with a zone that is enforced for a share of the clients
// and, in the path /both, one that is enforced for all.
var observing = caddytest.Site("%s", `
log
route {
	header >X-Decision "{http.rate_limit.api.outcome} {http.rate_limit.api.reason} {http.rate_limit.api.wait} {http.rate_limit.outcome}"
	rate_limit {
		`+zoneWith("api", "events 2", "window 1h", "enforce %v", "%s")+`
		`+zoneWith("enforced", "match {\npath /both\n}", "events 3", "%[3]s")+`
	}
	respond ok
}
`)

// TestObservedClientsPass checks that a zone that is not enforced refuses no request, does not keep
// another zone from refusing, and reports what it would have done.
func TestObservedClientsPass(t *testing.T) {
	t.Parallel()
	forStores(t, bothStores(caddytest.StartShards(t, 2, 1)), func(t *testing.T, store string) {
		for _, charge := range []string{"charge after", "charge before"} {
			t.Run(charge, func(t *testing.T) {
				c := caddytest.Start(t, fmt.Sprintf(observing, store, 0, charge))
				for n, decision := range []string{
					"allowed   allowed", "allowed   allowed",
					"would_refuse over_limit 3600 would_refuse", "would_refuse over_limit 3600 would_refuse",
				} {
					a := c.Ask("/", "X-Key: alice "+charge)
					// What would have been refused is not charged.
					must(t, fmt.Sprintf("request %d", n), errors.Join(
						want("status", a.Status, http.StatusOK),
						want("remaining", a.Remaining, int64(max(1-n, 0))),
						want("used", a.Used, int64(min(n+1, 2))),
						want("retry-after", a.RetryAfter, -1),
						want("decision", aboutAnHour(a.Header.Get("X-Decision")), decision)))
				}
				must(t, "metrics", errors.Join(
					want("allowed", c.Metric(`caddy_rate_limit_decisions_total{outcome="allowed",zone="api"}`), "2"),
					want("would_refuse", c.Metric(`caddy_rate_limit_decisions_total{outcome="would_refuse",zone="api"}`), "2"),
					want("refused", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="api"}`), "0"),
					want("declined", c.Metric(`caddy_rate_limit_declined_requests_total{zone="api"}`), "0")))
				for n := range 4 {
					a := c.Ask("/both", "X-Key: bob "+charge)
					status, resource := http.StatusOK, "api"
					if n == 3 {
						status, resource = http.StatusTooManyRequests, "enforced"
					}
					must(t, fmt.Sprintf("request %d of both", n), errors.Join(
						want("status", a.Status, status), want("resource", a.Resource, resource)))
				}
				must(t, "metric", want("refused by the other", c.Metric(`caddy_rate_limit_decisions_total{outcome="refused",zone="enforced"}`), "1"))
				eventually(t, "the log has both", func() error {
					return errors.Join(
						want("lines of observed refusals", len(entriesOf(c, "rate limit would have been exceeded")), 2),
						want("lines of refusals", len(entriesOf(c, "rate limit exceeded")), 1))
				})
			})
		}
	})
}

// TestEnforceIsRaisedLive raises the share by PATCH: refused clients stay refused, and others join
// them until all are.
func TestEnforceIsRaisedLive(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, fmt.Sprintf(observing, "", 0, ""))
	const clients = 40
	for client := range clients {
		for range 2 {
			c.Get("/", fmt.Sprint("X-Key: ", client))
		}
	}
	refused := map[int]bool{}
	for _, percent := range []float64{0, 12.5, 50, 100} {
		status, body := patch(c, "enforce", percent)
		must(t, body, want("status", status, http.StatusOK))
		c.AwaitServers()
		now := map[int]bool{}
		for client := range clients {
			if c.Get("/", fmt.Sprint("X-Key: ", client)).StatusCode == http.StatusTooManyRequests {
				now[client] = true
			}
		}
		for client := range refused {
			must(t, fmt.Sprintf("client %d at %v percent", client, percent), want("refused", now[client], true))
		}
		if share := 100 * float64(len(now)) / clients; share < percent-15 || share > percent+15 {
			t.Errorf("at %v percent %v percent of the clients are refused", percent, share)
		}
		refused = now
	}
	must(t, "at 100 percent", want("refused clients", len(refused), clients))
	for _, bad := range []float64{-1, 100.5} {
		status, body := patch(c, "enforce", bad)
		must(t, body, errors.Join(want("accepted", status == http.StatusOK, false),
			want("names the option", strings.Contains(body, fmt.Sprintf("enforce %v: it must be from 0 to 100 percent", bad)), true)))
	}
}

// TestObservedClientsOutliveTheStore checks that a zone that only observes denies no request.
func TestObservedClientsOutliveTheStore(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := caddytest.Start(t, fmt.Sprintf(observing, servers.Store("on_error deny"), 0, "charge before"))
	must(t, "before", want("status", c.Get("/", "X-Key: alice").StatusCode, http.StatusOK))
	must(t, "kill", servers[0].Primary.Kill())
	a := c.Ask("/", "X-Key: alice")
	must(t, "without a store", errors.Join(
		want("status", a.Status, http.StatusOK),
		want("decision", a.Header.Get("X-Decision"), "error_allowed store_error  error_allowed"),
		want("status in the other zone", c.Get("/both", "X-Key: alice").StatusCode, http.StatusServiceUnavailable)))
}
