package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// A charge or take of a fixed window that the caller knows to be open calls no script:
// it is HINCRBY with HMGET of the window. The reply shows whether the bucket was what
// the caller thought; what it was not is mended here.

// surelyBy returns the instant by which an operation that begins now has surely run, by
// the primary's clock, or 0 if that clock was not heard for a while.
func (s *Store) surelyBy(at *servers, began time.Time, timeout time.Duration) int64 {
	now, age := s.timeAt(at, began)
	if s.opts.NoPlainCharges || now == 0 || age > clockPeriod {
		return 0
	}
	return now + (timeout + replyTimeout).Microseconds()
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
	if c.window.Val()[0] == "" {
		return 0, true
	}
	window, _ := parseNumbers(c.window.Val())
	return cost, window[0] <= -c.ints[placeOfNow]
}

// mend charges by the script what a plain charge of r has left: nothing, which opens a
// window for the orphan that it has made, or all. In an orphan the charge counts already,
// so an error leaves its outcome unknown.
func (s *Store) mend(at owner, r *store.Request, left int64, place int, report func(i int, st store.State)) {
	again := *r
	again.Cost, again.Until = left, 0
	s.post(algorithm.Charge, at, whole([]store.Request{again}, nil), func(_ int, st store.State) {
		if st.Err != nil && left == 0 {
			st.Err = uncertainAfter("give a bucket its window", st.Err)
		}
		report(place, st)
	})
}

// uncertainAfter makes the error of a step after a spend that of a spend of unknown outcome.
func uncertainAfter(what string, err error) error {
	if errors.Is(err, store.ErrUncertain) {
		return err
	}
	return fmt.Errorf("%w: %s: %s", store.ErrUncertain, what, err.Error())
}

// take takes: by a plain charge where the caller knows an open window far from its
// limit, by the script otherwise. What a plain take has spent beyond the limit, or under
// a penalty that the caller did not know of, is given back, and the script decides.
func (s *Store) take(ctx context.Context, at *servers, g group, deadline time.Time) {
	op, began := s.writing(algorithm.Take, at), time.Now()
	op.surely = s.surelyBy(at, began, deadline.Sub(began))
	var orphans, over, left []int
	s.askAndSee(ctx, at.checks, g, deadline, op, func(i int, cmd *command) {
		r, st := &g.reqs[i], &g.states[i]
		if cmd.charge == nil || st.Err != nil {
			return
		}
		switch cost, is := cmd.unopened(r.Cost); {
		case is && cost == 0:
			orphans = append(orphans, i)
		case is:
			left = append(left, i)
		case st.Used > r.Capacity() || st.Content[2] != 0:
			over = append(over, i)
		}
	})
	if len(orphans)+len(over)+len(left) == 0 {
		return
	}
	// The cost of these is in Redis, whatever comes of it here.
	settled := context.WithoutCancel(ctx)
	s.redo(settled, at, g, orphans, deadline, algorithm.Charge, func(r *store.Request) { r.Cost = 0 })
	for _, i := range orphans {
		switch st := &g.states[i]; {
		case st.Err != nil:
			st.Err = uncertainAfter("give a bucket its window", st.Err)
		case st.Used > g.reqs[i].Capacity():
			over = append(over, i)
		default:
			st.Allowed, st.RetryAfter, st.Receipt = true, 0, store.Receipt{Period: st.Reset}
		}
	}
	s.redo(settled, at, g, over, deadline, algorithm.Refund, func(r *store.Request) {})
	for _, i := range over {
		if st := &g.states[i]; st.Err != nil {
			st.Err = uncertainAfter("give back what was taken beyond the limit", st.Err)
		} else {
			left = append(left, i)
		}
	}
	s.redo(ctx, at, g, left, deadline, algorithm.Take, func(*store.Request) {})
}

// redo runs another operation, by the script, on copies of some members of g, and sets
// their states. A refund gives back what the state has the receipt of.
func (s *Store) redo(ctx context.Context, at *servers, g group, members []int, deadline time.Time, op algorithm.Operation, change func(r *store.Request)) {
	if len(members) == 0 {
		return
	}
	again := group{reqs: slices.Clone(g.reqs), states: g.states, members: members}
	for _, i := range members {
		r := &again.reqs[i]
		r.Until, r.Receipt = 0, g.states[i].Receipt
		change(r)
	}
	s.ask(ctx, at.checks, again, deadline, s.writing(op, at))
}
