package limit

import (
	"context"
	"testing"
	"time"
)

// TestNextInLineIsNotBoundByTheFirst: the wait of a caller that has left is no bound for the next one.
func TestNextInLineIsNotBoundByTheFirst(t *testing.T) {
	var l lines
	first, _ := l.join(t.Context(), "a", true)
	_, _ = l.join(t.Context(), "a", true)
	l.postpone("a", first, time.Now().Add(time.Hour))
	l.leave("a", first)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := l.join(ctx, "a", true); err != nil {
		t.Errorf("a client that waits for a minute: %v", err)
	}
}
