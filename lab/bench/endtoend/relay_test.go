package endtoend

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// echo answers with what it gets.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	redistest.Must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return l.Addr().String()
}

// TestRelayDelays checks that nothing is lost or arrives early.
func TestRelayDelays(t *testing.T) {
	for _, delay := range []time.Duration{0, 50 * time.Microsecond, 20 * time.Millisecond} {
		r, err := startRelay(echo(t), delay)
		redistest.Must(t, err)
		conn, err := net.Dial("tcp", r.addr())
		redistest.Must(t, err)
		const messages = 10
		sent := bytes.Repeat([]byte("0123456789"), 1000)
		start := time.Now()
		for i := range messages {
			if i > 0 {
				time.Sleep(delay / messages)
			}
			if _, err := conn.Write(sent); err != nil {
				t.Fatal(err)
			}
		}
		got := make([]byte, messages*len(sent))
		if _, err := io.ReadFull(conn, got); err != nil {
			t.Fatal(err)
		}
		took := time.Since(start)
		if !bytes.Equal(got, bytes.Repeat(sent, messages)) {
			t.Errorf("delay %v: what came back is not what was sent", delay)
		}
		if took < 2*delay {
			t.Errorf("delay %v: it took %v, want twice the delay", delay, took)
		}
		_ = conn.Close()
		r.close()
	}
}

// TestRelayEnds: who is at one end learns that the other end has hung up, and
// close does not wait for anybody.
func TestRelayEnds(t *testing.T) {
	r, err := startRelay(echo(t), time.Millisecond)
	redistest.Must(t, err)
	conn, err := net.Dial("tcp", r.addr())
	redistest.Must(t, err)
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.close()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is open after close")
	}
}
