package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
	return stopAfter(tb, p, err, p.Close)
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
	server, err := net.DialTimeout("tcp", upstream, waitTimeout)
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

// session is a client's connection through a proxy, together with the
// connection to the server that was made for it.
type session struct {
	client net.Conn
	server net.Conn // nil until it is made
	cut    bool     // whether the connections were closed by the proxy

	flowing atomic.Int32  // directions that have not ended
	ended   chan struct{} // closed when both directions have ended
}

func newSession(client net.Conn) *session {
	s := &session{client: client, ended: make(chan struct{})}
	s.flowing.Store(2)
	return s
}

// close closes the connections; what flows through them then ends.
func (s *session) close() {
	s.cut = true
	s.client.Close()
	if s.server != nil {
		s.server.Close()
	}
}

// sink is where one direction of a session flows to.
type sink struct {
	conn net.Conn
	end  func() // called when the direction has ended

	// reset is called once more bytes have passed than limit, unless that is 0.
	// Both are nil where there is no limit.
	limit  *atomic.Int64
	reset  func()
	passed *int64
}

// Write never fails. Toxiproxy stops reading a direction whose sink fails, and
// its toxics then wait forever to pass their bytes on, even when they should be
// removed. What cannot be written is lost anyway, and the session ends because
// reading from a broken connection fails.
func (s sink) Write(b []byte) (int, error) {
	most := len(b)
	if s.limit != nil {
		most = s.most(b)
	}
	_, _ = s.conn.Write(b[:most])
	if most < len(b) {
		s.reset()
	}
	return len(b), nil
}

// most is how much of b may pass.
func (s sink) most(b []byte) int {
	*s.passed += int64(len(b))
	limit := s.limit.Load()
	if limit == 0 || *s.passed <= limit {
		return len(b)
	}
	return int(max(limit-(*s.passed-int64(len(b))), 0))
}

// Close is called by Toxiproxy once, after the last Write.
func (s sink) Close() error {
	err := s.conn.Close()
	s.end()
	return err
}

// The names of the toxics, which also identify them.
const (
	delayToxic    = "delay"
	requestsToxic = "drop requests"
	repliesToxic  = "drop replies"
)

// Delay makes all bytes from the server arrive later by d, rounded up to whole
// milliseconds, on present and on new connections. It replaces the previous
// delay; 0 removes it.
func (p *Proxy) Delay(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("delay by %v: negative", d)
	}
	p.ops.Lock()
	defer p.ops.Unlock()
	return p.setDelay(d)
}

func (p *Proxy) setDelay(d time.Duration) error {
	// Toxiproxy's way to update a toxic races with the toxic's work.
	if err := p.remove(delayToxic); err != nil {
		return err
	}
	if d == 0 {
		return nil
	}
	milliseconds := (d + time.Millisecond - 1) / time.Millisecond
	return p.add(delayToxic, "latency", stream.Downstream, fmt.Sprintf(`{"latency": %d}`, milliseconds))
}

// SwallowReplies drops all bytes from the server. Bytes to the server pass and
// connections stay open, so that commands take effect and no client learns of it.
func (p *Proxy) SwallowReplies() error {
	p.ops.Lock()
	defer p.ops.Unlock()
	return p.setDrops(false, true)
}

// SwallowAll drops all bytes in both directions. Connections stay open and new
// ones are accepted, but they are a black hole.
func (p *Proxy) SwallowAll() error {
	p.ops.Lock()
	defer p.ops.Unlock()
	return p.setDrops(true, true)
}

// ResetReplies makes every connection, present ones too, break with a reset once
// n bytes have come from the server in all, and so in the middle of a reply or
// between two. It replaces the previous number; 0 removes it. n must not be
// negative.
func (p *Proxy) ResetReplies(n int64) error {
	if n < 0 {
		return fmt.Errorf("reset after %d bytes: negative", n)
	}
	p.replyLimit.Store(n)
	return nil
}

// Pass ends the delay, the resets and the dropping of bytes. Connections that
// were open while bytes were dropped are closed, so that no stream of replies
// goes on after a gap.
func (p *Proxy) Pass() error {
	p.replyLimit.Store(0)
	p.ops.Lock()
	defer p.ops.Unlock()
	if err := p.setDelay(0); err != nil {
		return err
	}
	return p.setDrops(false, false)
}

// setDrops makes the proxy drop the bytes to the server, or those from it, or
// both, or none.
func (p *Proxy) setDrops(requests, replies bool) error {
	drops := []struct {
		name      string
		direction stream.Direction
		want      bool
	}{
		{requestsToxic, stream.Upstream, requests},
		{repliesToxic, stream.Downstream, replies},
	}
	for _, drop := range drops {
		has := p.has(drop.name)
		switch {
		case drop.want && !has:
			// A timeout of 0 drops bytes and never closes the connection.
			if err := p.add(drop.name, "timeout", drop.direction, `{"timeout": 0}`); err != nil {
				return err
			}
		case !drop.want && has:
			p.drain()
			if err := p.remove(drop.name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *Proxy) has(toxic string) bool {
	return p.links.Toxics.GetToxic(toxic) != nil
}

func (p *Proxy) add(name, kind string, direction stream.Direction, attributes string) error {
	// JSON is Toxiproxy's only way in.
	description := fmt.Sprintf(`{"name": %q, "type": %q, "stream": %q, "attributes": %s}`,
		name, kind, direction, attributes)
	if _, err := p.links.Toxics.AddToxicJson(strings.NewReader(description)); err != nil {
		return fmt.Errorf("add toxic %q to proxy %s: %w", name, p.Addr(), err)
	}
	return nil
}

// remove removes the toxic of that name, if there is one.
func (p *Proxy) remove(name string) error {
	if !p.has(name) {
		return nil
	}
	if err := p.links.Toxics.RemoveToxic(context.Background(), name); err != nil {
		return fmt.Errorf("remove toxic %q from proxy %s: %w", name, p.Addr(), err)
	}
	return nil
}
