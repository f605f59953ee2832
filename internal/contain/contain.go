// Package contain keeps a panic of one call from ending the process.
package contain

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
)

// ErrPanic is the error, wrapped, of what has panicked.
var ErrPanic = errors.New("panic")

// Run runs f, and returns its error. A panic, such as of a library at a malformed reply, is an error that
// wraps [ErrPanic]. What f has begun, such as to read from a connection, is in an unknown state then.
func Run(f func() error) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("%w in %s: %v", ErrPanic, place(), reason)
		}
	}()
	return f()
}

// place returns the function and line that has panicked. Only a deferred function may call it.
func place() string {
	var callers [32]uintptr
	frames := runtime.CallersFrames(callers[:runtime.Callers(3, callers[:])])
	for {
		frame, more := frames.Next()
		if !more || !strings.HasPrefix(frame.Function, "runtime.") {
			return fmt.Sprintf("%s:%d", frame.Function, frame.Line)
		}
	}
}
