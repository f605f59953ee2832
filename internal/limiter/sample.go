package limiter

import (
	"hash/maphash"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// sampleSize is how many requests of a zone are looked at between two calls of TakeSample.
const sampleSize = 256

// Sample is what the first requests of a zone were like since the sample was last taken.
type Sample struct {
	Requests int
	// Forwarded are those whose key has the address of a proxy in place of the client's.
	Forwarded int
	// OverSocket counts forwarded requests that come over a Unix socket, where the peer has no address.
	OverSocket int
	// Empty are those that no text of the key names, so that the client's address counts.
	Empty int
	// Key is a hash of the key that most requests have, and OfKey are those. Keys of texts
	// without placeholders are the same for all on purpose, and none of these.
	Key   uint64
	OfKey int
}

// requestSample collects a [Sample]. A request that comes once it is full costs one load.
type requestSample struct {
	isFull atomic.Bool
	mu     sync.Mutex
	taken  Sample
	keys   []uint64
}

// sampleSeed is the same for all zones, so that hashes of one key agree.
var sampleSeed = maphash.MakeSeed()

// sampled looks at a request with that client key, unless enough were looked at.
func (z *boundZone) sampled(clientKey string, r *http.Request) {
	s := &z.sample
	if s.isFull.Load() {
		return
	}
	i := slices.IndexFunc(z.templates, func(t keyTemplate) bool { return strings.HasPrefix(clientKey, t.tag) })
	if i < 0 {
		return
	}
	t := &z.templates[i]
	isForwarded := t.hasAddress && isForwarded(r, t)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken.Requests++
	if isForwarded {
		s.taken.Forwarded++
		if _, _, err := net.SplitHostPort(r.RemoteAddr); err != nil {
			s.taken.OverSocket++
		}
	}
	if i >= len(z.Key) {
		s.taken.Empty++
	}
	if len(t.placeholders) > 0 {
		s.keys = append(s.keys, maphash.String(sampleSeed, clientKey))
	}
	s.isFull.Store(s.taken.Requests >= sampleSize)
}

// take returns the sample and begins another.
func (s *requestSample) take() Sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.keys)
	for from := 0; from < len(s.keys); {
		until := from
		for until < len(s.keys) && s.keys[until] == s.keys[from] {
			until++
		}
		if until-from > s.taken.OfKey {
			s.taken.Key, s.taken.OfKey = s.keys[from], until-from
		}
		from = until
	}
	taken := s.taken
	s.taken, s.keys = Sample{}, s.keys[:0]
	s.isFull.Store(false)
	return taken
}

// TakeSample returns the sample of the zone's requests in a store in which it counts, and begins another. It
// forgets what has expired of what was logged of clients.
func (z *Zone) TakeSample(in *stores.Handle, now time.Time) Sample {
	bound := &z.bound[ownStore]
	if bound.handle != in {
		bound = &z.bound[rolloutStore]
	}
	bound.recent.expire(now)
	return bound.sample.take()
}

// isForwarded reports whether a proxy tells, in a header that Caddy does not believe or that the
// key does not read, for whom it sends the request.
func isForwarded(r *http.Request, t *keyTemplate) bool {
	var headers []string
	if server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); server != nil {
		headers = server.ClientIPHeaders
	}
	if !slices.ContainsFunc(headers, func(name string) bool { return r.Header.Get(name) != "" }) {
		return false
	}
	isTrusted, _ := caddyhttp.GetVar(r.Context(), caddyhttp.TrustedProxyVarKey).(bool)
	return !isTrusted || !slices.Contains(t.placeholders, "http.vars."+caddyhttp.ClientIPVarKey)
}

// manyRequests is from how many requests on a limiter is in use.
const manyRequests = 1000

// arrivals counts requests up to manyRequests; a later one costs one load.
type arrivals struct{ n atomic.Int32 }

func (a *arrivals) note() {
	if a.n.Load() < manyRequests {
		a.n.Add(1)
	}
}

// IsInUse reports whether the limiter has got at least 1000 requests, whether or not they match
// its zones.
func (l *Limiter) IsInUse() bool { return l.arrived.n.Load() >= manyRequests }
