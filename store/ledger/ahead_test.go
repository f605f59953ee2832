package ledger

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// newLine returns a ledger on a store in which a bucket of alice is full, and a
// request of hers.
func newLine(limit store.Limit) (*simulation, *Ledger, store.Request) {
	s := newSimulation(1)
	limit.Zone, limit.Window = "zone", time.Hour
	r := store.Request{Limit: &limit, ClientKey: "alice", Events: 5, Cost: 1, ID: "id"}
	full := r
	full.Cost, full.ID = 5, "other"
	s.others(algorithm.Charge, full)
	return s, New(NewBooks(nil), s, Options{}), r
}

// TestLineIsAskedAboutOnceASecond, however many requests join it, and what they
// are told is what the store would have said.
func TestLineIsAskedAboutOnceASecond(t *testing.T) {
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			s, l, r := newLine(kind)
			for i := range 10_000 {
				if r.Ahead = 7; algorithm.Copies(kind.Algorithm) {
					r.Ahead = int64(i % 20)
				}
				st, exact := l.CheckAhead(t.Context(), r, time.Minute), s.word(r)
				if st.Err != nil || st.Allowed || st.Used != 5 || (st.RetryAfter-exact.RetryAfter).Abs() > time.Second {
					t.Fatalf("%s, %d ahead: %+v, want %+v", kind.Algorithm, r.Ahead, st, exact)
				}
				time.Sleep(time.Millisecond)
			}
			// Ten seconds have passed.
			if s.checks < 9 || s.checks > 12 {
				t.Errorf("%s: asked %d times in 10 s", kind.Algorithm, s.checks)
			}
			l.Leave()
		})
	}
}

// TestLineOfALog: of a bucket that cannot be copied a refusal answers those that
// need more only if it already is beyond their patience.
func TestLineOfALog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l, r := newLine(store.Limit{Algorithm: store.SlidingLog})
		for _, step := range []struct {
			ahead    int64
			patience time.Duration
			wait     time.Duration
			checks   int
		}{
			{0, 2 * time.Hour, time.Hour, 1},
			{0, 2 * time.Hour, time.Hour, 1},
			{0, time.Minute, time.Hour, 1},
			// It needs to know whether it is one window or two.
			{7, 2 * time.Hour, time.Hour, 2},
			{7, 2 * time.Hour, time.Hour, 2},
			{12, 90 * time.Minute, 2 * time.Hour, 3},
			{17, 90 * time.Minute, 2 * time.Hour, 3},
			{17, 150 * time.Minute, 3 * time.Hour, 4},
			// What holds for more does not hold for less.
			{0, time.Minute, time.Hour, 5},
		} {
			r.Ahead = step.ahead
			st := l.CheckAhead(t.Context(), r, step.patience)
			if wait := st.RetryAfter.Round(time.Minute); st.Allowed || wait != step.wait || s.checks != step.checks {
				t.Errorf("%+v: wait %v, %d checks", step, st.RetryAfter, s.checks)
			}
		}
		l.Leave()
	})
}

// TestLineInAnOutage: what is known refuses nobody while the store does not
// answer, and answers again when it does. A client that leaves while it asks
// says nothing about the store, so that the next one asks.
func TestLineInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l, r := newLine(store.Limit{Algorithm: store.FixedWindow})
		check := func(what string, fails bool, checks int) {
			t.Helper()
			before := s.checks
			for range 3 {
				if st := l.CheckAhead(t.Context(), r, 0); (st.Err != nil) != fails {
					t.Errorf("%s: %+v", what, st)
				}
			}
			if s.checks-before != checks {
				t.Errorf("%s: %d checks, want %d", what, s.checks-before, checks)
			}
		}
		check("at first", false, 1)
		time.Sleep(2 * DefaultTrust)
		left, leave := context.WithCancel(t.Context())
		leave()
		if st := l.CheckAhead(left, r, 0); !errors.Is(st.Err, context.Canceled) {
			t.Errorf("a client that has left: %+v", st)
		}
		check("after a client has left", false, 1)
		time.Sleep(2 * DefaultTrust)
		s.setDown(true, false)
		check("in an outage", true, 3)
		s.setDown(false, false)
		check("after it", false, 1)
		l.Leave()
	})
}
