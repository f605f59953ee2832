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
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// trackerVar is the request variable that holds the request's tracker.
const trackerVar = "rate_limit.tracker"

// tracker is the state of one request, shared by all handlers that it passes: its
// evaluations, and whether it is settled. It is also the response writer of the
// handlers after the outermost one, and so sees the final status in time.
type tracker struct {
	caddyhttp.ResponseWriterWrapper

	evaluations []*evaluation
	// request is what the outermost handler got; nil in tests of the writer alone.
	request *http.Request
	// admitted is when the last handler admitted the request: see [Limiter.stamp].
	admitted uint32
	// inherited is how many evaluations were settled before this tracker began, in
	// the route whose error is being handled.
	inherited uint16
	settled   bool
	// unsent is how much of the body is not written yet, by the length that the header declares;
	// unknownLength without one.
	unsent int64
	// response is nil if no zone settles when the response has ended.
	response *response

	// limitValues are the values of the headers X-RateLimit-*.
	limitValues [5]string

	first evaluation
	room  [1]*evaluation
}

func trackerOf(r *http.Request) *tracker {
	t, _ := caddyhttp.GetVar(r.Context(), trackerVar).(*tracker)
	return t
}

// newTracker returns a tracker of responses to w, with room for an evaluation in so
// many zones. If settled is not nil, it was the request's tracker before. It is not
// pooled: handlers may use it as a writer, and access logs read it, after this
// handler has returned.
func newTracker(w http.ResponseWriter, settled *tracker, zones int) (t *tracker) {
	if zones == 1 {
		in := new(struct {
			tracker
			roomForOne
		})
		t = &in.tracker
		in.lend(&t.first)
	} else {
		in := new(struct {
			tracker
			roomForTwo
		})
		t = &in.tracker
		in.lend(&t.first)
	}
	t.ResponseWriter, t.evaluations = w, t.room[:0]
	if settled != nil {
		t.evaluations = append(t.evaluations, settled.evaluations...)
		t.inherited = uint16(len(t.evaluations)) //nolint:gosec // a handful
	}
	return t
}

// newEvaluation returns an evaluation that is not enrolled yet.
func (t *tracker) newEvaluation(l *Limiter, repl *caddy.Replacer) *evaluation {
	e := &t.first
	if len(t.own()) > 0 {
		in := new(struct {
			evaluation
			roomForTwo
		})
		e = &in.evaluation
		in.lend(e)
	}
	e.limiter, e.repl = l, repl
	return e
}

// own returns the evaluations that t settles.
func (t *tracker) own() []*evaluation { return t.evaluations[t.inherited:] }

// enroll adds e to t, and makes t the request's tracker.
func (t *tracker) enroll(e *evaluation, r *http.Request) {
	if len(t.own()) == 0 {
		t.request = r
		caddyhttp.SetVar(r.Context(), trackerVar, t)
		t.logAccess(r)
	}
	t.evaluations = append(t.evaluations, e)
	for _, z := range e.zones {
		if !z.SettleAtEnd {
			continue
		}
		if t.response == nil {
			t.response = &response{began: e.limiter.Now(), isHead: r.Method == http.MethodHead}
		}
		t.response.watch(z.Zone)
	}
}

// counts reports whether the request is counted in that bucket already, or in one that
// clients share instead.
func (t *tracker) counts(z *boundZone, req *store.Request) bool {
	for _, e := range t.evaluations {
		for i := range e.zones {
			other := e.zones[i].boundZone
			if other.Name == z.Name && other.handle.Name == z.handle.Name && e.resolvedKey(i) == req.ClientKey {
				return true
			}
		}
	}
	return false
}

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
		t.setHeaders()
	}
}

// endBy notes the decision that ends the request.
func (t *tracker) endBy(d decision) { t.first.rarely().refusal = &d }

// refusal returns the decision that ended the request, or nil. It has no outcome if the client left
// while the evaluation asked.
func (t *tracker) refusal() *decision {
	if t.first.rare == nil {
		return nil
	}
	return t.first.rare.refusal
}

// isEnded reports whether a handler has ended the request: it was not served.
func (t *tracker) isEnded() bool { return t.refusal() != nil }

// noVerdict stands for the status of a request whose client left before there was one. It is
// in no StatusSet, so such a request is charged and forgives nothing.
const noVerdict = -1

// hasLeft reports whether the client has left: its connection or stream is closed. The end
// of a timeout is a decision of the server.
func (t *tracker) hasLeft() bool {
	return t.request != nil && errors.Is(t.request.Context().Err(), context.Canceled)
}

// commitVerdict commits a status with which a handler answers. Each part of a body calls it, so it looks
// for the client only before the first.
func (t *tracker) commitVerdict(status int) {
	if !t.settled {
		t.commit(t.verdict(status))
	}
}

// verdict returns the status by which a request settles that no handler has answered with
// a status of its own, or noVerdict.
func (t *tracker) verdict(status int) int {
	if t.hasLeft() {
		return noVerdict
	}
	return status
}

// unknownLength is more than any body has.
const unknownLength = math.MaxInt64

// bodyLength returns how long the body of a response with this status is, by its header.
func (t *tracker) bodyLength(status int) int64 {
	switch {
	case status == noVerdict:
		return unknownLength
	case status == http.StatusNoContent, status == http.StatusNotModified, t.request != nil && t.request.Method == http.MethodHead:
		return 0
	}
	length := t.Header().Get("Content-Length")
	if length == "" {
		// Parsing it would allocate an error.
		return unknownLength
	}
	if n, err := strconv.ParseInt(length, 10, 64); err == nil && n >= 0 {
		return n
	}
	return unknownLength
}

// isCut reports whether the client has left before the end of the response. It may leave before
// the handlers have returned, if it can tell from the header where the response ends.
func (t *tracker) isCut() bool { return t.unsent > 0 && t.hasLeft() }

// finish settles the zones that wait for the end of the response.
func (t *tracker) finish(how ending) {
	if t.response == nil {
		return
	}
	t.response.end(t.own()[0].limiter.Now(), t.Header(), how)
	if t.isEnded() {
		return
	}
	for _, e := range t.own() {
		e.settle(t, t.response.status, true)
		e.notePace(t, t.isCut(), func(z *Zone) bool { return z.SettleAtEnd })
	}
}

// statusFor returns the status by which a zone settles: that of gRPC, if the zone has such
// statuses and the response has ended with one.
func (t *tracker) statusFor(z *Zone, status int) int {
	if !z.KnowsGRPC || status == noVerdict {
		return status
	}
	code, err := strconv.Atoi(trailerOf(t.Header(), "Grpc-Status"))
	switch {
	case err != nil && strings.HasPrefix(t.Header().Get("Content-Type"), grpcType):
		// The status of a call follows its messages, for which its client may not have waited.
		return t.verdict(status)
	case err != nil || code < 0 || code > maxGRPCStatus:
		return status
	}
	return StatusGRPC + code
}

// statusOf returns the status with which the server answers err.
func statusOf(err error) int {
	var handlerErr caddyhttp.HandlerError
	if errors.As(err, &handlerErr) && handlerErr.StatusCode != 0 {
		return handlerErr.StatusCode
	}
	return http.StatusInternalServerError
}

// settle charges and refunds by the status, or refunds everything if a handler
// refused the request, and leaves the stores without leases.
func (t *tracker) settle(status int) {
	t.settled = true
	if t.response != nil {
		t.response.status = status
	}
	for _, e := range t.own() {
		if !t.isEnded() {
			e.settle(t, status, false)
			e.notePace(t, status == noVerdict, func(z *Zone) bool { return !z.SettleAtEnd && !z.isLease() })
		} else {
			held := e.where(func(z *inZone) bool { return z.spend != spend{} })
			e.undo()
			e.wakeLines(held)
		}
		if e.lease() == nil && (t.isEnded() || t.response == nil) {
			e.release()
		}
	}
}

// end gives back the leases, and leaves the stores.
func (t *tracker) end() {
	for _, e := range t.own() {
		t.endLease(e)
		e.release()
	}
}

// endLease gives back the leases of e. What runs on behind Caddy after its client has left
// counts for a while.
func (t *tracker) endLease(e *evaluation) {
	if e.lease() == nil {
		return
	}
	isAborted := t.isCut()
	if isAborted {
		e.noteAborted(t)
	}
	e.notePace(t, isAborted, (*Zone).isLease)
	e.lease().end()
}

// The methods that can begin a response settle the request first. With the embedded
// writer's own, Flush and Hijack would bypass that.

// WriteHeader implements [http.ResponseWriter]. Informational statuses are not
// final, except for the one that hands the connection over.
func (t *tracker) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		// A handler may answer for a proxy that has reported that the client has left.
		t.commitVerdict(status)
	}
	t.ResponseWriter.WriteHeader(status)
}

// Write implements [http.ResponseWriter].
func (t *tracker) Write(b []byte) (int, error) {
	t.commitVerdict(http.StatusOK)
	n, err := t.ResponseWriter.Write(b)
	t.unsent -= int64(n)
	t.response.saw(b[:n], err)
	return n, err
}

// ReadFrom implements [io.ReaderFrom], which lets the server use sendfile.
func (t *tracker) ReadFrom(r io.Reader) (int64, error) {
	t.commitVerdict(http.StatusOK)
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
	t.commitVerdict(http.StatusOK)
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
