// Package ui serves a page that shows the limits of a running Caddy to browsers on
// the same machine ([Handler]), and forwards the page's calls to the admin API.
//
// Any web page that the user visits can send requests to a loopback address. So
// Handler answers only requests whose host is a loopback name with this server's
// port, which stops names that are rebound to a loopback address, and forwards only
// calls that come from the page itself.
package ui

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// files are those of the page. The directory uplot has the charts: uPlot, as it is published.
//
//go:embed page
var files embed.FS

// styles and scripts are the files that the page consists of, in their order.
var (
	styles  = []string{"uplot/uPlot.min.css", "page.css"}
	scripts = []string{"uplot/uPlot.iife.min.js", "base.js", "clients.js", "lists.js", "zones.js", "page.js"}
)

// page is the whole page, and policy allows what it does and nothing else.
var page, policy = build()

// build puts all files of the page into one, so that it loads nothing, and makes the policy of it.
func build() (page, policy string) {
	page = read("index.html")
	page, style := put(page, "style", styles)
	page, script := put(page, "script", scripts)
	return page, "default-src 'none'; connect-src 'self'; img-src data:; script-src" + script + "; style-src" + style +
		"; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

// put replaces the empty element of that name by one for each file, and returns the source expressions
// of what is in them.
func put(page, element string, names []string) (filled, sources string) {
	var all strings.Builder
	for _, name := range names {
		content := read(name)
		sum := sha256.Sum256([]byte(content))
		sources += " 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		all.WriteString("<" + element + ">" + content + "</" + element + ">\n")
	}
	return strings.Replace(page, "<"+element+"></"+element+">\n", all.String(), 1), sources
}

func read(name string) string {
	content, err := files.ReadFile("page/" + name)
	if err != nil {
		panic(err) // it is embedded
	}
	return string(content)
}

// API is the admin API of a running Caddy.
type API interface {
	// Call sends one request, whose path includes the query, and returns the answer
	// whatever its status. An error means that there is no answer.
	Call(ctx context.Context, method, path string, body []byte) (status int, answer []byte, err error)
}

// Listen listens on a loopback address, and on no other.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", address, err)
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() || ip.Is4In6() {
		return nil, fmt.Errorf("listen on %q: it must be a loopback address, such as 127.0.0.1:2020: any client that reaches the page can reset limits", address)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(host, port))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%w: write --listen 127.0.0.1:0 for any free port", err)
	}
	return l, err
}

// Serve serves the page until ctx ends.
func Serve(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// gate passes requests that name this server as their host, and calls that come from
// its page.
type gate struct {
	hosts  map[string]bool
	routes http.Handler
}

// fromPage is a header that pages of other sites cannot send without a preflight.
const fromPage = "X-Rate-Limit-Page"

// Handler serves the page on the loopback address.
func Handler(api API, address *net.TCPAddr) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", servePage)
	p := &proxy{api: api}
	mux.HandleFunc("GET /rate_limit/{$}", p.pass)
	mux.HandleFunc("GET /rate_limit/clients", p.pass)
	mux.HandleFunc("GET /rate_limit/top", p.pass)
	mux.HandleFunc("GET /rate_limit/near", p.pass)
	mux.HandleFunc("GET /rate_limit/overrides", p.pass)
	mux.HandleFunc("GET /rate_limit/history", p.pass)
	mux.HandleFunc("GET /rate_limit/buckets/{zone}", p.pass)
	for _, list := range []string{"buckets", "blocks", "grants", "limits", "zones"} {
		mux.HandleFunc("DELETE /rate_limit/"+list+"/{zone}", p.pass)
	}
	mux.HandleFunc("POST /rate_limit/blocks/{zone}", p.pass)
	mux.HandleFunc("POST /rate_limit/grants/{zone}", p.pass)
	g := &gate{hosts: map[string]bool{address.String(): true}, routes: mux}
	for _, name := range []string{"127.0.0.1", "localhost", "[::1]"} {
		g.hosts[name+":"+strconv.Itoa(address.Port)] = true
		if address.Port == 80 {
			g.hosts[name] = true
		}
	}
	return g
}

// ServeHTTP implements [http.Handler].
func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", policy)
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	if err := g.check(r); err != nil {
		fail(w, http.StatusForbidden, err)
		return
	}
	g.routes.ServeHTTP(w, r)
}

// check returns an error that says why a request is not answered.
func (g *gate) check(r *http.Request) error {
	if !g.hosts[r.Host] {
		return fmt.Errorf("host %q is not this server", r.Host)
	}
	isPage := r.URL.Path == "/"
	if origin := r.Header.Get("Origin"); origin != "" && origin != "http://"+r.Host {
		return fmt.Errorf("origin %q is not this page", origin)
	}
	switch site := r.Header.Get("Sec-Fetch-Site"); {
	case site == "", site == "same-origin":
	case site == "none" && isPage:
		// An address that was typed, or a bookmark.
	default:
		return fmt.Errorf("a request from another site (%s) is not answered", site)
	}
	if !isPage && r.Header.Get(fromPage) == "" {
		return errors.New("the header " + fromPage + " is missing")
	}
	return nil
}

func servePage(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = io.WriteString(w, page)
}

// proxy forwards calls to the admin API.
type proxy struct{ api API }

// zoneName matches names of zones.
var zoneName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

func (p *proxy) pass(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	if zone := r.PathValue("zone"); zone != "" {
		if !zoneName.MatchString(zone) || strings.Trim(zone, ".") == "" {
			fail(w, http.StatusBadRequest, fmt.Errorf("zone %q: that is no name of a zone", zone))
			return
		}
		path = strings.TrimSuffix(path, zone) + zone
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("query: %w", err))
		return
	}
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	status, answer, err := p.api.Call(r.Context(), r.Method, path, nil)
	if err != nil {
		fail(w, http.StatusBadGateway, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(answer)
}

func fail(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
}
