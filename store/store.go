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
	"time"
)

// MaxInteger is the largest integer, 2^53-1, that the arithmetic of every
// store holds exactly. A count that would pass it stays there.
const MaxInteger = 1<<53 - 1

// ErrNotExecuted is the error, possibly wrapped, of an operation that surely did not
// run: the backend was not reached, or it said that it did nothing.
var ErrNotExecuted = errors.New("not executed")

// ErrUncertain is the error, possibly wrapped, of a charge whose outcome is
// unknown, because the backend was asked and its answer did not arrive. Such a
// charge is never repeated.
var ErrUncertain = errors.New("outcome unknown")

// Store keeps buckets. Every method answers each request at the same place of
// the returned slice. A refusal is a value of [State]; [State.Err] is set only
// where the backend failed for that one bucket, and one bucket's failure
// leaves the other answers standing.
//
// Stores are safe for concurrent use. A context that ends makes the waiting
// end with State.Err set; a charge that was already on its way stays.
type Store interface {
	// Check tells whether each request's cost would fit, and spends nothing.
	// It may read a replica, so it may lag behind. Where no window is open it
	// opens one, count 0, so that the reset it returns is one that is stored.
	// A cost of 0 fits as long as no more than the limit is spent.
	Check(ctx context.Context, reqs []Request) []State

	// Charge spends each request's cost, whether or not it still fits, in the
	// window that is open now; it opens one where none is.
	Charge(ctx context.Context, reqs []Request) []State
}

// Detacher is a Store that can charge without being waited for, as remote
// stores do so that a response is never delayed by its charge.
type Detacher interface {
	// ChargeDetached may keep reqs, which nobody changes any more, and returns
	// at once. Charges it cannot deliver are counted and logged by the store.
	ChargeDetached(reqs []Request)
}

// Warmer is a Store that can get ready ahead of its first use.
type Warmer interface {
	// Warm does so and returns when it is done, cannot be done, or ctx ends.
	Warm(ctx context.Context)
}

// Limit is one zone's rule as the stores know it. It identifies, with a client
// key, a bucket; a limit that differs in any field has buckets of its own.
type Limit struct {
	// Zone is the zone's name.
	Zone string
	// Algorithm is how events are counted.
	Algorithm Algorithm
	// Window is the length of a window: whole microseconds, at least one, and
	// at most 100 years, so that instants stay below MaxInteger.
	Window time.Duration
}

// Algorithm names a way of counting.
type Algorithm string

// FixedWindow counts in windows of a fixed length; a client's first request
// opens its window.
const FixedWindow Algorithm = "fixed_window"

// Request asks about one bucket.
type Request struct {
	// Limit is the bucket's limit; it must not be nil, nor change while a call
	// runs. Equal limits are the same limit.
	Limit *Limit
	// ClientKey is whose bucket it is, any bytes.
	ClientKey string
	// Events is how many events the window admits for this client, from 1 to
	// MaxInteger. It is not part of the bucket: changing it keeps the count.
	Events int64
	// Cost is what the request spends, from 0 to MaxInteger.
	Cost int64
}

// State is what a bucket looks like to one request.
type State struct {
	// Allowed tells whether the cost fits (Check) or did fit (Charge).
	Allowed bool
	// Limit is the request's Events.
	Limit int64
	// Used is what has been spent in the window; it can be above Limit.
	Used int64
	// Remaining is what is left, never below zero.
	Remaining int64
	// Reset is the instant, stored beside the count, at which the window ends.
	Reset int64
	// RetryAfter is how long a refused client has to wait, by the clock that
	// decided; zero if Allowed.
	RetryAfter time.Duration
	// Now is the instant of the decision by the clock that decided.
	Now int64
	// Err is set if the backend failed; then no other field means anything.
	// It wraps ErrNotExecuted or ErrUncertain where it belongs to a charge.
	Err error
}
