package limiter

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

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

// Reserve is a part of a zone's capacity that is kept for matching requests.
type Reserve struct {
	Percent  int64
	Matchers caddyhttp.MatcherSets
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
