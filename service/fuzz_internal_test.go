package service

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/envoy"
	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
)

// provisioned returns a service with a config.
func provisioned(tb testing.TB, config string) *Service {
	tb.Helper()
	s := new(Service)
	if err := json.Unmarshal([]byte(config), s); err != nil {
		tb.Fatal(err)
	}
	ctx, err := caddy.ProvisionContext(new(caddy.Config))
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(ctx)
	tb.Cleanup(cancel)
	if err := s.Provision(ctx); err != nil {
		tb.Fatal(err)
	}
	return s
}

// serve answers a request as Caddy's server lets the service do.
func serve(tb testing.TB, s *Service, r *http.Request) *httptest.ResponseRecorder {
	tb.Helper()
	w := httptest.NewRecorder()
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
	if err := s.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })); err != nil {
		tb.Error(err)
	}
	return w
}

// FuzzDescriptors sends any message. Nothing may panic, and what is answered has a status for each
// descriptor.
func FuzzDescriptors(f *testing.F) {
	const config = `{
		"domains": [{"name": "a", "descriptors": [
			{"key": "k", "zone": "z"}, {"key": "k", "value": "x*", "zone": "c", "descriptors": [{"key": "k", "zone": "l"}]},
			{"key": "remote_address", "zone": "c"}, {"key": "d", "denied": true}, {"key": "u", "unlimited": true}, {"key": "r", "zone": "z", "always": true}
		]}],
		"zones": [
			{"name": "z", "events": 5, "window": "1m"},
			{"name": "c", "key": ["{rate_limit_service.k}", "{http.vars.client_ip}"], "events": "{rate_limit_service.e}", "events_fallback": 3, "window": "1s", "algorithm": "gcra", "cost": "{rate_limit_service.c}", "ipv6_prefix": 64},
			{"name": "l", "key": "{http.request.header.K}", "events": 7, "window": "1s", "algorithm": "sliding_log"}
		]}`
	s := provisioned(f, config)
	for _, d := range []*commonv3.RateLimitDescriptor{
		{Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: "k", Value: "v"}}},
		{Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: "k", Value: "xy"}, {Key: "k", Value: "2"}}, HitsAddend: wrapperspb.UInt64(0)},
		{Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: "remote_address", Value: "2001:db8::1"}}, HitsAddend: wrapperspb.UInt64(3), IsNegativeHits: true},
		{Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: "k", Value: "x"}, {Key: "e", Value: "1"}, {Key: "c", Value: "4503599627370496"}}},
	} {
		text, err := proto.Marshal(&ratelimitv3.RateLimitRequest{Domain: "a", HitsAddend: 2, Descriptors: []*commonv3.RateLimitDescriptor{d, d}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r := httptest.NewRequest(http.MethodPost, procedure, bytes.NewReader(text))
		r.Header.Set("Content-Type", "application/proto")
		w := serve(t, s, r)
		answer, err := io.ReadAll(w.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		if w.Code != http.StatusOK {
			var failure struct{ Code string }
			if json.Unmarshal(answer, &failure) != nil || failure.Code != "invalid_argument" && failure.Code != "resource_exhausted" {
				t.Fatalf("status %d: %s", w.Code, answer)
			}
			return
		}
		var asked ratelimitv3.RateLimitRequest
		var got ratelimitv3.RateLimitResponse
		if err := proto.Unmarshal(answer, &got); err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(text, &asked); err != nil || len(got.GetStatuses()) != len(asked.GetDescriptors()) {
			t.Fatalf("%v: %d statuses for %d descriptors", err, len(got.GetStatuses()), len(asked.GetDescriptors()))
		}
	})
}

// FuzzLimits sends any message to a procedure. Nothing may panic, and no error is one of the server.
func FuzzLimits(f *testing.F) {
	s := provisioned(f, `{
		"domains": [{"name": "a", "descriptors": [
			{"key": "k", "zone": "z"}, {"key": "l", "zone": "l"}, {"key": "d", "denied": true}, {"key": "u", "unlimited": true}, {"key": "r", "zone": "z", "always": true}
		]}],
		"zones": [
			{"name": "z", "events": 5, "window": "1m", "cost": "{rate_limit_service.c}", "cost_fallback": 2},
			{"name": "l", "events": 7, "window": "1s", "algorithm": "sliding_log"}
		]}`)
	names := []string{"Take", "Reserve", "Commit", "Release", "Renew"}
	descriptors := []*limitv1.Descriptor{
		{Entries: []*limitv1.Entry{{Key: "k", Value: "v"}}, Hits: proto.Uint64(3)}, {Entries: []*limitv1.Entry{{Key: "l", Value: "v"}, {Key: "c", Value: "9"}}},
	}
	for i, m := range []proto.Message{
		&limitv1.TakeRequest{Domain: "a", Descriptors: descriptors, RequestId: "t"},
		&limitv1.ReserveRequest{Domain: "a", Descriptors: descriptors, RequestId: "r"},
		&limitv1.CommitRequest{RequestId: "r", Hits: []uint64{4503599627370496, 0}},
		&limitv1.ReleaseRequest{RequestId: "r", Domain: "a"},
		&limitv1.RenewRequest{RequestId: "r", Domain: "a"},
	} {
		text, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), text)
	}
	f.Fuzz(func(t *testing.T, which uint8, text []byte) {
		r := httptest.NewRequest(http.MethodPost, limitService+names[int(which)%len(names)], bytes.NewReader(text))
		r.Header.Set("Content-Type", "application/proto")
		w := httptest.NewRecorder()
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
		if err := s.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })); err != nil {
			t.Fatal(err)
		}
		if w.Code >= http.StatusInternalServerError {
			t.Fatalf("status %d: %s", w.Code, w.Body)
		}
	})
}

// FuzzConvert converts a config with some texts as keys and values. What is printed loads, with those texts, or
// a difference is named.
func FuzzConvert(f *testing.F) {
	f.Add("edge", "k", "v", "l")
	f.Add("a b", "a\u00a0b", "x\r\ny", "`")
	f.Add("zone", "unlimited", "import", "always")
	f.Add(`"`, "`\"", "\\\"", `\`)
	f.Add("#", "<<x", "404", "k*")
	f.Add("0", "0", "0", "{$")
	f.Add("日本", "\u2028", "\ufeff", "{x}")
	f.Add("0", "0", "{", "0")
	f.Fuzz(func(t *testing.T, domain, key, value, nested string) {
		for _, text := range []*string{&domain, &key, &value, &nested} {
			*text = strings.ToValidUTF8(*text, "")
		}
		text := fmt.Appendf(nil, `domain: %+q
descriptors:
- key: %+q
  value: %+q
  rate_limit: {unit: day, requests_per_unit: 1}
  descriptors: [{key: %+q, value: %+q, share_threshold: yes, rate_limit: {unit: day, requests_per_unit: 2}}]
- key: %+[4]q
  descriptors: [{key: %+[2]q}]
`, domain, key, value, nested, value+"*")
		converted, err := envoy.Convert(envoy.File{Name: "f.yaml", Text: text})
		if err != nil {
			if domain != "" && key != "" && nested != "" && !strings.Contains(err.Error(), ": domain: ") {
				t.Fatalf("%s\n%v", text, err)
			}
			return
		}
		got := adapted(t, converted.Caddyfile)
		// Where there are zones, one is of Envoy's own config.
		if n := len(converted.Differences); n > 1 || n == 1 && len(got.Zones) == 0 {
			return
		}
		here := func(value string) string {
			if value == "*" {
				return ""
			}
			return value
		}
		want := []*Domain{{Name: domain, Descriptors: []*Descriptor{
			{Key: key, Value: here(value), Zone: got.Zones[0].Name, Descriptors: []*Descriptor{
				{Key: nested, Value: here(value + "*"), Zone: got.Zones[1].Name},
			}},
			{Key: nested, Descriptors: []*Descriptor{{Key: key, Unlimited: true}}},
		}}}
		if !reflect.DeepEqual(got.Domains, want) || !slices.Equal(got.Zones[1].Key, []string{"{rate_limit_service." + key + "}"}) {
			t.Errorf("%s\nis converted to\n%s", text, converted.Caddyfile)
		}
	})
}

// adapted returns the service of a Caddyfile.
func adapted(t *testing.T, text string) *Service {
	t.Helper()
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	var config struct {
		Apps struct {
			HTTP struct {
				Servers struct {
					Srv0 struct {
						Routes []struct{ Handle []json.RawMessage }
					}
				}
			}
		}
	}
	if err = errors.Join(err, json.Unmarshal(out, &config)); err != nil {
		t.Fatalf("%s\n%v", text, err)
	}
	var handler map[string]json.RawMessage
	err = json.Unmarshal(config.Apps.HTTP.Servers.Srv0.Routes[0].Handle[0], &handler)
	delete(handler, "handler")
	s := new(Service)
	out, _ = json.Marshal(handler)
	if err = errors.Join(err, json.Unmarshal(out, s)); err != nil {
		t.Fatalf("%s\n%v", text, err)
	}
	return s
}
