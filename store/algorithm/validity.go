package algorithm

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// minWindow is the shortest window, and minLease the shortest lease.
	minWindow = time.Millisecond
	minLease  = time.Second
	// century is [store.MaxWindow] in microseconds.
	century = int64(store.MaxWindow / time.Microsecond)
)

// Invalid is the error of a limit that cannot be counted.
type Invalid struct {
	// Field is the wrong field of [store.Limit], such as Window or Calendar.Unit.
	Field string
	// Problem stands behind the name of the field, or of the option that sets it.
	Problem string
}

// Error implements the interface error.
func (e *Invalid) Error() string { return e.Field + " " + e.Problem }

// CheckLimit returns the first error of a limit, or nil. It does not check the name of the zone.
func CheckLimit(l *store.Limit) *Invalid {
	invalid := func(field, format string, args ...any) *Invalid {
		return &Invalid{field, fmt.Sprintf(format, args...)}
	}
	if l.Algorithm >= store.Algorithms {
		return invalid("Algorithm", "%d: there is no such algorithm", uint8(l.Algorithm))
	}
	traits, hasCalendar := Of(l.Algorithm), l.Calendar != store.Calendar{}
	least, with := minWindow, ""
	if traits.Lease {
		least, with = minLease, "with "+l.Algorithm.String()+" "
	}
	windowed := func(a store.Algorithm) bool { return Of(a).Windowed() }
	switch {
	case hasCalendar && !traits.Windowed():
		return invalid("Calendar", "goes with algorithm %s only", Names(windowed))
	case l.Align && !traits.Windowed():
		return invalid("Align", "goes with algorithm %s only", Names(windowed))
	case hasCalendar && l.Calendar.Unit.Length() == 0:
		return invalid("Calendar.Unit", "%q: it must be day, week, month or year", l.Calendar.Unit)
	case hasCalendar && l.Calendar.Validate() != nil:
		return invalid("Calendar.TimeZone", "%q: it must be an IANA name, such as Europe/Berlin: %v", l.Calendar.TimeZone, l.Calendar.Validate())
	case hasCalendar && (l.Window != l.Calendar.Window() || !l.Align):
		return invalid("Window", "%s: it must be aligned and %s, as of the calendar", l.Window, l.Calendar.Window())
	case l.Window < least || l.Window > store.MaxWindow:
		return invalid("Window", "%s: %sit must be from %s to 100 years", l.Window, with, least)
	case l.Window%time.Microsecond != 0:
		return invalid("Window", "%s: it must be whole microseconds", l.Window)
	}
	return nil
}

// CheckEvents returns an error if an algorithm cannot count that number of events. Its text continues the name
// of the option.
func CheckEvents(a store.Algorithm, events int64) error {
	if t := Of(a); events < 1 || events > t.MostEvents {
		return fmt.Errorf("%d: it must be from 1 to %s", events, t.MostWords)
	}
	return nil
}

// CheckBurst returns an error if a valid limit with that number of events cannot have the burst; 0 is none. Its
// text continues the name of the option.
func CheckBurst(l *store.Limit, events, burst int64) error {
	switch {
	case burst == 0:
		return nil
	case !l.Algorithm.HasBurst():
		return fmt.Errorf("goes with algorithm %s only", Names(store.Algorithm.HasBurst))
	}
	if err := CheckEvents(l.Algorithm, burst); err != nil {
		return err
	}
	if least := LeastEvents(burst, l.Window); events < least {
		return fmt.Errorf("%d would take more than 100 years to come back, at %d in %s: lower it, or raise events to %d", burst, events, l.Window, least)
	}
	return nil
}

// LeastEvents returns how many events a limit has to admit in a window. A burst must
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

// MostBurst returns the largest burst that drains within a century at this rate.
func MostBurst(events int64, window time.Duration) int64 {
	if hi, lo := bits.Mul64(uint64(events), uint64(century)); hi < uint64(window.Microseconds()) {
		n, _ := bits.Div64(hi, lo, uint64(window.Microseconds()))
		return int64(min(n, store.MaxEvents))
	}
	return store.MaxEvents
}
