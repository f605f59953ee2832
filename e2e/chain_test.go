package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// startBackend starts a server with a path for each way in which a response can begin.
func startBackend(t *testing.T) (addr string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/plain", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("/nothing", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/teapot", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	mux.HandleFunc("/panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	mux.HandleFunc("/hints", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusNotFound)
	})
	mux.HandleFunc("/stream", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "first")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	mux.HandleFunc("/headers", func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range limitHeaders {
			w.Header().Set(name, "backend")
		}
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, _ *http.Request) {
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_, _ = io.Copy(conn, buf)
	})
	server := httptest.NewUnstartedServer(mux)
	server.Config.ErrorLog = nil
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return strings.TrimPrefix(server.URL, "http://")
}

var limitHeaders = []string{
	"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Used", "X-RateLimit-Reset", "X-RateLimit-Resource",
}

// behind is a limiter of 100 events in front of a backend.
func behind(t *testing.T, route string, env ...string) *caddytest.Caddy {
	t.Helper()
	return caddytest.Start(t, caddytest.Site("servers {\nprotocols h1 h2c\n}", "rate_limit {header.X-Key} 100 1h api\n"+route), env...)
}

// leftOf sends a plain request and returns how much was left before it.
func leftOf(t *testing.T, c *caddytest.Caddy, path, key string) int {
	t.Helper()
	var n int
	if _, err := fmt.Sscan(caddytest.Remaining(c.Get(path, "X-Key: "+key)), &n); err != nil {
		t.Fatalf("no remaining on %s: %v", path, err)
	}
	return n + 1
}

func TestResponsesBeginInManyWays(t *testing.T) {
	t.Parallel()
	c := behind(t, proxyTo(startBackend(t), "flush_interval -1"))
	for path, want := range map[string]struct {
		status int
		method string
	}{
		"/plain":   {200, http.MethodGet},
		"/nothing": {200, http.MethodGet},
		"/teapot":  {418, http.MethodGet},
		"/headers": {503, http.MethodGet},
		"/panic":   {502, http.MethodGet},
		"/hints":   {404, http.MethodGet},
		"/stream":  {200, http.MethodGet},
		"/plain?h": {200, http.MethodHead},
	} {
		t.Run(path, func(t *testing.T) {
			key := "key" + strings.ReplaceAll(path, "/", "-")
			hints := 0
			trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				hints++
				if code != http.StatusEarlyHints || h.Get("X-RateLimit-Limit") != "" {
					t.Errorf("informational response %d has headers %v", code, h)
				}
				return nil
			}}
			req, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), want.method, c.URL+path, nil)
			must(t, "request", err)
			req.Header.Set("X-Key", key)
			resp, err := c.Client.Do(req)
			must(t, "send", err)
			if path == "/stream" {
				// The header has arrived and the body has not ended.
				if _, err := io.ReadFull(resp.Body, make([]byte, len("first"))); err != nil {
					t.Error(err)
				}
			}
			if resp.StatusCode != want.status {
				t.Errorf("status is %d, want %d", resp.StatusCode, want.status)
			}
			for i, value := range []string{"100", "99", "1", resp.Header.Get("X-RateLimit-Reset"), "api"} {
				if got := resp.Header.Values(limitHeaders[i]); len(got) != 1 || got[0] != value || value == "" || value == "backend" {
					t.Errorf("%s is %q, want one value %q", limitHeaders[i], got, value)
				}
			}
			if (path == "/hints") != (hints == 1) {
				t.Errorf("%d informational responses", hints)
			}
			if path == "/headers" && resp.Header.Get("Retry-After") != "7" {
				t.Errorf("the backend's Retry-After is gone: %v", resp.Header)
			}
			if got := leftOf(t, c, "/plain", key); got != 99 {
				t.Errorf("%d are left after one request, want 99", got)
			}
			_ = resp.Body.Close()
		})
	}
}

func TestWebSocketOverHTTP1SettlesAtItsUpgrade(t *testing.T) {
	t.Parallel()
	c := behind(t, proxyTo(startBackend(t)))
	conn, r, resp := openWebSocket(t, c, "ws")
	if resp.StatusCode != http.StatusSwitchingProtocols || caddytest.Remaining(resp) != "99" {
		t.Errorf("upgrade has status %d and headers %v", resp.StatusCode, resp.Header)
	}
	// The open connection is charged, and once.
	if got := leftOf(t, c, "/plain", "ws"); got != 99 {
		t.Errorf("%d are left during the upgraded connection, want 99", got)
	}
	echoes(t, conn, r, "echo")
	_ = conn.Close()
	if got := leftOf(t, c, "/plain", "ws"); got != 98 {
		t.Errorf("%d are left after the upgraded connection, want 98", got)
	}
}

func TestSendfile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	content := strings.Repeat("x", 1<<20)
	must(t, "write", os.WriteFile(dir+"/file.txt", []byte(content), 0o600))
	c := behind(t, "file_server {\n\t\troot "+dir+"\n\t}")
	resp := c.Get("/file.txt", "X-Key: f")
	body, err := io.ReadAll(resp.Body)
	if err != nil || string(body) != content || caddytest.Remaining(resp) != "99" {
		t.Errorf("file has %d bytes, error %v, headers %v", len(body), err, resp.Header)
	}
	modified := resp.Header.Get("Last-Modified")
	resp = c.Get("/file.txt", "X-Key: f", "If-Modified-Since: "+modified)
	if resp.StatusCode != http.StatusNotModified || caddytest.Remaining(resp) != "99" {
		t.Errorf("an unmodified file has status %d and headers %v", resp.StatusCode, resp.Header)
	}
}

func TestHandlersInTheChain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status int
		left   int
	}{
		// A panic leaves the request without an answer, but the request is charged.
		"panic":      {0, 99},
		"panic-late": {200, 99},
		"hijack":     {418, 99},
		"flush":      {200, 99},
		"controller": {204, 99},
		"silent":     {200, 99},
		"twice":      {202, 99},
		"error":      {507, 99},
	} {
		t.Run(name, func(t *testing.T) {
			caddy := behind(t, "handle /plain {\n\t\trespond ok\n\t}\n\troute {\n\t\ttest_answer "+name+"\n\t}")
			resp, err := caddy.Try("/", "X-Key: k")
			if (err != nil) != (name == "panic" || name == "panic-late") {
				t.Errorf("error is %v", err)
			}
			if err == nil {
				if resp.StatusCode != c.status {
					t.Errorf("status is %d, want %d", resp.StatusCode, c.status)
				}
				// A handler that hijacks the connection writes its own header.
				if name != "hijack" && caddytest.Remaining(resp) != "99" {
					t.Errorf("headers are %v", resp.Header)
				}
			}
			if got := leftOf(t, caddy, "/plain", "k"); got != c.left {
				t.Errorf("%d are left, want %d", got, c.left)
			}
		})
	}
}

// TestWebSocketOverHTTP2SettlesAtItsAnswer speaks extended CONNECT (RFC 8441)
// frame by frame, because Go's clients do not.
func TestWebSocketOverHTTP2SettlesAtItsAnswer(t *testing.T) {
	t.Parallel()
	// Go's server supports it only with this setting.
	c := behind(t, proxyTo(startBackend(t)), "GODEBUG=http2xconnect=1")
	conn, err := net.Dial("tcp", c.Addr)
	must(t, "dial", err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(caddytest.Patience))
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	must(t, "write settings", framer.WriteSettings())
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range [][2]string{
		{":method", "CONNECT"}, {":protocol", "websocket"}, {":scheme", "http"},
		{":path", "/ws"}, {":authority", c.Addr}, {"x-key", "ws2"}, {"sec-websocket-version", "13"},
	} {
		must(t, "write field", encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}))
	}
	must(t, "write headers", framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}))
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			t.Fatalf("reading the answer: %v", err)
		}
		headers, ok := frame.(*http2.MetaHeadersFrame)
		if !ok {
			continue
		}
		got := map[string]string{}
		for _, field := range headers.Fields {
			got[field.Name] = field.Value
		}
		if got[":status"] != "200" || got["x-ratelimit-remaining"] != "99" {
			t.Errorf("the answer has headers %v", got)
		}
		break
	}
	if got := leftOf(t, c, "/plain", "ws2"); got != 99 {
		t.Errorf("%d are left during the WebSocket, want 99", got)
	}
}

func init() {
	caddy.RegisterModule(new(answerModule))
	httpcaddyfile.RegisterHandlerDirective("test_answer", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		if !h.NextArg() {
			return nil, h.ArgErr()
		}
		return &answerModule{How: h.Val()}, nil
	})
	httpcaddyfile.RegisterDirectiveOrder("test_answer", httpcaddyfile.Before, "respond")
}

// answerModule is a handler that answers in ways that Caddy's own do not.
type answerModule struct {
	How string `json:"how"`
}

func (*answerModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_answer", New: func() caddy.Module { return new(answerModule) }}
}

func (a *answerModule) ServeHTTP(w http.ResponseWriter, _ *http.Request, _ caddyhttp.Handler) error {
	controller := http.NewResponseController(w)
	switch a.How {
	case "panic":
		panic(http.ErrAbortHandler)
	case "panic-late":
		_, _ = io.WriteString(w, "some")
		_ = controller.Flush()
		panic(http.ErrAbortHandler)
	case "hijack":
		conn, _, err := controller.Hijack()
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = io.WriteString(conn, "HTTP/1.1 418 I'm a teapot\r\nContent-Length: 0\r\n\r\n")
		return err
	case "flush":
		return controller.Flush()
	case "controller":
		if err := controller.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		if err := controller.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	case "silent":
		return nil
	case "twice":
		w.WriteHeader(http.StatusAccepted)
		w.WriteHeader(http.StatusInternalServerError)
		return nil
	case "error":
		return caddyhttp.Error(http.StatusInsufficientStorage, nil)
	default:
		return fmt.Errorf("test_answer cannot %s", a.How)
	}
}

var _ caddyhttp.MiddlewareHandler = (*answerModule)(nil)
