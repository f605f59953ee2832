package redistest

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP proxy in front of a server that makes network faults. A new
// one passes everything. Its methods are safe for concurrent use.
type Proxy struct {
	port *port

	mu       sync.Mutex
	upstream string       // the server that new connections go to
	listener net.Listener // nil while the proxy is down
	closed   bool
	sessions map[*session]struct{}
	faults   faults
	// changed is closed when the delay changes.
	changed chan struct{}

	running sync.WaitGroup
}

// faults are the faults that a proxy makes. The zero value passes everything.
type faults struct {
	delay                     time.Duration // of bytes from the server
	dropRequests, dropReplies bool
	// replyLimit is after how many bytes from the server a connection is reset; 0
	// means never.
	replyLimit int64
}

var errProxyClosed = errors.New("the proxy was closed")

// NewProxy starts a proxy on a free loopback port. It connects to upstream, a
// host:port, whenever a client connects, and hangs up if it cannot.
func NewProxy(upstream string) (*Proxy, error) {
	reserved, err := reservePort()
	if err != nil {
		return nil, fmt.Errorf("make proxy: %w", err)
	}
	p := &Proxy{
		upstream: upstream,
		port:     reserved,
		sessions: make(map[*session]struct{}),
		changed:  make(chan struct{}),
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

// cut needs mu.
func (p *Proxy) cut() {
	for s := range p.sessions {
		s.close()
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
	p.running.Go(func() { p.accept(listener) })
	return nil
}

// Close closes all connections, waits until nothing flows in them, and releases
// the port. Closing a proxy again does nothing.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	err := p.down()
	p.mu.Unlock()
	p.running.Wait()
	return errors.Join(err, p.port.release())
}

// Delay makes all bytes from the server arrive later by d, on present and on new
// connections. It replaces the previous delay; 0 removes it.
func (p *Proxy) Delay(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("delay by %v: negative", d)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setDelay(d)
	return nil
}

// setDelay needs mu.
func (p *Proxy) setDelay(d time.Duration) {
	p.faults.delay = d
	close(p.changed)
	p.changed = make(chan struct{})
}

// SwallowReplies drops all bytes from the server. Bytes to the server pass and
// connections stay open, so that commands take effect and no client learns of it.
func (p *Proxy) SwallowReplies() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setDrops(false, true)
	return nil
}

// SwallowAll drops all bytes in both directions. Connections stay open and new
// ones are accepted, but they are a black hole.
func (p *Proxy) SwallowAll() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setDrops(true, true)
	return nil
}

// ResetReplies makes every connection, present ones too, break with a reset once
// n bytes have come from the server in all, and so in the middle of a reply or
// between two. It replaces the previous number; 0 removes it. n must not be
// negative.
func (p *Proxy) ResetReplies(n int64) error {
	if n < 0 {
		return fmt.Errorf("reset after %d bytes: negative", n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.replyLimit = n
	return nil
}

// Pass ends the delay, the resets and the dropping of bytes. Connections that
// were open while bytes were dropped are closed, so that no stream of replies
// goes on after a gap.
func (p *Proxy) Pass() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults.replyLimit = 0
	p.setDelay(0)
	p.setDrops(false, false)
	return nil
}

// setDrops sets which directions drop their bytes. It needs mu. Where one no longer
// does, connections with a gap are cut before bytes pass again.
func (p *Proxy) setDrops(requests, replies bool) {
	if p.faults.dropRequests && !requests || p.faults.dropReplies && !replies {
		p.cut()
	}
	p.faults.dropRequests, p.faults.dropReplies = requests, replies
}

// accept serves the connections that arrive until listener is closed.
func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		s := &session{client: client, done: make(chan struct{})}
		p.mu.Lock()
		if p.listener == listener {
			p.sessions[s] = struct{}{}
			upstream := p.upstream
			p.running.Go(func() { p.serve(s, upstream) })
		} else {
			client.Close()
		}
		p.mu.Unlock()
	}
}

// serve connects to the server and passes bytes until a side has gone.
func (p *Proxy) serve(s *session, upstream string) {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		s.close()
		delete(p.sessions, s)
	}()
	server, err := net.DialTimeout("tcp", upstream, waitTimeout)
	if err != nil {
		return
	}
	p.mu.Lock()
	s.server = server
	if s.isCut {
		server.Close()
	}
	p.mu.Unlock()

	chunks := make(chan chunk, maxChunks)
	var flowing sync.WaitGroup
	flowing.Go(func() {
		p.passRequests(s)
		p.end(s) // the client has gone, and with it the use of replies
	})
	flowing.Go(func() { p.readReplies(s, chunks) })
	p.writeReplies(s, chunks)
	p.end(s)
	flowing.Wait()
}

func (p *Proxy) end(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.close()
}

const (
	chunkSize = 32 << 10
	// maxChunks is how many chunks wait for their delay to end in one connection.
	maxChunks = 1024
)

// chunk is bytes from a server, and when they came.
type chunk struct {
	bytes []byte
	came  time.Time
}

// passRequests passes bytes to the server until a side has gone.
func (p *Proxy) passRequests(s *session) {
	buffer := make([]byte, chunkSize)
	for {
		n, err := s.client.Read(buffer)
		if n > 0 {
			p.mu.Lock()
			isDropped, isCut := p.faults.dropRequests, s.isCut
			p.mu.Unlock()
			if isCut {
				return
			}
			if !isDropped {
				if _, err := s.server.Write(buffer[:n]); err != nil {
					return
				}
			}
		}
		if err != nil {
			return
		}
	}
}

// readReplies reads from the server until it ends the connection, and then closes chunks.
func (p *Proxy) readReplies(s *session, chunks chan<- chunk) {
	defer close(chunks)
	buffer := make([]byte, chunkSize)
	for {
		n, err := s.server.Read(buffer)
		if n > 0 {
			select {
			case chunks <- chunk{append([]byte(nil), buffer[:n]...), time.Now()}:
			case <-s.done:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// writeReplies passes chunks on to the client, each after its delay, until a side has
// gone or the limit is reached.
func (p *Proxy) writeReplies(s *session, chunks <-chan chunk) {
	var passed int64
	for c := range chunks {
		now, isCut := p.await(s, c.came)
		if isCut {
			return
		}
		if now.dropReplies {
			continue
		}
		size := int64(len(c.bytes))
		isOver := now.replyLimit > 0 && passed+size > now.replyLimit
		if isOver {
			size = max(now.replyLimit-passed, 0)
		}
		if _, err := s.client.Write(c.bytes[:size]); err != nil {
			return
		}
		passed += size
		if isOver {
			if tcp, ok := s.client.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			return
		}
	}
}

// await waits until bytes that came at an instant have had their delay, and returns the
// faults of then, and whether the session was cut.
func (p *Proxy) await(s *session, came time.Time) (now faults, isCut bool) {
	for {
		p.mu.Lock()
		now, changed := p.faults, p.changed
		isCut = s.isCut
		p.mu.Unlock()
		left := now.delay - time.Since(came)
		if now.delay == 0 || left <= 0 || isCut {
			return now, isCut
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-changed:
		case <-s.done:
		}
		timer.Stop()
	}
}

// session is a client's connection through a proxy, together with the
// connection to the server that was made for it. The mutex of the proxy guards it.
type session struct {
	client net.Conn
	server net.Conn // nil until it is made
	isCut  bool
	done   chan struct{} // closed with the connections
}

// close closes the connections; what flows through them then ends.
func (s *session) close() {
	if s.isCut {
		return
	}
	s.isCut = true
	close(s.done)
	s.client.Close()
	if s.server != nil {
		s.server.Close()
	}
}
