package algorithm

import (
	"math"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Held is what takes hold of one bucket until they settle, beside its content. The script held.lua does the same.
type Held struct{ takes members }

// mostHolds is how many takes hold something of a bucket at most; those beyond are not held.
const mostHolds = 1000

// MostHeld stands for anything that may come back: sums stop there.
const MostHeld = store.MaxMembers

// HeldRetry is the time to wait for what is held: when it comes back is unknown.
const HeldRetry = time.Second

// Hears reports whether the answer to op says what is held.
func (op Operation) Hears(r *store.Request) bool {
	switch op {
	case Check, Peek, Take, Refund:
		return r.Hold != 0
	case Charge, Penalize:
	}
	return false
}

// After takes in op on the bucket of r, which has answered st, and makes st show what is held. It returns h, or what
// begins to hold something if h is nil.
func (h *Held) After(op Operation, r *store.Request, st *store.State) *Held {
	if !op.Hears(r) {
		return h
	}
	switch {
	case op == Refund:
		h.end(r.Hold)
	case op == Take && r.MayHold():
		// It may have been taken before, by a try that failed.
		h.end(r.Hold)
		if st.Allowed && r.Cost > 0 && leaves(r, st) < r.LeastUnheld() && (h == nil || len(h.takes) < mostHolds) {
			if h == nil {
				h = new(Held)
			}
			h.takes.put(endOfHold(r, st), holder(r.Hold), spentBy(r))
			st.IsHeld = true
		}
	}
	if h != nil {
		h.takes.believe(st.Now, r.Limit.Window)
		ShowHeld(st, r, min(h.takes.after(st.Now).since(0), MostHeld))
	}
	return h
}

func (h *Held) end(number uint32) {
	if h != nil && number > store.HearsHeld {
		h.takes.remove(holder(number), math.MaxInt64)
	}
}

func holder(number uint32) string { return strconv.FormatUint(uint64(number), 10) }

// leaves is what an allowed take has left of its capacity, as its script has it.
func leaves(r *store.Request, st *store.State) int64 {
	if Of(r.Limit.Algorithm).Drains() {
		return r.Capacity() - int64(math.Ceil(gcraOf(st.Content).count(st.Now)*(1-exactness)))
	}
	return r.Capacity() - st.Used
}

// endOfHold is when what an allowed take has spent counts no more.
func endOfHold(r *store.Request, st *store.State) int64 {
	end := st.Now + r.Limit.Window.Microseconds()
	if Of(r.Limit.Algorithm).Windowed() {
		return min(end, st.Reset)
	}
	return end
}

// ShowHeld makes st show what is held, and a refusal of r say so that would be none without it.
func ShowHeld(st *store.State, r *store.Request, held int64) {
	st.Held = int32(held) //nolint:gosec // at most MostHeld
	isInTheWay := held >= MostHeld || fitsIn(r, st.Used-held)
	if held == 0 || st.Allowed || st.Penalty != 0 || st.RetryAfter == store.Never || !isInTheWay {
		return
	}
	st.ResetOtherwise = st.Now + st.RetryAfter.Microseconds()
	st.InFlight, st.RetryAfter = true, min(st.RetryAfter, HeldRetry)
}
