package examples

import (
	"bufio"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// shippedSite is a shipped config that runs as it is, but for the addresses of its listeners, its Redis
// and what is behind it, and for timeouts that a busy machine exceeds.
type shippedSite struct {
	c     *caddytest.Caddy
	zones []shippedZone
	// config is what Caddy runs.
	config map[string]any
	// proxy is an address that the config trusts, "" if there is none, and forwards the header in which it
	// names clients.
	proxy, forwards string
	isStrict        bool
	// sender is an address from which the config takes PROXY headers, "" if there is none.
	sender string
	// host is the site's.
	host string
	// front is the address of a proxy before the site, "" without one.
	front string
}

// sitePorts are those on which the sites of shipped configs listen.
var sitePorts = []string{":8080", ":8081", ":443"}

// within calls f for each object in a config, always in the same order.
func within(config any, f func(object map[string]any)) {
	switch v := config.(type) {
	case []any:
		for _, value := range v {
			within(value, f)
		}
	case map[string]any:
		f(v)
		for _, name := range slices.Sorted(maps.Keys(v)) {
			within(v[name], f)
		}
	}
}

// startShipped runs a shipped config. Connections may begin with PROXY headers that say where they come
// from: see [rawRequest.source].
func startShipped(t *testing.T, text, backend string, shards caddytest.Shards, edits ...func(config map[string]any)) *shippedSite {
	t.Helper()
	adapted, err := adapt(text)
	must(t, "adapt", err)
	var config map[string]any
	must(t, "unmarshal", json.Unmarshal(hash.ReplaceAllLiteral(adapted, []byte(cheapHash)), &config))
	s := &shippedSite{c: caddytest.Start(t, "{\n\t{{global}}\n}\n{{site}} {\n\trespond none\n}\n")}
	for _, zones := range zonesIn(config) {
		s.zones = append(s.zones, zones...)
	}
	config["admin"] = map[string]any{"listen": s.c.Admin, "config": map[string]any{"persist": false}}
	apps := config["apps"].(map[string]any)
	dials := s.moveServers(t, apps["http"].(map[string]any)["servers"].(map[string]any))
	s.moveStores(config, shards)
	s.host = "localhost"
	within(config, func(object map[string]any) {
		if hosts, ok := object["host"].([]any); ok {
			s.host = hosts[0].(string)
		}
		if dial, ok := object["dial"].(string); ok {
			_, port, _ := net.SplitHostPort(dial)
			object["dial"] = backend
			if standIn, ok := dials[":"+port]; ok {
				object["dial"] = standIn
			}
		}
		if object["protocol"] == "http" {
			delete(object, "tls") // the backend has none
		}
		if object["handler"] == "exec" {
			object["command"] = "true"
		}
	})
	s.config = config
	s.load(edits...)
	return s
}

// load edits the config and loads it.
func (s *shippedSite) load(edits ...func(config map[string]any)) {
	s.c.T.Helper()
	for _, edit := range edits {
		edit(s.config)
	}
	loaded, err := json.Marshal(s.config)
	must(s.c.T, "marshal", err)
	if status, answer := s.c.AdminCall(http.MethodPost, "/load", "application/json", string(loaded)); status != http.StatusOK {
		s.c.T.Fatalf("load: %d %s\n%s", status, answer, loaded)
	}
	s.c.AwaitServers()
}

// moveServers moves a config's servers to free addresses, that of the site to c.Addr, and returns the
// new ones by the old.
func (s *shippedSite) moveServers(t *testing.T, servers map[string]any) (moved map[string]string) {
	t.Helper()
	moved = map[string]string{}
	for _, server := range servers {
		server := server.(map[string]any)
		was := server["listen"].([]any)[0].(string)
		if !slices.Contains(sitePorts, was) {
			moved[was] = caddytest.FreeAddr(t)
			server["listen"] = []any{moved[was]}
			continue
		}
		server["listen"] = []any{s.c.Addr}
		server["automatic_https"] = map[string]any{"disable": true}
		wrappers, _ := server["listener_wrappers"].([]any)
		within(wrappers, func(wrapper map[string]any) {
			if allowed, ok := wrapper["allow"].([]any); ok {
				s.sender = netip.MustParsePrefix(allowed[0].(string)).Addr().Next().String()
			}
		})
		server["listener_wrappers"] = append([]any{map[string]any{"wrapper": "proxy_protocol", "allow": []string{"127.0.0.1/32"}}}, wrappers...)
		if trusted, ok := server["trusted_proxies"].(map[string]any); ok {
			s.proxy = netip.MustParsePrefix(trusted["ranges"].([]any)[0].(string)).Addr().Next().String()
			s.forwards = "X-Forwarded-For"
			_, s.isStrict = server["trusted_proxies_strict"]
			if named, ok := server["client_ip_headers"].([]any); ok {
				s.forwards = named[0].(string)
			}
		}
	}
	must(t, "the config", want("its sites that listen on one of "+fmt.Sprint(sitePorts), len(servers)-len(moved), 1))
	return moved
}

// moveStores makes the Redis stores of a config use those shards, which others may use too.
func (s *shippedSite) moveStores(config map[string]any, shards caddytest.Shards) {
	within(config, func(object map[string]any) {
		if object["module"] != "redis" {
			return
		}
		delete(object, "password")
		object["key_prefix"] = rand.Text()
		object["check_timeout"], object["charge_timeout"] = caddytest.WaitLimit, caddytest.WaitLimit
		for i, shard := range object["shards"].([]any) {
			shard, server := shard.(map[string]any), shards[i]
			delete(shard, "url")
			shard["primary"] = server.Primary.Addr()
			if replicas, ok := shard["replicas"].([]any); ok {
				replicas[0] = server.Replicas[0].Addr()
			}
		}
	})
}

// buckets returns how many Caddy knows in all zones.
func (s *shippedSite) buckets() (sum int64) {
	s.c.T.Helper()
	var status struct{ Stores []adminapi.Store }
	s.c.AdminJSON(http.MethodGet, "/rate_limit/", "", &status)
	for _, store := range status.Stores {
		if store.Buckets != nil {
			sum += int64(*store.Buckets)
		} else {
			sum += store.Ledger.Buckets
		}
	}
	return sum
}

// rawRequest is written as it is, because Go's client corrects what it sends.
type rawRequest struct {
	// source are addresses that PROXY headers name, the outermost first; the last is that of the client.
	source []string
	// line is method and target, host the header Host, "" being the site's.
	line, host string
	headers    []string
	body       string
}

func (r rawRequest) String() string {
	return fmt.Sprintf("%s %s %q from %v", r.line, r.host, r.headers, r.source)
}

// dial opens a connection to the site and writes a request to it.
func (s *shippedSite) dial(r rawRequest) (net.Conn, error) {
	conn, err := net.Dial("tcp", cmp.Or(s.front, s.c.Addr))
	if err != nil {
		return nil, err
	}
	var text strings.Builder
	for _, source := range r.source {
		family, destination := "TCP4", "127.0.0.1"
		if strings.Contains(source, ":") {
			family, destination = "TCP6", "::1"
		}
		fmt.Fprintf(&text, "PROXY %s %s %s 5000 8080\r\n", family, source, destination)
	}
	host := r.host
	if host == "" {
		host = s.host
	}
	fmt.Fprintf(&text, "%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: %d\r\n", r.line, host, len(r.body))
	for _, header := range r.headers {
		text.WriteString(header + "\r\n")
	}
	text.WriteString("\r\n" + r.body)
	err = conn.SetDeadline(time.Now().Add(caddytest.Patience))
	if err == nil {
		_, err = io.WriteString(conn, text.String())
	}
	return conn, err
}

// send returns the response to a request, whose body it has read.
func (s *shippedSite) send(r rawRequest) (*http.Response, error) {
	conn, err := s.dial(r)
	if conn != nil {
		defer conn.Close()
	}
	if err != nil {
		return nil, err
	}
	method, _, _ := strings.Cut(r.line, " ")
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method, URL: new(url.URL)})
	if err != nil {
		return nil, fmt.Errorf("%v: %w", r, err)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return resp, errors.Join(err, resp.Body.Close())
}

// must is send where the client stays.
func (s *shippedSite) must(r rawRequest) *http.Response {
	s.c.T.Helper()
	resp, err := s.send(r)
	must(s.c.T, r.String(), err)
	return resp
}

// startBackend serves HTTP/1 and HTTP/2 without TLS, and returns the address.
func startBackend(t *testing.T, handler http.HandlerFunc) (addr string) {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}
