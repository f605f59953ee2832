package wire

import (
	"testing"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestServerIsLeftOutUntilAPing is answered. Where pings are answered and calls are not, it is left out for longer.
func TestServerIsLeftOutUntilAPing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l := newLane(newShard(t, Options{Primary: server.Addr()}), server.Addr(), false)
	defer l.close(t.Context())
	leaveOut := func() {
		for l.IsUp() {
			reported, err := l.breaker.Allow()
			if err != nil {
				t.Fatal(err)
			}
			reported(errNoReply)
		}
	}
	isCalled := func() {
		t.Helper()
		redistest.Eventually(t, "it is called", func() error {
			if l.ping(t.Context()); !l.IsUp() {
				return l.Down()
			}
			return nil
		})
	}
	rest := func() time.Duration { return time.Until(*l.rests.Load()) }
	if leaveOut(); rest() > 0 {
		t.Error("it is not pinged the first time")
	}
	isCalled()
	if leaveOut(); rest() <= 0 {
		t.Error("it is pinged at once although it answers pings alone")
	}
	redistest.Eventually(t, "the breaker allows a ping", func() error {
		if l.breaker.State() != gobreaker.StateHalfOpen {
			return l.Down()
		}
		return nil
	})
	if l.ping(t.Context()); l.IsUp() {
		t.Error("it is called although it rests")
	}
	l.rests.Store(new(time.Now()))
	isCalled()
	l.rests.Store(new(time.Now().Add(-relapseTime)))
	if leaveOut(); rest() > 0 {
		t.Error("it is not pinged although it was well for long")
	}
	isCalled()
}
