package redis

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// holders returns requests of one client, each held under a number of its own.
func holders(a store.Algorithm, n int) []store.Request {
	limit := &store.Limit{Zone: "held", Algorithm: a, Window: time.Hour}
	reqs := make([]store.Request, n)
	for i := range reqs {
		reqs[i] = store.Request{Limit: limit, ClientKey: "k", Events: int64(n), Cost: 1, ID: fmt.Sprint(i), Hold: store.HearsHeld + 1 + uint32(i)}
	}
	return reqs
}

// TestHeldIsBounded in time and number: the key expires after what is held, ten minutes at most, and takes beyond a hundred
// are not held, whatever they cost.
func TestHeldIsBounded(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA} {
		reqs := holders(a, 600)
		held := ask.Held(s.asker.Keys.Key(reqs[0].Limit, "k"))
		var last, lastHeld store.State
		for i := range reqs {
			last = store.Answers(t.Context(), s.Take, reqs[i:i+1])[0]
			if must(t, last.Err); last.IsHeld {
				lastHeld = last
			}
		}
		n, err := server.Client().StrLen(t.Context(), held).Result()
		must(t, err)
		if n /= 24; n != 100 || last.Held != 100 || last.IsHeld {
			t.Errorf("%v: %d are held, the last answer says %+v", a, n, last)
		}
		at, err := server.Client().PExpireTime(t.Context(), held).Result()
		must(t, err)
		if late := at.Microseconds() - lastHeld.Now - (10 * time.Minute).Microseconds(); late < 0 || late > 2e6 {
			t.Errorf("%v: the key expires %d µs later than in ten minutes", a, late)
		}
		must(t, s.Reset(t.Context(), reqs[0]))
		if n := server.Client().Exists(t.Context(), held).Val(); n != 0 {
			t.Errorf("%v: a reset leaves what was held", a)
		}
		large := holders(a, 100_000)[:1]
		large[0].Cost = 99_999
		if st := store.Answers(t.Context(), s.Take, large)[0]; st.Err != nil || st.Held != 99_999 || server.Client().StrLen(t.Context(), held).Val() != 24 {
			t.Errorf("%v: take of 99,999: %+v", a, st)
		}
		must(t, s.Reset(t.Context(), large[0]))
	}
}

// lookNothingUp requires that takes are allowed and not held, and look no key up.
func lookNothingUp(t *testing.T, reqs []store.Request) {
	t.Helper()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	before := calls(t, server, "get")
	for i := range reqs {
		if st := store.Answers(t.Context(), s.Take, reqs[i:i+1])[0]; st.Err != nil || !st.Allowed || st.IsHeld || st.Held != 0 {
			t.Errorf("take %d: %+v", i, st)
		}
	}
	if n := calls(t, server, "get") - before; n != 0 {
		t.Errorf("%d keys were looked at", n)
	}
}

// TestNothingIsHeldWithoutAnAsk: other takes look nothing up, and get replies as before.
func TestNothingIsHeldWithoutAnAsk(t *testing.T) {
	reqs := holders(store.FixedWindow, 2)
	for i := range reqs {
		reqs[i].Hold = 0
	}
	lookNothingUp(t, reqs)
}

// TestTakesThatLeaveEnoughLookNothingUp, although they could be held.
func TestTakesThatLeaveEnoughLookNothingUp(t *testing.T) {
	lookNothingUp(t, holders(store.FixedWindow, 100)[:20])
}

// TestTakesCountWhatCannotBeHeld: the key is another program's, or a clock was wrong. Nothing is held then. The
// end of a hold fails, and is tried again, but no refund is, which would give back twice.
func TestTakesCountWhatCannotBeHeld(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := holders(store.FixedWindow, 3)
	held := ask.Held(s.asker.Keys.Key(reqs[0].Limit, "k"))
	must(t, server.Client().Set(t.Context(), held, "foreign", 0).Err())
	taken := store.Answers(t.Context(), s.Take, reqs[:1])[0]
	if taken.Err != nil || !taken.Allowed || taken.Used != 1 || taken.IsHeld || taken.Held != 0 {
		t.Errorf("beside foreign data: %+v", taken)
	}
	end, back := reqs[0], reqs[0]
	end.Cost, back.Receipt = 0, taken.Receipt
	if st := store.Answers(t.Context(), s.Refund, []store.Request{end})[0]; !errors.Is(st.Err, store.ErrNotExecuted) {
		t.Errorf("the end of what is held there: %+v", st)
	}
	if st := store.Answers(t.Context(), s.Refund, []store.Request{back})[0]; st.Err != nil || st.Used != 0 || st.Held != 0 {
		t.Errorf("a refund there: %+v", st)
	}
	must(t, server.Client().Del(t.Context(), held).Err())
	year := time.Now().AddDate(1, 0, 0).UnixMicro()
	must(t, server.Client().Set(t.Context(), held, wire.AppendPacked(nil, 99, 5, year, 98, -5, year/2), 0).Err())
	if st := store.Answers(t.Context(), s.Take, reqs[1:2])[0]; st.Err != nil || st.Held != 1 {
		t.Errorf("beside what cannot be: %+v", st)
	}
	if n := server.Client().StrLen(t.Context(), held).Val() / 24; n != 1 {
		t.Errorf("%d are left of what cannot be", n-1)
	}
}

// TestBundlesTellWhatIsHeld: each bucket has its own answer, whatever takes beside it ask.
func TestBundlesTellWhatIsHeld(t *testing.T) {
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), nil)
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.GCRA} {
		reqs := holders(a, 16)
		for i := range reqs {
			if reqs[i].ClientKey = fmt.Sprint("client", i); i%3 == 0 {
				reqs[i].Hold = 0
			}
			reqs[i].Cost = int64(1 + i%2)
		}
		states := store.Answers(t.Context(), s.Take, reqs)
		must(t, anyError(states))
		for i, st := range states {
			want := int32(reqs[i].Cost)
			if i%3 == 0 {
				want = 0
			}
			if st.Used != reqs[i].Cost || st.Held != want || st.IsHeld != (want > 0) {
				t.Errorf("%v: take %d of %d: %+v", a, i, reqs[i].Cost, st)
			}
		}
	}
}

// TestResetRemovesHoldsFirst: a take of the new bucket keeps its hold. Slots are not held.
func TestResetRemovesHoldsFirst(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	r := holders(store.FixedWindow, 1)[0]
	must(t, store.Answers(t.Context(), s.Take, []store.Request{r})[0].Err)
	must(t, server.Client().ConfigSet(t.Context(), "notify-keyspace-events", "Egx").Err())
	deleted := server.Client().Subscribe(t.Context(), "__keyevent@0__:del")
	defer deleted.Close()
	_, err := deleted.Receive(t.Context())
	must(t, err)
	before := calls(t, server, "del")
	must(t, s.Reset(t.Context(), r))
	key := s.asker.Keys.Key(r.Limit, "k")
	for _, want := range []string{ask.Held(key), key} {
		got, err := deleted.ReceiveMessage(t.Context())
		if must(t, err); got.Payload != want {
			t.Errorf("%q is deleted, want %q", got.Payload, want)
		}
	}
	if n, buckets := calls(t, server, "del")-before, int64(len(s.asker.Keys.Like(r.Limit, "k"))); n != 2*buckets-1 {
		t.Errorf("%d keys are deleted for %d buckets", n, buckets)
	}
}
