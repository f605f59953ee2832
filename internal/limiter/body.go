package limiter

import (
	"io"
	"net/http"
)

// maxReadAhead bounds what is kept of the body of a request that waits.
const maxReadAhead = 4 << 10

// bodyAhead is a short body that is read while its request waits. With HTTP/1 the server
// notices that a client has gone only while it reads from the connection, which it does in the
// background once it has the whole body.
type bodyAhead struct {
	io.ReadCloser
	// done is closed once rest has what was read, and err the error that ended it.
	done chan struct{}
	rest []byte
	err  error
}

// readAhead begins to read a short body of HTTP/1, which r has from then on. Others are left
// alone: HTTP/2 and HTTP/3 tell when a client has gone.
func readAhead(r *http.Request) {
	if r.ProtoMajor != 1 || r.ContentLength <= 0 || r.ContentLength > maxReadAhead || r.Body == nil {
		return
	}
	if _, isRead := r.Body.(*bodyAhead); isRead {
		return
	}
	b := &bodyAhead{ReadCloser: r.Body, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		b.rest, b.err = io.ReadAll(io.LimitReader(b.ReadCloser, maxReadAhead))
	}()
	r.Body = b
}

// Read implements [io.Reader].
func (b *bodyAhead) Read(p []byte) (n int, err error) {
	<-b.done
	switch {
	case len(b.rest) > 0:
		n = copy(p, b.rest)
		b.rest = b.rest[n:]
		return n, nil
	case b.err != nil:
		return 0, b.err
	}
	return b.ReadCloser.Read(p)
}
