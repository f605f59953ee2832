package limiter

import (
	"bytes"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/zap"
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

// DefaultSettleBuffer is the default of [Zone.SettleBuffer].
const DefaultSettleBuffer = 64 << 10

// response is what is learnt of a response as it passes, for costs that are known when
// it has ended. It delays and changes nothing.
type response struct {
	began  time.Time
	size   int64
	status int
	// ended is when the handler chain has returned.
	ended time.Time
	// paths are the paths in JSON that zones ask for, values what was found there last.
	paths  []string
	values map[string]string
	// most bounds what is kept of the body.
	most int
	// kept is the body or, of a stream, the event so far; isTooLong is set if that is
	// longer.
	kept      []byte
	isTooLong bool
	// hasLine is set if the line that passes is not empty so far.
	hasLine bool
	// reads is how the body is read.
	reads bodyKind
	// isHead is set if the request wants no body: the server discards what is written.
	isHead bool
	// isHijacked is set if the connection was handed over, so that nothing of it is seen.
	isHijacked bool
}

type bodyKind uint8

const (
	// The zero value is a body in which there is no JSON to be found.
	_ bodyKind = iota
	// encoded is one that is compressed.
	encoded
	// document is one JSON document.
	document
	// stream is server-sent events.
	stream
)

// IsUnknown reports whether a name has the prefix of placeholders about the response, but
// there is no such placeholder.
func IsUnknown(name string) bool {
	what, is := strings.CutPrefix(name, responsePrefix)
	// A zone may be named response.
	return is && !IsKnownAtEnd(name) && !slices.Contains(zonePlaceholders, what)
}

// IsKnownAtEnd reports whether a placeholder has no value before the response has ended.
func IsKnownAtEnd(name string) bool {
	what, is := strings.CutPrefix(name, responsePrefix)
	return is && (what == responseSize || what == responseTime || strings.HasPrefix(what, responseJSON) && what != responseJSON) || strings.HasPrefix(name, trailerPrefix)
}

// watch makes r find what a zone's cost asks for.
func (r *response) watch(z *Zone) {
	r.most = max(r.most, z.SettleBuffer)
	for _, path := range z.responsePaths {
		if !slices.Contains(r.paths, path) {
			r.paths = append(r.paths, path)
		}
	}
}

// begin notes what the header says.
func (r *response) begin(h http.Header) {
	if len(r.paths) == 0 {
		return
	}
	kind, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	encoding := h.Get("Content-Encoding")
	switch {
	case kind != "text/event-stream" && kind != "application/json" && !strings.HasSuffix(kind, "+json"):
	case encoding != "" && encoding != "identity":
		r.reads = encoded
	case kind == "text/event-stream":
		r.reads = stream
	default:
		r.reads = document
	}
}

// isRead reports whether the body has to be seen, and not only counted.
func (r *response) isRead() bool { return r != nil && r.reads >= document }

// saw notes a part of the body.
func (r *response) saw(b []byte) {
	if r == nil || r.isHead {
		return
	}
	r.size += int64(len(b))
	switch r.reads {
	case document:
		r.keep(b)
	case stream:
		r.sawEvents(b)
	}
}

func (r *response) keep(b []byte) {
	if r.isTooLong = r.isTooLong || len(r.kept)+len(b) > r.most; r.isTooLong {
		r.kept = r.kept[:0]
		return
	}
	r.kept = append(r.kept, b...)
}

// sawEvents reads the data of events, which end with an empty line.
func (r *response) sawEvents(b []byte) {
	for len(b) > 0 {
		line, rest, isWhole := bytes.Cut(b, []byte("\n"))
		r.keep(b[:len(b)-len(rest)])
		r.hasLine = r.hasLine || len(bytes.TrimRight(line, "\r")) > 0
		if !isWhole {
			return
		}
		if !r.hasLine {
			r.endEvent()
		}
		r.hasLine, b = false, rest
	}
}

// endEvent looks for the paths in the data of the event that is kept.
func (r *response) endEvent() {
	var data []byte
	for line := range bytes.Lines(r.kept) {
		if text, is := bytes.CutPrefix(line, []byte("data:")); is {
			data = append(data, text...)
		}
	}
	r.find(data)
	r.kept, r.isTooLong = r.kept[:0], false
}

// find notes what a JSON document has at the paths.
func (r *response) find(document []byte) {
	if len(document) == 0 {
		return
	}
	for _, path := range r.paths {
		switch found := gjson.GetBytes(document, path); found.Type {
		case gjson.Number, gjson.String:
			if r.values == nil {
				r.values = map[string]string{}
			}
			r.values[path] = found.String()
		}
	}
}

// end notes that the handler chain has returned.
func (r *response) end(now time.Time) {
	r.ended = now
	switch {
	case r.isTooLong:
	case r.reads == document:
		r.find(r.kept)
	case r.reads == stream:
		r.endEvent()
	}
	r.kept = nil
}

// value returns what a placeholder yields once the response has ended.
func (r *response) value(name string) (any, bool) {
	path, isPath := strings.CutPrefix(name, responseJSON)
	switch {
	case !isPath && name != responseSize && name != responseTime:
		return nil, false
	case r == nil || r.ended.IsZero(), r.isHijacked && name != responseTime:
		return nil, true
	case name == responseSize:
		return strconv.FormatInt(r.size, 10), true
	case name == responseTime:
		return strconv.FormatInt(r.ended.Sub(r.began).Milliseconds(), 10), true
	}
	if text, ok := r.values[path]; ok {
		return text, true
	}
	return nil, true
}

// warnEncoded logs that a body could not be read.
func (e *evaluation) warnEncoded() {
	for _, z := range e.zones {
		if len(z.responsePaths) == 0 {
			continue
		}
		if times, log := e.limiter.mayLog(&z.encoded); log {
			e.limiter.Logger.Warn("a response is compressed, so its cost cannot be read; charging the fallback",
				zap.String("zone", z.Name), zap.Int64("fallback", z.Cost.Number), zap.Int64("times", times),
				zap.String("hint", "write header_up Accept-Encoding identity in reverse_proxy and, where there is encode, put it before rate_limit in a route"))
		}
	}
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
