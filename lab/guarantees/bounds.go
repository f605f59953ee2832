package guarantees

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The values of a zone's options.
const (
	fixedWindow   = "fixed_window"
	slidingWindow = "sliding_window"
	slidingLog    = "sliding_log"
	gcra          = "gcra"
	concurrency   = "concurrency"

	after  = "after"
	before = "before"
)

// limit is the limit of a zone.
type limit struct {
	algorithm, charge string
	batched           bool  // set if Caddys take events in advance
	events, burst     int64 // burst is set for gcra alone
	window            time.Duration
	takes             time.Duration // the backend's time for each request
}

const (
	// window is long enough that a client with one request at a time reaches its limit,
	// and so short that several windows go by.
	window     = 4 * time.Second
	batchShare = 10 // in percent
	trustShare = 10 // the part of a window, as its divisor, for which answers are relied on
)

func limits() (all []limit) {
	for _, name := range []string{fixedWindow, slidingWindow, slidingLog, gcra} {
		l := limit{algorithm: name, events: 100, window: window, takes: 10 * time.Millisecond}
		if name == gcra {
			l.burst = 25
		}
		for _, charge := range []string{after, before} {
			l.charge = charge
			all = append(all, l)
		}
		if name == fixedWindow || name == slidingWindow {
			l.batched = true
			all = append(all, l)
		}
	}
	return append(all, limit{algorithm: concurrency, charge: before, events: 8, window: window, takes: 50 * time.Millisecond})
}

func (l limit) zone() string {
	name := l.algorithm + "." + l.charge
	if l.batched {
		name += ".batch"
	}
	return name
}

// String is the name of the limit in the tables.
func (l limit) String() string {
	switch {
	case l.algorithm == concurrency:
		return l.algorithm
	case l.batched:
		return l.algorithm + ", " + l.charge + ", batch auto"
	default:
		return l.algorithm + ", " + l.charge
	}
}

func (l limit) caddyfile() string {
	text := fmt.Sprintf("zone %s {\nmatch {\npath /%s\n}\nkey {header.X-Client}\nevents %d\nwindow %s\nalgorithm %s\n",
		l.zone(), l.zone(), l.events, l.window, l.algorithm)
	if l.algorithm != concurrency {
		text += "charge " + l.charge + "\n"
	}
	if l.burst > 0 {
		text += fmt.Sprintf("burst %d\n", l.burst)
	}
	if l.batched {
		text += "batch auto\n"
	}
	return text + "}\n"
}

func (l limit) capacity() int64 { return cmp.Or(l.burst, l.events) }

// reach is how long an admitted request can stay unknown to other Caddys after its
// response: its charge has to arrive, and then to be replicated.
func reach(arrival, lag time.Duration) time.Duration { return arrival + lag }

// arrival bounds the time until a charge arrives. It waits for others to join it and for
// the previous one, as each bucket has one charge in flight at a time.
func arrival(longest time.Duration) time.Duration { return ledger.UsualChargeDelay + 2*longest }

// mayBeBeyond bounds the admissions of a client at once beyond its capacity. There are
// none if check and charge are one step, or if there is one Caddy. Otherwise they are the
// admissions of other Caddys that a Caddy cannot have seen: those unseen by a check or,
// without one, those unasked less the half of the limit that has to be left. Older answers
// add to that, and it is at most the limit for each of the other Caddys. The latter does
// not hold for gcra, whose bucket drains once, however many Caddys fill it.
func (l limit) mayBeBeyond(caddys int, unseen, unasked int64) int64 {
	if l.charge == before || caddys == 1 {
		return 0
	}
	most := unseen
	if l.isCopied() {
		most = max(unseen, unasked-(l.capacity()+1)/2) + l.onOlderAnswers(caddys)
	}
	if l.algorithm == gcra {
		return most
	}
	return min(most, int64(caddys-1)*l.events)
}

// isCopied reports whether a Caddy that has a client to itself admits it without a check.
func (l limit) isCopied() bool {
	a, _ := store.ParseAlgorithm(l.algorithm)
	return algorithm.Of(a).Copies()
}

// onOlderAnswers bounds the admissions on answers that are older than ledger_trust: one at
// each other Caddy. An answer is never relied on for longer than a part of the window.
func (l limit) onOlderAnswers(caddys int) int64 {
	if l.window/trustShare <= ledger.DefaultTrust {
		return 0
	}
	return int64(caddys - 1)
}

// unseen is the most requests admitted by the other Caddys that one Caddy cannot have
// known at some instant at which it may have admitted a request itself: those in flight,
// and those answered less than reach ago.
func unseen(seen []response, caddys int, reach time.Duration) (most int64) {
	type change struct {
		at          time.Time
		others, own int64
	}
	admitted := traffic.Those(seen, response.isAdmitted)
	for caddy := range caddys {
		var changes []change
		for _, r := range admitted {
			if r.caddy != caddy {
				changes = append(changes, change{r.begun, 1, 0}, change{r.ended.Add(reach), -1, 0})
			} else {
				changes = append(changes, change{r.begun, 0, 1}, change{r.ended, 0, -1})
			}
		}
		slices.SortFunc(changes, func(a, b change) int {
			return cmp.Or(a.at.Compare(b.at), int(b.others+b.own-a.others-a.own))
		})
		others, own := int64(0), int64(0)
		for _, c := range changes {
			others, own = others+c.others, own+c.own
			if own > 0 {
				most = max(most, others)
			}
		}
	}
	return most
}

// unasked is the most requests admitted by the other Caddys that one Caddy cannot have
// known when it admitted a request without a check: those that may have been charged after
// its own last charge, the reply to which it relies on for ledger_trust.
func unasked(seen []response, caddys int, arrival time.Duration) (most int64) {
	admitted := byEnd(traffic.Those(seen, response.isAdmitted))
	for caddy := range caddys {
		isOwn := func(r response) bool { return r.caddy == caddy }
		own := traffic.Those(admitted, isOwn)
		others := traffic.Those(admitted, func(r response) bool { return !isOwn(r) })
		for i, r := range own {
			// The answer was asked for since then.
			since, relies := r.begun.Add(-ledger.DefaultTrust), false
			for _, earlier := range own[:i] {
				charged := earlier.ended.Add(arrival)
				relies = relies || !charged.Before(r.begun.Add(-ledger.DefaultTrust))
				if !charged.After(r.begun) && earlier.begun.After(since) {
					since = earlier.begun
				}
			}
			if relies {
				most = max(most, count(others, func(o *response) bool {
					return !o.begun.After(r.ended) && !o.ended.Add(arrival).Before(since)
				}))
			}
		}
	}
	return most
}

// mayBeRoom bounds the room when a request is refused: the batches that the Caddys hold,
// which are 10 percent of the limit together or one event each. In a sliding window the
// batches of the previous window count as well.
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

// beyond is how much more than the limit was certainly admitted at once: the highest excess
// of the bucket over its capacity at any instant. Each admitted request counts at the one
// of its two instants that lowers the result. For concurrency the peak at the backend
// counts.
func (l limit) beyond(seen []response, peak int64) int64 {
	admitted := byEnd(traffic.Those(seen, response.isAdmitted))
	most := int64(0)
	switch l.algorithm {
	case fixedWindow:
		most = l.mostOfWindow(admitted)
	case slidingWindow:
		most = l.mostEstimated(admitted)
	case slidingLog:
		most = l.mostLogged(admitted)
	case gcra:
		most = l.mostUndrained(admitted)
	case concurrency:
		most = peak
	}
	return max(most-l.capacity(), 0)
}

// mostOfWindow is the most that was admitted in one window, that is, with one reset.
func (l limit) mostOfWindow(admitted []response) (most int64) {
	of := map[int64]int64{}
	for _, r := range admitted {
		of[r.reset]++
		most = max(most, of[r.reset])
	}
	return most
}

func (l limit) mostLogged(admitted []response) (most int64) {
	for i := range admitted {
		from := admitted[i].begun
		most = max(most, count(admitted, func(r *response) bool {
			return !r.begun.Before(from) && r.ended.Before(from.Add(l.window))
		}))
	}
	return most
}

func (l limit) mostUndrained(admitted []response) (most int64) {
	for i := range admitted {
		from, n := admitted[i].begun, int64(0)
		for j := range admitted {
			if !admitted[j].begun.Before(from) {
				n++
				most = max(most, n-int64(l.drained(admitted[j].ended.Sub(from))))
			}
		}
	}
	return most
}

// drained is how much drains from a gcra bucket that does not become empty.
func (l limit) drained(d time.Duration) float64 {
	return max(d.Seconds(), 0) / l.window.Seconds() * float64(l.events)
}

// mostEstimated is the highest estimate of a sliding window: the requests admitted in a
// window of the clock, and the share of the previous window that overlaps when the last
// of them is admitted.
func (l limit) mostEstimated(admitted []response) (most int64) {
	for i := range admitted {
		until := admitted[i].ended
		start, earlier := l.windowOf(until), int64(0)
		now := count(admitted, func(r *response) bool { return !r.begun.Before(start) && !r.ended.After(until) })
		if now > 0 {
			earlier = count(admitted, func(r *response) bool {
				return !r.begun.Before(start.Add(-l.window)) && r.ended.Before(start)
			})
		}
		most = max(most, now+int64(l.overlap(until)*float64(earlier)))
	}
	return most
}

func (l limit) windowOf(t time.Time) time.Time {
	micros := t.UnixMicro()
	return time.UnixMicro(micros - micros%l.window.Microseconds())
}

func (l limit) overlap(t time.Time) float64 {
	return 1 - t.Sub(l.windowOf(t)).Seconds()/l.window.Seconds()
}

// client is all responses to one client, prepared for judging refusals.
type client struct {
	limit limit
	// arrival is how long after its response a request may begin to count or, for
	// concurrency, may still count.
	arrival        time.Duration
	seen, admitted []response
	opened         map[int64]time.Time // the begin of the first request, by reset
}

func newClient(l limit, seen []response, arrival time.Duration) *client {
	c := &client{limit: l, arrival: arrival, seen: seen, opened: map[int64]time.Time{}}
	c.admitted = byEnd(traffic.Those(seen, response.isAdmitted))
	for _, r := range seen {
		if first, ok := c.opened[r.reset]; !ok || r.begun.Before(first) {
			c.opened[r.reset] = r.begun
		}
	}
	return c
}

func (c *client) late(r *response) time.Time { return r.ended.Add(c.arrival) }

// room is the most room at a refusal, even if all requests counted then that may have.
func (c *client) room() (most int64) {
	for i := range c.seen {
		if r := &c.seen[i]; r.isRefused() {
			most = max(most, c.limit.capacity()-c.spent(r))
		}
	}
	return most
}

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

// spentInWindow counts the admissions in the window of a refusal, or in the one before the
// window that it waits for.
func (c *client) spentInWindow(refused *response) int64 {
	spent := c.spentUntil(refused, refused.reset)
	if reset := c.limit.waitsBeyond(refused, c.admitted, c.arrival); reset > 0 {
		spent = max(spent, c.spentUntil(refused, reset))
	}
	return spent
}

// spentUntil counts the admissions in the window with a reset, and those of an earlier window
// that may have been charged so late that they count in this one.
func (c *client) spentUntil(refused *response, reset int64) int64 {
	return count(c.admitted, func(r *response) bool {
		if r.reset == reset {
			return !r.begun.After(refused.ended)
		}
		return c.limit.charge == after && r.reset < reset && !c.late(r).Before(c.opened[reset])
	})
}

// waitsBeyond returns the reset of the window in which a request was refused, if the refusal
// names another time, or else 0. If only holds are in the way of a request that is charged before, the refusal names
// a second. Where charges in flight will count after the reset, a Caddy makes
// the client wait for about the end of the window that they will open or, if the request fits but
// for them, until they have arrived.
func (l limit) waitsBeyond(refused *response, admitted []response, arrival time.Duration) int64 {
	// A charge takes that long, and the next one as long again. A Caddy that has had no reply yet
	// takes it for a second.
	latest := refused.ended.Add(l.window + 2*max(arrival, time.Second) + time.Second)
	if time.Unix(refused.reset, 0).After(latest) {
		return 0
	}
	// A refusal waits at least a second, and the instant that it names is rounded up to one.
	isSoon := !time.Unix(refused.reset-1, 0).After(refused.ended.Add(max(arrival, time.Second)))
	for i := range admitted {
		r := &admitted[i]
		if l.charge != after {
			if isSoon && refused.reset < r.reset && !r.begun.After(refused.ended) && refused.begun.Before(time.Unix(r.reset, 0)) {
				return r.reset
			}
			continue
		}
		end, isLate := time.Unix(r.reset, 0), !r.begun.After(refused.ended) && !r.ended.Add(arrival).Before(time.Unix(r.reset, 0))
		isNext := time.Duration(refused.reset-r.reset)*time.Second >= l.window
		if isLate && refused.begun.Before(end) && (isNext || isSoon && refused.reset > r.reset) {
			return r.reset
		}
	}
	return 0
}

func (c *client) stillThere(refused *response, lasts time.Duration) int64 {
	return count(c.admitted, func(r *response) bool {
		return !r.begun.After(refused.ended) && !c.late(r).Add(lasts).Before(refused.begun)
	})
}

// estimated is the highest possible estimate of a sliding window for a refusal at an
// instant. A request at the end of a window may count in either.
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

// undrained is the most that a gcra bucket can have held, rounded up: for each instant,
// the requests since then less the drain since then.
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

// hasReset reports whether the responses of a window must name the same reset: the end of
// the window or, for a sliding window, of the next. Refusals of a sliding window name when the
// request fits.
func (l limit) hasReset() bool { return l.algorithm == fixedWindow || l.algorithm == slidingWindow }

// wobble returns how many windows the responses span, and the most resets that those of
// one window name. Resets that are less than a window apart are of one window.
func (l limit) wobble(seen []response, arrival time.Duration) (windows, most int64) {
	resets, admitted := map[int64]bool{}, traffic.Those(seen, response.isAdmitted)
	for _, r := range seen {
		if r.isAdmitted() || r.isRefused() && l.algorithm == fixedWindow && l.waitsBeyond(&r, admitted, arrival) == 0 {
			resets[r.reset] = true
		}
	}
	first, n := int64(0), int64(0)
	for i, reset := range slices.Sorted(maps.Keys(resets)) {
		if i == 0 || time.Duration(reset-first)*time.Second >= l.window {
			windows++
			first, n = reset, 0
		}
		n++
		most = max(most, n)
	}
	return windows, most
}
