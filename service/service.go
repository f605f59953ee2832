// Package service is a Caddy module: the HTTP handler [Service] (http.handlers.rate_limit_service,
// Caddyfile directive rate_limit_service), which serves Envoy's rate limit service v3, and reservations
// (limitv1), by gRPC, gRPC-Web and JSON. Its limits are zones, as those of rate_limit.
//
// It is a package of its own, so that who does not import it does not carry the libraries of the protocol.
package service

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

func init() {
	caddy.RegisterModule(new(Service))
	httpcaddyfile.RegisterHandlerDirective(directive, parseDirective)
	httpcaddyfile.RegisterDirectiveOrder(directive, httpcaddyfile.Before, "respond")
	shardlimit.AddHandlerSchema(directive, schema)
}

const directive = "rate_limit_service"

// Service answers Envoy's rate limit service v3, and whoever else speaks it: calls of
// `/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit` by gRPC, gRPC-Web or JSON. It also
// answers `Take`, `Reserve`, `Commit`, `Release` and `Renew` of `/shardlimit.limit.v1.LimitService/`. Other
// requests pass to the next handler.
//
// A call names a domain and descriptors, each a list of keys and values. The domains of the config lead
// descriptors to zones. A call has to fit into all zones to which its descriptors lead; if one
// refuses, none charges it.
//
// Whoever can call the service can spend anybody's limit, so it belongs on an internal address, or
// behind TLS with client certificates. gRPC without TLS needs the server option `protocols h1 h2c`.
//
// In the options of zones, `{rate_limit_service.<key>}` is the value of an entry,
// `{rate_limit_service}` is all of a descriptor, and `{http.vars.client_ip}` is the entry
// `remote_address`. Entries are request headers as well. The cost of a zone is what one hit costs.
// A zone without `key` counts each descriptor by itself.
type Service struct {
	shardlimit.Limits

	// The domains that calls may name. A call with another one is an error. Required.
	Domains []*Domain `json:"domains,omitempty"`

	domains map[string]level
	limiter *limiter.Limiter
	// calls are the procedures, by their paths.
	calls  map[string]http.Handler
	logger *zap.Logger
	// limitsIgnored throttles the warning about a descriptor's own limit.
	limitsIgnored telemetry.LogThrottle
	sweeper
}

// Domain leads the descriptors of calls to zones.
type Domain struct {
	// The name that calls give. Required.
	Name string `json:"name,omitempty"`

	// The first entries of descriptors. A descriptor that matches none has no limit.
	// Default: none.
	Descriptors []*Descriptor `json:"descriptors,omitempty"`
}

// Descriptor is an entry of descriptors, and where it leads. It needs `zone`, `zones`, `unlimited`, `denied`
// or `descriptors`.
type Descriptor struct {
	// The key of the entry. Required.
	Key string `json:"key,omitempty"`

	// The value of the entry. At its end, `*` stands for anything. The value itself precedes
	// values with `*`, of which the longest counts. Default: any other value.
	Value string `json:"value,omitempty"`

	// The zone that limits descriptors that end with this entry. Default: none.
	Zone string `json:"zone,omitempty"`

	// Several zones, in place of `zone`, into all of which such a descriptor has to fit: 10 in a second and
	// 1000 in a day, say. Default: none.
	Zones []string `json:"zones,omitempty"`

	// Whether `zone` charges descriptors that end with this entry although they do not fit, and refuses
	// none: reports of what was used already, such as those of Envoy's `apply_on_stream_done`.
	// Default: false.
	Always bool `json:"always,omitempty"`

	// Whether `zone` refuses descriptors that end with this entry if nothing was left before, and charges
	// their hits whole, even in a call that is refused: one descriptor that is asked with 0 hits first, and
	// reports what was used later, as Envoy Gateway and Envoy AI Gateway do. What is charged beyond the limit
	// ends with the window, or drains with algorithm gcra. Default: false.
	Postpaid bool `json:"postpaid,omitempty"`

	// Whether descriptors that end with this entry have no limit. Default: false.
	Unlimited bool `json:"unlimited,omitempty"`

	// Whether descriptors that end with this entry are always refused. Default: false.
	Denied bool `json:"denied,omitempty"`

	// The entries that may follow this one. Default: none.
	Descriptors []*Descriptor `json:"descriptors,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*Service) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.rate_limit_service",
		New: func() caddy.Module { return new(Service) },
	}
}

// UnmarshalJSON implements [json.Unmarshaler].
func (s *Service) UnmarshalJSON(text []byte) error {
	type plain Service
	return option.Decode(text, (*plain)(s))
}

// Provision implements [caddy.Provisioner]. It touches no network.
func (s *Service) Provision(ctx caddy.Context) error {
	if _, err := s.validate(); err != nil {
		return option.InJSON(err)
	}
	var err error
	if s.limiter, err = s.ProvisionService(ctx); err != nil {
		return err
	}
	s.logger = ctx.Logger()
	s.compile()
	s.calls = map[string]http.Handler{procedure: connect.NewUnaryHandler(procedure, s.shouldRateLimit, s.limits()...)}
	handle(s, "Take", s.take)
	handle(s, "Reserve", s.reserve)
	handle(s, "Commit", s.commit)
	handle(s, "Release", s.release)
	handle(s, "Renew", s.renew)
	s.handleStandard()
	s.prepareSweeps()
	return nil
}

// limits are the options of all procedures.
func (s *Service) limits() []connect.HandlerOption {
	return []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithRecover(s.recovered)}
}

// handle adds the handler of a procedure of limitv1.
func handle[Asked, Answer any](s *Service, name string, call func(context.Context, *Asked) (*Answer, error)) {
	handler := connect.NewUnaryHandler(limitService+name,
		func(ctx context.Context, r *connect.Request[Asked]) (*connect.Response[Answer], error) {
			answer, err := call(ctx, r.Msg)
			if err != nil {
				return nil, err
			}
			return connect.NewResponse(answer), nil
		}, s.limits()...)
	s.calls[limitService+name] = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, withCaller(r))
	})
}

// handleStandard adds the procedures of grpc.health.v1 and grpc.reflection. A service whose config runs serves:
// a store that cannot answer is no reason to ask another service, as on_error says what follows.
func (s *Service) handleStandard() {
	var names []string
	for _, path := range slices.Sorted(maps.Keys(s.calls)) {
		name := strings.Trim(path[:strings.LastIndexByte(path, '/')], "/")
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	add := func(path string, h http.Handler, methods ...string) {
		for _, method := range methods {
			s.calls[path+method] = h
		}
	}
	limits := connect.WithHandlerOptions(s.limits()...)
	path, health := grpchealth.NewHandler(grpchealth.NewStaticChecker(names...), limits)
	add(path, health, "Check", "Watch")
	reflector := grpcreflect.NewStaticReflector(append(names, grpchealth.HealthV1ServiceName)...)
	path, reflection := grpcreflect.NewHandlerV1(reflector, limits)
	add(path, reflection, "ServerReflectionInfo")
	path, reflection = grpcreflect.NewHandlerV1Alpha(reflector, limits)
	add(path, reflection, "ServerReflectionInfo")
}

// Cleanup implements [caddy.CleanerUpper].
func (s *Service) Cleanup() error {
	s.stop()
	return s.Limits.Cleanup()
}

// ServeHTTP implements [caddyhttp.MiddlewareHandler].
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	call, is := s.calls[r.URL.Path]
	if !is {
		return next.ServeHTTP(w, r)
	}
	call.ServeHTTP(flusher{w}, r)
	return nil
}

// flusher is a response writer that flushes by the writer behind it, which Caddy wraps: streams need that.
type flusher struct{ http.ResponseWriter }

// Flush implements [http.Flusher]. A writer that cannot flush keeps what it has until the call ends.
func (f flusher) Flush() { _ = http.NewResponseController(f.ResponseWriter).Flush() }

// Unwrap returns the writer behind it.
func (f flusher) Unwrap() http.ResponseWriter { return f.ResponseWriter }

// Interface guards.
var (
	_ caddy.Provisioner           = (*Service)(nil)
	_ caddy.CleanerUpper          = (*Service)(nil)
	_ caddyhttp.MiddlewareHandler = (*Service)(nil)
	_ json.Unmarshaler            = (*Service)(nil)
)
