package store

import (
	"errors"
	"sync"
)

// Late is how a take ends whose caller has stopped waiting for it. The error of the take has it: see
// [LateOf].
type Late struct {
	mu      sync.Mutex
	isEnded bool
	err     error
	then    []func(err error)
}

// End sets how the take has ended: nil if the cost was spent, or an error that wraps [ErrNotExecuted] or
// [ErrUncertain].
func (l *Late) End(err error) {
	l.mu.Lock()
	then := l.then
	l.isEnded, l.err, l.then = true, err, nil
	l.mu.Unlock()
	for _, f := range then {
		f(err)
	}
}

// Then calls f with how the take has ended: at once, or when End is called.
func (l *Late) Then(f func(err error)) {
	l.mu.Lock()
	isEnded, err := l.isEnded, l.err
	if !isEnded {
		l.then = append(l.then, f)
	}
	l.mu.Unlock()
	if isEnded {
		f(err)
	}
}

type lateError struct {
	error
	late *Late
}

func (e *lateError) Unwrap() error { return e.error }

// Wrap returns an error with l.
func (l *Late) Wrap(err error) error { return &lateError{err, l} }

// LateOf returns how the take ends that failed with err: err itself is the end, unless it has a Late.
func LateOf(err error) *Late {
	if e := (*lateError)(nil); errors.As(err, &e) {
		return e.late
	}
	return &Late{isEnded: true, err: err}
}
