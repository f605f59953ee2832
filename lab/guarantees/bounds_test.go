package guarantees

import (
	"net/http"
	"testing"
	"time"
)

func TestUnseen(t *testing.T) {
	of := func(caddy int, all []response) []response {
		for i := range all {
			all[i].caddy = caddy
		}
		return all
	}
	const ms = time.Millisecond
	for name, test := range map[string]struct {
		seen   []response
		caddys int
		reach  time.Duration
		want   int64
	}{
		"one Caddy":                 {admitted(9, 0, 10, 0), 1, ms, 0},
		"in flight elsewhere":       {join(admitted(9, 0, 10, 0), of(1, admitted(4, 5, 10, 0))), 2, 0, 9},
		"one after the other":       {join(admitted(9, 0, 10, 20), of(1, admitted(9, 10, 10, 20))), 2, 0, 1},
		"rate times reach":          {join(admitted(9, 0, 10, 20), of(1, admitted(9, 10, 10, 20))), 2, 100 * ms, 6},
		"at several":                {join(admitted(3, 0, 10, 0), of(1, admitted(4, 5, 10, 0)), of(2, admitted(5, 5, 10, 0))), 3, 0, 9},
		"refusals are none of them": {join(admitted(1, 0, 10, 0), of(1, []response{at(429, 0, 10)})), 2, ms, 0},
		"nothing is admitted then":  {join(admitted(9, 0, 10, 0), of(1, admitted(1, 40, 10, 0))), 2, 20 * ms, 0},
	} {
		if got := unseen(test.seen, test.caddys, test.reach); got != test.want {
			t.Errorf("%s: %d unseen, want %d", name, got, test.want)
		}
	}
}

func TestUnasked(t *testing.T) {
	of := func(caddy int, all []response) []response {
		for i := range all {
			all[i].caddy = caddy
		}
		return all
	}
	visits := func(at ...int) (all []response) {
		for _, ms := range at {
			all = append(all, admitted(1, ms, 10, 0)...)
		}
		return all
	}
	for name, test := range map[string]struct {
		seen   []response
		caddys int
		want   int64
	}{
		"one Caddy":                      {visits(0, 500, 900), 1, 0},
		"while it was away":              {join(visits(0, 900), of(1, admitted(30, 200, 10, 10))), 2, 30},
		"longer ago than answers count":  {join(visits(0, 1300), of(1, admitted(30, 200, 10, 10))), 2, 1},
		"before any answer that counts":  {join(visits(0, 1100), of(1, admitted(30, -60, 10, 1))), 2, 0},
		"shown by the reply to a charge": {join(visits(0, 1300, 1500), of(1, admitted(30, 200, 10, 10))), 2, 1},
		"a charge without a reply":       {join(visits(0, 1300, 1380), of(1, admitted(30, 200, 10, 10))), 2, 23},
		"after it has left":              {join(visits(0, 100), of(1, admitted(30, 200, 10, 10))), 2, 2},
		"at several":                     {join(visits(0, 900), of(1, admitted(30, 200, 10, 10)), of(2, admitted(20, 200, 10, 10))), 3, 50},
	} {
		if got := unasked(test.seen, test.caddys, 100*time.Millisecond); got != test.want {
			t.Errorf("%s: %d unasked, want %d", name, got, test.want)
		}
	}
}

func TestBounds(t *testing.T) {
	for _, l := range limits() {
		for _, caddys := range caddyCounts {
			exact := l.charge == before || caddys == 1
			for seen, want := range map[int64]int64{0: 0, 7: 7, 1000: int64(caddys-1) * l.events} {
				switch {
				case exact:
					want = 0
				case l.algorithm == gcra:
					want = seen
				}
				if got := l.mayBeBeyond(caddys, seen, 0); got != want {
					t.Errorf("%s, %d Caddys, %d unseen: %d may be beyond, want %d", l, caddys, seen, got, want)
				}
			}
			want := int64(0)
			if l.batched {
				want = map[string]int64{fixedWindow: 10, slidingWindow: 20}[l.algorithm]
			}
			if got := l.mayBeRoom(caddys); got != want {
				t.Errorf("%s, %d Caddys: room for %d may be, want %d", l, caddys, got, want)
			}
		}
	}
	for name, test := range map[string]struct {
		limit                 limit
		caddys                int
		unseen, unasked, want int64
	}{
		"less than half of the limit": {small(fixedWindow, after), 2, 0, 2, 0},
		"more than half of the limit": {small(fixedWindow, after), 2, 0, 5, 3},
		"of an odd limit":             {limit{algorithm: fixedWindow, charge: after, events: 5, window: window}, 2, 0, 5, 2},
		"of a burst":                  {small(gcra, after), 2, 0, 5, 4},
		"unseen by a check":           {small(fixedWindow, after), 2, 4, 5, 4},
		"a limit for each other":      {small(slidingWindow, after), 3, 0, 90, 8},
		"a log is always checked":     {small(slidingLog, after), 2, 1, 5, 1},
		"before":                      {small(fixedWindow, before), 2, 1, 5, 0},
		"one Caddy":                   {small(fixedWindow, after), 1, 1, 5, 0},
		"older answers":               {long(fixedWindow, after), 4, 0, 0, 3},
		"older answers beside others": {long(gcra, after), 4, 1, 4, 6},
		"older answers, a log":        {long(slidingLog, after), 4, 1, 0, 1},
		"older answers, before":       {long(fixedWindow, before), 4, 1, 0, 0},
		"older answers, one Caddy":    {long(fixedWindow, after), 1, 1, 0, 0},
	} {
		if got := test.limit.mayBeBeyond(test.caddys, test.unseen, test.unasked); got != test.want {
			t.Errorf("%s: %d may be beyond, want %d", name, got, test.want)
		}
	}
	batched := limit{algorithm: fixedWindow, charge: before, batched: true, events: 20}
	if got := batched.mayBeRoom(4); got != 4 {
		t.Errorf("4 Caddys may hold %d of 20, want one each", got)
	}
	if got := reach(arrival(5*time.Millisecond), time.Second); got != 1060*time.Millisecond {
		t.Errorf("a charge can be unknown for %v", got)
	}
}

func TestWobble(t *testing.T) {
	with := func(resets ...int64) (all []response) {
		for _, reset := range resets {
			all = append(all, response{status: 200, reset: reset})
		}
		return all
	}
	for _, test := range []struct {
		algorithm     string
		seen          []response
		windows, most int64
	}{
		{fixedWindow, nil, 0, 0},
		{fixedWindow, with(10, 10, 10), 1, 1},
		{fixedWindow, with(14, 10, 18, 10), 3, 1},
		{fixedWindow, with(10, 11, 14), 2, 2},
		{fixedWindow, with(10, 12, 13, 14), 2, 3},
		{fixedWindow, append(with(10), response{reset: 11}), 1, 1},
		{fixedWindow, append(with(10), response{status: 429, reset: 11}), 1, 2},
		{slidingWindow, append(with(10), response{status: 429, reset: 11}), 1, 1},
	} {
		if windows, most := (limit{algorithm: test.algorithm, window: 4 * time.Second}).wobble(test.seen, 0); windows != test.windows || most != test.most {
			t.Errorf("%v: %d resets in one of %d windows, want %d in %d", test.seen, most, windows, test.most, test.windows)
		}
	}

	end := zero.Add(window).Unix()
	for name, test := range map[string]struct {
		charge string
		begun  int   // of the admission, in milliseconds
		waits  int64 // until so many seconds after the end of the window
		want   int64
	}{
		"its charge is late":                 {after, 3850, 5, 1},
		"its charge is not late":             {after, 0, 5, 2},
		"its cost is spent before it begins": {before, 3850, 5, 2},
		"it waits for the charge":            {after, 3850, 1, 1},
		"it waits for no charge":             {after, 0, 1, 2},
		"it waits longer than the charge":    {after, 3850, 2, 2},
	} {
		seen := join(in(end, admitted(1, test.begun, 1, 0)), in(end+test.waits, []response{at(429, 3900, 3901)}), in(end+4, admitted(1, 4100, 1, 0)))
		if windows, most := small(fixedWindow, test.charge).wobble(seen, 200*time.Millisecond); windows != 2 || most != test.want {
			t.Errorf("%s: %d resets in one of %d windows, want %d of 2", name, most, windows, test.want)
		}
	}
}

func TestLoss(t *testing.T) {
	for name, test := range map[string]struct {
		loss     loss
		breaches int
	}{
		"after, all counted":             {loss{limit: small(fixedWindow, after), served: 5, counted: 5, uncertain: 1}, 0},
		"after, one is lost":             {loss{limit: small(fixedWindow, after), served: 5, counted: 4, uncertain: 1}, 0},
		"after, two are lost":            {loss{limit: small(fixedWindow, after), served: 5, counted: 3, uncertain: 1}, 1},
		"after, one is double":           {loss{limit: small(fixedWindow, after), served: 5, counted: 6, uncertain: 1}, 1},
		"before, denied and taken":       {loss{limit: small(gcra, before), served: 5, counted: 6, unanswered: 3, untold: 1}, 0},
		"before, denied and taken twice": {loss{limit: small(gcra, before), served: 5, counted: 7, unanswered: 3, untold: 1}, 1},
		"before, served and not taken":   {loss{limit: small(gcra, before), served: 5, counted: 4, untold: 1}, 1},
		"a log gives back":               {loss{limit: small(slidingLog, before), served: 5, counted: 6, unanswered: 3, untold: 3}, 1},
		"a log cannot give back":         {loss{limit: small(slidingLog, before), served: 5, counted: 6, unanswered: 3, untold: 3, notRefunded: 1}, 0},
		"no fault":                       {loss{limit: small(gcra, before), served: 5, counted: 5}, 1},
		"refused":                        {loss{limit: small(gcra, after), served: 5, counted: 5, uncertain: 1, refused: 1}, 1},
	} {
		if got := test.loss.breaches(); len(got) != test.breaches {
			t.Errorf("%s: %q, want %d", name, got, test.breaches)
		}
	}
}

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

// long are small limits with a window in which answers older than ledger_trust count.
func long(algorithm, charge string) limit {
	l := small(algorithm, charge)
	l.window = 11 * time.Second
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

func TestRoom(t *testing.T) {
	refusal := func(ms int) []response { return []response{at(429, ms, ms+1)} }
	end := zero.Add(window).Unix()
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

		"waits for a late charge":      {small(fixedWindow, after), join(in(end, admitted(3, 0, 1, 0)), in(end, admitted(1, 3890, 50, 0)), in(end+5, refusal(3900))), 0},
		"waits, though there is room":  {small(fixedWindow, after), join(in(end, admitted(2, 0, 1, 0)), in(end, admitted(1, 3890, 50, 0)), in(end+5, refusal(3900))), 1},
		"waits until it arrives":       {small(fixedWindow, after), join(in(end, admitted(3, 0, 1, 0)), in(end, admitted(1, 3890, 50, 0)), in(end+1, refusal(3950))), 0},
		"waits until later":            {small(fixedWindow, after), join(in(end, admitted(3, 0, 1, 0)), in(end, admitted(1, 3890, 50, 0)), in(end+2, refusal(3950))), 3},
		"waits, though none is late":   {small(fixedWindow, after), join(in(end, admitted(4, 0, 1, 0)), in(end+5, refusal(3900))), 4},
		"waits for a time without end": {small(fixedWindow, after), join(in(end, admitted(3, 0, 1, 0)), in(end, admitted(1, 3890, 50, 0)), in(end+400, refusal(3900))), 3},
		"waits, but its cost is taken": {small(fixedWindow, before), join(in(end, admitted(4, 3890, 50, 0)), in(end+5, refusal(3900))), 4},

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
