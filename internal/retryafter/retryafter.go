// Package retryafter reads from a response for how long its server wants no more requests:
// Retry-After (RFC 9110), RateLimit of draft-ietf-httpapi-ratelimit-headers, and what servers
// sent before that was written. Package limit and the handler of Caddy obey it alike.
package retryafter

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dunglas/httpsfv"
)

// Max is the longest time that is obeyed. A server that means longer says so again to the next request.
const Max = time.Hour

// Fields are those that are read, in canonical form.
var Fields = []string{
	"Date", "Retry-After", "Ratelimit", "Ratelimit-Remaining", "Ratelimit-Reset", "X-Ratelimit-Remaining", "X-Ratelimit-Reset",
}

// maxField bounds what is parsed of a field.
const maxField = 4096

// Asks reports whether responses with a status may ask to send no more for a while.
func Asks(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
}

// Read returns for how long a response asks to send no more: 0 if it does not, and at most [Max]. Only
// responses for whose status [Asks] holds do. Retry-After counts before RateLimit, and both before the
// fields RateLimit-Reset and X-RateLimit-Reset; what makes no sense is skipped, also where the same field
// is there again. Dates are compared with that of the response or, without one, now.
func Read(status int, h http.Header, now time.Time) time.Duration {
	if !Asks(status) {
		return 0
	}
	if date, ok := first(h, "Date", date); ok {
		now = date
	}
	for _, read := range [...]func(http.Header, time.Time) (time.Duration, bool){retryAfter, rateLimit, rateLimitReset} {
		if wait, ok := read(h, now); ok {
			return min(max(wait, 0), Max).Truncate(time.Microsecond)
		}
	}
	return 0
}

// retryAfter reads Retry-After: seconds, or a date.
func retryAfter(h http.Header, now time.Time) (wait time.Duration, ok bool) {
	return first(h, "Retry-After", func(text string) (time.Duration, bool) {
		if seconds, ok := number(text); ok {
			return duration(seconds), true
		}
		at, ok := date(text)
		return at.Sub(now), ok
	})
}

// first returns what parse makes of the first field of a name that makes sense.
func first[T any](h http.Header, name string, parse func(string) (T, bool)) (v T, ok bool) {
	for _, text := range h.Values(name) {
		if v, ok = parse(strings.TrimSpace(text)); ok {
			break
		}
	}
	return v, ok
}

func date(text string) (time.Time, bool) {
	at, err := http.ParseTime(text)
	return at, err == nil
}

// rateLimit reads RateLimit: a list of limits with what remains (r) and the seconds until there is
// more (t), or in drafts up to 7 the members remaining and reset. Of several limits that are used up,
// the longest counts.
func rateLimit(h http.Header, _ time.Time) (wait time.Duration, ok bool) {
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

// firstEpoch is the least number that is an instant, in seconds since the epoch, and no time span: it
// is in 2001. From firstMillisecond on, it is in milliseconds: as seconds, that is in the year 5138.
const firstEpoch, firstMillisecond = 1e9, 1e11

// farthest is the most seconds ahead that make sense where the unit is a guess: no window is longer than a year.
const farthest = 366 * 24 * 60 * 60

// rateLimitReset reads RateLimit-Reset and X-RateLimit-Reset: seconds, or an instant in seconds or
// milliseconds since the epoch. Where the field with what remains is missing, the status says that nothing does.
func rateLimitReset(h http.Header, now time.Time) (wait time.Duration, ok bool) {
	reset := func(text string) (seconds float64, ok bool) {
		seconds, ok = number(text)
		switch {
		case seconds >= firstMillisecond:
			seconds = (seconds - float64(now.UnixMilli())) / 1000
		case seconds >= firstEpoch:
			seconds -= float64(now.UnixMilli()) / 1000
		}
		return seconds, ok && seconds <= farthest
	}
	for _, prefix := range [...]string{"RateLimit-", "X-RateLimit-"} {
		remaining, isNumber := first(h, prefix+"Remaining", signed)
		isInWords := !isNumber && strings.Join(h.Values(prefix+"Remaining"), "") != ""
		if remaining > 0 || isInWords {
			continue
		}
		if seconds, ok := first(h, prefix+"Reset", reset); ok {
			return duration(seconds), true
		}
	}
	return 0, false
}

// signed parses a number that may be below 0, as where more was used than there was.
func signed(text string) (n float64, ok bool) {
	digits, isNegative := strings.CutPrefix(text, "-")
	if n, ok = number(digits); isNegative {
		n = -n
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
