package redistest

import (
	"net"
	"sync/atomic"
)

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
// its toxics then wait forever to pass their bytes on, even when they shall be
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
