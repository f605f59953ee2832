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
		{"an instant in microseconds", []string{"Date: " + date, "X-RateLimit-Reset: 1795780830000000"}, 0},
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
	} {
		for _, status := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
			if got := retryafter.Read(status, header(test.lines...), now); got != test.want {
				t.Errorf("%s: %d %q: %v, want %v", test.name, status, test.lines, got, test.want)
			}
		}
		for _, status := range []int{http.StatusOK, http.StatusForbidden, http.StatusBadGateway, 0, -1} {
			if got := retryafter.Read(status, header(test.lines...), now); got != 0 {
				t.Errorf("%s: status %d closes for %v", test.name, status, got)
			}
		}
	}
}

// FuzzRead: whatever a server says, it is obeyed for at most Max, and in whole microseconds.
func FuzzRead(f *testing.F) {
	f.Add("30", "", "", "", "")
	f.Add("Fri, 27 Nov 2026 12:00:10 GMT", date, `"a";r=0;t=9`, "0", "1795780830")
	f.Add("", "x", "limit=1, remaining=0, reset=2", "0", "9e99")
	f.Add("18446744073709551616", "", `"a";r=0;t=1.5, ("b" "c");r=0`, "-1", "....")
	f.Fuzz(func(t *testing.T, after, date, limit, remaining, reset string) {
		h := http.Header{
			"Retry-After": {after}, "Date": {date}, "Ratelimit": {limit},
			"X-Ratelimit-Remaining": {remaining}, "X-Ratelimit-Reset": {reset},
		}
		for _, status := range []int{http.StatusOK, http.StatusTooManyRequests, http.StatusServiceUnavailable} {
			switch got := retryafter.Read(status, h, now); {
			case got < 0 || got > retryafter.Max || got%time.Microsecond != 0:
				t.Errorf("%d %q: %v", status, h, got)
			case status == http.StatusOK && got != 0:
				t.Errorf("%q closes for %v with status 200", h, got)
			}
		}
	})
}
