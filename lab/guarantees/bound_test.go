package guarantees

import (
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
		"refusals are none of them": {join(admitted(1, 0, 10, 0), of(1, []response{at(429, 0, 10)})), 2, ms, 1},
	} {
		if got := unseen(test.seen, test.caddys, test.reach); got != test.want {
			t.Errorf("%s: %d unseen, want %d", name, got, test.want)
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
				if got := l.mayBeBeyond(caddys, seen); got != want {
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
	batched := limit{algorithm: fixedWindow, charge: before, batched: true, events: 20}
	if got := batched.mayBeRoom(4); got != 4 {
		t.Errorf("4 Caddys may hold %d of 20, want one each", got)
	}
	if got := reach(arrival(5*time.Millisecond), time.Second); got != 1010*time.Millisecond {
		t.Errorf("a charge can be unknown for %v", got)
	}
}

func TestWobble(t *testing.T) {
	at := func(resets ...int64) (all []response) {
		for _, reset := range resets {
			all = append(all, response{status: 200, reset: reset})
		}
		return all
	}
	for _, test := range []struct {
		seen          []response
		windows, most int64
	}{
		{nil, 0, 0},
		{at(10, 10, 10), 1, 1},
		{at(14, 10, 18, 10), 3, 1},
		{at(10, 11, 14), 2, 2},
		{at(10, 12, 13, 14), 2, 3},
		{append(at(10), response{reset: 11}), 1, 1},
	} {
		if windows, most := wobble(test.seen, 4*time.Second); windows != test.windows || most != test.most {
			t.Errorf("%v: %d resets in one of %d windows, want %d in %d", test.seen, most, windows, test.most, test.windows)
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
