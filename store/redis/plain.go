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
	count := cmd.Cmder.(*goredis.IntCmd).Val()
	numbers, err := parseNumbers(append(cmd.numbers[:0], count), cmd.window.Val())
	switch {
	case cmd.window.Err() != nil:
		return store.State{Err: cmd.window.Err()}
	case err != nil:
		return store.State{Err: err}
	}
	return l.state(r, -cmd.ints[placeOfNow], true, numbers)
}

// missedWindow reports whether c is a plain charge that did not count in an open window, as
// far as its reply, st, shows, and what is left to charge by the script: nothing of an
// orphan, which it made if there was no bucket, or if the server has counted it and does
// not show the window; all if the window was over, as on a promoted server with an old
// copy, or is not believed.
func (c *command) missedWindow(cost int64, st *store.State) (left int64, is bool) {
	switch {
	case c.charge == nil || c.outcome != nil:
		return 0, false
	case st.Err != nil:
		return 0, c.hidesWindow()
	}
	reset := c.window.Val()[0]
	if reset == "" {
		return 0, true
	}
	// The state has shown that it is a number.
	end, _ := strconv.ParseInt(reset, 10, 64)
	now := -c.ints[placeOfNow]
	return cost, end <= now || !algorithm.Believes(end, now, c.charge.Limit.Window)
}

// hidesWindow reports whether the server refuses to show the window of a plain charge.
func (c *command) hidesWindow() bool { return says(c.window.Err(), lacking) }

// mend charges by the script what cmd, a plain charge of r, has left. In an orphan the
// charge counts already, so an error leaves its outcome unknown.
func (s *Store) mend(at owner, r *store.Request, cmd *command, left int64, report func(i int, st store.State)) {
	again := *r
	again.Cost, again.Until = left, 0
	place, hidden := cmd.place, cmd.hidesWindow()
	s.post(algorithm.Charge, at, whole([]store.Request{again}, nil), func(_ int, st store.State) {
		if st.Err != nil && left == 0 && !errors.Is(st.Err, store.ErrUncertain) {
			st.Err = fmt.Errorf("%w: give a bucket its window: %s", store.ErrUncertain, st.Err.Error())
		}
		if hidden && st.Err == nil {
			at.servers.charges.scripted.Store(true)
		}
		s.report(report, algorithm.Charge, r, place, st)
	})
}

// replacePlain makes the plain charges that the server has refused calls of the script,
// and returns them.
func replacePlain(cmds []*command) (instead []*command) {
	for _, c := range cmds {
		if c.charge != nil && says(c.outcome, lacking) {
			c.becomeScript()
			instead = append(instead, c)
		}
	}
	return instead
}
