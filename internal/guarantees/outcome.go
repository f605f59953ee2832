package main

import (
	"fmt"
	"time"
)

// outcome is what came of a cell.
type outcome struct {
	cell
	// lagged is the longest lag that was seen, arrived the longest that a charge
	// can have taken to arrive.
	lagged, arrived time.Duration

	sent, served, refused int64
	// failed are requests without an answer of the limiter.
	failed int64
	// beyond and room are what was seen, mayBeyond and mayRoom what may be.
	beyond, mayBeyond int64
	room, mayRoom     int64
	// windows is how many there were, resets how many one told at most.
	windows, resets int64
	// disturbed is how many requests of the second client were not admitted, of
	// how many.
	disturbed, others int64
}

// judge makes an outcome of responses.
func (c cell) judge(seen, others []response, peak int64, lagged, longest time.Duration) *outcome {
	o := &outcome{cell: c, lagged: lagged, arrived: arrival(longest), sent: int64(len(seen)), others: int64(len(others))}
	o.served, o.refused = count(seen, (*response).isAdmitted), count(seen, (*response).isRefused)
	o.failed = o.sent - o.served - o.refused
	o.beyond = c.limit.beyond(seen, peak)
	o.mayBeyond = c.limit.mayBeBeyond(c.caddys, unseen(seen, c.caddys, reach(o.arrived, lagged)))
	o.room = newClient(c.limit, seen, o.arrived).room()
	o.mayRoom = c.limit.mayBeRoom(c.caddys)
	if c.limit.hasReset() {
		o.windows, o.resets = wobble(seen, c.limit.window)
	}
	o.disturbed = o.others - count(others, (*response).isAdmitted)
	return o
}

// isStill tells whether the machine stood still for so long that timeouts passed,
// or that too little was sent.
func (o *outcome) isStill() bool { return o.failed > 0 || o.isIdle() }

// breaches are the bounds that were exceeded.
func (o *outcome) breaches() (all []string) {
	tell := func(format string, args ...any) { all = append(all, o.cell.String()+": "+fmt.Sprintf(format, args...)) }
	if o.beyond > o.mayBeyond {
		tell("%d beyond the limit, at most %d may be", o.beyond, o.mayBeyond)
	}
	if o.room > o.mayRoom {
		tell("refused although there was room for %d, at most %d may be", o.room, o.mayRoom)
	}
	if o.resets > 1 {
		tell("%d resets in one window", o.resets)
	}
	if o.disturbed > 0 {
		tell("%d of %d requests of the second client were not admitted", o.disturbed, o.others)
	}
	if o.failed > 0 {
		tell("%d of %d requests got no answer of the limiter", o.failed, o.sent)
	}
	if o.isIdle() {
		tell("the limit was not reached: %d sent, %d refused", o.sent, o.refused)
	}
	return all
}

// isIdle tells whether a client that should have reached its limit did not, so
// that nothing was tried.
func (o *outcome) isIdle() bool {
	return o.refused == 0 && (o.limit.algorithm != concurrency || int64(o.connections) > o.limit.events)
}

func (o *outcome) String() string {
	return fmt.Sprintf("%s: %d sent, %d served, %d of %d beyond, room for %d of %d, lag %v, arrival %v, %d windows",
		o.cell, o.sent, o.served, o.beyond, o.mayBeyond, o.room, o.mayRoom,
		o.lagged.Round(time.Millisecond), o.arrived, o.windows)
}
