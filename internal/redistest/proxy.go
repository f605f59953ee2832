package redistest

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/stream"
	"github.com/rs/zerolog"
)

// Proxy is a TCP proxy in front of a server that makes network faults. A new
// one passes everything. Its methods are safe for concurrent use; while a client
// does not read the bytes that are on their way to it, they may have to wait.
type Proxy struct {
	port *port

	// Connections are accepted here and not by Toxiproxy because it cannot cut
	// them without refusing new ones for a moment.
	api   *toxiproxy.ApiServer
	links *toxiproxy.Proxy

	// ops serializes changes of the toxics and the linking of sessions. It is
	// taken before mu.
	ops     sync.Mutex
	counter int

	// replyLimit is after how many bytes from the server a connection is reset; 0
	// means never.
	replyLimit atomic.Int64

	mu       sync.Mutex
	upstream string       // the server that new connections go to
	listener net.Listener // nil while the proxy is down
	closed   bool
	sessions map[*session]struct{}
}

var errProxyClosed = errors.New("the proxy was closed")

// NewProxy starts a proxy on a free loopback port. It connects to upstream, a
// host:port, whenever a client connects, and hangs up if it cannot.
func NewProxy(upstream string) (*Proxy, error) {
	reserved, err := reservePort()
	if err != nil {
		return nil, fmt.Errorf("make proxy: %w", err)
	}
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := &Proxy{
		upstream: upstream,
		port:     reserved,
		api:      api,
		links:    toxiproxy.NewProxy(api, upstream, reserved.addr(), upstream),
		sessions: make(map[*session]struct{}),
	}
	if err := p.Up(); err != nil {
		return nil, errors.Join(err, reserved.release())
	}
	return p, nil
}

// StartProxy makes a proxy in front of upstream and closes it when the test
// ends. The test fails if that is impossible.
func StartProxy(tb testing.TB, upstream string) *Proxy {
	tb.Helper()
	p, err := NewProxy(upstream)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// Addr is the proxy's address, "127.0.0.1:port". It never changes.
func (p *Proxy) Addr() string {
	return p.port.addr()
}

// PointTo makes new connections go to another server, as when a virtual IP moves.
// The connections that exist stay with theirs.
func (p *Proxy) PointTo(upstream string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.upstream = upstream
}

// Cut closes all connections that the proxy has accepted. It goes on accepting
// new ones.
func (p *Proxy) Cut() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut()
	return nil
}

func (p *Proxy) cut() {
	for s := range p.sessions {
		s.close()
	}
}

// drain closes all connections and waits until nothing flows in them. If a
// toxic that drops bytes were removed from a connection in use, those bytes that
// are on their way to it would be stuck forever. It needs ops.
func (p *Proxy) drain() {
	p.mu.Lock()
	p.cut()
	var linked []*session
	for s := range p.sessions {
		if s.server != nil {
			linked = append(linked, s)
		}
	}
	p.mu.Unlock()
	for _, s := range linked {
		<-s.ended
	}
}

// Down closes all connections and refuses new ones. It does nothing if the
// proxy is down.
func (p *Proxy) Down() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down()
}

func (p *Proxy) down() error {
	if p.listener == nil {
		return nil
	}
	err := p.listener.Close()
	p.listener = nil
	p.cut()
	if err != nil {
		return fmt.Errorf("take down proxy %s: %w", p.Addr(), err)
	}
	return nil
}

// Up ends a Down: the proxy accepts connections at the same address again. It
// does nothing if the proxy is up.
func (p *Proxy) Up() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("bring up proxy %s: %w", p.Addr(), errProxyClosed)
	}
	if p.listener != nil {
		return nil
	}
	listener, err := net.Listen("tcp", p.Addr())
	if err != nil {
		return fmt.Errorf("bring up proxy %s: %w", p.Addr(), err)
	}
	p.listener = listener
	go p.accept(listener)
	return nil
}

// Close closes all connections and releases the port. Closing a proxy again
// does nothing.
func (p *Proxy) Close() error {
	p.ops.Lock()
	defer p.ops.Unlock()
	p.mu.Lock()
	p.closed = true
	err := p.down()
	p.mu.Unlock()

	err = errors.Join(err, p.setDelay(0))
	p.drain()
	return errors.Join(err, p.port.release())
}

// accept serves the connections that arrive until listener is closed.
func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		s := newSession(client)
		p.mu.Lock()
		if p.listener == listener {
			p.sessions[s] = struct{}{}
			go p.connect(s, p.upstream)
		} else {
			client.Close()
		}
		p.mu.Unlock()
	}
}

// connect makes the connection to the server and lets bytes flow.
func (p *Proxy) connect(s *session, upstream string) {
	server, err := net.DialTimeout("tcp", upstream, patience)
	if err != nil {
		s.client.Close()
		p.forget(s)
		return
	}
	p.ops.Lock()
	defer p.ops.Unlock()
	p.mu.Lock()
	s.server = server
	if s.cut {
		server.Close()
		delete(p.sessions, s)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()

	end := func() {
		if s.flowing.Add(-1) == 0 {
			p.forget(s)
			close(s.ended)
		}
	}
	// Toxiproxy forgets a link some time after its end, by name. A name that
	// came back with the client's port would make it forget a new link.
	p.counter++
	name := strconv.Itoa(p.counter)
	requests := sink{conn: server, end: end}
	replies := sink{conn: s.client, end: end, limit: &p.replyLimit, reset: func() { p.reset(s) }, passed: new(int64)}
	p.links.Toxics.StartLink(p.api, name+" requests", s.client, requests, stream.Upstream)
	p.links.Toxics.StartLink(p.api, name+" replies", server, replies, stream.Downstream)
}

// reset closes a session so that the client sees a reset.
func (p *Proxy) reset(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if tcp, ok := s.client.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	s.close()
}

func (p *Proxy) forget(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.sessions, s)
}
