package redis

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// far is by how much a clock is wrong.
const far = 30 * 24 * time.Hour

// TestBucketOfTheFutureIsRepaired by whatever asks for it first once the primary's clock is
// right again: nobody is refused for as long as the clock was ahead, nor is anything read at
// a replica believed.
func TestBucketOfTheFutureIsRepaired(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	ahead := newStore(t, shardOf(t, sh), func(o *Options) {
		o.clock = func() time.Time { return time.Now().Add(far) }
	})
	right := newStore(t, shardOf(t, sh), nil)
	for n, limit := range append([]store.Limit{storetest.Days}, storetest.Limits...) {
		limit.Zone = fmt.Sprint("repaired", n)
		if limit.Calendar.Unit == "" {
			limit.Window = 10 * time.Hour
		}
		for _, op := range []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take, algorithm.Peek} {
			r := store.Request{Limit: &limit, ClientKey: op.String(), Events: 10, Cost: 10, ID: "first"}
			must(t, store.Answers(t.Context(), ahead.Charge, []store.Request{r})[0].Err)
			if algorithm.Of(limit.Algorithm).Penalties {
				penalty := r
				penalty.Until = time.Now().Add(far + time.Minute).UnixMicro()
				must(t, store.Answers(t.Context(), ahead.Penalize, []store.Request{penalty})[0].Err)
			}
			must(t, sh.WaitReplicated(t.Context()))
			r.Cost, r.ID = 1, "second"
			reqs, want := []store.Request{r}, int64(1)
			var st store.State
			switch op {
			case algorithm.Charge:
				// It was open by the clock that was ahead, so it may be plain.
				reqs[0].Until = time.Now().Add(far).UnixMicro()
				st = reported(t, right, reqs...)[0]
			case algorithm.Take:
				st = store.Answers(t.Context(), right.Take, reqs)[0]
			case algorithm.Check:
				st, want = store.Answers(t.Context(), right.Check, reqs)[0], 0
			default:
				st, want = store.Answers(t.Context(), right.Peek, reqs)[0], 0
			}
			latest := time.Now().Add(2*limit.Window + algorithm.Grace).UnixMicro()
			if st.Err != nil || !st.Allowed || st.Used != want || st.Penalty != 0 || st.Reset > latest {
				t.Errorf("%s of %v: %+v", op, limit, st)
			}
		}
	}
}

// shiftedClock is a filter in front of a server that answers takes of fixed windows by a
// clock that is wrong.
type shiftedClock struct {
	*redistest.Filter
	// takes is by how much the clock is ahead in replies to takes, asked in those to TIME,
	// in microseconds.
	takes, asked atomic.Int64
}

func startShiftedClock(t *testing.T, server *redistest.Server) *shiftedClock {
	c := new(shiftedClock)
	c.Filter = redistest.StartFilter(t, server.Addr(), func(command []string) string {
		switch now := time.Now().UnixMicro(); {
		case command[0] == "time":
			now += c.asked.Load()
			seconds, micros := fmt.Sprint(now/1e6), fmt.Sprint(now%1e6)
			return fmt.Sprintf("*2\r\n$%d\r\n%s\r\n$%d\r\n%s", len(seconds), seconds, len(micros), micros)
		case command[0] == "evalsha" && command[4] == algorithm.Take.String():
			now += c.takes.Load()
			reply := wire.AppendPacked(nil, now, 1, 1, now+time.Hour.Microseconds(), 0, 0)
			return fmt.Sprintf("$%d\r\n%s", len(reply), reply)
		}
		return ""
	})
	return c
}

// TestFalseTimeIsNotBelieved: a reply with a damaged time is an error of unknown outcome, and
// changes no estimate. A clock that was set is believed at once, reported, and in the figures.
func TestFalseTimeIsNotBelieved(t *testing.T) {
	clock := startShiftedClock(t, redistest.Start(t))
	shard := newShard(t, ShardOptions{Primary: clock.Addr()})
	jumps := make(chan wire.Event, 10)
	shard.Listen(func(e wire.Event) {
		if e.Kind == wire.ClockJumped {
			jumps <- e
		}
	})
	s := newStore(t, shard, nil)
	began := time.Now()
	// late is how old an estimate may be at most.
	late := func() time.Duration { return algorithm.Grace + time.Since(began) }
	take := func(want error) {
		t.Helper()
		st := store.Answers(t.Context(), s.Take, oneOf("k"))[0]
		ahead := time.Duration(clock.takes.Load()) * time.Microsecond
		if !errors.Is(st.Err, want) || st.Err == nil && time.UnixMicro(st.Now).Sub(time.Now().Add(ahead)).Abs() > late() {
			t.Fatalf("a take %v ahead: %+v, want the error %v", ahead, st, want)
		}
		if now, _, _ := shard.Owner(0).Clock.Estimate(time.Now()); want != nil && time.Until(time.UnixMicro(now)).Abs() > late() {
			t.Fatalf("the estimate is %v", time.UnixMicro(now))
		}
	}
	take(nil)
	for _, wrong := range []time.Duration{far, -far, 70 * 365 * 24 * time.Hour, time.Minute} {
		clock.takes.Store(wrong.Microseconds())
		take(store.ErrUncertain)
		take(store.ErrUncertain)
		clock.takes.Store(0)
		take(nil)
	}
	if jump := s.Shards()[0].Servers[0].Jump; jump != 0 || len(jumps) > 0 {
		t.Errorf("damaged replies are a jump by %v, %d events", jump, len(jumps))
	}
	for _, set := range []time.Duration{far, 0} {
		clock.takes.Store(set.Microseconds())
		clock.asked.Store(set.Microseconds())
		take(nil)
		select {
		case e := <-jumps:
			if e.Addr != clock.Addr() || e.Err == nil {
				t.Errorf("event %+v", e)
			}
		case <-time.After(waitTimeout):
			t.Fatal("no event")
		}
		want := far
		if set == 0 {
			want = -far
		}
		if jump := s.Shards()[0].Servers[0].Jump; (jump - want).Abs() > late() {
			t.Errorf("the figures have a jump by %v, want %v", jump, want)
		}
	}
}
