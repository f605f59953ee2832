package store

import (
	"math"
	"time"
)

// Never is the RetryAfter of a request for which no waiting helps, because it
// costs more than could ever fit.
const Never time.Duration = math.MaxInt64

// Content is a bucket's numbers. Which they are is for package algorithm to
// say.
type Content [7]int64

// State is what a bucket looks like to one request.
type State struct {
	// Allowed reports whether the cost fits (Check), was spent (Take) or did fit
	// (Charge).
	Allowed bool
	// Replica is set if a replica answered, which may lag behind.
	Replica bool
	// InFlight is set if the cost would fit but for requests of this process
	// that were admitted and are not charged yet, or for what is held.
	InFlight bool
	// IsHeld is set if a Take is held.
	IsHeld bool
	// Held is how much of Used is held, and may come back: any more from [MaxMembers] on. It is 0 if the request has
	// no Hold, or is a Take that leaves enough not to be held.
	Held int32
	// Limit is the request's Capacity, or 0 if that is less.
	Limit int64
	// Used is what has been spent and still counts; it can be above Limit. It
	// has the request's cost in it once that is spent.
	Used int64
	// Remaining is what is left for the request, never below zero; zero while
	// it is refused because of a penalty.
	Remaining int64
	// Reset is the instant at which nothing of Used counts any more if nothing
	// else is spent: where there are windows, the end of one. Under a penalty it
	// is no earlier than the penalty's end. It is 0 under [Concurrency], which
	// has no such instant.
	Reset int64
	// ResetOtherwise is Reset in the other case: without the request's cost if that
	// was spent, with it if it was not. Settling uses it. If InFlight is set, it is when
	// the request would fit if what is in flight were spent now.
	ResetOtherwise int64
	// RetryAfter is how long a refused client has to wait, by the clock that
	// decided, or Never; zero if Allowed.
	RetryAfter time.Duration
	// Penalty is the instant until which the client is refused whatever is
	// left; 0 if it is not.
	Penalty int64
	// Now is the instant of the decision by the clock that decided.
	Now int64
	// Content is the bucket as its algorithm keeps it, as far as it counts at
	// Now. It is zero for [SlidingLog] and [Concurrency].
	Content Content
	// Receipt is what a refund takes, where a Take has spent something.
	Receipt Receipt
	// Err is set if the backend failed; then no other field means anything.
	// It wraps ErrNotExecuted or ErrUncertain where the operation writes.
	Err error
}
