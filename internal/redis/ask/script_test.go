package ask

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestCalendarWindowByTheServersClock opens windows by a clock that is ahead of the
// caller's, or behind it, around the days on which clocks are changed.
func TestCalendarWindowByTheServersClock(t *testing.T) {
	client := redistest.Start(t).Client()
	limit, fixedWindow := storetest.Days, layoutOf(store.FixedWindow)
	for _, day := range []string{"2026-03-28", "2026-03-29", "2026-10-24", "2026-10-25", "2026-12-31"} {
		midnight, err := time.Parse(time.DateOnly, day)
		redistest.Must(t, err)
		for hour := range 24 {
			now := midnight.Add(time.Duration(hour) * time.Hour).UnixMicro()
			for skew := -calendarMargin; skew <= calendarMargin; skew += calendarMargin / 2 {
				r := store.Request{Limit: &limit, Events: 10, Cost: 1}
				key := fmt.Sprint(day, hour, skew)
				op := Op{Operation: algorithm.Take, Now: now + skew.Microseconds()}
				var c wire.ScriptCall
				c.Begin(fixedWindow.script, words[op.Operation], false, key)
				c.Add(now)
				fixedWindow.arguments(&c, op, &r)
				c.Ready()
				pipe := client.Pipeline()
				fixedWindow.script.Load(t.Context(), pipe)
				c.AddTo(t.Context(), pipe)
				_, err := pipe.Exec(t.Context())
				redistest.Must(t, err)
				if st := op.replied(fixedWindow, &r, c.Numbers(), 0); st.Err != nil || st.Reset != limit.Calendar.End(now) {
					t.Errorf("%s, hour %d, caller's clock %v ahead: the window ends at %v, want %v", day, hour, skew,
						time.UnixMicro(st.Reset), time.UnixMicro(limit.Calendar.End(now)))
				}
			}
		}
	}
}

// TestChargeReadsTheClockNearTheReset: a charge with any instant that has passed counts
// in the window that is open by the server's clock, which it reads unless the window ends
// more than five seconds after that instant. A take does the same.
func TestChargeReadsTheClockNearTheReset(t *testing.T) {
	server := redistest.Start(t)
	shard := wire.NewShard(wire.Options{Primary: server.Addr(), DialTimeout: redistest.WaitTimeout}, nil)
	redistest.CloseAtEnd(t, shard)
	for _, op := range []algorithm.Operation{algorithm.Charge, algorithm.Take} {
		for i, c := range []struct {
			name          string
			reset, passed time.Duration
			want          int64
			reads         bool
		}{
			{"over", -time.Second, time.Second, 1, true},
			{"ended long ago, by an old instant", -2 * time.Second, 6 * time.Second, 1, true},
			{"at the margin, by an old instant, and over", -time.Second, 6 * time.Second, 1, true},
			{"open and near its end", 4 * time.Second, 0, 6, true},
			{"open, just outside the margin", 5*time.Second + time.Microsecond, 0, 6, false},
			{"in the second second of ten", 9 * time.Second, time.Millisecond, 6, false},
			{"open for long", time.Hour, time.Second, 6, false},
			{"of a clock that was ahead", 2 * time.Hour, 0, 1, true},
		} {
			key := fmt.Sprintf("clock:%v:%d", op, i)
			now, err := server.Client().Time(t.Context()).Result()
			redistest.Must(t, err)
			redistest.Must(t, server.Client().HSet(t.Context(), key, "c", 5, "r", now.Add(c.reset).UnixMicro()).Err())
			call := wire.NewCall(time.Now().Add(redistest.WaitTimeout), 0)
			spend := new(wire.ScriptCall)
			spend.Begin(layoutOf(store.FixedWindow).script, words[op], false, key)
			spend.Add(-now.Add(-c.passed).UnixMicro(), 10e6, 1, 10, 0, time.Hour.Microseconds(), 0, 0)
			spend.Ready()
			call.Cmds = append(call.Cmds, &spend.Command)
			_, err = shard.Owner(0).Checks.Do(t.Context(), call)
			redistest.Must(t, err)
			redistest.Must(t, spend.Outcome)
			reply := spend.Numbers()
			if reply[2] != c.want || (reply[0] != 0) != c.reads {
				t.Errorf("%v, %s: reply is %v, want count %d, and the clock read: %v", op, c.name, reply, c.want, c.reads)
			}
		}
	}
}
