package limiter

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dunglas/httpsfv"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// What the option headers can be.
const (
	HeadersGitHub = "github"
	HeadersIETF   = "ietf"
	HeadersBoth   = "both"
	HeadersNone   = "none"
)

func (l *Limiter) setsGitHub() bool { return l.Headers != HeadersNone && l.Headers != HeadersIETF }

func (l *Limiter) setsIETF() bool { return l.Headers == HeadersIETF || l.Headers == HeadersBoth }

// setHeaders tells a client that may pass where it stands.
func (t *tracker) setHeaders() {
	ietf := false
	var best *evaluation
	var at, rank int
	for _, e := range t.evaluations {
		// An evaluation has no states if its check did not come to an end.
		if e.states == nil {
			continue
		}
		ietf = ietf || e.limiter.setsIETF()
		if !e.limiter.setsGitHub() {
			continue
		}
		for i := range e.zones {
			r := e.rank(i)
			if r > max(rank, rankError) || best != nil && r == rank && e.states[i].Remaining < best.states[at].Remaining {
				best, at, rank = e, i, r
			}
		}
	}
	if best != nil {
		t.setLimitHeaders(t.Header(), best.zones[at].Zone, &best.states[at])
	}
	if ietf {
		t.setFields(t.Header())
	}
}

// setRefusal tells a client that zone i of p, which is the last evaluation, refused.
func (t *tracker) setRefusal(e *evaluation, i int, h http.Header) {
	deleteLimitHeaders(h)
	if e.limiter.setsGitHub() {
		t.setLimitHeaders(h, e.zones[i].Zone, &e.states[i])
	}
	if e.limiter.setsIETF() {
		t.setFields(h)
	}
}

// ceilSeconds rounds microseconds up to seconds, so that a client which waits
// that long, or until that second, does not come too early.
func ceilSeconds(microseconds int64) int64 {
	return (microseconds + 999_999) / 1_000_000
}

// setLimitHeaders sets the headers that tell of st, in place of any that are
// there, such as a backend's own. It is called for every request: keys are in
// canonical form, all values share one string, and t has the room for them.
func (t *tracker) setLimitHeaders(h http.Header, z *Zone, st *store.State) {
	var scratch [96]byte
	b := strconv.AppendInt(scratch[:0], st.Limit, 10)
	limit := len(b)
	b = strconv.AppendInt(b, st.Remaining, 10)
	remaining := len(b)
	b = strconv.AppendInt(b, st.Used, 10)
	used := len(b)
	b = strconv.AppendInt(b, ceilSeconds(st.Reset), 10)
	text := string(b)
	values := &t.limitValues
	*values = [...]string{text[:limit], text[limit:remaining], text[remaining:used], text[used:], z.Name}
	h["X-Ratelimit-Limit"] = values[0:1:1]
	h["X-Ratelimit-Remaining"] = values[1:2:2]
	h["X-Ratelimit-Used"] = values[2:3:3]
	if st.Reset != 0 {
		h["X-Ratelimit-Reset"] = values[3:4:4]
	} else {
		// Requests that run at the same time know no reset.
		delete(h, "X-Ratelimit-Reset")
	}
	h["X-Ratelimit-Resource"] = values[4:5:5]
}

// deleteLimitHeaders takes back what an earlier route was told.
func deleteLimitHeaders(h http.Header) {
	for _, name := range []string{"Limit", "Remaining", "Used", "Reset", "Resource"} {
		delete(h, "X-Ratelimit-"+name)
	}
	delete(h, policyField)
	delete(h, limitField)
}

// retryAfter is how many seconds a refused client is told to wait.
func (l *Limiter) retryAfter(st *store.State) int64 {
	wait := st.RetryAfter.Microseconds()
	if l.Jitter > 0 {
		// In floating point, for a century times ten leaves a Duration.
		wait += int64(rand.Float64() * l.Jitter * float64(wait))
	}
	return max(ceilSeconds(wait), 1)
}

func setRetryAfter(h http.Header, seconds int64) {
	h["Retry-After"] = []string{strconv.FormatInt(seconds, 10)}
}

// The fields of draft-ietf-httpapi-ratelimit-headers-10, in canonical form.
const (
	policyField = "Ratelimit-Policy"
	limitField  = "Ratelimit"
)

// maxFieldInteger is the largest integer of a structured field (RFC 9651).
const maxFieldInteger = 999_999_999_999_999

// setFields sets the draft's fields: the policies of all zones that match the
// request, in the order of the config, and where the client stands in those
// that were asked. They replace a backend's own.
func (t *tracker) setFields(h http.Header) {
	var policies, limits httpsfv.List
	for _, e := range t.evaluations {
		if !e.limiter.setsIETF() {
			continue
		}
		for i, z := range e.zones {
			policies = append(policies, policyItem(z.Name, &e.reqs[i]))
			if o := e.outcome(i); o != telemetry.Undecided && e.states[i].Err == nil {
				limits = append(limits, limitItem(z.Name, &e.states[i], e.declines(i)))
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

// policyItem tells what a zone admits.
func policyItem(zone string, req *store.Request) httpsfv.Item {
	item := httpsfv.NewItem(zone)
	item.Params.Add("q", min(max(req.Capacity(), 0), maxFieldInteger))
	if req.Limit.Algorithm == store.Concurrency {
		item.Params.Add("qu", "concurrent-requests")
		return item
	}
	if window := policyWindow(req); window >= time.Second {
		// Rounded up: who believes it does not come too often.
		item.Params.Add("w", ceilSeconds(window.Microseconds()))
	}
	return item
}

// policyWindow is the time in which a client gets its capacity again.
func policyWindow(req *store.Request) time.Duration {
	if req.Limit.Algorithm != store.GCRA || req.Burst == 0 {
		return req.Limit.Window
	}
	microseconds, _ := algorithm.DrainTime(req, req.Burst)
	return time.Duration(microseconds) * time.Microsecond
}

// limitItem tells what is left, and how long it takes until there is more or,
// where there are windows, until they end.
func limitItem(zone string, st *store.State, declined bool) httpsfv.Item {
	item := httpsfv.NewItem(zone)
	item.Params.Add("r", min(st.Remaining, maxFieldInteger))
	switch {
	case declined && wait(st) > 0:
		item.Params.Add("t", ceilSeconds(wait(st)))
	case !declined && st.Reset > st.Now:
		item.Params.Add("t", ceilSeconds(st.Reset-st.Now))
	}
	return item
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

// writeProblem answers a request that the limiter ended because of err, unless
// an error route does. It returns what is left to be handled.
func (e *evaluation) writeProblem(w http.ResponseWriter, r *http.Request, err error) error {
	var handlerErr caddyhttp.HandlerError
	if !errors.As(err, &handlerErr) || handlerErr.StatusCode == statusClientClosedRequest || hasErrorRoute(r, handlerErr) {
		return err
	}
	body, marshalErr := json.Marshal(e.problem(handlerErr.StatusCode))
	if marshalErr != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(handlerErr.StatusCode)
	if r.Method != http.MethodHead {
		// Who does not take the body has left.
		_, _ = w.Write(body)
	}
	return nil
}

// problem tells why the evaluation ended the request.
func (e *evaluation) problem(status int) problem {
	tell := problem{Type: problemReduced, Title: "The service is short of capacity", Status: status}
	for i, z := range e.zones {
		if !e.refuses(i) {
			continue
		}
		tell.Violated = append(tell.Violated, z.Name)
		if e.reason(i) != reasonReserved {
			tell.Type, tell.Title = problemQuotaExceeded, "The quota is exceeded"
		}
	}
	return tell
}

// hasErrorRoute tells whether the server has a route for the error, which gets
// the request as it came.
func hasErrorRoute(r *http.Request, err caddyhttp.HandlerError) bool {
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil || server.Errors == nil || len(server.Errors.Routes) == 0 {
		return false
	}
	if original, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request); ok {
		came := *r
		came.Method, came.RemoteAddr, came.RequestURI, came.URL = original.Method, original.RemoteAddr, original.RequestURI, original.URL
		r = &came
	}
	return anyRoute(server.Errors.Routes, server.Errors.WithError(r, err))
}

// anyRoute tells whether a route is for r. One whose matchers cannot tell counts
// as one that is.
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
