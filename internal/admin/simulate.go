package admin

// A simulation asks what the limits would do with a request, and neither counts nor
// serves it. [routes.Walk] leads the request through the routes of the running config to
// the rate_limit handlers that it would meet; an answer names the handlers in passed_over
// that were not run and may matter.

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http/httpguts"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/routes"
)

// simulationTimeout bounds a simulation.
const simulationTimeout = 5 * time.Second

// simulate answers POST /rate_limit/simulate with what the limits would do with a
// request.
func simulate(_ runningConfig, r *http.Request) (any, error) {
	w := nowhere{}
	var asked simulatedRequest
	if err := readBody(r.Body, maxSimulatedRequest, &asked); err != nil {
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
	answer := adminapi.Simulation{Zones: []adminapi.SimulatedZone{}}
	k := &routes.Walk{Server: server, W: w, Meet: s.Meet}
	if err := k.Lead(request); err != nil {
		answer.Error = err.Error()
	}
	foreseen := &s.Answer
	answer.Decision, answer.Zone, answer.Wait, answer.PassedOver = foreseen.Decision.String(), foreseen.Zone, foreseen.Wait, k.PassedOver
	for i := range foreseen.Zones {
		answer.Zones = append(answer.Zones, simulatedZone(&foreseen.Zones[i]))
	}
	return answer, nil
}

func simulatedZone(z *limiter.PredictedZone) adminapi.SimulatedZone {
	shown := adminapi.SimulatedZone{
		Name: z.Name, Store: z.Store, Client: adminapi.Client(z.Client), Limit: z.Limit, Used: z.Used, Remaining: z.Remaining,
		Reset: z.Reset, Cost: z.Cost, Allowed: z.Allowed, Outcome: z.Outcome.String(), Reason: z.Reason,
	}
	if z.Error != nil {
		shown.Error = z.Error.Error()
	}
	return shown
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
// that listens where the URL says.
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
		return !slices.ContainsFunc(app.Servers[name].Listen, func(addr string) bool { return listensAt(addr, target.Hostname(), port) })
	})
	switch {
	case len(fitting) == 1:
		return app.Servers[fitting[0]], nil
	case len(names) == 1 && target.Port() == "":
		// Something in front of it may map the ports that URLs leave out.
		return app.Servers[names[0]], nil
	case len(fitting) == 0 && port != "":
		return nil, apiErrorf(http.StatusNotFound, "no server listens at %s; there is %s: if something in front of Caddy maps addresses, name the server (--server, in JSON server)",
			net.JoinHostPort(target.Hostname(), port), listeners(app, names))
	default:
		return nil, fmt.Errorf("which server is meant is not clear: name one of %s (--server, in JSON server)", strings.Join(names, ", "))
	}
}

// listeners says where the servers listen.
func listeners(app *caddyhttp.App, names []string) string {
	var all []string
	for _, name := range names {
		all = append(all, name+" at "+strings.Join(app.Servers[name].Listen, " and "))
	}
	return strings.Join(all, ", ")
}

// listensAt reports whether an address to listen at takes connections to a host and a port. Which
// addresses a name has is not known.
func listensAt(addr, host, port string) bool {
	parsed, err := caddy.ParseNetworkAddress(addr)
	n, _ := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || uint(n) < parsed.StartPort || parsed.EndPort < uint(n) {
		return false
	}
	to, err := netip.ParseAddr(host)
	own, errOwn := netip.ParseAddr(parsed.Host)
	return err != nil || errOwn != nil || own.IsUnspecified() || own.Unmap() == to.Unmap()
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
