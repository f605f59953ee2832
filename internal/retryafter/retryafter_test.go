package retryafter_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
)

// now is this machine's clock, an hour ahead of that of the servers, whose date is the other.
var (
	now  = time.Date(2026, 11, 27, 13, 0, 0, 0, time.UTC)
	date = "Fri, 27 Nov 2026 12:00:00 GMT"
)

func header(lines ...string) http.Header {
	h := http.Header{}
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		h.Add(name, value)
	}
	return h
}

func TestRead(t *testing.T) {
	const s = time.Second
	for _, test := range []struct {
		name  string
		lines []string
		want  time.Duration
	}{
		{"nothing", nil, 0},
		{"seconds", []string{"Retry-After: 30"}, 30 * s},
		{"a fraction of them", []string{"Retry-After: 1.5"}, 1500 * time.Millisecond},
		{"zero seconds, which RateLimit does not overrule", []string{"Retry-After: 0", `RateLimit: "a";r=0;t=9`}, 0},
		{"a date of the server's clock", []string{"Date: " + date, "Retry-After: Fri, 27 Nov 2026 12:00:10 GMT"}, 10 * s},
		{"a date without one of the response", []string{"Retry-After: Fri, 27 Nov 2026 13:00:10 GMT"}, 10 * s},
		{"an old form of dates", []string{"Date: " + date, "Retry-After: Friday, 27-Nov-26 12:00:07 GMT"}, 7 * s},
		{"a date that has passed", []string{"Date: " + date, "Retry-After: Fri, 27 Nov 2026 11:00:00 GMT"}, 0},
		{"a date far away", []string{"Date: " + date, "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"}, time.Hour},
		{"a date no clock has", []string{"Date: Mon, 01 Jan 0001 00:00:00 GMT", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"}, time.Hour},
		{"a broken date of the response", []string{"Date: today", "Retry-After: Fri, 27 Nov 2026 13:00:05 GMT"}, 5 * s},
		{"a day", []string{"Retry-After: 86400"}, time.Hour},
		{"more than a number holds", []string{"Retry-After: " + strings.Repeat("9", 30)}, time.Hour},
		{"more digits than are read", []string{"Retry-After: " + strings.Repeat("9", 3000)}, 0},
		{"a negative number", []string{"Retry-After: -5"}, 0},
		{"what only Go calls a number", []string{"Retry-After: 0x10"}, 0},
		{"no number", []string{"Retry-After: NaN"}, 0},
		{"infinity", []string{"Retry-After: Inf"}, 0},
		{"an exponent", []string{"Retry-After: 1e3"}, 0},
		{"several points", []string{"Retry-After: 1.2.3"}, 0},
		{"two values in one", []string{"Retry-After: 5, 10"}, 0},
		{"garbage, then RateLimit", []string{"Retry-After: soon", `RateLimit: "a";r=0;t=9`}, 9 * s},
		{"the longest of the limits that are used up", []string{`RateLimit: "a";r=0;t=9, "b";r=0;t=40, "c";r=3;t=400`}, 40 * s},
		{"the same in several fields", []string{`RateLimit: "a";r=0;t=9`, `RateLimit: "b";r=0;t=40`}, 40 * s},
		{"a limit with something left", []string{`RateLimit: "a";r=1;t=9`}, 0},
		{"a limit that does not say when", []string{`RateLimit: "a";r=0`}, 0},
		{"a limit that says when in words", []string{`RateLimit: "a";r=0;t=soon`}, 0},
		{"a limit that was over before", []string{`RateLimit: "a";r=0;t=-9`}, 0},
		{"a limit for long", []string{`RateLimit: "a";r=0;t=999999999999999`}, time.Hour},
		{"lists inside", []string{`RateLimit: ("a" "b");r=0;t=9`}, 0},
		{"draft 7", []string{"RateLimit: limit=10, remaining=0, reset=12"}, 12 * s},
		{"draft 7 with something left", []string{"RateLimit: limit=10, remaining=2, reset=12"}, 0},
		{"draft 7 without what is left", []string{"RateLimit: limit=10, reset=12"}, 0},
		{"a field too long", []string{`RateLimit: "a";r=0;t=9, ` + strings.Repeat(`"b", `, 2000) + `"c"`}, 0},
		{"draft 6", []string{"RateLimit-Remaining: 0", "RateLimit-Reset: 20"}, 20 * s},
		{"draft 6 with something left", []string{"RateLimit-Remaining: 4", "RateLimit-Reset: 20"}, 0},
		{"seconds as GitHub once had them", []string{"X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 25"}, 25 * s},
		{"an instant as GitHub has it", []string{"Date: " + date, "X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 1795780830"}, 30 * s},
		{"an instant that has passed", []string{"Date: " + date, "X-RateLimit-Reset: 1795780000"}, 0},
		{"an instant in milliseconds", []string{"Date: " + date, "X-RateLimit-Reset: 1795780830000"}, 30 * s},
		{"a fraction of a second in them", []string{"Date: " + date, "X-RateLimit-Reset: 1795780800250"}, 250 * time.Millisecond},
		{"milliseconds that have passed", []string{"Date: " + date, "RateLimit-Reset: 1795780000000"}, 0},
		{"an instant in a month", []string{"Date: " + date, "X-RateLimit-Reset: 1798372800"}, time.Hour},
		{"an instant in two years", []string{"Date: " + date, "X-RateLimit-Reset: 1858852800"}, 0},
		{"the last instant in seconds", []string{"Date: " + date, "X-RateLimit-Reset: 99999999999"}, 0},
		{"the first in milliseconds, in 1973", []string{"Date: " + date, "X-RateLimit-Reset: 100000000000"}, 0},
		{"an instant in microseconds", []string{"Date: " + date, "X-RateLimit-Reset: 1795780830000000"}, 30 * s},
		{"an instant in milliseconds of a field of them", []string{"Date: " + date, "X-RateLimit-Reset-Ms: 1795780830000"}, 30 * s},
		{"another name", []string{"X-RateLimit-Retry-After-Seconds: 30"}, 30 * s},
		{"a third name", []string{"X-RateLimit-Retry-After: 30"}, 30 * s},
		{"parameters of a reset", []string{"RateLimit-Reset: 20;w=60"}, 20 * s},
		{"a list of resets", []string{"X-RateLimit-Remaining: 0, 5", "X-RateLimit-Reset: 2, 30"}, 30 * s},
		{"days", []string{"X-RateLimit-Reset: 1d2h"}, time.Hour},
		{"no days", []string{"X-RateLimit-Reset: 0d2m"}, 2 * time.Minute},
		{"a unit after a space", []string{"Retry-After: 30 s"}, 30 * s},
		{"a unit in capitals", []string{"Retry-After: 30S"}, 30 * s},
		{"a date after SQL", []string{"Date: " + date, "X-RateLimit-Reset: 2026-11-27 12:00:30"}, 30 * s},
		{"the same with a zone", []string{"Date: " + date, "X-RateLimit-Reset: 2026-11-27 12:00:30 UTC"}, 30 * s},
		{"zero milliseconds beside seconds", []string{"Retry-After-Ms: 0", "Retry-After: 30"}, 30 * s},
		{"too few tokens", []string{"X-RateLimit-Remaining-Requests: 5", "X-RateLimit-Reset-Requests: 50s", "X-RateLimit-Remaining-Tokens: 500", "X-RateLimit-Reset-Tokens: 2s"}, 2 * s},
		{"counts that disagree", []string{"X-RateLimit-Remaining: 5", "X-Rate-Limit-Remaining: 0", "X-RateLimit-Reset: 7"}, 7 * s},
		{"a reset in seconds by name", []string{"X-RateLimit-Remaining: 0", "X-RateLimit-Reset-Seconds: 8"}, 8 * s},
		{"an instant in nanoseconds", []string{"Date: " + date, "X-RateLimit-Reset: 1795780830123456789"}, 0},
		{"nanoseconds, then seconds", []string{"Date: " + date, "RateLimit-Reset: 1795780830123456789", "X-RateLimit-Reset: 1795780830"}, 30 * s},
		{"a time span of thirty years", []string{"X-RateLimit-Reset: 946080000"}, 0},
		{"less than nothing left", []string{"X-RateLimit-Remaining: -1", "X-RateLimit-Reset: 3"}, 3 * s},
		{"less than nothing left of draft 7", []string{"RateLimit: limit=10, remaining=-2, reset=12"}, 12 * s},
		{"less than nothing left of a limit", []string{`RateLimit: "a";r=-1;t=9`}, 9 * s},
		{"a negative time span", []string{"X-RateLimit-Reset: -3"}, 0},
		{"a second field that makes sense", []string{"Retry-After: soon", "Retry-After: 3"}, 3 * s},
		{"a second date of the response", []string{"Date: today", "Date: " + date, "Retry-After: Fri, 27 Nov 2026 12:00:10 GMT"}, 10 * s},
		{"a second reset", []string{"X-RateLimit-Reset: soon", "X-RateLimit-Reset: 4"}, 4 * s},
		{"a second count of what is left", []string{"X-RateLimit-Remaining: few", "X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 4"}, 4 * s},
		{"a second count, with something left", []string{"X-RateLimit-Remaining: few", "X-RateLimit-Remaining: 2", "X-RateLimit-Reset: 4"}, 0},
		{"something left, in words", []string{"X-RateLimit-Remaining: few", "X-RateLimit-Reset: 25"}, 0},
		{"a reset and no more", []string{"X-RateLimit-Reset: 25"}, 25 * s},
		{"the older field if the newer says nothing", []string{"RateLimit-Reset: soon", "X-RateLimit-Reset: 25"}, 25 * s},
		{"an instant in Retry-After", []string{"Date: " + date, "Retry-After: 1795780830"}, 30 * s},
		{"RFC 3339", []string{"Date: " + date, "Retry-After: 2026-11-27T12:00:10Z"}, 10 * s},
		{"RFC 3339 elsewhere", []string{"Date: " + date, "Retry-After: 2026-11-27T13:00:10.5+01:00"}, 10500 * time.Millisecond},
		{"ISO 8601 without seconds", []string{"Date: " + date, "X-RateLimit-Reset: 2026-11-27T12:02Z"}, 2 * time.Minute},
		{"ISO 8601 without a zone", []string{"Date: " + date, "X-RateLimit-Reset: 2026-11-27T12:00:09"}, 9 * s},
		{"a date with a numeric zone", []string{"Date: " + date, "Retry-After: Fri, 27 Nov 2026 14:00:10 +0200"}, 10 * s},
		{"RFC 3339 of the year 9999", []string{"Date: " + date, "X-RateLimit-Reset: 9999-12-31T23:59:59Z"}, time.Hour},
		{"RFC 3339 that has passed", []string{"Date: " + date, "X-RateLimit-Reset: 2026-11-27T11:00:00Z"}, 0},
		{"a month that does not exist", []string{"X-RateLimit-Reset: 2026-13-27T12:00:00Z"}, 0},
		{"milliseconds", []string{"Retry-After-Ms: 2500", "Retry-After: 9"}, 2500 * time.Millisecond},
		{"no milliseconds", []string{"Retry-After-Ms: soon", "Retry-After: 9"}, 9 * s},
		{"negative milliseconds", []string{"Retry-After-Ms: -5", "Retry-After: 9"}, 9 * s},
		{"milliseconds for long", []string{"X-Ms-Retry-After-Ms: 99999999999999999999"}, time.Hour},
		{"a span with its unit", []string{"Retry-After: 2s"}, 2 * s},
		{"spans of several units", []string{"X-RateLimit-Remaining-Tokens: 0", "X-RateLimit-Reset-Tokens: 6m1.5s"}, 361500 * time.Millisecond},
		{"a span that overflows", []string{"X-RateLimit-Reset-Tokens: 99999999999h", "X-RateLimit-Reset-Requests: 2s"}, 2 * s},
		{"a negative span", []string{"X-RateLimit-Reset-Tokens: -2s"}, 0},
		{"a span without a unit behind", []string{"X-RateLimit-Reset-Tokens: 2s3"}, 0},
		{"units alone", []string{"X-RateLimit-Reset-Tokens: ms"}, 0},
		{"the limit that is used up", []string{"X-RateLimit-Remaining-Requests: 5", "X-RateLimit-Reset-Requests: 50s", "X-RateLimit-Remaining-Tokens: 0", "X-RateLimit-Reset-Tokens: 2s", "X-RateLimit-Reset-Day: 99s"}, 2 * s},
		{"the longest where nobody says which", []string{"X-RateLimit-Reset-Requests: 120ms", "X-RateLimit-Reset-Tokens: 2s"}, 2 * s},
		{"something left of the only limit with a reset", []string{"X-RateLimit-Remaining-Minute: 0", "X-RateLimit-Remaining: 5", "X-RateLimit-Reset: 25"}, 0},
		{"fields by vendor", []string{"Date: " + date, "Anthropic-RateLimit-Tokens-Remaining: 0", "Anthropic-RateLimit-Tokens-Reset: 2026-11-27T12:00:03Z", "Anthropic-RateLimit-Requests-Remaining: 4", "Anthropic-RateLimit-Requests-Reset: 2026-11-27T12:00:59Z"}, 3 * s},
		{"another hyphen", []string{"Date: " + date, "X-Rate-Limit-Remaining: 0", "X-Rate-Limit-Reset: 1795780830"}, 30 * s},
		{"seconds as Discord has them", []string{"Date: " + date, "X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 1795780802.250", "X-RateLimit-Reset-After: 2.5"}, 2500 * time.Millisecond},
		{"a date as GitLab has it", []string{"Date: " + date, "RateLimit-Remaining: 0", "RateLimit-ResetTime: Fri, 27 Nov 2026 12:00:10 GMT"}, 10 * s},
		{"milliseconds of a limit", []string{"X-RateLimit-Reset-Ms: 1500"}, 1500 * time.Millisecond},
		{"parameters of what is left", []string{"RateLimit-Remaining: 0;w=60", "RateLimit-Reset: 20"}, 20 * s},
		{"another field's reset", []string{"X-Password-Reset: 20", "X-RateLimit-Resource: core"}, 0},
	} {
		for _, status := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable, 420, 430, 509, 529} {
			if got := retryafter.Read(status, header(test.lines...), now); got != test.want {
				t.Errorf("%s: %d %q: %v, want %v", test.name, status, test.lines, got, test.want)
			}
		}
		for _, status := range []int{http.StatusOK, http.StatusUnauthorized, http.StatusNotFound, http.StatusBadGateway, 0, -1} {
			if got := retryafter.Read(status, header(test.lines...), now); got != 0 {
				t.Errorf("%s: status %d closes for %v", test.name, status, got)
			}
		}
	}
}

// TestStatusesThatNeedProof: a 403 has often nothing to do with a limit, whatever fields about limits it has.
func TestStatusesThatNeedProof(t *testing.T) {
	for _, test := range []struct {
		lines []string
		want  time.Duration
	}{
		{nil, 0},
		{[]string{"Retry-After: 30"}, 30 * time.Second},
		{[]string{"Retry-After: soon"}, 0},
		{[]string{"Retry-After-Ms: 300"}, 300 * time.Millisecond},
		{[]string{"Date: " + date, "X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 1795780830"}, 30 * time.Second},
		{[]string{"Date: " + date, "X-RateLimit-Remaining: 57", "X-RateLimit-Reset: 1795780830"}, 0},
		{[]string{"X-RateLimit-Remaining: few", "X-RateLimit-Reset: 30"}, 0},
		{[]string{"X-RateLimit-Reset: 30"}, 0},
		{[]string{"X-RateLimit-Remaining-Tokens: 500", "X-RateLimit-Reset-Tokens: 2s"}, 0},
		{[]string{"X-RateLimit-Remaining: 0", "X-RateLimit-Reset-Seconds: 8"}, 8 * time.Second},
		{[]string{"X-RateLimit-Remaining: 0"}, 0},
		{[]string{`RateLimit: "a";r=0;t=9`}, 9 * time.Second},
		{[]string{`RateLimit: "a";r=1;t=9`}, 0},
	} {
		for _, status := range []int{http.StatusForbidden, http.StatusPaymentRequired} {
			if got := retryafter.Read(status, header(test.lines...), now); got != test.want {
				t.Errorf("%d %q: %v, want %v", status, test.lines, got, test.want)
			}
		}
	}
}

// FuzzRead: whatever a server says, it is obeyed for at most Max, and in whole microseconds.
func FuzzRead(f *testing.F) {
	f.Add("30", "", "", "", "", "", uint16(429))
	f.Add("Fri, 27 Nov 2026 12:00:10 GMT", date, `"a";r=0;t=9`, "0", "1795780830", "X-Rate-Limit-Reset", uint16(403))
	f.Add("", "x", "limit=1, remaining=0, reset=2", "0", "9e99", "Retry-After-Ms", uint16(503))
	f.Add("18446744073709551616", "", `"a";r=0;t=1.5, ("b" "c");r=0`, "-1", "....", "a-ratelimit-resetms", uint16(529))
	f.Add("", "", "", "0", "6m0.5s", "X-RateLimit-Reset-Tokens", uint16(429))
	f.Add("", date, "", "NaN", "9999-12-31T23:59:59+23:59", "ratelimitremainingreset", uint16(402))
	f.Add("", "", "", "0", "7", "X-Rate-Limit-Remaining", uint16(429))
	f.Fuzz(func(t *testing.T, after, date, limit, remaining, reset, name string, status uint16) {
		h := http.Header{
			"Retry-After": {after}, "Date": {date}, "Ratelimit": {limit},
			"X-Ratelimit-Remaining": {remaining}, "X-Ratelimit-Reset": {reset}, name: {reset, after},
		}
		switch got := retryafter.Read(int(status), h, now); {
		case got < 0 || got > retryafter.Max || got%time.Microsecond != 0:
			t.Errorf("%d %q: %v", status, h, got)
		case got != 0 && !retryafter.Asks(int(status)):
			t.Errorf("%q closes for %v with status %d", h, got, status)
		case got != retryafter.Read(int(status), h, now):
			t.Errorf("%d %q: %v, and then another time", status, h, got)
		}
	})
}
