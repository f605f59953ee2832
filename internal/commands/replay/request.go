package replay

import (
	"net"
	"net/http"
	"net/url"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// response is the response to a request of a log: its header.
type response struct{ header http.Header }

// Header implements [http.ResponseWriter].
func (w *response) Header() http.Header {
	if w.header == nil {
		w.header = http.Header{}
	}
	return w.header
}

// Write implements [http.ResponseWriter].
func (*response) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements [http.ResponseWriter].
func (*response) WriteHeader(int) {}

// protocols are those of HTTP.
var protocols = map[string][2]int{
	"HTTP/1.1": {1, 1}, "HTTP/2.0": {2, 0}, "HTTP/3.0": {3, 0}, "HTTP/1.0": {1, 0}, "HTTP/2": {2, 0}, "HTTP/3": {3, 0},
}

// request returns the request as the server handed it to its routes. What it has received is in arrived.
func (s *site) request(l *Line, host string, w http.ResponseWriter, arrived *http.Request) (*http.Request, error) {
	target, err := url.ParseRequestURI(l.URI)
	if err != nil {
		if l.Method != http.MethodConnect && l.URI != "*" {
			return nil, err
		}
		target = &url.URL{Path: l.URI}
	}
	r := arrived
	*r = http.Request{
		Method: l.Method, URL: target, RequestURI: l.URI, Proto: l.Proto, Header: l.Header, Body: http.NoBody,
		Host: l.Host, RemoteAddr: l.Remote, TLS: l.TLS,
	}
	if l.Format == Combined {
		r.Host = host
	}
	if l.Remote != "" && l.Remote != "@" {
		port := l.Port
		if port == "" {
			port = "0"
		}
		r.RemoteAddr = net.JoinHostPort(l.Remote, port)
	}
	if r.Header == nil {
		r.Header = http.Header{}
	}
	version := protocols[l.Proto]
	r.ProtoMajor, r.ProtoMinor = version[0], version[1]
	repl := caddy.NewReplacer()
	r = caddyhttp.PrepareRequest(r, repl, w, s.server)
	// The log has what the server found, by its trusted proxies.
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, l.Client)
	if l.User != "" {
		repl.Set("http.auth.user.id", l.User)
	}
	return r, nil
}
