package limiter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/body"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// What the cost of a zone that settles at the end may be made of, besides placeholders
// of Caddy. The names follow responsePrefix.
const (
	responsePrefix = placeholderPrefix + "response."
	responseSize   = "size"
	responseTime   = "duration_ms"
	responseJSON   = "json."
	trailerPrefix  = "http.response.trailer."
)

// maxGRPCStatus is the highest status of gRPC.
const maxGRPCStatus = 16

// response is what is learnt of a response as it passes, for costs that are known when
// it has ended. It delays and changes nothing.
type response struct {
	began time.Time
	// held is how long handlers of this module have held the request since.
	held   time.Duration
	size   int64
	status int
	// ended is when the handler chain has returned.
	ended time.Time
	// paths are the paths in JSON that zones ask for, in the body if it is read.
	paths []body.Path
	body  *body.Reader
	// isHead is set if the request wants no body: the server discards what is written.
	isHead bool
	// isUnseen is set if the rest of the body, or all of it, bypasses the tracker: the
	// connection was handed over, or an error route answers.
	isUnseen bool
	// isBrokenOff is set if the body ended too early.
	isBrokenOff bool
}

// checkKnown returns an error if a name has the prefix of this module's placeholders, but there is no such
// placeholder. Any text may be a zone of a handler before.
func checkKnown(name string) error {
	rest, is := strings.CutPrefix(name, placeholderPrefix)
	if !is || IsKnownAtEnd(name) || rest == exceededName || slices.Contains(zonePlaceholders, rest[strings.LastIndexByte(rest, '.')+1:]) {
		return nil
	}
	first, path, _ := strings.Cut(rest, ".")
	if meant := responsePrefix + path; first != "response" && option.Nearest(first, []string{"response"}) != "" && IsKnownAtEnd(meant) {
		return fmt.Errorf("has {%s}, which is unknown: did you mean {%s}?", name, meant)
	}
	return fmt.Errorf("has {%s}, which is unknown: there is {http.rate_limit.response.size}, .duration_ms and .json.<path>", name)
}

// IsKnownAtEnd reports whether a placeholder has no value before the response has ended.
func IsKnownAtEnd(name string) bool {
	what, is := strings.CutPrefix(name, responsePrefix)
	return is && (what == responseSize || what == responseTime || strings.HasPrefix(what, responseJSON) && what != responseJSON) || strings.HasPrefix(name, trailerPrefix)
}

// watch makes r find what a zone's cost asks for.
func (r *response) watch(z *Zone) {
	for _, path := range z.paths {
		if !slices.ContainsFunc(r.paths, func(p body.Path) bool { return p.String() == path.String() }) {
			r.paths = append(r.paths, path)
		}
	}
}

// begin notes what the header says.
func (r *response) begin(h http.Header) {
	if len(r.paths) > 0 && !r.isHead {
		r.body = body.NewReader(h, r.paths)
	}
}

// isRead reports whether the body has to be seen, and not only counted.
func (r *response) isRead() bool { return r != nil && r.body.Reads() }

// saw notes that the part b of the body was written, or so much of it before an error.
func (r *response) saw(b []byte, err error) {
	if r == nil {
		return
	}
	r.wrote(int64(len(b)), err)
	r.body.Saw(b)
}

// wrote notes that a part of the body was written without being seen.
func (r *response) wrote(n int64, err error) {
	if r == nil || r.isHead {
		return
	}
	r.size += n
	r.isBrokenOff = r.isBrokenOff || err != nil && !errors.Is(err, http.ErrBodyNotAllowed)
}

// ending is how the handler chain has ended.
type ending struct {
	ctx context.Context
	// err is what the chain has returned, unless it panicked.
	err      error
	panicked bool
}

// end notes that the handler chain has returned, or panicked.
func (r *response) end(now time.Time, h http.Header, how ending) {
	r.ended = now
	r.body.Close()
	isLeft := how.ctx.Err() != nil
	declared, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64)
	isEmpty := r.isHead || r.status == http.StatusNoContent || r.status == http.StatusNotModified || err == nil && declared == 0
	// Nothing was written before the client left, or before the panic, although something would
	// have been.
	isNone := r.size == 0 && !isEmpty && (isLeft || how.panicked)
	r.isUnseen = r.isUnseen || how.err != nil || isNone
	isShort := err == nil && r.size < declared && !r.isHead && r.status != http.StatusNotModified
	// Most streams have no end of their own: one that was left looks like a whole one.
	isCut := how.panicked || isShort || isLeft && r.body.IsStream() || r.isUnseen && r.size > 0
	r.isBrokenOff = r.isBrokenOff || isNone || isCut
}

// value returns what a placeholder yields once the response has ended.
func (r *response) value(name string) (any, bool) {
	path, isPath := strings.CutPrefix(name, responseJSON)
	switch {
	case !isPath && name != responseSize && name != responseTime:
		return nil, false
	case r == nil || r.ended.IsZero():
		return nil, true
	case name == responseTime:
		return strconv.FormatInt(max(r.ended.Sub(r.began)-r.held, 0).Milliseconds(), 10), true
	case name == responseSize && r.isUnseen && r.size == 0:
		return nil, true
	case name == responseSize:
		return strconv.FormatInt(r.size, 10), true
	}
	if text, ok := r.body.Number(path); ok {
		return text, true
	}
	return nil, true
}

// fault returns why not all of the response is known of which the cost of a zone is made.
func (r *response) fault(z *Zone) (telemetry.Cause, error) {
	if r == nil || len(z.paths) == 0 && !z.readsSize {
		return telemetry.Known, nil
	}
	// The client has chosen the part, which may even look like a document.
	isPart := r.status == http.StatusPartialContent
	isWhole := !isPart && r.body.IsWhole()
	switch {
	case isWhole && r.body.IsStream() && !z.readsSize:
		// Clients leave such a stream, and handlers then fail or panic.
		return telemetry.Known, nil
	case r.isUnseen && r.isBrokenOff:
		return telemetry.BrokenOff, nil
	case r.isUnseen:
		return telemetry.NotFound, nil
	case len(z.paths) == 0, isWhole:
		return telemetry.Known, nil
	}
	err := r.body.Err()
	switch {
	case errors.Is(err, body.ErrEncoding):
		return telemetry.Encoding, err
	case r.isBrokenOff, errors.Is(err, body.ErrBrokenOff):
		return telemetry.BrokenOff, err
	case errors.Is(err, body.ErrNotJSON):
		return telemetry.NotJSON, err
	case isPart:
		return telemetry.BrokenOff, nil
	}
	return telemetry.Known, nil
}

// trailerOf returns a trailer of a response, which the handler has declared in its header
// or not.
func trailerOf(h http.Header, name string) string {
	name = http.CanonicalHeaderKey(name)
	if values := h[http.TrailerPrefix+name]; len(values) > 0 {
		return values[0]
	}
	return h.Get(name)
}
