package shardlimit

import (
	"bufio"
	"io"
	"net"
	"net/http"
)

// The methods by which a response can begin. Each settles the request first;
// what is embedded alone would let Flush and Hijack reach past it.

// WriteHeader implements [http.ResponseWriter]. Informational statuses are not
// final, except for the one that hands the connection over.
func (t *tracker) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		t.commit(status)
	}
	t.ResponseWriter.WriteHeader(status)
}

// Write implements [http.ResponseWriter].
func (t *tracker) Write(b []byte) (int, error) {
	t.commit(http.StatusOK)
	return t.ResponseWriter.Write(b)
}

// ReadFrom implements [io.ReaderFrom], which lets the server use sendfile.
func (t *tracker) ReadFrom(r io.Reader) (int64, error) {
	t.commit(http.StatusOK)
	return t.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError is what [http.ResponseController] calls to flush.
func (t *tracker) FlushError() error {
	t.commit(http.StatusOK)
	return http.NewResponseController(t.ResponseWriter).Flush()
}

// Hijack implements [http.Hijacker].
func (t *tracker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buf, err := http.NewResponseController(t.ResponseWriter).Hijack()
	if err == nil {
		t.commit(http.StatusSwitchingProtocols)
	}
	return conn, buf, err
}

// Interface guards.
var (
	_ http.ResponseWriter = (*tracker)(nil)
	_ io.ReaderFrom       = (*tracker)(nil)
	_ http.Hijacker       = (*tracker)(nil)
)
