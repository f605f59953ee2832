package limiter

import (
	"net/http"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// pace is how long requests of a zone commonly hold what they hold, and how many of them are
// charged in the end: moving figures of this process. Updates that coincide may get lost.
type pace struct {
	// took is the time in microseconds; 0 before the first request has ended. It rises with
	// a longer request by a quarter of the difference, and falls with a shorter one by a
	// 64th, so that about one in ten is longer. It falls once per fallsEvery at most: a flood
	// of short requests does not hide how long others take.
	took atomic.Int64
	// fell is when it fell last: see [Limiter.stamp].
	fell atomic.Uint32
	// uncharged is the share of requests that were not charged, in units of 1/paceUnits. It
	// moves by a 16th of the difference.
	uncharged atomic.Int64
}

const (
	paceUnits  = 1 << 20
	fallsEvery = 250 * time.Millisecond
)

// note notes a request that ended at a stamp and held something for so long. One that its client has cut short
// would have taken longer, and says nothing of charges.
func (p *pace) note(at uint32, took time.Duration, isCut, isCharged bool) {
	was, now := p.took.Load(), max(took.Microseconds(), 1)
	switch {
	case was == 0 && !isCut:
		p.took.Store(now)
	case now > was && was > 0:
		p.took.Store(was + (now-was+3)/4)
	case now < was && !isCut && at-p.fell.Load() >= uint32(fallsEvery.Milliseconds()):
		p.fell.Store(at)
		p.took.Store(was - (was-now)/64)
	}
	if isCut {
		return
	}
	share, target := p.uncharged.Load(), int64(paceUnits)
	if isCharged {
		target = 0
	}
	if was > 0 {
		target = share + (target-share)/16
	}
	if target != share {
		p.uncharged.Store(target)
	}
}

// commonly returns how long a request commonly takes, up to a window; 0 if no request has
// ended.
func (p *pace) commonly(window time.Duration) time.Duration {
	return min(time.Duration(p.took.Load())*time.Microsecond, window)
}

// untilKnown is how long a request is taken to last while all have ended by their clients' leaving.
const untilKnown = 10 * time.Second

// mayTake is commonly, or untilKnown if no request has ended.
func (p *pace) mayTake(window time.Duration) time.Duration {
	if took := p.commonly(window); took > 0 {
		return took
	}
	return min(untilKnown, window)
}

// areCharged reports whether most requests are charged: before the first has ended, whether
// those are that succeed.
func (z *boundZone) areCharged() bool {
	if z.pace.took.Load() == 0 {
		return !z.Free.Contains(http.StatusOK) && !z.Forgives.Contains(http.StatusOK)
	}
	return 2*z.pace.uncharged.Load() < paceUnits
}

var processBegan = time.Now()

// stamp returns the age of this process in milliseconds. It begins anew every 49 days, which
// differences do not show.
func (l *Limiter) stamp() uint32 {
	return uint32(l.Now().Sub(processBegan).Milliseconds()) //nolint:gosec // that is meant
}

// took returns how long ago the request was admitted.
func (t *tracker) took(l *Limiter) time.Duration {
	return time.Duration(l.stamp()-t.admitted) * time.Millisecond
}

// notePace notes how long the request has held something in some zones.
func (e *evaluation) notePace(t *tracker, isCut bool, some func(z *Zone) bool) {
	if t.admitted == 0 || !e.isAsked {
		// A store panicked, maybe when an inner handler entered it.
		return
	}
	took := time.Duration(-1)
	for _, z := range e.zones {
		if !some(z.Zone) || z.answer != hasRoom {
			continue
		}
		if took < 0 {
			took = t.took(e.limiter)
		}
		z.pace.note(t.admitted+uint32(took.Milliseconds()), took, isCut, z.ask.Cost > 0)
	}
}

// leastWait is the least wait for what is running.
const leastWait = time.Second

// estimateWait makes the zone, if only requests that run here are in the way there, say how long these
// commonly take. What they hold is then charged, if that is common, or free.
func (z *inZone) estimateWait() {
	st := &z.ask.State
	isHeld := st.InFlight && st.Held > 0
	if z.answer != hasNoRoom || z.role == blocks || st.RetryAfter == store.Never || z.ask.Events == 0 || isHeld {
		return
	}
	took := z.pace.commonly(z.limit.Window)
	switch {
	case z.isLease && st.InFlight:
		// Aborted requests are in the way, for a time that is known.
	case z.isLease:
		// One of the slots is free after its share of the time.
		st.RetryAfter = max(took/time.Duration(max(st.Limit, 1)), leastWait)
	case !st.InFlight:
	case z.areCharged():
		st.RetryAfter = max(chargedWait(st, &z.limit, took), leastWait)
	default:
		st.RetryAfter = max(took, leastWait)
	}
}

// chargedWait returns how long a request has to wait that does not fit once what is in flight
// is charged, after so long.
func chargedWait(st *store.State, limit *store.Limit, took time.Duration) time.Duration {
	wait := time.Duration(st.ResetOtherwise-st.Now) * time.Microsecond
	switch aging := algorithm.Of(limit.Algorithm).Aging; aging {
	case algorithm.AtWindowEnd:
		// It is charged to the window that ends then, or later.
		return max(wait, took)
	case algorithm.ByClock:
		if took == 0 {
			// No request has ended.
			took = leastWait
		}
		window := limit.Window.Microseconds()
		return wait + time.Duration((st.Now+took.Microseconds())/window-st.Now/window)*limit.Window
	case algorithm.Draining, algorithm.OneByOne:
		return wait + took
	default:
		panic(aging.Unknown())
	}
}
