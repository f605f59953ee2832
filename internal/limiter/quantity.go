package limiter

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/body"
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
	unlimited = store.Unlimited
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
		events = z.read("events", z.Events, &z.events, algorithm.LeastEvents(burst, z.Window), t.MostEvents, t.MostWords, repl, l)
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
			l.Logger.Warn(name+" is neither a whole number nor unlimited; using the fallback", append([]zap.Field{
				zap.String("zone", z.Name), zap.String(name, clipped(text)), zap.Int64("fallback", q.Number), zap.Int64("times", times),
			}, l.hintFields(q.Text)...)...)
		}
		l.countUnreadable(z, name, telemetry.NotFound)
		n = q.Number
	case n == 0:
		return 0
	}
	nearest := min(max(n, least), most)
	if nearest == n {
		return n
	}
	if !isUnreadable {
		l.countUnreadable(z, name, telemetry.OutOfRange)
	}
	if times, log := l.mayLog(&log.outOfRange); log {
		l.Logger.Warn(fmt.Sprintf("%s is not a number from %d to %s; using the nearest", name, least, words),
			zap.String("zone", z.Name), zap.String(name, clipped(text)), zap.Int64("nearest", nearest), zap.Int64("times", times))
	}
	return nearest
}

// Check returns why the zone cannot count by the events and the burst of an override, or nil. A burst that it
// does not name is that of the config.
func (z *Zone) Check(o *store.Override) error {
	if o.Events <= 0 {
		return nil
	}
	if err := algorithm.CheckEvents(z.Algorithm, o.Events); err != nil {
		return fmt.Errorf("events %w", err)
	}
	if o.Kind == store.OverrideGrant || !z.Algorithm.HasBurst() {
		return nil
	}
	limit := store.Limit{Algorithm: z.Algorithm, Window: z.Window}
	if err := algorithm.CheckBurst(&limit, o.Events, cmp.Or(o.Burst, z.Burst.Number)); err != nil {
		return fmt.Errorf("burst %w", err)
	}
	return nil
}

// Bounded returns the events and the burst of an override as far as the algorithm can count them: what was
// set may be of another config.
func (z *Zone) Bounded(o *store.Override) (events, burst int64) {
	events, burst = min(o.Events, algorithm.Of(z.Algorithm).MostEvents), o.Burst
	if events > 0 && z.Algorithm.HasBurst() {
		burst = min(burst, algorithm.MostBurst(events, z.Window))
	}
	return events, burst
}

func (l *Limiter) countUnreadable(z *Zone, option string, cause telemetry.Cause) {
	if l.simulation == nil {
		telemetry.Default.Unreadable.WithLabelValues(z.Name, option, cause.String()).Inc()
	}
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

// Sum is a cost that depends on the request: terms that are added up, each a number,
// placeholders, or placeholders times a number.
type Sum []term

type term struct {
	// text is one placeholder or several side by side, of which the first with a value is
	// meant, or "" for a number.
	text string
	// number is the number, or what the placeholders are multiplied by; nil for 1.
	number *big.Rat
	// written is number as it was written.
	written string
}

// String returns the sum in one form for all ways of writing it.
func (s Sum) String() string {
	var terms []string
	for _, t := range s {
		switch {
		case t.text == "":
			terms = append(terms, t.written)
		case t.number == nil:
			terms = append(terms, t.text)
		default:
			terms = append(terms, t.written+"*"+t.text)
		}
	}
	return strings.Join(terms, " + ")
}

// ParseSum returns the sum at the beginning of a text, and the rest of that.
func ParseSum(text string) (s Sum, rest string, err error) {
	for {
		var t term
		if t, text, err = parseTerm(text); err != nil {
			return nil, "", err
		}
		s = append(s, t)
		if text = strings.TrimLeft(text, " \t"); !strings.HasPrefix(text, "+") {
			return s, text, s.check()
		}
		text = text[1:]
	}
}

func parseTerm(text string) (t term, rest string, err error) {
	for {
		text = strings.TrimLeft(text, " \t")
		n := strings.IndexFunc(text, func(c rune) bool { return c != '.' && (c < '0' || c > '9') })
		if n < 0 {
			n = len(text)
		}
		switch {
		case n > 0 && t.number == nil:
			if t.written = text[:n]; n > maxNumberLength {
				return t, "", fmt.Errorf("has a number of more than %d digits: shorten it", maxNumberLength)
			}
			number, ok := new(big.Rat).SetString(t.written)
			if !ok || number.Cmp(largest) > 0 {
				return t, "", fmt.Errorf("has %q, which must be a number up to 2^52, such as 4 or 0.25", t.written)
			}
			t.number, text = number, text[n:]
		case strings.HasPrefix(text, "{") && t.text == "":
			if t.text, text, err = cutPlaceholders(text); err != nil {
				return t, "", err
			}
		default:
			return t, "", fmt.Errorf("must be a sum of numbers, placeholders, and placeholders times a number, such as {header.A} + 4*{header.B}; found %q", clipped(text))
		}
		if text != "" && !strings.ContainsAny(text[:1], " \t*+") {
			return t, "", fmt.Errorf("has %q behind a number or placeholder: multiply by *, add by +, as in {header.A} + 4*{header.B}", clipped(text))
		}
		after, isProduct := strings.CutPrefix(strings.TrimLeft(text, " \t"), "*")
		if !isProduct {
			return t, text, nil
		}
		text = after
	}
}

// cutPlaceholders returns the placeholders at the beginning of a text, and the rest.
func cutPlaceholders(text string) (placeholders, rest string, err error) {
	for rest = text; strings.HasPrefix(rest, "{"); {
		end := strings.IndexByte(rest, '}')
		if end <= 1 {
			return "", "", fmt.Errorf("has a placeholder without a name, or without }: write one such as {http.request.header.A}")
		}
		rest = rest[end+1:]
	}
	return text[:len(text)-len(rest)], rest, nil
}

// check returns what is wrong with placeholders about the response.
func (s Sum) check() error {
	for _, name := range s.placeholders() {
		if err := checkKnown(name); err != nil {
			return err
		}
		if path, is := strings.CutPrefix(name, responsePrefix+responseJSON); is {
			if _, err := body.ParsePath(path); err != nil {
				return fmt.Errorf("has {%s}, whose path %w", name, err)
			}
		}
	}
	return nil
}

// placeholders returns the names of the placeholders.
func (s Sum) placeholders() (names []string) {
	for _, t := range s {
		names = append(names, PlaceholdersIn(t.text)...)
	}
	return names
}

// IsKnownAtEnd reports whether a placeholder has no value before the response has ended.
func (s Sum) IsKnownAtEnd() bool { return slices.ContainsFunc(s.placeholders(), IsKnownAtEnd) }

// paths returns the paths in the JSON of responses that s asks for.
func (s Sum) paths() (paths []body.Path) {
	for _, name := range s.placeholders() {
		if text, is := strings.CutPrefix(name, responsePrefix+responseJSON); is {
			path, _ := body.ParsePath(text) // checked
			paths = append(paths, path)
		}
	}
	return paths
}

// reading is what a cost is, or what is known of it.
type reading struct {
	cost int64
	// cause is why not all of the cost is known.
	cause telemetry.Cause
	// text is what a placeholder yields in place of a number.
	text string
}

// read adds up the terms. Those that yield no number count for nothing.
func (s Sum) read(repl *caddy.Replacer) (r reading) {
	if len(s) == 1 && s[0].number == nil {
		// Most costs are one whole number.
		text := strings.TrimSpace(repl.ReplaceAll(s[0].text, ""))
		if n, err := strconv.ParseInt(text, 10, 64); err == nil && n >= 0 {
			return reading{cost: min(n, store.MaxEvents)}
		}
	}
	var total big.Rat
	for _, t := range s {
		if t.text == "" {
			total.Add(&total, t.number)
			continue
		}
		text := strings.TrimSpace(repl.ReplaceAll(t.text, ""))
		number, cause := parseNumber(text)
		if cause != telemetry.Known && r.cause == telemetry.Known {
			r.cause, r.text = cause, clipped(text)
		}
		if cause != telemetry.Known {
			continue
		}
		if t.number != nil {
			number.Mul(number, t.number)
		}
		total.Add(&total, number)
	}
	r.cost = ceil(&total)
	return r
}

// largest is the largest cost.
var largest = new(big.Rat).SetInt64(store.MaxEvents)

// Texts up to maxNumberLength, of numbers not below leastExact, are read exactly; others as the
// nearest float, because an exponent could make an exact number fill the memory.
const (
	maxNumberLength = 64
	leastExact      = 1e-18
)

// parseNumber returns the number that a text is, which is at most the largest, or why it is
// none.
func parseNumber(text string) (*big.Rat, telemetry.Cause) {
	if !body.IsNumber(text) {
		return nil, telemetry.NotFound
	}
	f, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange):
		return nil, telemetry.NotFound
	case math.IsNaN(f) || f < 0:
		return nil, telemetry.OutOfRange
	case f > store.MaxEvents:
		return new(big.Rat).Set(largest), telemetry.Known
	}
	if f >= leastExact && len(text) <= maxNumberLength {
		if number, ok := new(big.Rat).SetString(text); ok {
			return number, telemetry.Known
		}
	}
	return new(big.Rat).SetFloat64(f), telemetry.Known
}

// ceil rounds up to a whole number, which is at most the largest.
func ceil(r *big.Rat) int64 {
	if r.Cmp(largest) >= 0 {
		return store.MaxEvents
	}
	quotient, rest := new(big.Int).QuoRem(r.Num(), r.Denom(), new(big.Int))
	return quotient.Int64() + int64(rest.Sign())
}

// atLeast returns the cost, or a fallback if not all of the cost is known and the fallback is
// more.
func (r reading) atLeast(fallback int64) int64 {
	if r.cause == telemetry.Known {
		return r.cost
	}
	return max(r.cost, fallback)
}

// fields are those of the log entry about a cost that is not known.
func (r reading) fields() []zap.Field {
	fields := []zap.Field{zap.Stringer("cause", r.cause)}
	if r.text != "" {
		fields = append(fields, zap.String("cost", r.text))
	}
	if r.cause == telemetry.Encoding {
		fields = append(fields, zap.String("hint", "request another encoding from the backend, such as header_up Accept-Encoding gzip in reverse_proxy"))
	}
	return fields
}
