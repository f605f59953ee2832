package store

import (
	"errors"
	"fmt"
	"testing"
)

// TestLate: whoever asks learns how a take has ended, before it ends or after, and through errors that wrap its own.
func TestLate(t *testing.T) {
	t.Parallel()
	var l Late
	var heard []error
	hear := func(err error) { heard = append(heard, err) }
	err := fmt.Errorf("store default: %w", l.Wrap(fmt.Errorf("%w: too late", ErrUncertain)))
	if !errors.Is(err, ErrUncertain) {
		t.Errorf("%v is not uncertain", err)
	}
	LateOf(err).Then(hear)
	if len(heard) > 0 {
		t.Fatalf("%v before the end", heard)
	}
	l.End(ErrNotExecuted)
	LateOf(err).Then(hear)
	if len(heard) != 2 || !errors.Is(heard[0], ErrNotExecuted) || !errors.Is(heard[1], ErrNotExecuted) {
		t.Errorf("heard %v", heard)
	}
	// An error without an end is one.
	if LateOf(ErrUncertain).Then(hear); len(heard) != 3 || !errors.Is(heard[2], ErrUncertain) {
		t.Errorf("heard %v", heard)
	}
}
