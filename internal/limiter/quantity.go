package limiter

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
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

// firstCost returns the cost of a request that arrives: at least 1 if it is not known yet, because
// a cost of 0 passes however much is spent.
func (z *Zone) firstCost(repl *caddy.Replacer) int64 {
	if !z.Cost.isDynamic() {
		return z.Cost.Number
	}
	r := z.sum.read(repl)
	if r.cause == telemetry.Known {
		return r.cost
	}
	return max(r.atLeast(z.Cost.Number), 1)
}

// finalCost returns the cost of a request whose response has begun or, where that is awaited,
// ended.
func (z *Zone) finalCost(repl *caddy.Replacer, l *Limiter, resp *response) int64 {
	if !z.Cost.isDynamic() {
		return z.Cost.Number
	}
	r := z.sum.read(repl)
	fault, err := resp.fault(z)
	if fault != telemetry.Known && r.cause != telemetry.OutOfRange {
		r.cause = fault
	}
	cost := r.atLeast(z.Cost.Number)
	if r.cause == telemetry.Known {
		return cost
	}
	l.countUnreadable(z, "cost", r.cause)
	if times, log := l.mayLog(&z.noCost[r.cause]); log {
		l.Logger.Warn("cost is not known; charging the fallback or, if that is more, what is known", append(r.fields(),
			zap.String("zone", z.Name), zap.Error(err),
			zap.Int64("charged", cost), zap.Int64("fallback", z.Cost.Number), zap.Int64("times", times))...)
	}
	return cost
}
