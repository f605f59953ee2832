package limiter

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/body"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Zone is a named limit. New completes it.
type Zone struct {
	Name     string
	Matchers caddyhttp.MatcherSets
	// Key are the templates of the client key.
	Key []string
	// IPv4Prefix and IPv6Prefix are how many bits of an address identify a client;
	// 0 for all.
	IPv4Prefix, IPv6Prefix int

	Algorithm store.Algorithm
	Window    time.Duration
	Align     bool
	// Calendar, if it has a unit, replaces Window and Align.
	Calendar store.Calendar
	Events   Quantity
	// Burst is 0 for that of Events.
	Burst Quantity
	Cost  Quantity
	// ChargeBefore is set if the zone takes when a request arrives, as one with
	// concurrency always does.
	ChargeBefore bool
	// Batch is 0, [store.BatchAuto], or how many events are taken at once.
	Batch int64
	// Free are the statuses that cost nothing; Forgives are those that empty the bucket
	// as well.
	Free, Forgives StatusSet

	// Warn is the percentage of the limit from which a client is near it; 0 for none.
	Warn int64

	// SettleAtEnd is set if the final cost is known when the response has ended, and not
	// when it begins.
	SettleAtEnd bool
	// KnowsGRPC is set if Free or Forgives were made of statuses of gRPC: StatusGRPC.
	KnowsGRPC bool

	MaxWait      time.Duration
	MaxWaitQueue int
	Penalty      time.Duration
	// Reserves begin with the most important one.
	Reserves []Reserve
	// BlockStatus is the status of requests of blocked clients; 0 means 429.
	BlockStatus int
	// OnError is empty for the default of the store.
	OnError string
	// Enforce is the percentage of the clients for which the limit is enforced;
	// nil for all.
	Enforce *float64

	// Counts are set by New.
	Counts telemetry.ZoneCounters

	templates []keyTemplate
	// sum is the cost, if that depends on the request, and paths are those in the JSON of
	// responses that it asks for.
	sum       Sum
	paths     []body.Path
	readsSize bool
	limit     store.Limit
	// enforced is how many cohorts the limit is enforced for.
	enforced uint64
	refusal  error
	blocked  error
	bound    [maxStores]boundZone

	noKey, repeats, never telemetry.LogThrottle
	// unknown is a placeholder of the key that nothing defined for some request, or nil.
	unknown       atomic.Pointer[string]
	noCost        [telemetry.Causes]telemetry.LogThrottle
	events, burst quota
}

// When a zone charges.
const (
	ChargeAfter  = "after"
	ChargeBefore = "before"
)

// Quantity is a number, or a text with placeholders that yields a number for each
// request.
type Quantity struct {
	// Text is empty if the number is the same for all requests.
	Text string
	// Number is that number, or the fallback for a text that yields none.
	Number int64
}

// quota are the throttles of the log entries about a Quantity that yields no number, or
// one out of range.
type quota struct{ unreadable, outOfRange telemetry.LogThrottle }

func (q Quantity) isDynamic() bool { return q.Text != "" }

// String returns the text or the number.
func (q Quantity) String() string { return cmp.Or(q.Text, strconv.FormatInt(q.Number, 10)) }

// Reserve is a part of a zone's capacity that is kept for matching requests.
type Reserve struct {
	Percent  int64
	Matchers caddyhttp.MatcherSets
}

// StatusSet is a set of response statuses.
type StatusSet [16]uint64

// Add adds a status.
func (s *StatusSet) Add(code int) { s[code/64] |= 1 << (code % 64) }

// Contains reports whether a status is in s.
func (s *StatusSet) Contains(code int) bool {
	return code < len(s)*64 && code >= 0 && s[code/64]>>(code%64)&1 == 1
}

// StatusGRPC is added to a status of gRPC, from 0 to 16, for its place in a StatusSet.
const StatusGRPC = 1000

// IsEmpty reports whether no status is in s.
func (s *StatusSet) IsEmpty() bool { return *s == StatusSet{} }

// Complement returns the statuses that are not in s.
func (s StatusSet) Complement() (others StatusSet) {
	for i := range s {
		others[i] = ^s[i]
	}
	return others
}

// prepare derives what requests need from the exported fields.
func (z *Zone) prepare() {
	z.templates = compileKey(z.Key)
	if z.Cost.isDynamic() {
		z.sum, _, _ = ParseSum(z.Cost.Text) // checked
		z.paths, z.readsSize = z.sum.paths(), slices.Contains(z.sum.placeholders(), responsePrefix+responseSize)
	}
	if z.Calendar.Unit != "" {
		z.Window, z.Align = z.Calendar.Window(), true
	}
	z.limit = store.Limit{Zone: z.Name, Algorithm: z.Algorithm, Window: z.Window, Align: z.Align, Calendar: z.Calendar}
	if z.enforced = cohorts; z.Enforce != nil {
		z.enforced = cohortsIn(*z.Enforce)
	}
	z.ChargeBefore = z.ChargeBefore || z.isLease()
	z.refusal = fmt.Errorf("rate limit %s exceeded", z.Name)
	z.blocked = fmt.Errorf("the client is blocked in rate limit %s", z.Name)
	z.BlockStatus = cmp.Or(z.BlockStatus, http.StatusTooManyRequests)
}

// isLease reports whether the zone counts requests while they run.
func (z *Zone) isLease() bool { return algorithm.Of(z.Algorithm).Lease }

// needsID reports whether the zone keeps events one by one.
func (z *Zone) needsID() bool { return algorithm.Of(z.Algorithm).NeedsID }

// request returns what r asks of the zone. If its Events are unlimited the zone
// does not count r; if they are 0 no store is asked.
func (z *Zone) request(r *http.Request, repl *caddy.Replacer, l *Limiter) (store.Request, error) {
	// A client without a limit may be blocked, so it is named like others.
	key, err := z.clientKey(r, repl, l)
	if err != nil {
		return store.Request{}, err
	}
	events, burst := z.eventsFor(repl, l)
	if events == unlimited {
		return store.Request{Limit: &z.limit, ClientKey: key, Events: unlimited}, nil
	}
	req := store.Request{Limit: &z.limit, ClientKey: key, Events: events, Burst: burst, Batch: z.Batch, Penalty: z.Penalty}
	switch {
	case z.isLease():
		// A lease does not settle the cost.
		req.Cost = z.finalCost(repl, l, nil)
	default:
		req.Cost = z.firstCost(repl)
	}
	if z.needsID() {
		req.ID = newID()
	}
	if len(z.Reserves) == 0 {
		return req, nil
	}
	percent, err := z.reservedFrom(r)
	req.Reserved = Share(req.Capacity(), percent)
	return req, err
}

// override applies what operators have changed for the client of req: it adds what was
// granted, and returns the block, if there is one, and the zone in the store in which the
// client is counted. A client without a limit may be blocked as well.
func (z *Zone) override(req *store.Request, l *Limiter) (bound *boundZone, block *store.Override) {
	bound = z.storeOf(req.ClientKey, l.Rollout)
	if has := z.bound[ownStore].handle.HasOverrides() || l.Rollout != nil && z.bound[rolloutStore].handle.HasOverrides(); !has {
		return bound, nil
	}
	now := l.Now()
	block, grant := bound.handle.OverridesOf(z.Name, req.ClientKey, now)
	if grant != nil && req.Events != unlimited {
		if z.Algorithm.HasBurst() && req.Events > 0 {
			// The rate stays, at which all of them have to come back within a century.
			req.Burst = min(cmp.Or(req.Burst, req.Events)+grant.Events, store.MaxEvents, mostBurst(req.Events, z.Window))
		} else {
			req.Events = min(req.Events+grant.Events, algorithm.Of(z.Algorithm).MostEvents)
		}
	}
	if block == nil && l.Rollout != nil {
		// A rollout that moves the client ends no block.
		other := &z.bound[ownStore+rolloutStore-bound.in]
		block, _ = other.handle.OverridesOf(z.Name, req.ClientKey, now)
	}
	return bound, block
}

const (
	// unlimited stands for the events of a request that the zone does not limit.
	unlimited = -1
	// UnlimitedWord is what the placeholder of events yields for such a request.
	UnlimitedWord = "unlimited"
)

// eventsFor returns how many events the zone admits for the request, or unlimited, and
// how many at once. Where either is 0 or unlimited, the request has that limit.
func (z *Zone) eventsFor(repl *caddy.Replacer, l *Limiter) (events, burst int64) {
	if burst = z.Burst.Number; z.Burst.isDynamic() {
		if burst = z.read("burst", z.Burst, &z.burst, 1, store.MaxEvents, "2^52", repl, l); burst <= 0 {
			return burst, 0
		}
	}
	if events = z.Events.Number; z.Events.isDynamic() || z.Burst.isDynamic() {
		t := algorithm.Of(z.Algorithm)
		events = z.read("events", z.Events, &z.events, LeastEvents(burst, z.Window), t.MostEvents, t.MostWords, repl, l)
	}
	if events <= 0 {
		burst = 0
	}
	return events, burst
}

// read returns the number that q yields, which is the nearest one if it is out of range,
// or unlimited.
func (z *Zone) read(name string, q Quantity, log *quota, least, most int64, words string, repl *caddy.Replacer, l *Limiter) int64 {
	text := strconv.FormatInt(q.Number, 10)
	if q.isDynamic() {
		text = strings.TrimSpace(repl.ReplaceAll(q.Text, ""))
	}
	if text == UnlimitedWord {
		return unlimited
	}
	n, err := strconv.ParseInt(text, 10, 64)
	isUnreadable := err != nil && !errors.Is(err, strconv.ErrRange) || n < 0
	switch {
	case isUnreadable:
		if times, log := l.mayLog(&log.unreadable); log {
			l.Logger.Warn(name+" is neither a whole number nor unlimited; using the fallback",
				zap.String("zone", z.Name), zap.String(name, clipped(text)), zap.Int64("fallback", q.Number), zap.Int64("times", times))
		}
		n = q.Number
	case n == 0:
		return 0
	}
	nearest := min(max(n, least), most)
	switch {
	case isUnreadable:
		l.countUnreadable(z, name, telemetry.NotFound)
	case nearest != n:
		l.countUnreadable(z, name, telemetry.OutOfRange)
	}
	if nearest == n {
		return n
	}
	if times, log := l.mayLog(&log.outOfRange); log {
		l.Logger.Warn(fmt.Sprintf("%s is not a number from %d to %s; using the nearest", name, least, words),
			zap.String("zone", z.Name), zap.String(name, clipped(text)), zap.Int64("nearest", nearest), zap.Int64("times", times))
	}
	return nearest
}

// century is store.MaxWindow in microseconds.
const century = int64(store.MaxWindow / time.Microsecond)

// LeastEvents returns how many events a zone has to admit in a window. A burst must
// drain within a century: later instants are not exact numbers.
func LeastEvents(burst int64, window time.Duration) int64 {
	if burst == 0 {
		return 1
	}
	hi, lo := bits.Mul64(uint64(burst), uint64(window.Microseconds()))
	lo, carry := bits.Add64(lo, uint64(century-1), 0)
	n, _ := bits.Div64(hi+carry, lo, uint64(century))
	return max(int64(n), 1)
}

func (l *Limiter) countUnreadable(z *Zone, option string, cause telemetry.Cause) {
	if !l.isSimulated {
		telemetry.Default.Unreadable.WithLabelValues(z.Name, option, cause.String()).Inc()
	}
}

// mostBurst returns the largest burst that drains within a century at this rate.
func mostBurst(events int64, window time.Duration) int64 {
	if hi, lo := bits.Mul64(uint64(events), uint64(century)); hi < uint64(window.Microseconds()) {
		n, _ := bits.Div64(hi, lo, uint64(window.Microseconds()))
		return int64(min(n, store.MaxEvents))
	}
	return store.MaxEvents
}

// clipped returns the beginning of a text that a client chose, for the log.
func clipped(text string) string {
	const most = 128
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// reservedFrom returns how many percent r must not use: what is kept for more
// important requests.
func (z *Zone) reservedFrom(r *http.Request) (percent int64, err error) {
	for _, s := range z.Reserves {
		matches, err := s.Matchers.AnyMatchWithError(r)
		if err != nil {
			return percent, err
		}
		if matches {
			break
		}
		percent += s.Percent
	}
	return percent, nil
}

// Share returns a percentage of n, rounded up.
func Share(n, percent int64) int64 {
	return n/100*percent + (n%100*percent+99)/100
}

// newID returns an ID that no other request has.
func newID() string {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 8), rand.Uint64())
	return base64.RawURLEncoding.EncodeToString(b)
}
