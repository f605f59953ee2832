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

// NotExecuted returns err as an [ErrNotExecuted]. It is err itself if that is one already.
func NotExecuted(err error) error {
	if errors.Is(err, ErrNotExecuted) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrNotExecuted, err)
}

// ErrFinal is an [ErrNotExecuted] of an operation that would fail again: the backend
// refuses it for what it is, and not for a state that passes.
var ErrFinal = fmt.Errorf("%w, and trying again does not help", ErrNotExecuted)

// ErrGone is an [ErrFinal] of an operation at a shard that the store has no more, which changes nothing that counts.
var ErrGone = fmt.Errorf("%w: its shard is not in the config any more", ErrFinal)

// ErrUncertain is the error, possibly wrapped, of an operation that spends or
// gives back and whose outcome is unknown, because the backend was asked and
// its answer did not arrive, or says that it failed halfway. Such an operation is never repeated.
var ErrUncertain = errors.New("outcome unknown")

// Ask is what a request asks of one bucket, and the answer. The zero State is that of an ask that no store has
// answered.
type Ask struct {
	Request
	State
}

// Store keeps buckets. An operation sets the State of each ask, whatever it was before, and touches none after
// it has returned. Of the Request only ledgers set fields, Until and At. That a request does not fit is no error: State.Allowed is
// false. [State.Err] is set only where the backend failed for that one bucket, and the failure of one bucket
// spoils no other answer.
//
// Stores are safe for concurrent use. When a context ends, the waiting ends with
// State.Err set; what was sent may still run. A Store that is not [Remote] answers at once: it may
// be called while a response waits, with a context that does not end.
type Store interface {
	// Check reports whether each request's cost would fit, and spends nothing. It may
	// read a replica, so it may lag behind. Where a window has to be opened for there
	// to be a reset, and none is, it opens one, count 0, so that the reset it returns
	// is one that is stored. A cost of 0 fits however much is spent, unless the bucket
	// is under a penalty.
	Check(ctx context.Context, asks []*Ask)

	// Charge spends each request's cost, whether or not it still fits, in the
	// window that is open now; it opens one where none is. Under
	// [Concurrency] it makes the lease of the request's ID last for another
	// window from now on.
	Charge(ctx context.Context, asks []*Ask)

	// Take spends each request's cost where it fits, and nothing where it does not;
	// each request by itself. State.Allowed says which, and State.Receipt is what a
	// refund of it takes.
	Take(ctx context.Context, asks []*Ask)

	// Refund gives back all or a part of what an earlier Take spent; the request has
	// that Take's Receipt and ID. What the passing of time has given back is not given
	// back again. The store does not check that no more is given back than was taken.
	Refund(ctx context.Context, asks []*Ask)

	// Penalize keeps each request's bucket refused until the request's Until,
	// unless it is under a penalty already. Buckets of [SlidingLog] and
	// [Concurrency] know no penalty.
	Penalize(ctx context.Context, asks []*Ask)

	// Peek is Check, but opens no window. It may read a replica.
	Peek(ctx context.Context, asks []*Ask)

	// Reset empties the request's bucket wherever it is kept, so that its client
	// begins anew. Charges in flight may count in the new bucket. After an error the
	// bucket may still exist.
	Reset(ctx context.Context, r Request) error
}

// Remote is a Store with other writers, for which a ledger is kept. It can write without
// being waited for, so that a response is never delayed by its charge: such a method may keep
// reqs and the requests, which the caller no longer changes, and returns at once.
type Remote interface {
	Store

	// ChargeReported is Charge without waiting. report is called once for each request,
	// by its place in reqs, maybe before ChargeReported returns, and must be quick. The
	// caller handles what could not be delivered. If report is nil, the store counts and
	// logs that.
	ChargeReported(reqs []*Request, report func(i int, st State))
	// RefundReported is the same for Refund.
	RefundReported(reqs []*Request, report func(i int, st State))
	// PenalizeDetached is Penalize without waiting. What could not be delivered is counted
	// and logged by the store.
	PenalizeDetached(reqs []*Request)

	// Owner is the name of the shard that keeps the client's buckets, and Owners are those, in order,
	// of all that do while the client moves: its request asks each about a bucket of its own.
	Owner(clientKey string) string
	Owners(clientKey string) []string
	// Hurry sends at once what waits for others to join it, on its way to the client's
	// buckets.
	Hurry(clientKey string)
	// Warm gets ready ahead of the first use. It returns when that is done, cannot be done,
	// or ctx ends.
	Warm(ctx context.Context)
}

// Asks returns asks of requests.
func Asks(reqs []Request) []*Ask {
	room, asks := make([]Ask, len(reqs)), make([]*Ask, len(reqs))
	for i := range reqs {
		room[i].Request, asks[i] = reqs[i], &room[i]
	}
	return asks
}

// Answers returns the states of an operation of a store.
func Answers(ctx context.Context, op func(context.Context, []*Ask), reqs []Request) []State {
	asks := Asks(reqs)
	op(ctx, asks)
	return States(asks)
}

// States returns the states of asks.
func States(asks []*Ask) []State {
	states := make([]State, len(asks))
	for i, a := range asks {
		states[i] = a.State
	}
	return states
}
