package endtoend

import (
	"bytes"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

// relay stands between Caddy and a redis-server and makes it seem far away.
// One without a delay does the same work.
type relay struct {
	upstream string
	// delay is that of each direction.
	delay    time.Duration
	listener net.Listener
	running  sync.WaitGroup
	mu       sync.Mutex
	isClosed bool
	conns    map[net.Conn]struct{}
}

// chunk is a part of a stream, and when it arrives.
type chunk struct {
	b   []byte
	due time.Time
}

const (
	chunkSize = 16 << 10
	// onTheWay is how many chunks of a stream are under way at most.
	onTheWay = 1024
)

func startRelay(upstream string, delay time.Duration) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start relay: %w", err)
	}
	r := &relay{upstream: upstream, delay: delay, listener: l, conns: map[net.Conn]struct{}{}}
	r.running.Go(r.accept)
	return r, nil
}

func (r *relay) addr() string { return r.listener.Addr().String() }

// close cuts all connections and waits until nothing runs.
func (r *relay) close() {
	_ = r.listener.Close()
	r.mu.Lock()
	r.isClosed = true
	for conn := range r.conns {
		_ = conn.Close()
	}
	r.mu.Unlock()
	r.running.Wait()
}

// keep remembers connections that close is to cut, unless it has run.
func (r *relay) keep(conns ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isClosed {
		return false
	}
	for _, conn := range conns {
		r.conns[conn] = struct{}{}
	}
	return true
}

func (r *relay) forget(conns ...net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range conns {
		delete(r.conns, conn)
	}
}

func (r *relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.running.Go(func() { r.serve(client) })
	}
}

// serve lets a connection's bytes pass until one side hangs up.
func (r *relay) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", r.upstream)
	if err != nil {
		return
	}
	defer server.Close()
	if !r.keep(client, server) {
		return
	}
	defer r.forget(client, server)
	var both sync.WaitGroup
	for from, to := range map[net.Conn]net.Conn{client: server, server: client} {
		both.Go(func() {
			r.pass(from, to)
			// The other direction has nobody to talk to.
			_ = from.Close()
			_ = to.Close()
		})
	}
	both.Wait()
}

// pass lets the bytes of one direction pass, each after the delay.
func (r *relay) pass(from, to net.Conn) {
	chunks := make(chan chunk, onTheWay)
	var arriving sync.WaitGroup
	arriving.Go(func() {
		sleep := loadgen.NewSleeper()
		defer sleep.Close()
		for c := range chunks {
			sleep.Until(c.due)
			// An error shows in the other direction, too.
			_, _ = to.Write(c.b)
		}
	})
	b := make([]byte, chunkSize)
	for {
		n, err := from.Read(b)
		if n > 0 {
			chunks <- chunk{b: bytes.Clone(b[:n]), due: time.Now().Add(r.delay)}
		}
		if err != nil {
			break
		}
	}
	close(chunks)
	arriving.Wait()
}
