package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
)

const (
	// chunkSize is how much of a log is read at a time, and maxLine the longest line; a longer one is
	// unreadable.
	chunkSize = 256 << 10
	maxLine   = 1 << 20
	// maxChunks is how many chunks of a log are read ahead.
	maxChunks = 4
)

// chunk is what was read of some lines.
type chunk struct {
	requests          []*passing
	other, unreadable int64
	// sample is the first line that is unreadable.
	sample string
}

// logs are the logs of a replay, read in the order of time.
type logs struct {
	// waiting are those that begin later than what was read, the first at the end; open are the others.
	waiting []*stream
	open    []*stream
	wanted  reader
	// prepare is called for each request where it is read, in parallel.
	prepare func(p *passing)
	workers chan struct{}
	// free are requests that have ended.
	free  sync.Pool
	stdin io.Reader
	// bytes is how much was read of the files, and total how much there is; 0 if that is not known.
	bytes, total      atomic.Int64
	other, unreadable int64
	sample            string
	// errs say which logs could not be read to their ends.
	errs []error
}

// stream is one log.
type stream struct {
	name  string
	file  io.ReadCloser
	first int64
	out   chan chan chunk
	// rest are the requests that were read and not taken; err is why the reading ended.
	rest []*passing
	err  error
	// buf is used for one chunk after the other.
	buf []byte
}

// openLogs looks into logs, and sorts them by their first line. The name "-" is standard input, which as
// any pipe can be read only once, and so comes first.
func openLogs(names []string, stdin io.Reader, wanted reader, prepare func(p *passing)) (*logs, error) {
	l := &logs{wanted: wanted, prepare: prepare, stdin: stdin, workers: make(chan struct{}, runtime.GOMAXPROCS(0))}
	isKnown := true
	for _, name := range names {
		s := &stream{name: name, first: -1}
		size, isFile, err := sizeOf(name)
		if err == nil && isFile {
			l.total.Add(size)
			err = l.probe(s)
		}
		if err != nil {
			return nil, err
		}
		isKnown = isKnown && isFile
		l.waiting = append(l.waiting, s)
	}
	if l.bytes.Store(0); !isKnown {
		l.total.Store(0)
	}
	slices.SortStableFunc(l.waiting, func(a, b *stream) int { return cmp.Compare(b.first, a.first) })
	return l, nil
}

// sizeOf returns the size of a log, and whether it is a file that can be read again.
func sizeOf(name string) (size int64, isFile bool, err error) {
	if name == "-" {
		return 0, false, nil
	}
	info, err := os.Stat(name)
	if err != nil {
		return 0, false, err
	}
	return info.Size(), info.Mode().IsRegular(), nil
}

// probe finds the first line of a log that is a request. A log without one comes first.
func (l *logs) probe(s *stream) error {
	text, err := l.reader(s)
	if err != nil {
		return err
	}
	defer s.file.Close()
	for range maxLine {
		part, err := text.ReadSlice('\n')
		var line Line
		if read := l.wanted; read.read(string(part), &line) == isRequest {
			s.first = line.End
			return nil
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil
		}
	}
	return nil
}

// counting counts what is read of a file.
type counting struct {
	io.Reader
	count *atomic.Int64
}

func (c counting) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.count.Add(int64(n))
	return n, err
}

// reader opens a log, plain or gzip.
func (l *logs) reader(s *stream) (*bufio.Reader, error) {
	if s.file = io.NopCloser(l.stdin); s.name != "-" {
		file, err := os.Open(s.name)
		if err != nil {
			return nil, err
		}
		s.file = file
	}
	text := bufio.NewReaderSize(counting{s.file, &l.bytes}, chunkSize)
	magic, err := text.Peek(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", s.name, err)
	}
	if !bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		return text, nil
	}
	plain, err := gzip.NewReader(text)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", s.name, err)
	}
	return bufio.NewReaderSize(plain, chunkSize), nil
}

// start begins to read a log: its lines are read in parallel, and come in order.
func (l *logs) start(ctx context.Context, s *stream) error {
	text, err := l.reader(s)
	if err != nil {
		return err
	}
	s.out = make(chan chan chunk, maxChunks)
	go func() {
		defer close(s.out)
		defer s.file.Close()
		s.buf = make([]byte, 0, chunkSize+maxLine)
		for {
			part, err := s.readChunk(text)
			if len(part) > 0 && !l.hand(ctx, s, part) {
				return
			}
			if err != nil {
				if !errors.Is(err, io.EOF) {
					s.err = fmt.Errorf("read %s: %w", s.name, err)
				}
				return
			}
		}
	}()
	return nil
}

// hand has some lines read, and reports whether ctx goes on.
func (l *logs) hand(ctx context.Context, s *stream, part string) bool {
	done := make(chan chunk, 1)
	select {
	case s.out <- done:
	case <-ctx.Done():
		return false
	}
	l.workers <- struct{}{}
	go func() {
		defer func() { <-l.workers }()
		done <- l.readLines(part, l.wanted)
	}()
	return true
}

// readChunk reads whole lines. A line that is too long is cut, and so unreadable.
func (s *stream) readChunk(text *bufio.Reader) (string, error) {
	part := s.buf[:chunkSize]
	n := 0
	// io.ReadFull does not tell the end of a log from that of a gzip stream that was cut.
	for n < chunkSize {
		more, err := text.Read(part[n:])
		n += more
		if err != nil {
			return string(part[:n]), err
		}
	}
	for part[len(part)-1] != '\n' {
		more, err := text.ReadSlice('\n')
		if len(part)+len(more) <= cap(part) {
			part = append(part, more...)
		}
		if err == nil {
			if len(more) > 0 && part[len(part)-1] != '\n' {
				// The line was cut.
				return string(part), nil
			}
			continue
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return string(part), err
		}
	}
	return string(part), nil
}

// passing returns one for a line.
func (l *logs) passing() *passing {
	p, _ := l.free.Get().(*passing)
	if p == nil {
		p = new(passing)
	}
	p.reuse()
	return p
}

func (l *logs) readLines(part string, r reader) (c chunk) {
	c.requests = make([]*passing, 0, len(part)/512)
	p := l.passing()
	for part != "" {
		var text string
		text, part, _ = strings.Cut(part, "\n")
		if text = strings.TrimSuffix(text, "\r"); text == "" {
			continue
		}
		became := r.read(text, &p.line)
		if became == isRequest {
			l.prepare(p)
			c.requests = append(c.requests, p)
			p = l.passing()
			continue
		}
		if became == isOther {
			c.other++
		} else if c.unreadable++; c.sample == "" {
			c.sample = sampleOf(text, p.line.flaw)
		}
		p.line.reuse()
	}
	l.free.Put(p)
	return c
}

// sampleOf shows an unreadable line.
func sampleOf(text, flaw string) string {
	sample := strconv.Quote(text[:min(len(text), 120)])
	if flaw != "" {
		sample += ", and " + flaw
	}
	return sample
}

// next returns the request that ends next, or nil at the end of all logs.
func (l *logs) next(ctx context.Context) (*passing, error) {
	var first *stream
	for {
		if err := l.fill(ctx); err != nil {
			return nil, err
		}
		first = nil
		for _, s := range l.open {
			if first == nil || s.rest[0].line.End < first.rest[0].line.End {
				first = s
			}
		}
		n := len(l.waiting)
		if n == 0 || first != nil && first.rest[0].line.End < l.waiting[n-1].first {
			break
		}
		begin := l.waiting[n-1]
		if err := l.start(ctx, begin); err != nil {
			return nil, err
		}
		l.waiting, l.open = l.waiting[:n-1], append(l.open, begin)
	}
	if first == nil {
		return nil, nil
	}
	p := first.rest[0]
	first.rest = first.rest[1:]
	return p, nil
}

// fill gives each open log a request, and closes those without. What was read of a log counts, although
// its rest could not be read.
func (l *logs) fill(ctx context.Context) error {
	for i := 0; i < len(l.open); i++ {
		s := l.open[i]
		for len(s.rest) == 0 {
			done, ok := <-s.out
			if !ok {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				if s.err != nil {
					l.errs = append(l.errs, s.err)
				}
				l.open = slices.Delete(l.open, i, i+1)
				i--
				break
			}
			read := <-done
			s.rest = read.requests
			l.other, l.unreadable = l.other+read.other, l.unreadable+read.unreadable
			l.sample = cmp.Or(l.sample, read.sample)
		}
	}
	return nil
}
