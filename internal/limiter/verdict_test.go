package limiter

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestVerdict goes through two zones, in both orders, with each of their outcomes.
func TestVerdict(t *testing.T) {
	t.Parallel()
	type answer struct {
		name    string
		state   store.State
		role    role
		onError string
	}
	failed := store.State{Err: store.ErrNotExecuted}
	refused := func(after time.Duration) store.State { return store.State{Now: 1, RetryAfter: after} }
	left := func(n int64) store.State { return store.State{Now: 1, Allowed: true, Remaining: n} }
	// Those that come first outrank those that follow.
	ranked := []answer{
		{name: "never fits", state: refused(store.Never)},
		{name: "is blocked for two hours", state: refused(2 * time.Hour), role: blocks},
		{name: "is refused for an hour", state: refused(time.Hour)},
		{name: "is refused for a minute", state: refused(time.Minute)},
		{name: "is denied", state: failed, onError: stores.OnErrorDeny},
		{name: "would be refused for an hour", state: refused(time.Hour), role: observes},
		{name: "would be refused for a minute", state: refused(time.Minute), role: observes},
		{name: "has one left", state: left(1)},
		{name: "has two left", state: left(2)},
		{name: "passes without an answer", state: failed},
		{name: "was not asked"},
	}
	verdictOf := func(both ...answer) verdict {
		e := new(evaluation)
		for _, a := range both {
			z := &boundZone{Zone: &Zone{Name: a.name}, onError: a.onError}
			e.zones = append(e.zones, &inZone{boundZone: z, of: e, ask: store.Ask{State: a.state}, role: a.role, answer: answerOf(&a.state)})
		}
		e.limiter = new(Limiter)
		return (&tracker{own: []*evaluation{e}}).verdict(anyHandler)
	}
	for n, a := range ranked {
		for _, b := range ranked[n+1:] {
			for _, both := range [][]answer{{a, b}, {b, a}} {
				if v := verdictOf(both...); v.Name != a.name {
					t.Errorf("of %q and %q decides %q, want %q", both[0].name, both[1].name, v.Name, a.name)
				}
			}
		}
		v := verdictOf(a)
		if ends, want := endsRequest(v.outcome), n < 5; ends != want {
			t.Errorf("%q ends the request: %v, want %v", a.name, ends, want)
		}
		if got, want := refuses(v.outcome), n < 4; got != want {
			t.Errorf("%q refuses the request: %v, want %v", a.name, got, want)
		}
	}
	if v := verdictOf(ranked[len(ranked)-1]); v.inZone != nil {
		t.Errorf("a zone that was not asked decides: %+v", v)
	}
}
