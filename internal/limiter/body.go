package limiter

import (
	"io"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
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

// readAhead begins to read a short body of HTTP/1, which r has from then on, until awaitBody.
// Others are left alone: HTTP/2 and HTTP/3 tell when a client has gone.
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

// awaitBody waits until a body is there that is read ahead: what has wrapped the body, such as the
// access log's count of its bytes, expects no reader beside the handlers, nor after them. It is no
// use to interrupt the reading, because a failed read cancels the request. A client that never
// sends its body holds up no more than it would without: the server reads short bodies to their
// end before it sends a response. The error is that of a client that has left.
func awaitBody(r *http.Request) error {
	b, isRead := r.Body.(*bodyAhead)
	if !isRead {
		return nil
	}
	<-b.done
	if b.err != nil && r.Context().Err() != nil {
		return caddyhttp.Error(statusClientClosedRequest, b.err)
	}
	return nil
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
