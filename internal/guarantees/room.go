package main

import (
	"math"
	"slices"
	"time"
)

// client is all that one client was told, with what it takes to judge refusals.
type client struct {
	limit limit
	// arrival is how long after its response a request may begin to count, or,
	// if it only counts while it runs, may still do.
	arrival time.Duration

	seen     []response
	admitted []response
	// opened is when the first request with a reset began.
	opened map[int64]time.Time
}

func newClient(l limit, seen []response, arrival time.Duration) *client {
	c := &client{limit: l, arrival: arrival, seen: seen, opened: map[int64]time.Time{}}
	c.admitted = byEnd(those(seen, (*response).isAdmitted))
	for _, r := range seen {
		if first, ok := c.opened[r.reset]; !ok || r.begun.Before(first) {
			c.opened[r.reset] = r.begun
		}
	}
	return c
}

// late is the last instant at which a request can have been charged.
func (c *client) late(r *response) time.Time { return r.ended.Add(c.arrival) }

// room is the most that there was room for when a request was refused, even if
// all that may have counted then did.
func (c *client) room() (most int64) {
	for i := range c.seen {
		if r := &c.seen[i]; r.isRefused() {
			most = max(most, c.limit.capacity()-c.spent(r))
		}
	}
	return most
}

// spent is the most that can have been spent when a request was refused.
func (c *client) spent(refused *response) int64 {
	switch c.limit.algorithm {
	case fixedWindow:
		return c.spentInWindow(refused)
	case slidingWindow:
		return max(c.estimated(refused, refused.begun.Add(-c.arrival)), c.estimated(refused, refused.ended))
	case slidingLog:
		return c.stillThere(refused, c.limit.window)
	case gcra:
		return c.undrained(refused)
	default:
		return c.stillThere(refused, 0)
	}
}

// spentInWindow counts what was admitted in the window of a refusal, and requests
// of an earlier one that were charged so late that they count in this one.
func (c *client) spentInWindow(refused *response) int64 {
	return count(c.admitted, func(r *response) bool {
		if r.reset == refused.reset {
			return !r.begun.After(refused.ended)
		}
		return c.limit.charge == after && r.reset < refused.reset && !c.late(r).Before(c.opened[refused.reset])
	})
}

// stillThere counts what is there for some time.
func (c *client) stillThere(refused *response, lasts time.Duration) int64 {
	return count(c.admitted, func(r *response) bool {
		return !r.begun.After(refused.ended) && !c.late(r).Add(lasts).Before(refused.begun)
	})
}

// estimated is the most that a sliding window can have added up, if the refusal
// was at an instant. A request at the end of a window may count in either.
func (c *client) estimated(refused *response, at time.Time) int64 {
	start := c.limit.windowOf(at)
	now, earlier := int64(0), int64(0)
	for i := range c.admitted {
		r := &c.admitted[i]
		if r.begun.After(refused.ended) {
			continue
		}
		if !c.late(r).Before(start) {
			now++
		}
		if !c.late(r).Before(start.Add(-c.limit.window)) && r.begun.Before(start.Add(c.arrival)) {
			earlier++
		}
	}
	return now + int64(math.Ceil(c.limit.overlap(at)*float64(earlier)))
}

// undrained is the most that a gcra bucket can have held, rounded up: for each
// instant, what came since less what drains in that time.
func (c *client) undrained(refused *response) int64 {
	most, n := 0.0, 0.0
	for _, r := range slices.Backward(c.admitted) {
		if r.begun.After(refused.ended) {
			continue
		}
		n++
		most = max(most, n-c.limit.drained(refused.begun.Sub(c.late(&r))))
	}
	return int64(math.Ceil(most))
}
