package shardlimit

import (
	"cmp"
	"fmt"
	"math/bits"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// compiledZone is a named limit. New completes it.
type compiledZone struct {
	Name     string
	Matchers caddyhttp.MatcherSets
	// Key has the templates of the client key.
	Key []string
	// IPv4Prefix and IPv6Prefix are how many bits of an address count; 0 for all.
	IPv4Prefix, IPv6Prefix int

	Algorithm store.Algorithm
	Window    time.Duration
	Align     bool
	Events    Quantity
	Burst     int64
	Cost      Quantity
	// ChargeBefore is set for a zone that takes when a request comes, as one with
	// concurrency always does.
	ChargeBefore bool
	// Batch is 0, [store.BatchAuto], or the number of events that are taken at
	// once; BatchShare is in percent.
	Batch, BatchShare int64
	// Free has the statuses that cost nothing.
	Free StatusSet

	MaxWait      time.Duration
	MaxWaitQueue int
	Penalty      time.Duration
	// Reserves begin with the most important one.
	Reserves []compiledReserve
	// OnError is empty for the default of the store.
	OnError string
	// Enforce is the percentage of the clients for which the limit is enforced;
	// nil for all.
	Enforce *float64

	templates []keyText
	limit     store.Limit
	enforced  uint64 // of places
	needsID   bool
	refusal   error
	counts    zoneCounters
	uses      [mostStores]zoneUse

	noKey, noEvents, farEvents, noCost, never throttle
}

// When a zone charges.
const (
	chargeAfter  = "after"
	chargeBefore = "before"
)

// Quantity is a number, or a text with placeholders that yields one for each
// request.
type Quantity struct {
	// Text is empty where the number is the same for all requests.
	Text string
	// Number is that number, or the one for a text that yields none.
	Number int64
}

func (q Quantity) isDynamic() bool { return q.Text != "" }

// String is the text or the number.
func (q Quantity) String() string { return cmp.Or(q.Text, strconv.FormatInt(q.Number, 10)) }

// compiledReserve is a part of a zone's capacity that is kept for the requests that match.
type compiledReserve struct {
	Percent  int64
	Matchers caddyhttp.MatcherSets
}

// StatusSet is a set of response statuses.
type StatusSet [16]uint64

// add adds a status.
func (s *StatusSet) add(code int) { s[code/64] |= 1 << (code % 64) }

func (s *StatusSet) contains(code int) bool {
	return code < 1000 && code >= 0 && s[code/64]>>(code%64)&1 == 1
}

// complement returns the statuses that are not in s.
func (s StatusSet) complement() (others StatusSet) {
	for i := range s {
		others[i] = ^s[i]
	}
	return others
}

// prepare derives what requests need.
func (z *compiledZone) prepare() {
	z.templates = compileKey(z.Key)
	z.limit = store.Limit{Zone: z.Name, Algorithm: z.Algorithm, Window: z.Window, Align: z.Align}
	if z.enforced = places; z.Enforce != nil {
		z.enforced = boundOf(*z.Enforce)
	}
	z.ChargeBefore = z.ChargeBefore || z.isLease()
	z.needsID = z.isLease() || z.Algorithm == store.SlidingLog
	z.refusal = fmt.Errorf("rate limit %s exceeded", z.Name)
}

// isLease reports whether the zone counts requests while they run.
func (z *compiledZone) isLease() bool { return z.Algorithm == store.Concurrency }

// mostEvents returns how many events an algorithm can count, and in words.
func mostEvents(a store.Algorithm) (n int64, words string) {
	switch a {
	case store.SlidingWindow:
		return store.MaxWeighted, "2^32-1 with sliding_window"
	case store.SlidingLog, store.Concurrency:
		return store.MaxMembers, fmt.Sprintf("%d with %s", store.MaxMembers, a)
	default:
		return store.MaxEvents, "2^52"
	}
}

// leastEvents returns how many events a zone has to admit in a window. With a
// burst, which only gcra has, that is so many that the burst drains within a
// century, or else the instant at which it has would not be an exact number.
func leastEvents(burst int64, window time.Duration) int64 {
	if burst == 0 {
		return 1
	}
	const century = int64(store.MaxWindow / time.Microsecond)
	hi, lo := bits.Mul64(uint64(burst), uint64(window.Microseconds()))
	lo, carry := bits.Add64(lo, uint64(century-1), 0)
	n, _ := bits.Div64(hi+carry, lo, uint64(century))
	return max(int64(n), 1)
}
