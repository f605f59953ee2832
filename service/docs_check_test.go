//go:build check

package service_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_authz/v3"
	ratelimitfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	managerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// decode reads YAML, or what YAML was read to, as one of Envoy's own types, and checks it by their rules, also
// where it has others inside.
func decode(t *testing.T, from any, into proto.Message) {
	t.Helper()
	if text, is := from.(string); is {
		caddytest.Must(t, "read YAML", yaml.Unmarshal([]byte(text), &from))
	}
	text, err := json.Marshal(from)
	caddytest.Must(t, "encode", err)
	caddytest.Must(t, "decode", protojson.Unmarshal(text, into))
	caddytest.Must(t, "check", protorange.Range(into.ProtoReflect(), func(p protopath.Values) error {
		if m, is := p.Index(-1).Value.Interface().(protoreflect.Message); is {
			if v, has := m.Interface().(interface{ ValidateAll() error }); has {
				return v.ValidateAll()
			}
		}
		return nil
	}))
}

// descriptorsOf returns what Envoy asks about a request by the actions of a route.
func descriptorsOf(t *testing.T, limits []*routev3.RateLimit, path, address string) (all []*commonv3.RateLimitDescriptor) {
	t.Helper()
	for _, l := range limits {
		var entries []string
		for _, a := range l.GetActions() {
			switch {
			case a.GetRemoteAddress() != nil:
				entries = append(entries, "remote_address="+address)
			case a.GetRequestHeaders().GetHeaderName() == ":path":
				entries = append(entries, a.GetRequestHeaders().GetDescriptorKey()+"="+path)
			default:
				t.Fatalf("unexpected action %v", a)
			}
		}
		all = append(all, descriptor(entries...))
	}
	return all
}

// TestDocumentedGateways: Envoy's types have all that the configs for Envoy and Istio say, and by their
// actions the Caddyfile of the documents admits five logins of an address.
func TestDocumentedGateways(t *testing.T) {
	t.Parallel()
	var whole bootstrapv3.Bootstrap
	decode(t, read(t, "examples/envoy.yaml"), &whole)
	var manager managerv3.HttpConnectionManager
	caddytest.Must(t, "connection manager", whole.GetStaticResources().GetListeners()[0].GetFilterChains()[0].GetFilters()[0].GetTypedConfig().UnmarshalTo(&manager))
	decode(t, block(t, "docs/external_authorization.md", "ext_authz.v3"), new(managerv3.HttpFilter))

	var istio struct {
		Spec struct {
			ConfigPatches []struct {
				ApplyTo string `yaml:"applyTo"`
				Patch   struct{ Value any }
			} `yaml:"configPatches"`
		}
	}
	caddytest.Must(t, "read", yaml.Unmarshal([]byte(block(t, "docs/istio.md", "kind: EnvoyFilter")), &istio))
	patches := istio.Spec.ConfigPatches
	caddytest.Must(t, "patches", errors.Join(caddytest.Want("their number", len(patches), 2),
		caddytest.Want("the first", patches[0].ApplyTo, "HTTP_FILTER"), caddytest.Want("the second", patches[1].ApplyTo, "VIRTUAL_HOST")))
	var filter managerv3.HttpFilter
	decode(t, patches[0].Patch.Value, &filter)
	// What is merged into virtual hosts has no name of its own.
	var host routev3.VirtualHost
	merged, is := patches[1].Patch.Value.(map[string]any)
	caddytest.Must(t, "what is merged", caddytest.Want("being a map", is, true))
	merged["name"], merged["domains"] = "any", []string{"*"}
	decode(t, merged, &host)
	var exposed struct {
		Spec struct {
			Ports []struct {
				Name string
				Port int
			}
		}
	}
	caddytest.Must(t, "read", yaml.Unmarshal([]byte(block(t, "docs/istio.md", "kind: Service")), &exposed))

	for name, x := range map[string]struct {
		filter *managerv3.HttpFilter
		limits []*routev3.RateLimit
	}{
		"Envoy": {manager.GetHttpFilters()[0], manager.GetRouteConfig().GetVirtualHosts()[0].GetRateLimits()},
		"Istio": {&filter, host.GetRateLimits()},
	} {
		var limiter ratelimitfilterv3.RateLimit
		caddytest.Must(t, name, x.filter.GetTypedConfig().UnmarshalTo(&limiter))
		cluster := limiter.GetRateLimitService().GetGrpcService().GetEnvoyGrpc().GetClusterName()
		if name == "Istio" {
			port := exposed.Spec.Ports[0]
			caddytest.Must(t, name, errors.Join(caddytest.Want("port", port.Name, "grpc"),
				caddytest.Want("cluster", cluster, fmt.Sprintf("outbound|%d||shardlimit.limits.svc.cluster.local", port.Port))))
		} else {
			caddytest.Must(t, name, caddytest.Want("cluster", cluster, whole.GetStaticResources().GetClusters()[0].GetName()))
		}
		c := dial(t, documentedCaddy(t))
		ask := func(path, address string) string {
			return says(c.call(asking(limiter.GetDomain(), descriptorsOf(t, x.limits, path, address)...)))
		}
		for left := 4; left >= 0; left-- {
			caddytest.Must(t, name, caddytest.Want("a login", ask("/login", "192.0.2.7"), fmt.Sprintf("OK [OK %d/100 MINUTE, OK %d/5 MINUTE]", 95+left, left)))
		}
		if got := ask("/login", "192.0.2.7"); !strings.HasPrefix(got, "OVER_LIMIT [") || !strings.Contains(got, "OVER_LIMIT 0/5 MINUTE") {
			t.Errorf("%s: the sixth login: %s", name, got)
		}
		for _, path := range []string{"/login?x=1", "/login/", "/login;x", "/login%00"} {
			if got := ask(path, "192.0.2.7"); !strings.HasPrefix(got, "OVER_LIMIT [") {
				t.Errorf("%s: the seventh login, by %s: %s", name, path, got)
			}
		}
		caddytest.Must(t, name, errors.Join(
			caddytest.Want("another path", ask("/", "192.0.2.7"), "OK [OK 94/100 MINUTE, OK]"),
			caddytest.Want("another address", ask("/login", "192.0.2.8"), "OK [OK 99/100 MINUTE, OK 4/5 MINUTE]"),
		))
	}
}
