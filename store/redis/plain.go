package redis

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// A charge of a fixed window that the caller knows to be open calls no script: it is
// HINCRBY with HMGET of the window. The reply shows whether the bucket was what the
// caller thought; what it was not is mended here.

// surelyBy returns the instant by which a charge that is posted now has surely run, by
// the primary's clock, or 0 if that clock was not heard for a while.
func (s *Store) surelyBy(at *servers, posted time.Time) int64 {
	now, age := s.timeAt(at, posted)
	if s.opts.NoPlainCharges || now == 0 || age > clockPeriod {
		return 0
	}
	return now + (s.opts.ChargeTimeout + replyTimeout).Microseconds()
}

// charged is what the replies to a plain charge mean to r.
func (op operation) charged(l *layout, r *store.Request, cmd *command) store.State {
	window, err := parseNumbers(cmd.window.Val())
	switch {
	case cmd.window.Err() != nil:
		return store.State{Err: cmd.window.Err()}
	case err != nil || len(window) != 2:
		return store.State{Err: fmt.Errorf("%w: %q", errReply, cmd.window.Val())}
	}
	return l.state(r, -cmd.ints[placeOfNow], true, []int64{cmd.Cmder.(*goredis.IntCmd).Val(), window[0], window[1]})
}

// unopened reports whether a plain charge, which got a state, did not count in an open
// window, and what is left to charge by the script. If there was no bucket, it made an
// orphan, which has neither window nor expiry and counts in the window that opens next.
// If the window was over when the charge was sent, as on a server that was promoted with
// an old copy, the charge counted for nothing.
func (c *command) unopened(cost int64) (left int64, is bool) {
	reset := c.window.Val()[0]
	if reset == "" {
		return 0, true
	}
	// The state has shown that it is a number.
	end, _ := strconv.ParseInt(reset, 10, 64)
	return cost, end <= -c.ints[placeOfNow]
}

// mend charges by the script what a plain charge of r has left: nothing, which opens a
// window for the orphan that it has made, or all. In an orphan the charge counts already,
// so an error leaves its outcome unknown.
func (s *Store) mend(at owner, r *store.Request, left int64, place int, report func(i int, st store.State)) {
	again := *r
	again.Cost, again.Until = left, 0
	s.post(algorithm.Charge, at, whole([]store.Request{again}, nil), func(_ int, st store.State) {
		if st.Err != nil && left == 0 && !errors.Is(st.Err, store.ErrUncertain) {
			st.Err = fmt.Errorf("%w: give a bucket its window: %s", store.ErrUncertain, st.Err.Error())
		}
		report(place, st)
	})
}
