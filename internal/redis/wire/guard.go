package wire

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strconv"
	"syscall"
	"time"
)

// guarded is a connection to a server whose replies are believed within bounds only: go-redis
// allocates what a reply announces, and follows it however deep it nests. It does not send HELLO,
// with which go-redis begins: RESP2 needs none, and some proxies close the connection on it.
// go-redis logs in by AUTH then.
type guarded struct {
	net.Conn
	// isOpen is set once a command was written, hello is what is left of the reply to HELLO.
	isOpen bool
	hello  string
	// logsIn is set from a login until its reply.
	logsIn bool
	// asks is set once something was written since the last reply.
	asks bool
	// pings, if set, is for how long the reply to a PING is awaited, without which nothing is written
	// after quietLimit. heard is when the last reply came.
	pings func() time.Duration
	heard time.Time

	bounds bounds
}

// peekable is a connection that go-redis can look at before it uses it again: at the socket, also
// below TLS, where any byte that was not asked for is an alert.
type peekable struct {
	*guarded
	syscall.Conn
}

func guard(conn net.Conn, pings func() time.Duration) net.Conn {
	g, socket := &guarded{Conn: conn, pings: pings}, conn
	if encrypted, ok := conn.(*tls.Conn); ok {
		socket = encrypted.NetConn()
	}
	if raw, ok := socket.(syscall.Conn); ok {
		return peekable{g, raw}
	}
	return g
}

// quietLimit is the time without a reply after which a connection may be closed or cut without a
// sign: Redis closes none earlier. The PINGs, one a second at most, cost less than the INFO of each second.
const quietLimit = time.Second

// ping waits for the reply to a PING, an error too.
func (c *guarded) ping() error {
	if err := c.SetReadDeadline(time.Now().Add(c.pings())); err != nil {
		return err
	}
	if _, err := io.WriteString(c.Conn, "*1\r\n$4\r\nping\r\n"); err != nil {
		return err
	}
	var reply [512]byte
	for n := 0; n < len(reply); {
		more, err := c.Conn.Read(reply[n:])
		if n += more; err != nil {
			return err
		}
		if reply[n-1] == '\n' {
			return nil
		}
	}
	return ErrFraming
}

func (c *guarded) Write(b []byte) (int, error) {
	switch {
	case c.isOpen:
	case isCommand(b, "$5\r\nhello\r\n"):
		c.hello = "-ERR unknown command 'hello'\r\n"
		return len(b), nil
	default:
		c.isOpen, c.logsIn = true, isCommand(b, "$4\r\nauth\r\n")
	}
	if c.pings != nil && !c.asks && !c.heard.IsZero() && time.Since(c.heard) > quietLimit {
		if err := c.ping(); err != nil {
			return 0, unwrittenError{err}
		}
	}
	n, err := c.Conn.Write(b)
	if n == 0 && err != nil && !c.asks {
		err = unwrittenError{err}
	}
	c.asks = c.asks || n > 0
	return n, err
}

// unwrittenError is the error of a write when nothing has been written since the last reply, for example because the
// connection was ready too late: the command did not run.
type unwrittenError struct{ error }

func (e unwrittenError) Unwrap() error { return e.error }

// isCommand reports whether b is the command of a word: an array whose first text it is.
func isCommand(b []byte, word string) bool {
	_, rest, _ := bytes.Cut(b, []byte("\r\n"))
	return bytes.EqualFold(rest[:min(len(rest), len(word))], []byte(word))
}

// needless begins the reply to a login with a password alone at a server that wants none. HELLO,
// and a login with a user, succeed there, so that servers with and without a password can share
// the option.
const needless = "-ERR AUTH <password> called without any password configured"

// answerLogin returns the length of b after it has made a success of a login that was needless.
func answerLogin(b []byte) int {
	if end := bytes.IndexByte(b, '\n'); end >= 0 && bytes.HasPrefix(b, []byte(needless)) {
		return copy(b, "+OK\r\n") + copy(b[len("+OK\r\n"):], b[end+1:])
	}
	return len(b)
}

func (c *guarded) Read(b []byte) (n int, err error) {
	if c.hello != "" {
		n = copy(b, c.hello)
		c.hello = c.hello[n:]
		return n, nil
	}
	n, err = c.Conn.Read(b)
	c.asks = c.asks && n == 0
	if c.pings != nil && n > 0 {
		c.heard = time.Now()
	}
	if c.logsIn && n > 0 {
		c.logsIn, n = false, answerLogin(b[:n])
	}
	if !c.bounds.hold(b[:n]) {
		_ = c.Close()
		return 0, ErrFraming
	}
	if err != nil && c.bounds.isWithin() {
		err = partError{err}
	}
	return n, err
}

// partError is the error of a read after part of a reply: the server has answered.
type partError struct{ error }

func (e partError) Unwrap() error { return e.error }

// ErrFraming is the error of a connection whose server does not answer as one of the family does.
var ErrFraming = errors.New("a reply is no RESP2, larger than any that is expected, or nests deeper")

// The most that a reply may have. The largest are the copy of a full sliding_log, and the owners of the slots
// of a cluster where each lies alone. An element takes go-redis 16 bytes, so elements take as much as texts.
const (
	mostText     = 16 << 20 // bytes of its texts together
	mostElements = 1 << 20  // of its arrays together
	mostNested   = 8        // arrays within each other
	mostLine     = 64 << 10 // bytes of a line, such as an error
)

// bounds follows the replies on a connection.
type bounds struct {
	// skip is how many bytes of a text are to come.
	skip int
	// line is the beginning of the line that is read, which has length bytes so far.
	line   [24]byte
	length int
	// missing are how many elements are to come of the arrays that have begun, the outermost first, and
	// nested is the number of these arrays.
	missing [mostNested]int
	nested  int
	// text and elements are what the reply has announced so far.
	text, elements int
}

// isWithin reports whether part of a reply is to come.
func (x *bounds) isWithin() bool { return x.skip > 0 || x.length > 0 || x.nested > 0 }

// hold takes in what was read, and reports whether it is within the bounds.
func (x *bounds) hold(b []byte) bool {
	for len(b) > 0 {
		if x.skip > 0 {
			n := min(x.skip, len(b))
			x.skip -= n
			b = b[n:]
			continue
		}
		end := bytes.IndexByte(b, '\n')
		part := b[:end+1]
		if end < 0 {
			part = b
		}
		if x.length < len(x.line) {
			copy(x.line[x.length:], part)
		}
		if x.length += len(part); x.length > mostLine {
			return false
		}
		b = b[len(part):]
		if end < 0 {
			return true
		}
		if !x.begin(bytes.TrimRight(x.line[:min(x.length, len(x.line))], "\r\n")) {
			return false
		}
		x.length = 0
	}
	return true
}

// begin takes in a line, without its end and up to the room that it has.
func (x *bounds) begin(line []byte) bool {
	if len(line) == 0 {
		return false
	}
	switch line[0] {
	case '$':
		n, err := x.announced(line)
		if err != nil || n > mostText-x.text {
			return false
		}
		if n >= 0 {
			x.text += n
			x.skip = n + len("\r\n")
		}
		x.end()
		return true
	case '*':
		n, err := x.announced(line)
		switch {
		case err != nil || n > mostElements-x.elements:
			return false
		case n <= 0:
			x.end()
			return true
		case x.nested == mostNested:
			return false
		}
		x.elements += n
		x.missing[x.nested] = n
		x.nested++
		return true
	case '+', '-', ':':
		x.end()
		return true
	}
	// RESP2 has no other kinds.
	return false
}

// announced returns the number in a line, all of which has to be there: go-redis reads as many digits as there
// are.
func (x *bounds) announced(line []byte) (int, error) {
	if x.length > len(x.line) {
		return 0, ErrFraming
	}
	return strconv.Atoi(string(line[1:]))
}

// end takes in the end of an element, and of the arrays whose last one it is.
func (x *bounds) end() {
	for ; x.nested > 0; x.nested-- {
		if x.missing[x.nested-1]--; x.missing[x.nested-1] > 0 {
			return
		}
	}
	x.text, x.elements = 0, 0
}
