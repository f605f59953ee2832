package main

import (
	"slices"
	"time"
)

// reach is how long what a Caddy has admitted can stay unknown to others after its
// response: the charge has to arrive, and then to be replicated.
func reach(arrival, lag time.Duration) time.Duration { return arrival + lag }

// arrival is how long a charge takes to arrive at most: one is on its way for
// each bucket at a time, so it waits for the one before, and each takes no longer
// than the longest.
func arrival(longest time.Duration) time.Duration { return 2 * longest }

// mayBeBeyond is how much more than its capacity clients can have been admitted
// at once: nothing where the check and the charge are one step, or one Caddy
// knows it all; otherwise what a Caddy cannot have seen of the others when it
// admits, and never more than the limit for each of them. A gcra bucket that
// several Caddys fill drains but once, so that has no such end.
func (l limit) mayBeBeyond(caddys int, unseen int64) int64 {
	switch {
	case l.charge == before || caddys == 1:
		return 0
	case l.algorithm == gcra:
		return unseen
	default:
		return min(unseen, int64(caddys-1)*l.events)
	}
}

// unseen is the most that one Caddy cannot have known of at some instant, of what
// the others had admitted: their requests in flight, and those answered less than
// reach ago, which is their rate times reach.
func unseen(seen []response, caddys int, reach time.Duration) (most int64) {
	type change struct {
		at   time.Time
		more int64
	}
	admitted := those(seen, (*response).isAdmitted)
	for caddy := range caddys {
		var changes []change
		for _, r := range admitted {
			if r.caddy != caddy {
				changes = append(changes, change{r.begun, 1}, change{r.ended.Add(reach), -1})
			}
		}
		slices.SortFunc(changes, func(a, b change) int {
			if c := a.at.Compare(b.at); c != 0 {
				return c
			}
			return int(b.more - a.more)
		})
		n := int64(0)
		for _, c := range changes {
			n += c.more
			most = max(most, n)
		}
	}
	return most
}

// mayBeRoom is how much room there can be for a request that is refused: what
// Caddys hold of a batch each, which is batch_share of the limit together or one
// event each. Of a sliding window what they held in the window before counts on.
func (l limit) mayBeRoom(caddys int) int64 {
	if !l.batched {
		return 0
	}
	held := max(l.events*batchShare/100, int64(caddys))
	if l.algorithm == slidingWindow {
		held *= 2
	}
	return held
}
