package limiter

import (
	"bytes"
	"io"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// maxReadAhead bounds what is kept of the body of a request that waits.
const maxReadAhead = 4 << 10

// bodyAhead is a body that was read before its request stood in a line.
type bodyAhead struct {
	io.Reader
	io.Closer
}

// readAhead reads a short body of HTTP/1, which r has from then on: the server notices that a
// client has gone only while it reads from the connection, which it does in the background once
// it has the whole body. HTTP/2 and HTTP/3 tell in any case. A client that sends its body slowly
// holds meanwhile no more than with a handler that reads it. The error is that of a client that
// has left.
func readAhead(r *http.Request) error {
	if r.ProtoMajor != 1 || r.ContentLength <= 0 || r.ContentLength > maxReadAhead || r.Body == nil {
		return nil
	}
	if _, isRead := r.Body.(*bodyAhead); isRead {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(r.Body, maxReadAhead))
	if err != nil && r.Context().Err() != nil {
		return caddyhttp.Error(statusClientClosedRequest, err)
	}
	// What failed fails again.
	r.Body = &bodyAhead{io.MultiReader(bytes.NewReader(text), r.Body), r.Body}
	return nil
}
