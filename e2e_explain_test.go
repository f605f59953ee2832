package shardlimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
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

// entriesOf are the log entries whose message is that text.
func entriesOf(c *caddytest.Caddy, message string) (entries []map[string]any) {
	for line := range strings.Lines(c.Logs.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == message {
			entries = append(entries, entry)
		}
	}
	return entries
}

const explainedSite = `
{
	{{global}}
}
{{site}} {
	log
	route {
		rate_limit {
			zone api {
				key {header.X-Key}
				events 2
				window 1h
				algorithm %s
			}
			%s
		}
		respond "{http.rate_limit.zone} {http.rate_limit.key} {http.rate_limit.limit} {http.rate_limit.used} {http.rate_limit.cost} {http.rate_limit.outcome} {http.rate_limit.api.outcome}"
	}
	handle_errors {
		header X-Reason {http.rate_limit.reason}
		respond "{http.rate_limit.zone} {http.rate_limit.outcome} {http.rate_limit.reason} {http.rate_limit.wait}"
	}
}
`

// TestRefusalsAreLogged: the first one of each client and window, all, or none.
func TestRefusalsAreLogged(t *testing.T) {
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
			})
		}
	}
}

// TestDecisionsAreExplained: placeholders and the access log tell the same of
// the request, in the chain and in error routes.
func TestDecisionsAreExplained(t *testing.T) {
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
				want("in an error route", bodies[2], "api refused over_limit 3600")))
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

// TestEventsAreEmitted: of each refusal, and of servers that are left out and
// come back.
func TestEventsAreEmitted(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	config := fmt.Sprintf(`{
	"admin": {"listen": "{{admin}}", "config": {"persist": false}},
	"apps": {
		"events": {"subscriptions": [{"events": ["rate_limit_exceeded", "rate_limit_shard_down", "rate_limit_shard_up"], "handlers": [{"handler": "test_print"}]}]},
		"rate_limit": {"stores": {"default": {"module": "redis", "shards": [{"name": "a", "primary": %q}]}}},
		"http": {"servers": {"s": {"listen": ["{{addr}}"], "routes": [{"handle": [
			{"handler": "rate_limit", "zones": [{"name": "api", "key": ["static"], "events": 1, "window": "1h"}]},
			{"handler": "static_response", "body": "ok"}]}]}}}}}`, servers[0].Primary.Addr())
	c := startWithJSON(t, config)
	for range 3 {
		c.Get("/")
	}
	eventually(t, "events tell of the refusals", func() error {
		return want("events", strings.Count(c.Logs.String(), "event rate_limit_exceeded http.handlers.rate_limit map[remote_ip:127.0.0.1 wait:"), 2)
	})
	must(t, "kill", servers[0].Primary.Kill())
	eventually(t, "an event tells that the server is away", func() error {
		_ = c.Get("/")
		return want("told", strings.Contains(c.Logs.String(), "event rate_limit_shard_down rate_limit.stores.redis map[address:"+servers[0].Primary.Addr()+" role:charges shard:a store:default]"), true)
	})
	must(t, "restart", servers[0].Primary.Restart())
	eventually(t, "an event tells that it is back", func() error {
		return want("told", strings.Contains(c.Logs.String(), "event rate_limit_shard_up rate_limit.stores.redis map[address:"+servers[0].Primary.Addr()), true)
	})
}

// TestStoreCallsAreTraced: a traced request has a span for each question that a
// store is asked.
func TestStoreCallsAreTraced(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 0)
	const zones = `{"name": "checked", "key": ["static"], "events": 1, "window": "1h"}, {"name": "taken", "key": ["static"], "events": 5, "window": "1h", "charge": "before"}`
	config := fmt.Sprintf(`{
	"admin": {"listen": "{{admin}}", "config": {"persist": false}},
	"apps": {
		"rate_limit": {"stores": {"default": {"module": "redis", "shards": [{"name": "a", "primary": %q}]}}},
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
}
