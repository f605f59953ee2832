package contain_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
)

func cut(text string, n int) string { return text[:n] }

// TestRun returns errors, and panics as errors that say where.
func TestRun(t *testing.T) {
	if err := contain.Run(func() error { return nil }); err != nil {
		t.Errorf("without an error: %v", err)
	}
	if err := contain.Run(func() error { return io.EOF }); !errors.Is(err, io.EOF) || errors.Is(err, contain.ErrPanic) {
		t.Errorf("with an error: %v", err)
	}
	n := -3
	for want, f := range map[string]func() error{
		"slice bounds out of range": func() error { _ = cut("x", n); return nil },
		"broken on purpose":         func() error { panic("broken on purpose") },
	} {
		err := contain.Run(f)
		if !errors.Is(err, contain.ErrPanic) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "contain_test.") {
			t.Errorf("a panic: %v", err)
		}
	}
}
