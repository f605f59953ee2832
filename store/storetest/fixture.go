package storetest

import (
	"crypto/rand"
	"regexp"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// fixture is what one test works with.
type fixture struct {
	*testing.T
	clock *Clock
	store store.Store
	// id is part of every zone's name, so that no other test, nor another run
	// of this one, has the same buckets.
	id string
}

// client is the client key where any will do.
const client = "203.0.113.7"

var notInZoneNames = regexp.MustCompile(`[^A-Za-z0-9_-]+`)

func newFixture(t *testing.T, open Open) *fixture {
	clock := NewClock(start())
	return &fixture{
		T:     t,
		clock: clock,
		store: open(t, clock),
		id:    notInZoneNames.ReplaceAllString(t.Name(), "-") + "." + rand.Text()[:10],
	}
}

// limit returns a limit of this test alone.
func (f *fixture) limit(zone string, window time.Duration) *store.Limit {
	return &store.Limit{Zone: zone + "." + f.id, Algorithm: store.FixedWindow, Window: window}
}

// request asks, at a cost of 1, about client's bucket under a limit of this
// test with 5 events a minute.
func (f *fixture) request() store.Request {
	return store.Request{Limit: f.limit("zone", time.Minute), ClientKey: client, Events: 5, Cost: 1}
}

func (f *fixture) now() int64 { return f.clock.Now().UnixMicro() }

// check checks one request.
func (f *fixture) check(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Check(f.Context(), []store.Request{r}), 1)[0]
}

// charge charges one request.
func (f *fixture) charge(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Charge(f.Context(), []store.Request{r}), 1)[0]
}

// answer requires as many states as there were requests, and no failure. It
// does not stop the test, because it is called from many goroutines.
func (f *fixture) answer(states []store.State, requests int) []store.State {
	f.Helper()
	if len(states) != requests {
		f.Errorf("%d requests got %d states", requests, len(states))
		return make([]store.State, requests)
	}
	for i, s := range states {
		if s.Err != nil {
			f.Errorf("request %d failed: %v", i, s.Err)
		}
	}
	return states
}

// want compares a whole state of a fixed window.
func (f *fixture) want(what string, got, want store.State) {
	f.Helper()
	want.ResetOtherwise = want.Reset
	got.Receipt, got.Content = store.Receipt{}, store.Content{}
	if got != want {
		f.Errorf("%s:\n got %+v\nwant %+v", what, got, want)
	}
}

// wantUsed compares the count alone.
func (f *fixture) wantUsed(what string, got store.State, used int64) {
	f.Helper()
	if got.Used != used {
		f.Errorf("%s: used %d, want %d", what, got.Used, used)
	}
}

// micros is d as the stores count.
func micros(d time.Duration) int64 { return d.Microseconds() }
