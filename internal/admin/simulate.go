package admin

// A simulation asks what the limits would do with a request, and neither counts nor
// serves it. It leads the request through the routes of the running config to the
// rate_limit handlers that it would meet. Caddy compiles routes into closures that
// cannot be inspected, so [walk] follows their exported fields as
// [caddyhttp.RouteList.Compile] does. Handlers on the way are not run, because they
// may have effects; the exceptions are those that only prepare the request, such as
// rewrites, since matchers and keys depend on them. What a handler does to a request
// is known by its module ID alone (see handlersRun, handlersAside and
// handlersLast); an answer names the handlers of other modules in passed_over.

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http/httpguts"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

// simulationTimeout bounds a simulation.
const simulationTimeout = 5 * time.Second

// simulate answers POST /rate_limit/simulate with what the limits would do with a
// request.
func simulate(_ runningConfig, r *http.Request) (any, error) {
	w := nowhere{}
	asked, err := readSimulatedRequest(w, r.Body)
	if err != nil {
		return nil, err
	}
	web, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return nil, apiErrorf(http.StatusNotFound, "the running config has no HTTP servers")
	}
	ctx, cancel := context.WithTimeout(r.Context(), simulationTimeout)
	defer cancel()
	request, server, err := asked.prepare(ctx, w, web.(*caddyhttp.App))
	if err != nil {
		if apiErr := new(caddy.APIError); !errors.As(err, apiErr) {
			err = apiErrorf(http.StatusBadRequest, "%w", err)
		}
		return nil, err
	}
	s := limiter.NewSimulation(w)
	k := &walk{server: server, w: w, groups: map[string]bool{}, meet: s.Meet}
	if err := k.routes(server.Routes, request, func(*http.Request) error { return nil }); err != nil {
		s.Answer.Error = err.Error()
	}
	s.Answer.PassedOver = k.passedOver
	return s.Answer, nil
}

// nowhere discards the response to a simulated request, except for its header.
type nowhere http.Header

// Header implements [http.ResponseWriter].
func (w nowhere) Header() http.Header { return http.Header(w) }

// Write implements [http.ResponseWriter].
func (nowhere) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements [http.ResponseWriter].
func (nowhere) WriteHeader(int) {}

// simulatedRequest is the request to simulate.
type simulatedRequest adminapi.SimulatedRequest

const (
	// maxSimulatedRequest bounds the body of the call.
	maxSimulatedRequest = 256 << 10
	// redirectServer is the server with which Caddy redirects HTTP to HTTPS.
	redirectServer = "remaining_auto_https_redirects"
)

func readSimulatedRequest(w http.ResponseWriter, body io.ReadCloser) (*simulatedRequest, error) {
	decoder := json.NewDecoder(http.MaxBytesReader(w, body, maxSimulatedRequest))
	decoder.DisallowUnknownFields()
	var s simulatedRequest
	err := decoder.Decode(&s)
	if err == nil {
		if _, err = decoder.Token(); errors.Is(err, io.EOF) {
			return &s, nil
		}
		err = cmp.Or(err, errors.New("there is something behind the request"))
	}
	status := http.StatusBadRequest
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		status = http.StatusRequestEntityTooLarge
	}
	return nil, apiErrorf(status, "read the request to simulate: %w", err)
}

// prepare returns the request as the server would hand it to its routes, and that
// server.
func (s *simulatedRequest) prepare(ctx context.Context, w http.ResponseWriter, app *caddyhttp.App) (*http.Request, *caddyhttp.Server, error) {
	target, err := s.target()
	if err != nil {
		return nil, nil, err
	}
	server, err := serverFor(app, s.Server, target)
	if err != nil {
		return nil, nil, err
	}
	remote, err := remoteAddr(s.RemoteAddr)
	if err != nil {
		return nil, nil, err
	}
	host := cmp.Or(s.Headers.Get("Host"), target.Host)
	if host == "" {
		if host, err = onlyHost(server); err != nil {
			return nil, nil, err
		}
	}
	ctx = context.WithValue(ctx, http.LocalAddrContextKey, localAddr(server))
	r, err := http.NewRequestWithContext(ctx, s.Method, "/", http.NoBody)
	if err != nil {
		return nil, nil, err
	}
	// A server parses a target in this way: two slashes at its beginning are part of
	// the path.
	if r.URL, err = url.ParseRequestURI(target.RequestURI()); err != nil {
		return nil, nil, err
	}
	r.Host, r.RequestURI, r.RemoteAddr = host, target.RequestURI(), remote
	r.Method = cmp.Or(s.Method, http.MethodGet)
	if target.Scheme == "https" || target.Scheme == "" && len(server.TLSConnPolicies) > 0 {
		name, _, err := net.SplitHostPort(host)
		if err != nil {
			name = host
		}
		r.TLS = &tls.ConnectionState{HandshakeComplete: true, Version: tls.VersionTLS13, ServerName: name}
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
	}
	if err := s.setHeaders(r, server); err != nil {
		return nil, nil, err
	}
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, server), server, nil
}

// target parses the URL, which is a whole one or a path.
func (s *simulatedRequest) target() (*url.URL, error) {
	if s.URL == "" {
		return nil, errors.New(`url is missing: give one such as "https://example.com/api" or "/api"`)
	}
	target, err := url.Parse(s.URL)
	switch {
	case err != nil:
		return nil, err
	case target.Scheme == "" && target.Host == "" && strings.HasPrefix(s.URL, "/"):
	case (target.Scheme == "http" || target.Scheme == "https") && target.Host != "":
	default:
		return nil, fmt.Errorf("url %q: it must begin with http://, https:// or /", s.URL)
	}
	return target, nil
}

// setHeaders sets the headers of r, except for those that the server drops.
func (s *simulatedRequest) setHeaders(r *http.Request, server *caddyhttp.Server) error {
	for name, values := range s.Headers {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("header %q: that is no name of a header", name)
		}
		for _, value := range values {
			if !httpguts.ValidHeaderFieldValue(value) {
				return fmt.Errorf("header %s: its value has characters that are not allowed", name)
			}
			if drops(server, http.CanonicalHeaderKey(name)) {
				continue
			}
			r.Header.Add(name, value)
		}
	}
	r.Header.Del("Host")
	return nil
}

// drops reports whether the server drops a header for the characters in its name.
func drops(server *caddyhttp.Server, name string) bool {
	return strings.Contains(name, "_") && !expects(server.ExpectedUnderscoreHeaders, name) ||
		strings.Contains(name, ".") && !expects(server.ExpectedDotHeaders, name)
}

func expects(entries []string, name string) bool {
	return slices.ContainsFunc(entries, func(entry string) bool {
		prefix, isPrefix := strings.CutSuffix(http.CanonicalHeaderKey(entry), "*")
		return prefix == name || isPrefix && strings.HasPrefix(name, prefix)
	})
}

// remoteAddr returns the address with a port, which the text may leave out.
func remoteAddr(text string) (string, error) {
	if text == "" {
		return "127.0.0.1:0", nil
	}
	if addr, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return netip.AddrPortFrom(addr, 0).String(), nil
	}
	if _, err := netip.ParseAddrPort(text); err != nil {
		return "", fmt.Errorf("remote_addr %q: it must be an IP address, with or without a port", text)
	}
	return text, nil
}

// serverFor returns the server of that name or, if the name is empty, the only one
// that listens on the port of the URL.
func serverFor(app *caddyhttp.App, name string, target *url.URL) (*caddyhttp.Server, error) {
	names := sortedKeys(app.Servers)
	if name != "" {
		if server, ok := app.Servers[name]; ok {
			return server, nil
		}
		return nil, apiErrorf(http.StatusNotFound, "server %q is unknown; there is %s", name, strings.Join(names, ", "))
	}
	port := cmp.Or(target.Port(), map[string]string{"http": "80", "https": "443"}[target.Scheme])
	fitting := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		if port == "" {
			return name == redirectServer
		}
		return !slices.ContainsFunc(app.Servers[name].Listen, func(addr string) bool { return hasPort(addr, port) })
	})
	switch {
	case len(fitting) == 1:
		return app.Servers[fitting[0]], nil
	case len(names) == 1:
		// Something in front of it may map ports.
		return app.Servers[names[0]], nil
	default:
		return nil, fmt.Errorf("which server is meant is not clear: name one of %s (--server, in JSON server)", strings.Join(names, ", "))
	}
}

func hasPort(addr, port string) bool {
	parsed, err := caddy.ParseNetworkAddress(addr)
	n, _ := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0 && parsed.StartPort <= uint(n) && uint(n) <= parsed.EndPort
}

func localAddr(server *caddyhttp.Server) net.Addr {
	local := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}
	if len(server.Listen) > 0 {
		if parsed, err := caddy.ParseNetworkAddress(server.Listen[0]); err == nil {
			local.Port = int(parsed.StartPort)
		}
	}
	return local
}

// onlyHost returns the only host that the server's routes match.
func onlyHost(server *caddyhttp.Server) (string, error) {
	var hosts []string
	for _, route := range server.Routes {
		for _, set := range route.MatcherSets {
			for _, m := range set {
				switch m := m.(type) {
				case caddyhttp.MatchHost:
					hosts = append(hosts, m...)
				case *caddyhttp.MatchHost:
					hosts = append(hosts, *m...)
				}
			}
		}
	}
	slices.Sort(hosts)
	hosts = slices.Compact(hosts)
	switch {
	case len(hosts) == 0:
		return "localhost", nil
	case len(hosts) == 1 && !strings.ContainsAny(hosts[0], "*{"):
		return hosts[0], nil
	default:
		return "", fmt.Errorf("url has no host: write it out, for one of %s", strings.Join(hosts, ", "))
	}
}

// walk leads a request through the routes of a server.
type walk struct {
	server *caddyhttp.Server
	w      http.ResponseWriter
	groups map[string]bool
	depth  int
	// meet is called for each rate_limit handler. It reports whether the request goes
	// on.
	meet func(l *limiter.Limiter, r *http.Request) (goesOn bool, err error)
	// passedOver lists the modules of handlers that were not run and may matter.
	passedOver []string
}

// limiting is a handler that has a limiter.
type limiting interface{ Limiter() *limiter.Limiter }

// step continues a request with what comes next.
type step = func(r *http.Request) error

// maxDepth bounds the handlers of a walk, because named routes can invoke themselves.
const maxDepth = 1000

// handlersRun prepare a request and do nothing else, so they are run.
var handlersRun = map[caddy.ModuleID]bool{
	"http.handlers.headers": true,
	"http.handlers.map":     true,
	"http.handlers.rewrite": true,
	"http.handlers.vars":    true,
}

// handlersAside do nothing that a rate_limit after them could see, so they are
// skipped.
var handlersAside = map[caddy.ModuleID]bool{
	"http.handlers.copy_response":         true,
	"http.handlers.copy_response_headers": true,
	"http.handlers.encode":                true,
	"http.handlers.intercept":             true,
	"http.handlers.log_append":            true,
	"http.handlers.push":                  true,
	"http.handlers.request_body":          true,
	"http.handlers.templates":             true,
	"http.handlers.tracing":               true,
}

// handlersLast answer the request, which ends the walk. The value is a field that,
// if it is set, may let the request go on.
var handlersLast = map[caddy.ModuleID]string{
	"http.handlers.acme_server":     "",
	"http.handlers.error":           "",
	"http.handlers.file_server":     "PassThru",
	"http.handlers.metrics":         "",
	"http.handlers.reverse_proxy":   "HandleResponse",
	"http.handlers.static_response": "",
}

// routes leads r through a list of routes, and then to next.
func (k *walk) routes(routes caddyhttp.RouteList, r *http.Request, next step) error {
	if len(routes) == 0 {
		return next(r)
	}
	route := routes[0]
	rest := func(r *http.Request) error { return k.routes(routes[1:], r, next) }
	if route.Group != "" && k.groups[route.Group] {
		return rest(r)
	}
	matches, err := route.MatcherSets.AnyMatchWithError(r)
	switch {
	case err != nil:
		return fmt.Errorf("a route's matcher: %w", err)
	case !matches:
		return rest(r)
	}
	if route.Group != "" {
		k.groups[route.Group] = true
	}
	if route.Terminal {
		rest = func(*http.Request) error { return nil }
	}
	return k.handlers(route.Handlers, r, rest)
}

// handlers leads r through the handlers of a route, and then to next.
func (k *walk) handlers(handlers []caddyhttp.MiddlewareHandler, r *http.Request, next step) error {
	if len(handlers) == 0 {
		return next(r)
	}
	if k.depth++; k.depth > maxDepth {
		return errors.New("routes invoke each other without end")
	}
	rest := func(r *http.Request) error { return k.handlers(handlers[1:], r, next) }
	switch h := handlers[0].(type) {
	case limiting:
		goesOn, err := k.meet(h.Limiter(), r)
		if err != nil || !goesOn {
			return err
		}
		return rest(r)
	case *caddyhttp.Subroute:
		return k.routes(h.Routes, r, rest)
	case *caddyhttp.Invoke:
		route, ok := k.server.NamedRoutes[h.Name]
		if !ok {
			return fmt.Errorf("named route %q does not exist", h.Name)
		}
		return k.routes(caddyhttp.RouteList{*route}, r, rest)
	default:
		return k.other(h, r, rest)
	}
}

func (k *walk) other(h caddyhttp.MiddlewareHandler, r *http.Request, rest step) error {
	id := caddy.ModuleID(caddy.GetModuleID(h))
	field, isLast := handlersLast[id]
	switch {
	case handlersRun[id]:
		return h.ServeHTTP(k.w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error { return rest(r) }))
	case handlersAside[id]:
		return rest(r)
	case isLast && !isSet(h, field):
		return nil
	}
	if !slices.Contains(k.passedOver, string(id)) {
		k.passedOver = append(k.passedOver, string(id))
	}
	return rest(r)
}

// isSet reports whether a field of a handler has a value. It uses reflection rather
// than importing the types of these handlers.
func isSet(h caddyhttp.MiddlewareHandler, field string) bool {
	v := reflect.Indirect(reflect.ValueOf(h))
	if field == "" || v.Kind() != reflect.Struct {
		return false
	}
	f := v.FieldByName(field)
	return f.IsValid() && !f.IsZero()
}
