package shardlimit_test

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestWebSocketOverHTTP2SettlesAtItsAnswer speaks extended CONNECT (RFC 8441)
// frame by frame, because Go's clients do not.
func TestWebSocketOverHTTP2SettlesAtItsAnswer(t *testing.T) {
	// Go's server offers it only if told so.
	t.Setenv("GODEBUG", "http2xconnect=1")
	c := behind(t, "reverse_proxy "+startBackend(t))
	conn, err := net.Dial("tcp", c.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(caddytest.WaitLimit))
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range [][2]string{
		{":method", "CONNECT"}, {":protocol", "websocket"}, {":scheme", "http"},
		{":path", "/ws"}, {":authority", c.Addr}, {"x-key", "ws2"}, {"sec-websocket-version", "13"},
	} {
		if err := encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}); err != nil {
			t.Fatal(err)
		}
	}
	if err := framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}); err != nil {
		t.Fatal(err)
	}
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
