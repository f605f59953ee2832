package redis

import (
	"fmt"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
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

// TestHeldIsBounded in time and number: the set expires after what is held, and takes beyond a thousand are not held.
func TestHeldIsBounded(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA} {
		reqs := holders(a, 5000)
		held := ask.Held(s.asker.Keys.Key(reqs[0].Limit, "k"))
		var last store.State
		for i := range reqs {
			last = store.Answers(t.Context(), s.Take, reqs[i:i+1])[0]
			must(t, last.Err)
		}
		n, err := server.Client().ZCard(t.Context(), held).Result()
		must(t, err)
		if n != 1000 || last.Held != 1000 || last.IsHeld {
			t.Errorf("%v: %d are held, the last answer says %+v", a, n, last)
		}
		at, err := server.Client().PExpireTime(t.Context(), held).Result()
		must(t, err)
		if late := at.Microseconds() - last.Now - reqs[0].Limit.Window.Microseconds(); late > 2e6 {
			t.Errorf("%v: the set expires %d µs after the window", a, late)
		}
		must(t, s.Reset(t.Context(), reqs[0]))
		if n := server.Client().Exists(t.Context(), held).Val(); n != 0 {
			t.Errorf("%v: a reset leaves what was held", a)
		}
	}
}

// TestNothingIsHeldWithoutAnAsk: other takes make no set, and get replies as before.
func TestNothingIsHeldWithoutAnAsk(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := holders(store.FixedWindow, 2)
	before := calls(t, server, "zcard")
	for i := range reqs {
		reqs[i].Hold = 0
		if st := store.Answers(t.Context(), s.Take, reqs[i:i+1])[0]; st.Err != nil || !st.Allowed || st.IsHeld || st.Held != 0 {
			t.Errorf("take %d: %+v", i, st)
		}
	}
	if n := calls(t, server, "zcard") - before; n != 0 {
		t.Errorf("%d sets were looked at", n)
	}
}

// TestTakesCountWhatCannotBeHeld: the set is another program's, or its clock was wrong.
func TestTakesCountWhatCannotBeHeld(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	reqs := holders(store.FixedWindow, 3)
	held := ask.Held(s.asker.Keys.Key(reqs[0].Limit, "k"))
	must(t, server.Client().Set(t.Context(), held, "foreign", 0).Err())
	if st := store.Answers(t.Context(), s.Take, reqs[:1])[0]; st.Err != nil || !st.Allowed || st.Used != 1 || st.Held != 0 {
		t.Errorf("beside foreign data: %+v", st)
	}
	must(t, server.Client().Del(t.Context(), held).Err())
	must(t, server.Client().ZAdd(t.Context(), held, goredis.Z{Score: float64(time.Now().AddDate(1, 0, 0).UnixMicro()), Member: "99"}).Err())
	if st := store.Answers(t.Context(), s.Take, reqs[1:2])[0]; st.Err != nil || st.Held != 1 {
		t.Errorf("beside what cannot be: %+v", st)
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
