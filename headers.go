package shardlimit

import (
	"math/rand/v2"
	"net/http"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// What the option headers can be.
const (
	headersGitHub = "github"
	headersIETF   = "ietf"
	headersBoth   = "both"
	headersNone   = "none"
)

func (l *Limiter) setsGitHub() bool { return l.Headers != headersNone && l.Headers != headersIETF }

func (l *Limiter) setsIETF() bool { return l.Headers == headersIETF || l.Headers == headersBoth }

// setHeaders tells a client that may pass where it stands.
func (t *tracker) setHeaders() {
	ietf := false
	var part *part
	var at, rank int
	for _, p := range t.parts {
		// A part has no states if its check did not come to an end.
		if p.states == nil {
			continue
		}
		ietf = ietf || p.limiter.setsIETF()
		if !p.limiter.setsGitHub() {
			continue
		}
		for i := range p.zones {
			r := p.rank(i)
			if r > max(rank, rankError) || part != nil && r == rank && p.states[i].Remaining < part.states[at].Remaining {
				part, at, rank = p, i, r
			}
		}
	}
	if part != nil {
		t.setLimitHeaders(t.Header(), part.zones[at].compiledZone, &part.states[at])
	}
	if ietf {
		t.setFields(t.Header())
	}
}

// setRefusal tells a client that zone i of p, which is the last part, refused.
func (t *tracker) setRefusal(p *part, i int, h http.Header) {
	deleteLimitHeaders(h)
	if p.limiter.setsGitHub() {
		t.setLimitHeaders(h, p.zones[i].compiledZone, &p.states[i])
	}
	if p.limiter.setsIETF() {
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
func (t *tracker) setLimitHeaders(h http.Header, z *compiledZone, st *store.State) {
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
