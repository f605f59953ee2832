package limiter

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dunglas/httpsfv"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Values of the option headers.
const (
	HeadersGitHub = "github"
	HeadersIETF   = "ietf"
	HeadersBoth   = "both"
	HeadersNone   = "none"
)

// refuse returns the error of a request that a zone refuses.
func (t *tracker) refuse(v verdict, w http.ResponseWriter, r *http.Request) error {
	z, st, l := v.Zone, &v.ask.State, v.by.limiter
	z.Counts.Declined.Inc()
	for _, other := range t.own {
		other.showRefunds()
	}
	v.by.addJitter()
	v.reportRefusal(r)
	v.by.promise()
	t.endBy(v)
	prepareRefusal(w.Header())
	t.setHeaders(w.Header())
	switch {
	case st.RetryAfter != store.Never:
		setRetryAfter(w.Header(), ceilSeconds(wait(st)))
	case v.ask.Events > 0:
		l.warnNever(z, &v.ask.Request)
	}
	v.refused.note(v.decidedBy(), l.Now())
	if v.outcome == telemetry.Blocked {
		return caddyhttp.Error(z.BlockStatus, z.blocked)
	}
	return caddyhttp.Error(z.Status, z.refusal)
}

// prepareRefusal removes what earlier handlers wrote about the response that is refused, and forbids
// storage. Every request that the limiter ends passes here before error routes, which may write it again.
func prepareRefusal(h http.Header) {
	deleteLimitHeaders(h)
	for name := range h {
		if isForProxies(name) {
			delete(h, name)
		}
	}
	h["Cache-Control"] = []string{"no-store"}
}

// proxyFields say how caches keep or validate a response, some before Cache-Control, or make a proxy
// send something else in its place, whatever its status.
var proxyFields = []string{
	"Expires", "Etag", "Last-Modified", "X-Accel-Expires", "Surrogate-Control", "Edge-Control",
	"X-Accel-Redirect", "X-Sendfile", "X-Sendfile2", "X-Lighttpd-Send-File", "X-Lighttpd-Send-Tempfile", "X-Reproxy-Url",
}

// isForProxies reports whether a field is one of proxyFields, Cache-Control, or that of one kind of
// caches, such as CDN-Cache-Control. A handler may have written it in any case.
func isForProxies(name string) bool {
	const suffix = "Cache-Control"
	if prefix := len(name) - len(suffix); prefix >= 0 && strings.EqualFold(name[prefix:], suffix) {
		return prefix == 0 || name[prefix-1] == '-'
	}
	return slices.ContainsFunc(proxyFields, func(field string) bool { return strings.EqualFold(field, name) })
}

// warnNever logs that a request costs more than its zone ever admits.
func (l *Limiter) warnNever(z *Zone, req *store.Request) {
	if times, log := l.mayLog(&z.never); log {
		l.Logger.Warn("a request costs more than its zone ever admits; it is refused, and waiting will not help",
			zap.String("zone", z.Name), zap.Int64("cost", req.Cost), zap.Int64("capacity", req.Capacity()),
			zap.Int64("times", times), zap.String("hint", "raise events or, with gcra, burst; or lower cost or reserve"))
	}
}

// all returns the evaluations of the request, also those before an error.
func (t *tracker) all() []*evaluation {
	if t.first.rare == nil || len(t.first.rare.earlier) == 0 {
		return t.own
	}
	return slices.Concat(t.first.rare.earlier, t.own)
}

// setHeaders sets the headers about the verdict of the handlers that show it.
func (t *tracker) setHeaders(h http.Header) {
	if v := t.verdict((*Limiter).setsGitHub); ranks[v.outcome] > rankError {
		t.setLimitHeaders(h, v.Zone, &v.ask.State)
	}
	if t.showsFields() {
		t.setFields(h)
	}
}

// showsFields reports whether the handler that ended the request sets the draft's fields, or
// any that let it pass: the policies hold although no zone has decided.
func (t *tracker) showsFields() bool {
	if ending := t.refusal(); ending != nil {
		return ending.by.limiter.setsIETF()
	}
	return slices.ContainsFunc(t.all(), func(e *evaluation) bool { return e.limiter.setsIETF() })
}

func (l *Limiter) setsGitHub() bool { return l.Headers != HeadersNone && l.Headers != HeadersIETF }

func (l *Limiter) setsIETF() bool { return l.Headers == HeadersIETF || l.Headers == HeadersBoth }

// setLimitHeaders sets the headers that show st, and replaces those of a backend.
// It is called for every request: keys are in canonical form, all values share one
// string, and t has the room for them.
func (t *tracker) setLimitHeaders(h http.Header, z *Zone, st *store.State) {
	var scratch [96]byte
	b := strconv.AppendInt(scratch[:0], st.Limit, 10)
	limit := len(b)
	b = strconv.AppendInt(b, st.Remaining, 10)
	remaining := len(b)
	b = strconv.AppendInt(b, st.Used, 10)
	used := len(b)
	b = strconv.AppendInt(b, ceilSeconds(st.Reset), 10)
	text := chunkString(b)
	values := &t.limitValues
	*values = [...]string{text[:limit], text[limit:remaining], text[remaining:used], text[used:], z.Name}
	h["X-Ratelimit-Limit"] = values[0:1:1]
	h["X-Ratelimit-Remaining"] = values[1:2:2]
	h["X-Ratelimit-Used"] = values[2:3:3]
	if st.Reset != 0 {
		h["X-Ratelimit-Reset"] = values[3:4:4]
	} else {
		// Leases have no reset, unless they refuse.
		delete(h, "X-Ratelimit-Reset")
	}
	h["X-Ratelimit-Resource"] = values[4:5:5]
}

// chunks are strings of which header values are substrings, so that responses do not allocate each. A
// retained value retains its chunk.
var chunks = sync.Pool{New: func() any { return new(strings.Builder) }}

const chunkSize = 512

// chunkString returns b as a part of a chunk.
func chunkString(b []byte) string {
	chunk := chunks.Get().(*strings.Builder)
	defer chunks.Put(chunk)
	if chunk.Cap()-chunk.Len() < len(b) {
		chunk.Reset()
		chunk.Grow(chunkSize)
	}
	chunk.Write(b)
	return chunk.String()[chunk.Len()-len(b):]
}

// deleteLimitHeaders removes the headers of an earlier route.
func deleteLimitHeaders(h http.Header) {
	for _, name := range []string{"Limit", "Remaining", "Used", "Reset", "Resource"} {
		delete(h, "X-Ratelimit-"+name)
	}
	delete(h, policyField)
	delete(h, limitField)
}

// addJitter adds jitter to the wait of the zones that refuse.
func (e *evaluation) addJitter() {
	jitter := rand.Float64() * e.limiter.Jitter
	for _, z := range e.zones {
		if st := &z.ask.State; refuses(z.outcome()) && st.RetryAfter != store.Never {
			// Eleven times a century is no Duration.
			st.RetryAfter += time.Duration(min(jitter*float64(st.RetryAfter), float64(mostJitter)))
			st.RetryAfter = max(st.RetryAfter, time.Microsecond)
		}
	}
}

// promise makes the reset and the wait of the zones that refuse one time: clients obey the one or
// the other, and none may come too early, or late. Where no waiting helps, the reset is a window
// ahead if there is none, because without one some clients ask again at once. Call it after
// reportRefusal, which reads the end of the window.
func (e *evaluation) promise() {
	for _, z := range e.zones {
		st := &z.ask.State
		switch {
		case !refuses(z.outcome()):
		case st.RetryAfter != store.Never:
			st.Reset = st.Now + wait(st)
		case st.Reset <= st.Now:
			st.Reset = st.Now + z.limit.Window.Microseconds()
		}
	}
}

const mostJitter = store.MaxWindow

func setRetryAfter(h http.Header, seconds int64) {
	h["Retry-After"] = []string{strconv.FormatInt(seconds, 10)}
}

// ceilSeconds rounds microseconds up to seconds, so that a client that waits that
// long, or until that second, is not too early.
func ceilSeconds(microseconds int64) int64 {
	return (microseconds + 999_999) / 1_000_000
}

// The fields of draft-ietf-httpapi-ratelimit-headers-10, in canonical form.
const (
	policyField = "Ratelimit-Policy"
	limitField  = "Ratelimit"
)

// maxFieldInteger is the largest integer of a structured field (RFC 9651).
const maxFieldInteger = 999_999_999_999_999

// setFields sets the draft's fields: the policies of all zones that match the
// request, in the order of the config, and the limits of those that were asked. It
// replaces those of a backend.
func (t *tracker) setFields(h http.Header) {
	var policies, limits httpsfv.List
	for _, e := range t.all() {
		if !e.limiter.setsIETF() {
			continue
		}
		for _, z := range e.zones {
			if !z.leads() {
				continue
			}
			policies = append(policies, policyItem(z.Name, &z.ask.Request))
			if z.hasAnswered() {
				limits = append(limits, limitItem(z.Name, &z.ask.State, z.answer == hasNoRoom))
			}
		}
	}
	setField(h, policyField, policies)
	setField(h, limitField, limits)
}

func setField(h http.Header, name string, list httpsfv.List) {
	delete(h, name)
	if len(list) == 0 {
		return
	}
	// Names of zones and small integers are always fit for a structured field.
	if text, err := httpsfv.Marshal(list); err == nil {
		h[name] = []string{text}
	}
}

// policyItem shows what a zone admits.
func policyItem(zone string, req *store.Request) httpsfv.Item {
	item := httpsfv.NewItem(zone)
	item.Params.Add("q", min(max(req.Capacity(), 0), maxFieldInteger))
	if algorithm.Of(req.Limit.Algorithm).Lease {
		item.Params.Add("qu", "concurrent-requests")
		return item
	}
	if window := policyWindow(req); window >= time.Second {
		// Rounded up, so that a client that relies on it is not too early.
		item.Params.Add("w", ceilSeconds(window.Microseconds()))
	}
	return item
}

// policyWindow returns the time in which a client regains its capacity.
func policyWindow(req *store.Request) time.Duration {
	switch {
	case req.Limit.Calendar.Unit != "":
		return req.Limit.Calendar.Unit.Length()
	case !req.Limit.Algorithm.HasBurst() || req.Burst == 0:
		return req.Limit.Window
	}
	microseconds, _ := algorithm.DrainTime(req, req.Burst)
	return time.Duration(microseconds) * time.Microsecond
}

// limitItem shows what is left, and the time until there is more or, of windows,
// until they end.
func limitItem(zone string, st *store.State, declined bool) httpsfv.Item {
	item := httpsfv.NewItem(zone)
	item.Params.Add("r", min(st.Remaining, maxFieldInteger))
	switch {
	case declined && wait(st) > 0:
		item.Params.Add("t", ceilSeconds(wait(st)))
	case st.Reset > st.Now:
		item.Params.Add("t", ceilSeconds(st.Reset-st.Now))
	}
	return item
}

// respond writes the response to a request that e ended with err if the handler is configured to;
// otherwise it returns err.
func (l *Limiter) respond(t *tracker, e *evaluation, w http.ResponseWriter, r *http.Request, err error) error {
	if err == nil || !l.Problem && !l.GRPC {
		return err
	}
	ending := t.refusal()
	if ending == nil || ending.by != e || ending.outcome == telemetry.Undecided {
		return err
	}
	var why caddyhttp.HandlerError // It allocates, so most requests have returned.
	switch {
	case !errors.As(err, &why):
		return err
	case l.GRPC && isGRPC(r):
		writeGRPC(w, r, why, ending.outcome)
		return nil
	case !l.Problem:
		return err
	case hasErrorRoute(r, why):
		return err
	}
	return e.writeProblem(w, r, why)
}

// problem is the body of a refusal, by RFC 9457 and the problem types of
// draft-ietf-httpapi-ratelimit-headers-10.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Violated []string `json:"violated-policies,omitempty"`
}

const (
	problemTypes         = "https://iana.org/assignments/http-problem-types#"
	problemQuotaExceeded = problemTypes + "quota-exceeded"
	problemReduced       = problemTypes + "temporary-reduced-capacity"
)

// writeProblem answers a request that the limiter ended.
func (e *evaluation) writeProblem(w http.ResponseWriter, r *http.Request, why caddyhttp.HandlerError) error {
	body, err := json.Marshal(e.problem(why.StatusCode))
	if err != nil {
		return why
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(why.StatusCode)
	if r.Method != http.MethodHead {
		// A client that cannot be written to has left.
		_, _ = w.Write(body)
	}
	return nil
}

// grpcType begins the content types of gRPC and gRPC-Web.
const grpcType = "application/grpc"

// isGRPC reports whether r is a call of gRPC. A client can write all of it, so only handlers with the
// option grpc ask: a proxy that asks another handler takes status 200 for permission. Clients of gRPC-Web
// understand HTTP statuses.
func isGRPC(r *http.Request) bool {
	kind, is := strings.CutPrefix(r.Header.Get("Content-Type"), grpcType)
	return is && (kind == "" || strings.ContainsRune("+;", rune(kind[0]))) &&
		r.Method == http.MethodPost && r.ProtoMajor >= 2 && r.Header.Get("Te") == "trailers"
}

// grpcStatus returns the status of gRPC of a request that ended with an outcome and a status of HTTP:
// RESOURCE_EXHAUSTED, UNAVAILABLE and, with any block_status but 429, PERMISSION_DENIED.
func grpcStatus(o telemetry.Outcome, status int) string {
	switch {
	case o == telemetry.ErrorRefused:
		return "14"
	case o == telemetry.Blocked && status != http.StatusTooManyRequests:
		return "7"
	default:
		return "8"
	}
}

// writeGRPC answers a call that the limiter ended by a response of headers alone, which clients
// of gRPC take for trailers.
func writeGRPC(w http.ResponseWriter, r *http.Request, why caddyhttp.HandlerError, o telemetry.Outcome) {
	h := w.Header()
	h.Set("Content-Type", r.Header.Get("Content-Type"))
	h.Set("Grpc-Status", grpcStatus(o, why.StatusCode))
	// Names of zones need no escapes.
	h.Set("Grpc-Message", why.Err.Error())
	w.WriteHeader(http.StatusOK)
}

// problem returns why the evaluation ended the request.
func (e *evaluation) problem(status int) problem {
	p := problem{Type: problemReduced, Title: "The service is short of capacity", Status: status}
	for _, z := range e.zones {
		if !refuses(z.outcome()) || !z.leads() {
			continue
		}
		p.Violated = append(p.Violated, z.Name)
		if z.reason() != reasonReserved {
			p.Type, p.Title = problemQuotaExceeded, "The quota is exceeded"
		}
	}
	return p
}

// hasErrorRoute reports whether the server has a route for the error. It gets the
// request as it arrived.
func hasErrorRoute(r *http.Request, err caddyhttp.HandlerError) bool {
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil || server.Errors == nil || len(server.Errors.Routes) == 0 {
		return false
	}
	if original, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request); ok {
		arrived := *r
		arrived.Method, arrived.RemoteAddr, arrived.RequestURI, arrived.URL = original.Method, original.RemoteAddr, original.RequestURI, original.URL
		r = &arrived
	}
	return anyRoute(server.Errors.Routes, server.Errors.WithError(r, err))
}

// anyRoute reports whether a route is for r. A route whose matchers fail counts as
// one.
func anyRoute(routes caddyhttp.RouteList, r *http.Request) bool {
	for _, route := range routes {
		if matches, err := route.MatcherSets.AnyMatchWithError(r); err == nil && !matches {
			continue
		}
		for _, handler := range route.Handlers {
			if sub, ok := handler.(*caddyhttp.Subroute); !ok || anyRoute(sub.Routes, r) {
				return true
			}
		}
	}
	return false
}
