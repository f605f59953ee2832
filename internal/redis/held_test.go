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
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
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
		var last store.State
		for i := range reqs {
			last = store.Answers(t.Context(), s.Take, reqs[i:i+1])[0]
			must(t, last.Err)
		}
		n, err := server.Client().StrLen(t.Context(), held).Result()
		must(t, err)
		if n /= 24; n != 100 || last.Held != 100 || last.IsHeld {
			t.Errorf("%v: %d are held, the last answer says %+v", a, n, last)
		}
		at, err := server.Client().PExpireTime(t.Context(), held).Result()
		must(t, err)
		if late := at.Microseconds() - last.Now - (10 * time.Minute).Microseconds(); late > 2e6 {
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

// TestNothingIsHeldWithoutAnAsk: other takes look nothing up, and get replies as before.
func TestNothingIsHeldWithoutAnAsk(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := holders(store.FixedWindow, 2)
	before := calls(t, server, "get")
	for i := range reqs {
		reqs[i].Hold = 0
		if st := store.Answers(t.Context(), s.Take, reqs[i:i+1])[0]; st.Err != nil || !st.Allowed || st.IsHeld || st.Held != 0 {
			t.Errorf("take %d: %+v", i, st)
		}
	}
	if n := calls(t, server, "get") - before; n != 0 {
		t.Errorf("%d keys were looked at", n)
	}
}

// TestTakesThatLeaveEnoughLookNothingUp, although they could be held.
func TestTakesThatLeaveEnoughLookNothingUp(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := holders(store.FixedWindow, 100)
	take := func(i int) store.State { return store.Answers(t.Context(), s.Take, reqs[i:i+1])[0] }
	before := calls(t, server, "get")
	for i := range 20 {
		if st := take(i); st.Err != nil || !st.Allowed || st.IsHeld {
			t.Errorf("take %d: %+v", i, st)
		}
	}
	if n := calls(t, server, "get") - before; n != 0 {
		t.Errorf("%d keys were looked at", n)
	}
}

// TestTakesCountWhatCannotBeHeld: the key is another program's, or a clock was wrong. What is held is unknown then. The
// end of a hold fails, and is tried again, but no refund is, which would give back twice.
func TestTakesCountWhatCannotBeHeld(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := holders(store.FixedWindow, 3)
	held := ask.Held(s.asker.Keys.Key(reqs[0].Limit, "k"))
	must(t, server.Client().Set(t.Context(), held, "foreign", 0).Err())
	taken := store.Answers(t.Context(), s.Take, reqs[:1])[0]
	if taken.Err != nil || !taken.Allowed || taken.Used != 1 || taken.IsHeld || taken.Held != algorithm.MostHeld {
		t.Errorf("beside foreign data: %+v", taken)
	}
	end, back := reqs[0], reqs[0]
	end.Cost, back.Receipt = 0, taken.Receipt
	if st := store.Answers(t.Context(), s.Refund, []store.Request{end})[0]; !errors.Is(st.Err, store.ErrNotExecuted) {
		t.Errorf("the end of what is held there: %+v", st)
	}
	if st := store.Answers(t.Context(), s.Refund, []store.Request{back})[0]; st.Err != nil || st.Used != 0 || st.Held != algorithm.MostHeld {
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
