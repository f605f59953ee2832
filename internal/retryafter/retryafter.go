// Package retryafter reads from a response for how long its server wants no more requests:
// Retry-After (RFC 9110), RateLimit of draft-ietf-httpapi-ratelimit-headers, and fields that providers
// send instead. Package limit and the handler of Caddy obey it alike.
package retryafter

import (
	"cmp"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dunglas/httpsfv"
)

// Max is the longest time that is obeyed. A server that means longer says so again to the next request.
const Max = time.Hour

// Fields are the most usual fields that Read reads, in canonical form.
var Fields = []string{
	"Date", "Retry-After", "Ratelimit", "Ratelimit-Remaining", "Ratelimit-Reset", "X-Ratelimit-Remaining", "X-Ratelimit-Reset",
}

// maxField bounds what is parsed of a field.
const maxField = 4096

// proof is what has to show that a response asks to send no more.
type proof uint8

const (
	noProof proof = iota
	// proofOfTime: some field names a time.
	proofOfTime
	// proofOfLimit: Retry-After names a time, or a limit says that nothing remains.
	proofOfLimit
)

// statuses are the statuses with which a response may ask to send no more. GitHub and others answer 403 at a limit,
// and 402 at a budget; most such answers have nothing to do with limits.
var statuses = map[int]proof{
	http.StatusTooManyRequests:    proofOfTime,
	http.StatusServiceUnavailable: proofOfTime,
	420:                           proofOfTime, // as Twitter once had it
	430:                           proofOfTime, // Shopify
	509:                           proofOfTime, // bandwidth
	529:                           proofOfTime, // overloaded, by Anthropic and others
	http.StatusForbidden:          proofOfLimit,
	http.StatusPaymentRequired:    proofOfLimit,
}

// Asks reports whether responses with a status may ask to send no more for a while.
func Asks(status int) bool { return statuses[status] != noProof }

// Refuses reports whether responses with a status are refusals, even those that name no time.
func Refuses(status int) bool { return statuses[status] == proofOfTime }

// unit is what a number counts.
type unit uint8

const (
	seconds unit = iota
	milliseconds
	// guessed: seconds, unless the number makes no sense as such.
	guessed
)

// waits are the fields that name a time whatever the limit is. The first above zero counts, the
// more precise one before the other.
var waits = [...]struct {
	name string
	unit unit
}{
	{"Retry-After-Ms", milliseconds},
	{"X-Ms-Retry-After-Ms", milliseconds},
	{"Retry-After", seconds},
	{"X-Retry-After", seconds},
	{"X-RateLimit-Retry-After", seconds},
	{"X-RateLimit-Retry-After-Seconds", seconds},
	{"X-Rate-Limit-Retry-After", seconds},
	{"X-Rate-Limit-Retry-After-Seconds", seconds},
}

// Read returns for how long a response asks to send no more: 0 if it does not, and at most [Max]. Only
// responses for whose status [Asks] holds do. Retry-After counts before RateLimit, and both before fields
// that name the reset of a limit; values that make no sense are skipped, also where the same field is there
// again. Dates are compared with that of the response or, without one, now.
func Read(status int, h http.Header, now time.Time) time.Duration {
	needs := statuses[status]
	if needs == noProof {
		return 0
	}
	if at, ok := first(h.Values("Date"), date); ok {
		now = at
	}
	wait, ok := retryAfter(h, now)
	if !ok {
		wait, ok = rateLimit(h)
	}
	if !ok {
		wait = resets(h, now, needs)
	}
	return min(max(wait, 0), Max).Truncate(time.Microsecond)
}

// retryAfter reads the fields of waits.
func retryAfter(h http.Header, now time.Time) (wait time.Duration, ok bool) {
	for _, field := range waits {
		if w, isTime := first(h.Values(field.name), until(field.unit, now)); isTime {
			if wait, ok = w, true; wait > 0 {
				break
			}
		}
	}
	return wait, ok
}

// first returns what parse makes of the first text that makes sense.
func first[T any](texts []string, parse func(string) (T, bool)) (v T, ok bool) {
	for _, text := range texts {
		if v, ok = parse(strings.TrimSpace(text)); ok {
			break
		}
	}
	return v, ok
}

// dates are the layouts of instants that http.ParseTime does not know.
var dates = [...]string{time.RFC3339, "2006-01-02T15:04Z07:00", "2006-01-02T15:04:05Z0700", "2006-01-02T15:04:05", time.RFC1123Z,
	time.DateTime, "2006-01-02 15:04:05 UTC", "2006-01-02 15:04:05Z07:00"}

func date(text string) (time.Time, bool) {
	if at, err := http.ParseTime(text); err == nil {
		return at, true
	}
	for _, layout := range dates {
		if at, err := time.Parse(layout, text); err == nil {
			return at, true
		}
	}
	return time.Time{}, false
}

// firstEpoch is the least number of seconds that is an instant, since the epoch, and no time span: it
// is in 2001. From firstMillisecond on, it is in milliseconds: as seconds, that is in the year 5138.
const firstEpoch, firstMillisecond, firstMicrosecond, firstNanosecond = 1e9, 1e11, 1e14, 1e17

// farthest is the most seconds ahead that make sense where the unit is a guess: no window is longer than a year.
const farthest = 366 * 24 * 60 * 60

// until returns a function that parses how long it is from now: a number of units, or of seconds or milliseconds
// since the epoch; a time span with units, such as 6m0s; or a date.
func until(u unit, now time.Time) func(text string) (time.Duration, bool) {
	return func(text string) (time.Duration, bool) {
		if len(text) > 64 {
			return 0, false
		}
		if n, ok := number(text); ok {
			switch {
			case n >= firstMicrosecond && n < firstNanosecond:
				n = (n - float64(now.UnixMicro())) / 1e6
			case n >= firstMillisecond:
				n = (n - float64(now.UnixMilli())) / 1000
			case u == milliseconds:
				n /= 1000
			case n >= firstEpoch:
				n -= float64(now.UnixMilli()) / 1000
			}
			return duration(n), u != guessed || n <= farthest
		}
		if wait, ok := span(text); ok {
			return wait, true
		}
		at, ok := date(text)
		return at.Sub(now), ok
	}
}

// span parses a time span with units, such as 6m0s, 1d2h or 30 S.
func span(text string) (time.Duration, bool) {
	text = strings.ToLower(strings.ReplaceAll(text, " ", ""))
	if strings.Trim(text, "0123456789.dhmsuµn") != "" {
		return 0, false
	}
	days, rest, hasDays := strings.Cut(text, "d")
	if !hasDays {
		wait, err := time.ParseDuration(text)
		return wait, err == nil
	}
	n, ok := number(days)
	if !ok || rest == "" {
		return duration(n * 24 * 60 * 60), ok
	}
	wait, err := time.ParseDuration(rest)
	return duration(n*24*60*60 + wait.Seconds()), err == nil
}

// longest returns a function that parses a reset, which may have parameters or be a list: then the longest counts,
// because nobody says which limit is used up.
func longest(u unit, now time.Time) func(text string) (time.Duration, bool) {
	parse := until(u, now)
	return func(text string) (wait time.Duration, ok bool) {
		if wait, ok = parse(text); ok || len(text) > maxField {
			return wait, ok
		}
		for part := range strings.SplitSeq(text, ",") {
			part, _, _ = strings.Cut(part, ";")
			if w, isTime := parse(strings.TrimSpace(part)); isTime {
				wait, ok = max(wait, w), true
			}
		}
		return wait, ok
	}
}

// rateLimit reads RateLimit: a list of limits with what remains (r) and the seconds until there is
// more (t), or in drafts up to 7 the members remaining and reset. Of several limits that are used up,
// the longest counts.
func rateLimit(h http.Header) (wait time.Duration, ok bool) {
	fields := h.Values("RateLimit")
	if len(strings.Join(fields, ",")) > maxField {
		return 0, false
	}
	if list, err := httpsfv.UnmarshalList(fields); err == nil {
		for _, member := range list {
			item, isItem := member.(httpsfv.Item)
			if !isItem {
				continue
			}
			r, _ := item.Params.Get("r")
			t, _ := item.Params.Get("t")
			remaining, isKnown := r.(int64)
			if seconds, hasReset := t.(int64); isKnown && remaining <= 0 && hasReset && seconds >= 0 {
				wait, ok = max(wait, duration(float64(seconds))), true
			}
		}
		return wait, ok
	}
	dictionary, err := httpsfv.UnmarshalDictionary(fields)
	if err != nil {
		return 0, false
	}
	remaining, isKnown := integerIn(dictionary, "remaining")
	seconds, hasReset := integerIn(dictionary, "reset")
	return duration(float64(seconds)), isKnown && remaining <= 0 && hasReset && seconds >= 0
}

func integerIn(d *httpsfv.Dictionary, name string) (n int64, ok bool) {
	member, _ := d.Get(name)
	item, _ := member.(httpsfv.Item)
	n, ok = item.Value.(int64)
	return n, ok
}

// limit is what fields say of one limit.
type limit struct {
	wait time.Duration
	// hasReset is set if wait is known. left is how much remains, or NaN where a field says so in words.
	hasReset, hasLeft bool
	left              float64
}

// resets reads the fields that name the reset of a limit, such as X-RateLimit-Reset, X-Rate-Limit-Reset-After,
// X-RateLimit-Reset-Tokens and Anthropic-RateLimit-Tokens-Reset, with how much remains of it. Of the limits
// that are used up, the longest counts. If no field says that one is, the status may: then the longest counts
// of which nothing is known to remain.
func resets(h http.Header, now time.Time, needs proof) (wait time.Duration) {
	limits := map[string]limit{}
	for name, texts := range h {
		of, kind, u := limitOf(name)
		l := limits[of]
		switch kind {
		case leftField:
			left, isNumber := first(texts, signed)
			if !isNumber {
				left = math.NaN()
			}
			// Fields that disagree are in no order: the least counts.
			isLeast := !l.hasLeft || left < l.left || math.IsNaN(l.left)
			if isLeast && (isNumber || strings.Join(texts, "") != "") {
				l.left, l.hasLeft = left, true
			}
		case resetField:
			if wait, ok := first(texts, longest(u, now)); ok {
				l.wait, l.hasReset = max(l.wait, wait), true
			}
		case otherField:
			continue
		}
		limits[of] = l
	}
	isUsedUp := false
	var tokens time.Duration
	for of, l := range limits {
		switch {
		case !l.hasReset:
		case l.hasLeft && l.left <= 0:
			if !isUsedUp {
				isUsedUp, wait = true, 0
			}
			wait = max(wait, l.wait)
		case !l.hasLeft && !isUsedUp && needs == proofOfTime:
			wait = max(wait, l.wait)
		case needs == proofOfTime && strings.Contains(of, "token"):
			// A request costs many tokens: some may remain that are too few.
			tokens = max(tokens, l.wait)
		}
	}
	return cmp.Or(wait, tokens)
}

// kind is what a field says of a limit.
type kind uint8

const (
	otherField kind = iota
	leftField
	resetField
)

// limitOf returns the limit of which a field of that name tells something, in which unit.
func limitOf(name string) (limit string, k kind, u unit) {
	name = strings.ToLower(strings.ReplaceAll(name, "-", ""))
	if !strings.Contains(name, "ratelimit") {
		return "", otherField, guessed
	}
	if before, after, ok := strings.Cut(name, "remaining"); ok {
		return before + after, leftField, guessed
	}
	before, after, ok := strings.Cut(name, "reset")
	if !ok {
		return "", otherField, guessed
	}
	switch after {
	case "ms", "afterms", "inms":
		return before, resetField, milliseconds
	case "after", "at", "in", "time", "seconds", "afterseconds", "inseconds":
		return before, resetField, guessed
	}
	return before + after, resetField, guessed
}

// signed parses a number that may be below 0, as where more was used than there was, and have parameters. Of a list
// the least counts.
func signed(text string) (n float64, ok bool) {
	if len(text) > maxField {
		return 0, false
	}
	for part := range strings.SplitSeq(text, ",") {
		part, _, _ = strings.Cut(part, ";")
		digits, isNegative := strings.CutPrefix(strings.TrimSpace(part), "-")
		v, isNumber := number(digits)
		if isNegative {
			v = -v
		}
		if isNumber && (!ok || v < n) {
			n, ok = v, true
		}
	}
	return n, ok
}

// number parses a number without a sign, and without the forms that only Go has.
func number(text string) (n float64, ok bool) {
	if text == "" || len(text) > 32 || strings.Trim(text, "0123456789.") != "" {
		return 0, false
	}
	n, err := strconv.ParseFloat(text, 64)
	return n, err == nil
}

// duration returns a number of seconds, at most a little more than Max, in whole microseconds.
func duration(seconds float64) time.Duration {
	seconds = min(max(seconds, 0), 2*Max.Seconds())
	return time.Duration(seconds*1e6) * time.Microsecond
}
