package algorithm

import (
	"math"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Held is what takes hold of one bucket until they settle, beside its content. The script held.lua does the same.
type Held struct{ takes []hold }

// hold is what a take holds until an instant.
type hold struct {
	number     uint32
	cost, last int64
}

const (
	// mostHolds is how many takes hold something of a bucket at most; those beyond are not held.
	mostHolds = 100
	// MostHeld stands for anything that may come back: sums stop there.
	MostHeld = store.MaxMembers
	// HeldRetry is the time to wait for what is held: when it comes back is unknown.
	HeldRetry = time.Second
	// mostHeldFor is how long something is held at most, so that what nobody ends does not last.
	mostHeldFor = 10 * time.Minute
)

// Hears reports whether the answer to op says what is held.
func (op Operation) Hears(r *store.Request) bool {
	switch op {
	case Check, Peek, Take, Refund:
		return r.Hold != 0
	case Charge, Penalize:
	}
	return false
}

// LeavesEnough reports whether st, which answers a take of r, leaves so much that the take is not held, and is not told
// what is.
func LeavesEnough(r *store.Request, st *store.State) bool {
	return st.Allowed && r.Cost > 0 && leaves(r, st) >= r.LeastUnheld()
}

// After takes in op on the bucket of r, which has answered st, and makes st show what is held. It returns h, or what
// begins to hold something if h is nil, or nil if it holds nothing any more.
func (h *Held) After(op Operation, r *store.Request, st *store.State) *Held {
	if !op.Hears(r) || op == Take && LeavesEnough(r, st) {
		return h
	}
	writes, holds := op == Take || op == Refund, op == Take && st.Allowed && r.Cost > 0 && r.MayHold()
	if h == nil {
		if !holds {
			return nil
		}
		h = new(Held)
	}
	latest := st.Now + (mostHeldFor + Grace).Microseconds()
	live := slices.DeleteFunc(slices.Clone(h.takes), func(t hold) bool {
		// An earlier try may have taken it, and failed.
		isOwn := writes && t.number == r.Hold
		return isOwn || t.last <= st.Now || t.last > latest
	})
	if st.IsHeld = holds && len(live) < mostHolds; st.IsHeld {
		live = append(live, hold{r.Hold, spentBy(r), endOfHold(r, st)})
	}
	sum := int64(0)
	for _, t := range live {
		sum += t.cost
	}
	ShowHeld(st, r, min(sum, MostHeld))
	switch {
	case !writes:
		return h
	case len(live) == 0:
		return nil
	}
	h.takes = live
	return h
}

// Expiry is from when nothing is held, in microseconds since the epoch; 0 if h is nil.
func (h *Held) Expiry() (last int64) {
	if h != nil {
		for _, t := range h.takes {
			last = max(last, t.last)
		}
	}
	return last
}

// leaves is what an allowed take has left of its capacity, as its script has it.
func leaves(r *store.Request, st *store.State) int64 {
	if Of(r.Limit.Algorithm).Drains() {
		return r.Capacity() - int64(math.Ceil(gcraOf(st.Content).count(st.Now)*(1-exactness)))
	}
	return r.Capacity() - st.Used
}

// endOfHold is when an allowed take is held no more, whatever becomes of it.
func endOfHold(r *store.Request, st *store.State) int64 {
	end := st.Now + r.Limit.Window.Microseconds()
	if Of(r.Limit.Algorithm).Windowed() {
		end = st.Reset
	}
	return min(end, st.Now+mostHeldFor.Microseconds())
}

// ShowHeld makes st show what is held, and a refusal of r say so that would be none without it. It reports whether it is
// such a refusal.
func ShowHeld(st *store.State, r *store.Request, held int64) bool {
	st.Held = int32(held) //nolint:gosec // at most MostHeld
	isInTheWay := held >= MostHeld || fitsIn(r, st.Used-held)
	if held == 0 || st.Allowed || st.Penalty != 0 || st.RetryAfter == store.Never || !isInTheWay {
		return false
	}
	st.ResetOtherwise = st.Now + st.RetryAfter.Microseconds()
	st.InFlight, st.RetryAfter = true, min(st.RetryAfter, HeldRetry)
	return true
}
