package guarantees

import (
	"net/http"
	"testing"
	"time"
)

// zero is the beginning of a window of the clock.
var zero = time.UnixMicro(400_000_000 * window.Microseconds())

// at is a response from and to so many milliseconds after zero.
func at(status, begun, ended int) response {
	ms := func(n int) time.Time { return zero.Add(time.Duration(n) * time.Millisecond) }
	return response{status: status, begun: ms(begun), ended: ms(ended), reset: 1}
}

// admitted are n responses, the first at begin, each of which takes and is
// followed by the next after so many milliseconds.
func admitted(n, begin, takes, apart int) (all []response) {
	for i := range n {
		all = append(all, at(http.StatusOK, begin+i*apart, begin+i*apart+takes))
	}
	return all
}

func join(lists ...[]response) (all []response) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// small are limits of 4 events, or 2 slots, in a window of 4 s.
func small(algorithm, charge string) limit {
	l := limit{algorithm: algorithm, charge: charge, events: 4, window: window}
	switch algorithm {
	case gcra:
		l.burst = 2
	case concurrency:
		l.events = 2
	}
	return l
}

// in puts responses into a window that ends then.
func in(reset int64, all []response) []response {
	for i := range all {
		all[i].reset = reset
	}
	return all
}

func TestBeyond(t *testing.T) {
	for name, test := range map[string]struct {
		limit limit
		seen  []response
		peak  int64
		want  int64
	}{
		"nothing":                {small(fixedWindow, before), nil, 0, 0},
		"less than the limit":    {small(fixedWindow, before), admitted(3, 0, 1, 1), 0, 0},
		"a window":               {small(fixedWindow, before), admitted(6, 0, 1, 1), 0, 2},
		"two windows":            {small(fixedWindow, before), join(in(1, admitted(4, 0, 1, 1)), in(5, admitted(5, 10, 1, 1))), 0, 1},
		"refusals count nothing": {small(fixedWindow, before), join(admitted(4, 0, 1, 1), []response{at(429, 9, 10)}), 0, 0},

		"a log, within a window":      {small(slidingLog, before), admitted(6, 0, 1, 700), 0, 2},
		"a log, a window apart":       {small(slidingLog, before), admitted(8, 0, 1, 1000), 0, 0},
		"a log, perhaps not within":   {small(slidingLog, before), join(admitted(4, 0, 1, 1), admitted(1, 3990, 20, 0)), 0, 0},
		"a log, all at the same time": {small(slidingLog, after), admitted(9, 0, 100, 0), 0, 5},

		"gcra, a burst":                 {small(gcra, before), admitted(3, 0, 1, 1), 0, 1},
		"gcra, at its rate":             {small(gcra, before), join(admitted(2, 0, 1, 1), admitted(9, 1010, 1, 1000)), 0, 0},
		"gcra, faster than its rate":    {small(gcra, before), join(admitted(2, 0, 1, 1), admitted(9, 510, 1, 500)), 0, 5},
		"gcra, a burst after a time":    {small(gcra, before), join(admitted(2, 0, 1, 1), admitted(4, 9000, 1, 1)), 0, 2},
		"gcra, drained by the last end": {small(gcra, before), admitted(3, 0, 1000, 0), 0, 0},

		"an estimate, in one window":      {small(slidingWindow, before), admitted(5, 0, 1, 1), 0, 1},
		"an estimate, of two windows":     {small(slidingWindow, before), join(admitted(4, -100, 1, 1), admitted(3, 2000, 1, 1)), 0, 0},
		"an estimate, of too much in two": {small(slidingWindow, before), join(admitted(4, -100, 1, 1), admitted(4, 1000, 1, 1)), 0, 2},
		"an estimate, perhaps later":      {small(slidingWindow, before), join(admitted(4, -5, 10, 0), admitted(4, 3999, 1, 0)), 0, 0},

		"slots":          {small(concurrency, before), admitted(9, 0, 1, 0), 2, 0},
		"too many slots": {small(concurrency, before), admitted(9, 0, 1, 0), 3, 1},
	} {
		if got := test.limit.beyond(test.seen, test.peak); got != test.want {
			t.Errorf("%s: %d beyond, want %d", name, got, test.want)
		}
	}
}
