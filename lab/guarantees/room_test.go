package guarantees

import (
	"testing"
	"time"
)

func TestRoom(t *testing.T) {
	refusal := func(ms int) []response { return []response{at(429, ms, ms+1)} }
	for name, test := range map[string]struct {
		limit limit
		seen  []response
		want  int64
	}{
		"no refusal": {small(fixedWindow, before), admitted(2, 0, 1, 1), 0},

		"a window that is full":      {small(fixedWindow, before), join(admitted(4, 0, 1, 1), refusal(10)), 0},
		"a window with room":         {small(fixedWindow, before), join(admitted(3, 0, 1, 1), refusal(10)), 1},
		"a window filled later":      {small(fixedWindow, before), join(admitted(1, 0, 1, 1), refusal(10), admitted(3, 20, 1, 1)), 3},
		"in flight meanwhile":        {small(fixedWindow, after), join(admitted(4, 0, 500, 0), refusal(10)), 0},
		"another window, full":       {small(fixedWindow, before), join(in(1, admitted(4, 0, 1, 1)), in(5, refusal(10))), 4},
		"charged in a later window":  {small(fixedWindow, after), join(in(1, admitted(4, 0, 1, 0)), in(5, refusal(10))), 0},
		"charged in its own window":  {small(fixedWindow, after), join(in(1, admitted(4, 0, 1, 0)), in(5, refusal(200))), 4},
		"taken, so in no later":      {small(fixedWindow, before), join(in(1, admitted(4, 0, 1, 0)), in(5, refusal(10))), 4},
		"in an earlier window again": {small(fixedWindow, after), join(in(5, admitted(4, 0, 1, 0)), in(1, refusal(10))), 4},

		"a log that is full":  {small(slidingLog, before), join(admitted(4, 0, 1, 1), refusal(4000)), 0},
		"a log with room":     {small(slidingLog, before), join(admitted(4, 0, 1, 1), refusal(4300)), 4},
		"a log, the last one": {small(slidingLog, before), join(admitted(3, 0, 1, 1), admitted(1, 500, 1, 1), refusal(4300)), 3},

		"gcra, full":     {small(gcra, before), join(admitted(2, 0, 1, 1), refusal(10)), 0},
		"gcra, drained":  {small(gcra, before), join(admitted(2, 0, 1, 1), refusal(1200)), 1},
		"gcra, not yet":  {small(gcra, before), join(admitted(2, 0, 1, 1), refusal(1050)), 0},
		"gcra, by steps": {small(gcra, before), join(admitted(2, 0, 1, 1), admitted(2, 1000, 1, 1000), refusal(2500)), 0},

		"an estimate, full":        {small(slidingWindow, before), join(admitted(4, 0, 1, 1), refusal(10)), 0},
		"an estimate of the last":  {small(slidingWindow, before), join(admitted(4, -200, 1, 1), refusal(10)), 0},
		"an estimate, half is out": {small(slidingWindow, before), join(admitted(4, -200, 1, 1), refusal(2200)), 2},
		"an estimate, of both":     {small(slidingWindow, before), join(admitted(4, -200, 1, 1), admitted(2, 2050, 1, 1), refusal(2090)), 0},

		"slots that are used":      {small(concurrency, before), join(admitted(2, 0, 50, 0), refusal(40)), 0},
		"slots on their way back":  {small(concurrency, before), join(admitted(2, 0, 50, 0), refusal(100)), 0},
		"slots that are long free": {small(concurrency, before), join(admitted(2, 0, 50, 0), refusal(200)), 2},
		"slots, one is used still": {small(concurrency, before), join(admitted(1, 0, 50, 0), admitted(1, 0, 200, 0), refusal(190)), 1},
	} {
		if got := newClient(test.limit, test.seen, 100*time.Millisecond).room(); got != test.want {
			t.Errorf("%s: room for %d, want %d", name, got, test.want)
		}
	}
}
