package limiter

import (
	"bufio"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
)

// The methods that can begin a response settle the request first. With the embedded
// writer's own, Flush and Hijack would bypass that.

// WriteHeader implements [http.ResponseWriter]. Informational statuses are not
// final, except for the one that hands the connection over.
func (t *tracker) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		// A handler may answer for a proxy that has reported that the client has left.
		t.commitAs(status)
	}
	t.ResponseWriter.WriteHeader(status)
}

// Write implements [http.ResponseWriter].
func (t *tracker) Write(b []byte) (int, error) {
	t.commitAs(http.StatusOK)
	n, err := t.ResponseWriter.Write(b)
	t.unsent -= int64(n)
	t.response.saw(b[:n], err)
	return n, err
}

// ReadFrom implements [io.ReaderFrom], which lets the server use sendfile.
func (t *tracker) ReadFrom(r io.Reader) (int64, error) {
	t.commitAs(http.StatusOK)
	if t.response.isRead() {
		// Write sees what passes.
		n, err := io.Copy(struct{ io.Writer }{t}, r)
		t.response.wrote(0, err)
		return n, err
	}
	n, err := t.ResponseWriterWrapper.ReadFrom(r)
	t.unsent -= n
	t.response.wrote(n, err)
	return n, err
}

// FlushError is what [http.ResponseController] calls to flush.
func (t *tracker) FlushError() error {
	t.commitAs(http.StatusOK)
	return http.NewResponseController(t.ResponseWriter).Flush()
}

// Hijack implements [http.Hijacker].
func (t *tracker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buf, err := http.NewResponseController(t.ResponseWriter).Hijack()
	if err == nil {
		t.commit(http.StatusSwitchingProtocols)
		if t.response != nil {
			t.response.isUnseen = true
		}
	}
	return conn, buf, err
}

var _ http.Hijacker = (*tracker)(nil)

// commit settles and sets the headers, once the final status is known and before
// the header is sent.
func (t *tracker) commit(status int) {
	if t.settled {
		return
	}
	if t.response != nil {
		t.response.begin(t.Header())
	}
	t.unsent = t.bodyLength(status)
	t.settle(status)
	if !t.isEnded() {
		t.setHeaders(t.Header())
	}
}

// statusLeft stands for the status of a request whose client left before there was one. It is
// in no StatusSet, so such a request is charged and forgives nothing.
const statusLeft = -1

// hasLeft reports whether the client has left: its connection or stream is closed. The end
// of a timeout is a decision of the server.
func (t *tracker) hasLeft() bool {
	return t.request != nil && errors.Is(t.request.Context().Err(), context.Canceled)
}

// commitAs commits a status with which a handler answers. Each part of a body calls it, so it looks
// for the client only before the first.
func (t *tracker) commitAs(status int) {
	if !t.settled {
		t.commit(t.unlessLeft(status))
	}
}

// unlessLeft returns the status by which a request settles that no handler has answered with
// a status of its own, or statusLeft.
func (t *tracker) unlessLeft(status int) int {
	if t.hasLeft() {
		return statusLeft
	}
	return status
}

// unknownLength is more than any body has.
const unknownLength = math.MaxInt64

// bodyLength returns how long the body of a response with this status is, by its header.
func (t *tracker) bodyLength(status int) int64 {
	switch {
	case status == statusLeft:
		return unknownLength
	case status == http.StatusNoContent, status == http.StatusNotModified, t.request != nil && t.request.Method == http.MethodHead:
		return 0
	}
	if length := t.Header()["Content-Length"]; len(length) > 0 { // Parsing "" would allocate an error.
		if n, err := strconv.ParseInt(length[0], 10, 64); err == nil && n >= 0 {
			return n
		}
	}
	return unknownLength
}

// isCut reports whether the client has left before the end of the response. It may leave before
// the handlers have returned, if it can tell from the header where the response ends.
func (t *tracker) isCut() bool { return t.unsent > 0 && t.hasLeft() }
