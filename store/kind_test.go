package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
)

func TestKindOf(t *testing.T) {
	for want, errs := range map[ErrorKind][]error{
		KindTimeout:    {context.DeadlineExceeded, os.ErrDeadlineExceeded, &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}},
		KindConnection: {io.EOF, net.ErrClosed, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, &net.OpError{Op: "write", Err: errors.New("broken pipe")}},
		KindOther:      {errors.New("anything"), context.Canceled, ErrFinal, WithKind(KindOther, io.EOF)},
		KindMemory:     {WithKind(KindMemory, context.DeadlineExceeded), WithKind(KindMemory, WithKind(KindBreaker, io.EOF))},
		// The first in the table, whatever their order.
		KindAuth: {
			errors.Join(WithKind(KindTimeout, io.EOF), WithKind(KindAuth, io.EOF)),
			errors.Join(WithKind(KindAuth, io.EOF), context.DeadlineExceeded, WithKind(KindTimeout, io.EOF)),
		},
	} {
		for _, err := range errs {
			for _, err := range []error{err, fmt.Errorf("shard a: %w: %w", ErrNotExecuted, err)} {
				if got := KindOf(err); got != want {
					t.Errorf("%v is %s, want %s", err, got, want)
				}
			}
		}
	}
	if got := KindOf(nil); got != KindOther {
		t.Errorf("no error is %s", got)
	}
}

// TestWithKindChangesNoText: the error is still the one that it was.
func TestWithKindChangesNoText(t *testing.T) {
	if err := WithKind(KindMemory, io.EOF); err.Error() != "EOF" || !errors.Is(err, io.EOF) {
		t.Errorf("it is %v", err)
	}
}

// TestNotExecutedIsSaidOnce: an error that is one already stays as it is.
func TestNotExecutedIsSaidOnce(t *testing.T) {
	t.Parallel()
	refused := errors.New("connection refused")
	once := NotExecuted(refused)
	if !errors.Is(once, ErrNotExecuted) || !errors.Is(once, refused) {
		t.Errorf("%v", once)
	}
	for _, err := range []error{once, fmt.Errorf("shard a: %w", once), ErrGone} {
		if again := NotExecuted(err); again != err { //nolint:errorlint // it is the very error
			t.Errorf("%v became %v", err, again)
		}
	}
}
