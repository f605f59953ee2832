package service_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

const path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"

// site is a Caddyfile of a site with the service, in the store that the global option names.
func site(global, block string) string {
	return caddytest.Site("servers {\nprotocols h1 h2c\n}\n"+global, "rate_limit_service {\n"+block+"\n}\nrespond \"next\" 404\n")
}

// descriptor returns one of "key=value" entries.
func descriptor(entries ...string) *commonv3.RateLimitDescriptor {
	d := new(commonv3.RateLimitDescriptor)
	for _, e := range entries {
		key, value, _ := strings.Cut(e, "=")
		d.Entries = append(d.Entries, &commonv3.RateLimitDescriptor_Entry{Key: key, Value: value})
	}
	return d
}

// costing is d with its own hits, which are given back if they are less than 0.
func costing(hits int64, d *commonv3.RateLimitDescriptor) *commonv3.RateLimitDescriptor {
	d.IsNegativeHits = hits < 0
	d.HitsAddend = wrapperspb.UInt64(uint64(max(hits, -hits)))
	return d
}

func asking(domain string, descriptors ...*commonv3.RateLimitDescriptor) *ratelimitv3.RateLimitRequest {
	return &ratelimitv3.RateLimitRequest{Domain: domain, Descriptors: descriptors}
}

// client calls a service by gRPC.
type client struct {
	t *testing.T
	ratelimitv3.RateLimitServiceClient
}

func dial(t *testing.T, c *caddytest.Caddy) client {
	t.Helper()
	conn, err := grpc.NewClient(c.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	caddytest.Must(t, "dial", err)
	t.Cleanup(func() { conn.Close() })
	return client{t, ratelimitv3.NewRateLimitServiceClient(conn)}
}

func (c client) call(r *ratelimitv3.RateLimitRequest) *ratelimitv3.RateLimitResponse {
	c.t.Helper()
	answer, err := c.ShouldRateLimit(c.t.Context(), r)
	caddytest.Must(c.t, "call", err)
	return answer
}

// says returns the overall code and, in brackets, the code of each descriptor and what is left of its limit.
func says(a *ratelimitv3.RateLimitResponse) string {
	var all []string
	for _, s := range a.GetStatuses() {
		text := s.GetCode().String()
		if s.GetCurrentLimit() != nil {
			text += fmt.Sprintf(" %d/%d %s", s.GetLimitRemaining(), s.GetCurrentLimit().GetRequestsPerUnit(), s.GetCurrentLimit().GetUnit())
		}
		all = append(all, text)
	}
	return a.GetOverallCode().String() + " [" + strings.Join(all, ", ") + "]"
}

func (c client) expect(what, want string, r *ratelimitv3.RateLimitRequest) {
	c.t.Helper()
	if got := says(c.call(r)); got != want {
		c.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

const edge = `
	domain edge {
		descriptor remote_address zone per_ip
		descriptor path /login {
			descriptor remote_address zone logins
		}
		descriptor path /health unlimited
		descriptor path /admin denied
		descriptor tenant zone plain
		descriptor tenant gold* zone gold
		descriptor tenant gold-vip zone vip
		descriptor watched zone watched
		descriptor smooth zone smooth
		descriptor user zone tokens {
			descriptor used zone tokens always
		}
	}
	zone per_ip {
		events 5
		window 1h
	}
	zone logins {
		events 2
		window 1m
	}
	zone plain {
		key {rate_limit_service.tenant}
		events 10
		window 90s
	}
	zone gold {
		events 100
		window day
	}
	zone vip {
		events 1000
		window 1s
	}
	zone tokens {
		key {rate_limit_service.user}
		events 100
		window 1h
	}
	zone smooth {
		algorithm gcra
		events 100
		burst 10
		window 1h
	}
	zone watched {
		events 1
		window 1m aligned
		enforce 0
	}
`

// TestProtocol of descriptors, hits and answers, by gRPC.
func TestProtocol(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, caddytest.Start(t, site(store, edge)))
			one, two := descriptor("remote_address=192.0.2.1"), descriptor("remote_address=192.0.2.2")
			c.expect("first", "OK [OK 4/5 HOUR]", asking("edge", one))
			c.expect("a client of its own", "OK [OK 4/5 HOUR]", asking("edge", two))
			c.expect("nested", "OK [OK 1/2 MINUTE]", asking("edge", descriptor("path=/login", "remote_address=192.0.2.1")))
			c.expect("deeper than the config", "OK [OK]", asking("edge", descriptor("remote_address=192.0.2.1", "x=y")))
			c.expect("not as deep", "OK [OK]", asking("edge", descriptor("path=/login")))
			c.expect("unknown key", "OK [OK]", asking("edge", descriptor("x=y")))
			c.expect("unlimited", "OK [OK]", asking("edge", descriptor("path=/health")))
			c.expect("any value", "OK [OK 9/10 UNKNOWN]", asking("edge", descriptor("tenant=silver")))
			c.expect("a burst is no rate", "OK [OK 9/10 UNKNOWN]", asking("edge", descriptor("smooth=1")))
			c.expect("wildcard", "OK [OK 99/100 DAY]", asking("edge", descriptor("tenant=goldie")))
			c.expect("exact", "OK [OK 999/1000 SECOND]", asking("edge", descriptor("tenant=gold-vip")))
			c.expect("denied asks no other", "OVER_LIMIT [UNKNOWN, OVER_LIMIT]", asking("edge", one, descriptor("path=/admin")))

			c.expect("several", "OK [OK 3/5 HOUR, OK, OK 8/10 UNKNOWN]", asking("edge", one, descriptor("x=y"), descriptor("tenant=silver")))
			c.expect("one bucket twice", "OK [OK 1/5 HOUR, OK 1/5 HOUR]", asking("edge", one, one))
			r := asking("edge", one)
			r.HitsAddend = 2
			c.expect("hits that do not fit", "OVER_LIMIT [OVER_LIMIT 1/5 HOUR]", r)
			c.expect("hits of the descriptor", "OK [OK 0/5 HOUR]", &ratelimitv3.RateLimitRequest{
				Domain: "edge", HitsAddend: 7, Descriptors: []*commonv3.RateLimitDescriptor{costing(1, descriptor("remote_address=192.0.2.1"))},
			})
			// Whether the other zone is asked depends on what this process knows of the first.
			if got := says(c.call(asking("edge", one, two))); !strings.HasPrefix(got, "OVER_LIMIT [OVER_LIMIT 0/5 HOUR, ") {
				t.Errorf("a refusal that charges none: %s", got)
			}
			c.expect("nothing was charged", "OK [OK 3/5 HOUR]", asking("edge", two))
			c.expect("a look that finds nothing left", "OVER_LIMIT [OVER_LIMIT 0/5 HOUR]", asking("edge", costing(0, descriptor("remote_address=192.0.2.1"))))
			c.expect("a refund", "OK [OK 3/5 HOUR]", asking("edge", costing(-3, descriptor("remote_address=192.0.2.1"))))
			caddytest.Eventually(t, "the refund arrives", func() error {
				return caddytest.Want("a look", says(c.call(asking("edge", costing(0, descriptor("remote_address=192.0.2.1"))))), "OK [OK 3/5 HOUR]")
			})
			c.expect("a refund of more than was spent", "OK [OK 5/5 HOUR]", asking("edge", costing(-30, descriptor("remote_address=192.0.2.1"))))
			c.expect("all of it", "OK [OK 0/5 HOUR]", asking("edge", costing(5, descriptor("remote_address=192.0.2.1"))))

			ask := asking("edge", costing(0, descriptor("user=a")))
			c.expect("before a report", "OK [OK 100/100 HOUR]", ask)
			c.expect("a report", "OK [OK 40/100 HOUR]", asking("edge", costing(60, descriptor("user=a", "used=yes"))))
			c.expect("a report that does not fit", "OK [OK 0/100 HOUR]", asking("edge", costing(60, descriptor("user=a", "used=yes"))))
			caddytest.Eventually(t, "reports count", func() error {
				return caddytest.Want("a look", says(c.call(ask)), "OVER_LIMIT [OVER_LIMIT 0/100 HOUR]")
			})

			c.expect("shadow", "OK [OK 0/1 MINUTE]", asking("edge", descriptor("watched=a")))
			c.expect("shadow without room", "OK [OK 0/1 MINUTE]", asking("edge", descriptor("watched=a")))

			a := c.call(asking("edge", one))
			got := map[string]string{}
			for _, h := range a.GetResponseHeadersToAdd() {
				got[h.GetKey()] = h.GetValue()
			}
			left := a.GetStatuses()[0].GetDurationUntilReset().AsDuration()
			caddytest.Must(t, "headers", errors.Join(
				caddytest.Want("limit", got["X-Ratelimit-Limit"], "5"), caddytest.Want("remaining", got["X-Ratelimit-Remaining"], "0"),
				caddytest.Want("resource", got["X-Ratelimit-Resource"], "per_ip"), caddytest.Want("having Retry-After", got["Retry-After"] != "", true),
				caddytest.Want("until reset within an hour", left > 0 && left.Hours() <= 1, true),
			))
		})
	}
}

// TestErrorsOfTheProtocol: hostile and wrong calls are errors, and the service goes on.
func TestErrorsOfTheProtocol(t *testing.T) {
	t.Parallel()
	caddy := caddytest.Start(t, site("", edge+`
		domain logs {
			descriptor user zone log
		}
		zone log {
			events 5
			window 1m
			algorithm sliding_log
		}
		domain keyed {
			descriptor x-id zone by_header {
				descriptor x-id zone by_header
			}
		}
		zone by_header {
			key {header.X-Id}
			events 5
			window 1m
		}`))
	c := dial(t, caddy)
	many := func(n int) (all []*commonv3.RateLimitDescriptor) {
		for range n {
			all = append(all, descriptor("remote_address=192.0.2.1"))
		}
		return all
	}
	deep := new(commonv3.RateLimitDescriptor)
	for range 2000 {
		deep.Entries = append(deep.Entries, descriptor("path=/login").Entries...)
	}
	limited := descriptor("remote_address=192.0.2.1")
	limited.Limit = &commonv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1000}
	big := strings.Repeat("a", 1<<20)
	for name, x := range map[string]struct {
		asked *ratelimitv3.RateLimitRequest
		code  codes.Code
		says  string
	}{
		"no domain":           {asking("", many(1)...), codes.InvalidArgument, "domain is empty"},
		"unknown domain":      {asking("other", many(1)...), codes.InvalidArgument, `domain "other" is unknown`},
		"no descriptors":      {asking("edge"), codes.InvalidArgument, "descriptors is empty"},
		"101 descriptors":     {asking("edge", many(101)...), codes.InvalidArgument, "descriptors has 101, and a call may have at most 100"},
		"10,000 descriptors":  {asking("edge", many(10_000)...), codes.ResourceExhausted, "larger than configured max"},
		"a megabyte of key":   {asking("edge", descriptor(big+"=1")), codes.ResourceExhausted, "larger than configured max"},
		"a megabyte of value": {asking("edge", descriptor("remote_address="+big)), codes.ResourceExhausted, "larger than configured max"},
		"a long domain":       {asking(big[:50_000], many(1)...), codes.InvalidArgument, `aaa..." is unknown`},
		"no entries":          {asking("edge", new(commonv3.RateLimitDescriptor)), codes.InvalidArgument, "descriptors[0] has no entries"},
		"an empty key":        {asking("edge", descriptor("a=b"), descriptor("=b")), codes.InvalidArgument, "descriptors[1].entries[0] has an empty key"},
		"a limit":             {asking("edge", limited), codes.OK, ""},
		"too many hits":       {asking("edge", costing(1<<60, descriptor("a=b"))), codes.InvalidArgument, "descriptors[0].hits_addend"},
		"refund of a log":     {asking("logs", costing(-1, descriptor("user=a"))), codes.InvalidArgument, "descriptors[0].is_negative_hits: zone log"},
		"two names":           {asking("keyed", descriptor("x-id=a", "x-id=b")), codes.InvalidArgument, "several values of {http.request.header.X-Id}"},
		"many entries":        {asking("edge", deep), codes.OK, ""},
		"100 descriptors":     {asking("edge", many(100)...), codes.OK, ""},
		"a long value":        {asking("edge", descriptor("remote_address="+big[:60_000])), codes.OK, ""},
		"bytes that are rude": {asking("edge", descriptor("remote_address=\x00\r\n{http.request.host}\u202e")), codes.OK, ""},
	} {
		_, err := c.ShouldRateLimit(t.Context(), x.asked)
		if got := grpcstatus.Convert(err); got.Code() != x.code || !strings.Contains(got.Message(), x.says) {
			t.Errorf("%s: %v, want %v: %s", name, err, x.code, x.says)
		}
	}
	c.expect("afterwards", "OK [OK 4/5 HOUR]", asking("edge", descriptor("remote_address=192.0.2.9")))
}

// post sends a call as plain JSON.
func post(t *testing.T, c *caddytest.Caddy, body string) (code int, answer map[string]any) {
	t.Helper()
	resp, err := c.Client.Post(c.URL+path, "application/json", strings.NewReader(body))
	caddytest.Must(t, "post", err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	caddytest.Must(t, "read", err)
	if err := json.Unmarshal(text, &answer); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return resp.StatusCode, answer
}

// TestOtherProtocols: JSON and gRPC-Web, and other requests pass to the next handler.
func TestOtherProtocols(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, site("", edge))
	body, err := protojson.Marshal(asking("edge", descriptor("remote_address=192.0.2.1")))
	caddytest.Must(t, "encode", err)
	code, answer := post(t, c, string(body))
	caddytest.Must(t, "JSON", errors.Join(caddytest.Want("status", code, 200), caddytest.Want("code", answer["overallCode"], any("OK"))))
	for name, wrong := range map[string]string{
		"no JSON":        "{",
		"a wrong type":   `{"domain": 5}`,
		"another one":    `{"domain": "edge", "descriptors": {}}`,
		"negative hits":  `{"domain": "edge", "hitsAddend": -1, "descriptors": [{"entries": [{"key": "a"}]}]}`,
		"unknown domain": `{"domain": "x", "descriptors": [{"entries": [{"key": "a"}]}]}`,
	} {
		code, answer := post(t, c, wrong)
		caddytest.Must(t, name, errors.Join(caddytest.Want("status", code, 400), caddytest.Want("code", answer["code"], any("invalid_argument"))))
	}
	frame := func(message []byte) []byte { return append([]byte{0, 0, 0, 0, byte(len(message))}, message...) }
	resp, err := c.Client.Post(c.URL+path, "application/grpc-web+json", bytes.NewReader(frame(body)))
	caddytest.Must(t, "gRPC-Web", err)
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	caddytest.Must(t, "gRPC-Web", errors.Join(err, caddytest.Want("status 0", strings.Contains(strings.ToLower(string(text)), "grpc-status: 0"), true)))
	next, err := c.Try("/elsewhere")
	caddytest.Must(t, "another path", errors.Join(err, caddytest.Want("status", next.StatusCode, 404)))
	get, err := c.Try(path)
	caddytest.Must(t, "another method", errors.Join(err, caddytest.Want("status", get.StatusCode, http.StatusMethodNotAllowed)))
}
