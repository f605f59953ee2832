package body

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

const (
	// maxCodings is how many codings a body may have, one on the other.
	maxCodings = 3
	// maxWindow is the largest window that RFC 9659 allows zstd.
	maxWindow = 8 << 20
	// A body may be decoded to freeSize bytes, and beyond that to maxRatio times its size.
	freeSize = 16 << 20
	maxRatio = 100
)

// contentCodings returns the codings of a body, in the order in which they were applied.
func contentCodings(h http.Header) (codings []string) {
	for coding := range strings.SplitSeq(strings.Join(h.Values("Content-Encoding"), ","), ",") {
		switch coding = strings.ToLower(strings.TrimSpace(coding)); coding {
		case "", "identity":
		case "x-gzip":
			codings = append(codings, "gzip")
		default:
			codings = append(codings, coding)
		}
	}
	return codings
}

// reusable is a decoder that can be used for one body after the other.
type reusable interface {
	io.Reader
	Reset(r io.Reader) error
}

// decoders are decoders by coding. They are reused because they are large.
var decoders = map[string]*sync.Pool{
	"gzip":    {New: func() any { return new(gzip.Reader) }},
	"deflate": {New: func() any { return new(deflated) }},
	"br":      {New: func() any { return new(brotli.Reader) }},
	"zstd": {New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			panic(err) // The options are constant.
		}
		return d
	}},
}

// deflated decodes what the standard calls deflate, which has the header of zlib, and what
// some send, which has none.
type deflated struct{ io.Reader }

// Reset implements reusable.
func (d *deflated) Reset(r io.Reader) error {
	in := bufio.NewReader(r)
	header, err := in.Peek(2)
	switch {
	case err != nil:
		return io.ErrUnexpectedEOF
	case header[0]&0xf == 8 && (int(header[0])<<8|int(header[1]))%31 == 0:
		d.Reader, err = zlib.NewReader(in)
	default:
		d.Reader = flate.NewReader(in)
	}
	return err
}

// decoder decodes a body for another sink. The libraries pull, so it has a goroutine from the
// first part to Close; Write waits until that has taken the part.
type decoder struct {
	codings []string
	to      sink
	in      *io.PipeWriter
	done    chan struct{}
	// err is set once done is closed.
	err error
}

func newDecoder(codings []string, to sink) (*decoder, error) {
	isUnknown := func(coding string) bool { return decoders[coding] == nil }
	if len(codings) > maxCodings || slices.ContainsFunc(codings, isUnknown) {
		return nil, fmt.Errorf("%w %s is not supported", ErrEncoding, strings.Join(codings, ", "))
	}
	return &decoder{codings: codings, to: to}, nil
}

func (d *decoder) Write(b []byte) (int, error) {
	if d.in == nil {
		var out *io.PipeReader
		out, d.in = io.Pipe()
		d.done = make(chan struct{})
		go d.run(out)
	}
	return d.in.Write(b)
}

// Close implements sink.
func (d *decoder) Close() error {
	if d.in != nil {
		_ = d.in.Close()
		<-d.done
	}
	if err := d.to.Close(); d.err == nil {
		d.err = err
	}
	return d.err
}

// run decodes until the pipe ends, or more of it is of no use.
func (d *decoder) run(in *io.PipeReader) {
	defer close(d.done)
	// What is still written is not awaited.
	defer in.Close()
	defer func() {
		if p := recover(); p != nil {
			d.err = fmt.Errorf("%w: %v", ErrEncoding, p)
		}
	}()
	d.err = d.decode(in)
}

func (d *decoder) decode(in io.Reader) error {
	size := new(sizes)
	r := size.encoded(in)
	used := make([]reusable, len(d.codings))
	for i, coding := range slices.Backward(d.codings) {
		used[i] = decoders[coding].Get().(reusable)
		if err := used[i].Reset(r); err != nil {
			return decodeError(err)
		}
		r = size.decoded(used[i])
	}
	_, err := io.Copy(struct{ io.Writer }{d.to}, r)
	if err == nil {
		// A coding may end before the body does.
		_, err = io.Copy(io.Discard, in)
	}
	// Those of a body with an error, or a panic, are not used again.
	for i := 0; err == nil && i < len(used); i++ {
		decoders[d.codings[i]].Put(used[i])
	}
	return decodeError(err)
}

// decodeError returns the error of this package for one of a decoder or a sink.
func decodeError(err error) error {
	switch {
	case err == nil, errors.Is(err, ErrNotJSON), errors.Is(err, ErrEncoding):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return ErrBrokenOff
	}
	return fmt.Errorf("%w: %w", ErrEncoding, err)
}

// sizes bounds what a body expands to.
type sizes struct{ in int64 }

// encoded counts the bytes that are read of the body. Each read fills its buffer, so that how far a decoder reads
// ahead, and with it the bound, does not depend on how the body is cut into parts.
func (s *sizes) encoded(r io.Reader) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		n, err := io.ReadFull(r, p)
		s.in += int64(n)
		if n > 0 {
			err = nil
		}
		return n, err
	})
}

// decoded fails once more is read than the body may expand to.
func (s *sizes) decoded(r io.Reader) io.Reader {
	out := int64(0)
	return readerFunc(func(p []byte) (int, error) {
		n, err := r.Read(p)
		if out += int64(n); out > freeSize+maxRatio*s.in {
			return 0, fmt.Errorf("%w: it expands to more than %d times its size", ErrEncoding, maxRatio)
		}
		return n, err
	})
}

type readerFunc func(p []byte) (int, error)

// Read implements [io.Reader].
func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
