package shardlimit

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
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http/httpguts"
)

// simulatedRequest is the request that POST /rate_limit/simulate asks about.
type simulatedRequest struct {
	Method     string      `json:"method"`
	URL        string      `json:"url"`
	Headers    http.Header `json:"headers"`
	RemoteAddr string      `json:"remote_addr"`
	Server     string      `json:"server"`
}

const (
	// maxSimulatedRequest bounds the body of the call.
	maxSimulatedRequest = 256 << 10
	// redirectServer is the one with which Caddy leads from HTTP to HTTPS.
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
	return nil, apiError(status, fmt.Errorf("read the request to simulate: %w", err))
}

// prepare makes the request as the server would hand it to its routes.
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
	// As a server does, to which a path that begins with two slashes is one.
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

// target is what the URL says, a whole one or a path.
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

// setHeaders leaves out the headers that the server drops.
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

// drops tells whether the server drops a header for the characters in its name.
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

// remoteAddr is the address with a port, which may be left out.
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

// serverFor is the server of that name or, without one, the only one that
// listens where the URL leads.
func serverFor(app *caddyhttp.App, name string, target *url.URL) (*caddyhttp.Server, error) {
	names := sortedKeys(app.Servers)
	if name != "" {
		if server, ok := app.Servers[name]; ok {
			return server, nil
		}
		return nil, apiError(http.StatusNotFound, fmt.Errorf("server %q is unknown; there is %s", name, strings.Join(names, ", ")))
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
		// It may be behind something that maps ports.
		return app.Servers[names[0]], nil
	default:
		return nil, fmt.Errorf("which server is meant is not clear: name it in the field server; there is %s", strings.Join(names, ", "))
	}
}

func hasPort(addr, port string) bool {
	parsed, err := caddy.ParseNetworkAddress(addr)
	if err != nil {
		return false
	}
	for i := range parsed.PortRangeSize() {
		if _, p, err := net.SplitHostPort(parsed.JoinHostPort(i)); err == nil && p == port {
			return true
		}
	}
	return false
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

// onlyHost is the host that the server's routes are for.
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
