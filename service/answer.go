package service

import (
	"maps"
	"math"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

type (
	response = ratelimitv3.RateLimitResponse
	status   = ratelimitv3.RateLimitResponse_DescriptorStatus
	unit     = ratelimitv3.RateLimitResponse_RateLimit_Unit
)

// answer returns the answer to the call, once it is decided.
func (c *call) answer() *response {
	a := &response{OverallCode: ratelimitv3.RateLimitResponse_OK, ResponseHeadersToAdd: c.header.toAdd()}
	if c.isRefused {
		a.OverallCode = ratelimitv3.RateLimitResponse_OVER_LIMIT
	}
	item := 0
	for _, n := range c.nodes {
		st := &status{Code: ratelimitv3.RateLimitResponse_OK}
		switch {
		case n == nil:
		case n.Denied:
			st.Code = ratelimitv3.RateLimitResponse_OVER_LIMIT
		case n.Unlimited:
			st.LimitRemaining = math.MaxUint32
		case len(n.zones) > 0:
			st = c.statusOf(c.telling(item, len(n.zones)))
			item += len(n.zones)
		}
		a.Statuses = append(a.Statuses, st)
	}
	return a
}

// codes are those of what a zone decides. A zone that was not asked, because another refuses, has decided
// nothing.
var codes = [telemetry.Outcomes]ratelimitv3.RateLimitResponse_Code{
	telemetry.Undecided:    ratelimitv3.RateLimitResponse_UNKNOWN,
	telemetry.Allowed:      ratelimitv3.RateLimitResponse_OK,
	telemetry.WouldRefuse:  ratelimitv3.RateLimitResponse_OK,
	telemetry.ErrorAllowed: ratelimitv3.RateLimitResponse_OK,
	telemetry.Refused:      ratelimitv3.RateLimitResponse_OVER_LIMIT,
	telemetry.ErrorRefused: ratelimitv3.RateLimitResponse_OVER_LIMIT,
	telemetry.Blocked:      ratelimitv3.RateLimitResponse_OVER_LIMIT,
}

// telling returns which of the n items from first on, all of one descriptor, its status is about: one that
// refuses, or else the one with the least left.
func (c *call) telling(first, n int) int {
	best := first
	for i := first + 1; i < first+n && !c.isDenied; i++ {
		if c.places[i] >= 0 && (c.places[best] < 0 || tellsMore(&c.decisions[c.places[i]], &c.decisions[c.places[best]])) {
			best = i
		}
	}
	return best
}

// tellsMore reports whether a says more than b: it refuses, and for longer, or leaves less.
func tellsMore(a, b *limiter.Decision) bool {
	refuses := codes[a.Outcome] == ratelimitv3.RateLimitResponse_OVER_LIMIT
	switch {
	case refuses != (codes[b.Outcome] == ratelimitv3.RateLimitResponse_OVER_LIMIT):
		return refuses
	case refuses:
		return a.State.RetryAfter > b.State.RetryAfter
	case a.State.Now == 0 || b.State.Now == 0:
		return b.State.Now == 0
	default:
		return a.State.Remaining < b.State.Remaining
	}
}

// statusOf returns the status of the descriptor that asks the item.
func (c *call) statusOf(item int) *status {
	switch {
	case c.isDenied:
		return &status{Code: ratelimitv3.RateLimitResponse_UNKNOWN}
	case c.places[item] < 0:
		return &status{Code: ratelimitv3.RateLimitResponse_OK, LimitRemaining: math.MaxUint32}
	}
	d := &c.decisions[c.places[item]]
	st := &status{Code: codes[d.Outcome]}
	if d.State.Now == 0 {
		return st
	}
	st.CurrentLimit = &ratelimitv3.RateLimitResponse_RateLimit{Name: d.Zone.Name, RequestsPerUnit: small(d.State.Limit), Unit: unitOf(d)}
	st.LimitRemaining = small(d.State.Remaining)
	if left := d.State.Reset - d.State.Now; left > 0 {
		st.DurationUntilReset = durationpb.New(time.Duration(left) * time.Microsecond)
	}
	return st
}

// day is that of windows without a calendar.
const day = 24 * time.Hour

// units are the lengths of windows that the protocol has a word for, and calendarUnits those of calendars.
var (
	units = map[time.Duration]unit{
		time.Second: ratelimitv3.RateLimitResponse_RateLimit_SECOND, time.Minute: ratelimitv3.RateLimitResponse_RateLimit_MINUTE,
		time.Hour: ratelimitv3.RateLimitResponse_RateLimit_HOUR, day: ratelimitv3.RateLimitResponse_RateLimit_DAY,
		7 * day: ratelimitv3.RateLimitResponse_RateLimit_WEEK, 30 * day: ratelimitv3.RateLimitResponse_RateLimit_MONTH,
		365 * day: ratelimitv3.RateLimitResponse_RateLimit_YEAR,
	}
	calendarUnits = map[store.CalendarUnit]unit{
		store.Day: ratelimitv3.RateLimitResponse_RateLimit_DAY, store.Week: ratelimitv3.RateLimitResponse_RateLimit_WEEK,
		store.Month: ratelimitv3.RateLimitResponse_RateLimit_MONTH, store.Year: ratelimitv3.RateLimitResponse_RateLimit_YEAR,
	}
)

// unitOf returns the unit of the zone's window, or UNKNOWN if the protocol has none, or the limit is
// not what a window admits.
func unitOf(d *limiter.Decision) unit {
	switch z := d.Zone; {
	case d.Burst > 0:
		return ratelimitv3.RateLimitResponse_RateLimit_UNKNOWN
	case z.Calendar.Unit != "":
		return calendarUnits[z.Calendar.Unit]
	default:
		return units[z.Window]
	}
}

// toAdd returns the header fields in the order of their names.
func (h *header) toAdd() (all []*corev3.HeaderValue) {
	for _, name := range slices.Sorted(maps.Keys(h.fields)) {
		for _, value := range h.fields[name] {
			all = append(all, &corev3.HeaderValue{Key: name, Value: value})
		}
	}
	return all
}
