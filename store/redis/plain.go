package redis

import (
	"errors"
	"fmt"
	"strconv"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// A charge of a fixed window that the caller knows to be open calls no script: it is
// HINCRBY with HMGET of the window. The reply shows whether the bucket was what the
// caller thought; what it was not is repaired here.

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

// unopened reports whether a plain charge did not count in an open window, and what is
// left to charge by the script: nothing of an orphan, which it made if there was no
// bucket; all if the window was over, as on a promoted server with an old copy.
func (c *command) unopened(cost int64) (left int64, is bool) {
	reset := c.window.Val()[0]
	if reset == "" {
		return 0, true
	}
	// The state has shown that it is a number.
	end, _ := strconv.ParseInt(reset, 10, 64)
	return cost, end <= -c.ints[placeOfNow]
}

// mend charges by the script what a plain charge of r has left. In an orphan the charge
// counts already, so an error leaves its outcome unknown.
func (s *Store) mend(at owner, r *store.Request, left int64, place int, report func(i int, st store.State)) {
	again := *r
	again.Cost, again.Until = left, 0
	s.post(algorithm.Charge, at, whole([]store.Request{again}, nil), func(_ int, st store.State) {
		if st.Err != nil && left == 0 && !errors.Is(st.Err, store.ErrUncertain) {
			st.Err = fmt.Errorf("%w: give a bucket its window: %s", store.ErrUncertain, st.Err.Error())
		}
		s.report(report, algorithm.Charge, r, place, st)
	})
}
