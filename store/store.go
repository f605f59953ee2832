// Package store is the contract between the rate_limit handler and the places
// where buckets live.
//
// All instants are whole microseconds since the Unix epoch and all durations
// in arithmetic are whole microseconds, because that is what a Lua script can
// hold exactly (integers up to 2^53). The zero instant means "none".
package store

import (
	"context"
	"errors"
	"fmt"
)

// MaxInteger is the largest integer, 2^53-1, that the arithmetic of every
// store holds exactly. A count that would pass it stays there.
const MaxInteger = 1<<53 - 1

// ErrNotExecuted is the error, possibly wrapped, of an operation that certainly did not
// run: the backend was not reached, or it said that it did nothing.
var ErrNotExecuted = errors.New("not executed")

// ErrFinal is an [ErrNotExecuted] of an operation that would fail again: the backend
// refuses it for what it is, and not for a state that passes.
var ErrFinal = fmt.Errorf("%w, and trying again does not help", ErrNotExecuted)

// ErrUncertain is the error, possibly wrapped, of an operation that spends or
// gives back and whose outcome is unknown, because the backend was asked and
// its answer did not arrive, or says that it failed halfway. Such an operation is never repeated.
var ErrUncertain = errors.New("outcome unknown")

// Store keeps buckets. Every method answers each request at the same place of
// the returned slice. That a request does not fit is no error: State.Allowed is
// false. [State.Err] is set only where the backend failed for that one bucket, and
// the failure of one bucket spoils no other answer.
//
// Stores are safe for concurrent use. When a context ends, the waiting ends with
// State.Err set; what was sent may still run.
type Store interface {
	// Check reports whether each request's cost would fit, and spends nothing. It may
	// read a replica, so it may lag behind. Where a window has to be opened for there
	// to be a reset, and none is, it opens one, count 0, so that the reset it returns
	// is one that is stored. A cost of 0 fits however much is spent, unless the bucket
	// is under a penalty.
	Check(ctx context.Context, reqs []Request) []State

	// Charge spends each request's cost, whether or not it still fits, in the
	// window that is open now; it opens one where none is. Under
	// [Concurrency] it makes the lease of the request's ID last for another
	// window from now on.
	Charge(ctx context.Context, reqs []Request) []State

	// Take spends each request's cost where it fits, and nothing where it does not;
	// each request by itself. State.Allowed says which, and State.Receipt is what a
	// refund of it takes.
	Take(ctx context.Context, reqs []Request) []State

	// Refund gives back all or a part of what an earlier Take spent; the request has
	// that Take's Receipt and ID. What the passing of time has given back is not given
	// back again. The store does not check that no more is given back than was taken.
	Refund(ctx context.Context, reqs []Request) []State
}

// Immediate is a Store that answers without waiting, and so can set states that its
// caller has. It ignores contexts. A type that embeds one and changes Check or Take has
// to change these methods too.
type Immediate interface {
	// CheckInto is Check; states has the length of reqs.
	CheckInto(reqs []Request, states []State)
	// TakeInto is Take.
	TakeInto(reqs []Request, states []State)
}

// Detacher is a Store that can write without being waited for, as remote stores do so
// that a response is never delayed by its charge. The methods may keep reqs, which the
// caller no longer changes, and return at once. What cannot be delivered is counted and
// logged by the store.
type Detacher interface {
	// ChargeDetached is Charge without the states.
	ChargeDetached(reqs []Request)
	// RefundDetached is Refund without the states.
	RefundDetached(reqs []Request)
}

// Reporter is a Detacher that has other writers, and that reports the outcomes of
// charges and refunds.
type Reporter interface {
	Detacher
	// ChargeReported is Charge without waiting. report is called once for each request,
	// by its place in reqs, maybe before ChargeReported returns, and must be quick. The
	// caller handles what could not be delivered.
	ChargeReported(reqs []Request, report func(i int, st State))
	// RefundReported is the same for Refund.
	RefundReported(reqs []Request, report func(i int, st State))
	// Owner is the name of the shard that keeps the client's buckets.
	Owner(clientKey string) string
}

// Penalizer is a Store that can keep clients refused.
type Penalizer interface {
	// Penalize keeps each request's bucket refused until the request's Until,
	// unless it is under a penalty already. Buckets of [SlidingLog] and
	// [Concurrency] know no penalty.
	Penalize(ctx context.Context, reqs []Request) []State
	// PenalizeDetached is Penalize without the states; the rules of [Detacher]
	// hold.
	PenalizeDetached(reqs []Request)
}

// Peeker is a Store that can show a bucket without changing it.
type Peeker interface {
	// Peek is Check, but opens no window. It may read a replica.
	Peek(ctx context.Context, reqs []Request) []State
}

// Warmer is a Store that can get ready ahead of its first use.
type Warmer interface {
	// Warm does so and returns when it is done, cannot be done, or ctx ends.
	Warm(ctx context.Context)
}
