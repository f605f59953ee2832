package store

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
)

// ErrorKind says why an operation failed. Metrics have it as a label.
type ErrorKind string

// The kinds of errors.
const (
	// KindBreaker: the call was not made, because the previous ones failed.
	KindBreaker ErrorKind = "breaker"
	// KindMisconf: the server is set up so that it cannot keep buckets.
	KindMisconf ErrorKind = "misconf"
	// KindOverload: too many calls wait for the server.
	KindOverload ErrorKind = "overload"
	// KindUnfound: no primary is known.
	KindUnfound ErrorKind = "unfound"
	// KindForeignData: the key holds something else than a bucket.
	KindForeignData ErrorKind = "foreign_data"
	// KindAuth: the server refuses the credentials, or the user lacks a right.
	KindAuth ErrorKind = "auth"
	// KindMemory: the server has no memory left.
	KindMemory ErrorKind = "memory"
	// KindReadOnly: the server is a replica.
	KindReadOnly ErrorKind = "readonly"
	// KindLoading: the server reads its data.
	KindLoading ErrorKind = "loading"
	// KindBusy: the server runs a script that takes long.
	KindBusy ErrorKind = "busy"
	// KindConnection: there is no connection, or it broke.
	KindConnection ErrorKind = "connection"
	// KindTimeout: there was no answer in time.
	KindTimeout ErrorKind = "timeout"
	// KindOther: none of these.
	KindOther ErrorKind = "other"
)

// ErrorKinds are all kinds. Of several errors that were joined, the kind that comes first here counts.
var ErrorKinds = []ErrorKind{
	KindBreaker, KindMisconf, KindOverload, KindUnfound, KindForeignData, KindAuth, KindMemory, KindReadOnly, KindLoading, KindBusy,
	KindConnection, KindTimeout, KindOther,
}

// kindError is an error of a kind.
type kindError struct {
	error
	kind ErrorKind
}

// Unwrap implements [errors.Unwrap].
func (e *kindError) Unwrap() error { return e.error }

// WithKind returns err as an error of a kind, with the same text.
func WithKind(kind ErrorKind, err error) error { return &kindError{err, kind} }

// KindOf returns the kind of an error that is, or wraps, one of [WithKind] or of package net, or a deadline.
// All others are of KindOther.
func KindOf(err error) ErrorKind {
	if rank := rankOf(err); rank < len(ErrorKinds) {
		return ErrorKinds[rank]
	}
	var netErr net.Error
	var op *net.OpError
	isNetErr := errors.As(err, &netErr)
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		return KindConnection
	case errors.Is(err, context.DeadlineExceeded), isNetErr && netErr.Timeout():
		return KindTimeout
	case isNetErr, errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		return KindConnection
	default:
		return KindOther
	}
}

// rankOf returns the place in ErrorKinds of the kind that err was given, or their number if it was given none.
func rankOf(err error) int {
	rank := len(ErrorKinds)
	switch e := err.(type) { //nolint:errorlint // it goes through what err wraps
	case *kindError:
		rank = slices.Index(ErrorKinds, e.kind)
	case interface{ Unwrap() error }:
		rank = rankOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			rank = min(rank, rankOf(one))
		}
	}
	return rank
}
