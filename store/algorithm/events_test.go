package algorithm_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestEventsChange requires that other events leave what is used as it is. A
// bucket of gcra rounds the time that it takes to drain up to a microsecond.
func TestEventsChange(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := anyBucket(t, kind, check, charge, take)
		r := s.request()
		r.Cost, r.Reserved = 0, 0
		before := check.Run(s.bucket, &r, s.now)
		most := before.Used
		r.Events = number(t, "other events", 1, min(100, s.window()))
		if kind.Algorithm == store.GCRA && r.Events != s.events {
			most += 2 // the old time and the new may be rounded
			if 200 < s.window() {
				most-- // together to less than an event
			}
		}
		got := check.Run(s.bucket, &r, s.now)
		if got.Used < before.Used || got.Used > most || got.Remaining != max(r.Capacity()-got.Used, 0) {
			t.Fatalf("with %d events %+v,\nwith %d %+v", s.events, before, r.Events, got)
		}
	})
}

// TestGCRAEventsChange shows what changing the rate does: what was spent stays
// as many events, and drains at the new rate from the next time that something
// is spent.
func TestGCRAEventsChange(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	for _, c := range []struct {
		before, after int64
		reset         time.Duration
	}{
		{before: 10, after: 20, reset: 24 * time.Second},
		{before: 10, after: 5, reset: 96 * time.Second},
		{before: 10, after: 10, reset: 48 * time.Second},
		{before: 10, after: 7, reset: 68571430 * time.Microsecond},
	} {
		b := algorithm.New(&limit)
		charge.Run(b, &store.Request{Limit: &limit, Events: c.before, Burst: 20, Cost: 6}, origin)
		got := charge.Run(b, &store.Request{Limit: &limit, Events: c.after, Burst: 20, Cost: 2}, origin)
		if want := origin + c.reset.Microseconds(); got.Reset != want || got.Used < 8 || got.Used > 9 {
			t.Errorf("6 at %d a minute and 2 at %d: %d used until %d, want 8 until %d", c.before, c.after, got.Used, got.Reset, want)
		}
	}
}

// TestGCRADrainsAtTheOldRateUntilItIsSpent requires that only spending sets the
// rate: a look at the bucket cannot. The wait that it tells is that at the new
// rate, at which nothing drains yet.
func TestGCRADrainsAtTheOldRateUntilItIsSpent(t *testing.T) {
	limit := store.Limit{Algorithm: store.GCRA, Window: time.Minute}
	b := algorithm.New(&limit)
	old := store.Request{Limit: &limit, Events: 10, Burst: 6, Cost: 6}
	faster := store.Request{Limit: &limit, Events: 20, Burst: 6, Cost: 1}
	charge.Run(b, &old, origin)
	if got := check.Run(b, &faster, origin).RetryAfter; got != 3*time.Second {
		t.Errorf("wait %v, want 3s", got)
	}
	if take.Run(b, &faster, origin+3e6).Allowed {
		t.Error("an event has drained at the new rate already")
	}
	if got := take.Run(b, &faster, origin+6e6); !got.Allowed || got.Reset != origin+6e6+18e6 {
		t.Errorf("an event has drained at the old rate, and then the new one holds: %+v", got)
	}
}

// TestReserved requires that what is reserved is out of reach for a request,
// and there for one for which it is not.
func TestReserved(t *testing.T) {
	forKinds(t, func(t *rapid.T, kind store.Limit) {
		s := newSubject(t, kind)
		reserved := number(t, "reserved", 0, s.events-1)
		taken := func(reserved int64, id string) (n int64) {
			r := store.Request{Limit: &s.limit, Events: s.events, Reserved: reserved, Cost: 1, ID: id}
			for {
				r.ID += "+"
				got := take.Run(s.bucket, &r, s.now)
				if got.Limit != s.events-reserved {
					t.Fatalf("limit of %d events, %d reserved: %+v", s.events, reserved, got)
				}
				if !got.Allowed {
					return n
				}
				n++
			}
		}
		if got := taken(reserved, "many"); got != s.events-reserved {
			t.Fatalf("%d of %d taken with %d reserved", got, s.events, reserved)
		}
		if got := taken(0, "few"); got != reserved {
			t.Fatalf("%d of %d reserved taken by whom they are for", got, reserved)
		}
	})
}
