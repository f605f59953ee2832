package loadgen

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
)

// readPlain reads an answer whose headers are in r's buffer and say how long the
// body is, at a fraction of what http.ReadResponse takes. Of any other it reads
// nothing, and is not ok.
func readPlain(r *bufio.Reader) (status int, ok bool, err error) {
	// The first byte comes with all headers, mostly.
	if _, err := r.Peek(1); err != nil {
		return 0, false, fmt.Errorf("read response: %w", err)
	}
	b, err := r.Peek(r.Buffered())
	if err != nil {
		return 0, false, fmt.Errorf("read response: %w", err)
	}
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		return 0, false, nil
	}
	status, length := plainHead(b[:end])
	if length < 0 {
		return 0, false, nil
	}
	if _, err := r.Discard(end + len("\r\n\r\n") + length); err != nil {
		return 0, false, fmt.Errorf("read body: %w", err)
	}
	return status, true, nil
}

// plainHead reads the status and the length of the body. The length is negative
// if something else has to be known.
func plainHead(head []byte) (status, length int) {
	line, fields, _ := bytes.Cut(head, []byte("\r\n"))
	rest, isHTTP := bytes.CutPrefix(line, []byte("HTTP/1.1 "))
	if !isHTTP || len(rest) < 3 {
		return 0, -1
	}
	status, err := strconv.Atoi(string(rest[:3]))
	if err != nil || status < 200 {
		return 0, -1
	}
	length = -1
	for len(fields) > 0 {
		line, fields, _ = bytes.Cut(fields, []byte("\r\n"))
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return 0, -1
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")), bytes.EqualFold(name, []byte("Connection")):
			return 0, -1
		}
	}
	return status, length
}
