// Package storetest holds every implementation of [store.Store] to its
// contract. A backend's test calls it in a few lines:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T, clock *storetest.Clock) store.Store {
//			return memory.New(memory.NewBuckets(), memory.Options{Now: clock.Now})
//		})
//	}
//
// A backend may be shared: every test uses zones of its own and deletes
// nothing. A backend may let buckets expire in real time, counted from the
// opening of their window, as long as every one of them lives for a minute:
// the tests that need a bucket to last use windows of a minute or more and
// take less than that. Checks must see the charges before them, so a store
// that reads lagging replicas is run without them.
package storetest

import (
	"context"
	"crypto/rand"
	"errors"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Open returns a store whose decisions are made by clock, with no restriction
// that a test could run into. It is called once per test and releases what it
// acquires with t.Cleanup.
type Open = func(t *testing.T, clock *Clock) store.Store

// Run tests the whole contract, and ends with a random [History] of the
// default length for every algorithm.
func Run(t *testing.T, open Open) {
	for _, c := range contract {
		t.Run(c.name, func(t *testing.T) { c.test(newFixture(t, open)) })
	}
	for _, limit := range append(slices.Clone(Limits), Days) {
		t.Run("History/"+limit.Algorithm.String(), func(t *testing.T) {
			t.Parallel()
			History{Limit: limit}.Run(t, open)
		})
	}
}

// Limits are one limit, without a zone, for each way of counting.
var Limits = func() (all []store.Limit) {
	for a := range store.Algorithms {
		all = append(all, store.Limit{Algorithm: a, Window: time.Minute})
		if algorithm.Of(a).Windowed() {
			all = append(all, store.Limit{Algorithm: a, Window: time.Minute, Align: true})
		}
	}
	return all
}()

// Days is a limit of days, which have 23 and 25 hours once a year.
var Days = store.Limit{Algorithm: store.FixedWindow, Window: days.Window(), Align: true, Calendar: days}

var days = store.Calendar{Unit: store.Day, TimeZone: "Europe/Berlin"}

// contract has one test for every promise.
var contract = []struct {
	name string
	test func(*fixture)
}{
	{"Empty", testEmpty},
	{"CheckSpendsNothing", testCheckSpendsNothing},
	{"CheckOpensWindow", testCheckOpensWindow},
	{"CheckFits", testCheckFits},
	{"ChargeCounts", testChargeCounts},
	{"ChargeCountsPastLimit", testChargeCountsPastLimit},
	{"ChargeOpensWindow", testChargeOpensWindow},
	{"CostZero", testCostZero},
	{"CostAboveEvents", testCostAboveEvents},
	{"EventsChange", testEventsChange},
	{"DifferingLimits", testDifferingLimits},
	{"DifferingRates", testDifferingRates},
	{"Saturation", testSaturation},
	{"RetryAfter", testRetryAfter},

	{"TakeSpendsWhatFits", testTakeSpendsWhatFits},
	{"TakeIsAllOrNothing", testTakeIsAllOrNothing},
	{"RefundGivesBack", testRefundGivesBack},
	{"RefundOfAnotherTime", testRefundOfAnotherTime},
	{"RefundOfAnEarlierBucket", testRefundOfAnEarlierBucket},
	{"Reserved", testReserved},
	{"Held", testHeld},
	{"HeldEnds", testHeldEnds},
	{"Penalty", testPenalty},

	{"WindowClosesAtReset", testWindowClosesAtReset},
	{"WindowFollowsWindow", testWindowFollowsWindow},
	{"WindowLeftAlone", testWindowLeftAlone},
	{"WindowLengths", testWindowLengths},
	{"FractionalInstants", testFractionalInstants},

	{"AnswersInOrder", testAnswersInOrder},
	{"SameBucketTwice", testSameBucketTwice},
	{"RequestsAreReadOnly", testRequestsAreReadOnly},

	{"LimitsHaveOwnBuckets", testLimitsHaveOwnBuckets},
	{"EqualLimitsShareBuckets", testEqualLimitsShareBuckets},
	{"ClientKeysHaveOwnBuckets", testClientKeysHaveOwnBuckets},

	{"Reset", testReset},

	{"ConcurrentCharges", testConcurrentCharges},
	{"ConcurrentTakes", testConcurrentTakes},
	{"ConcurrentFirstChecks", testConcurrentFirstChecks},
	{"ConcurrentReopening", testConcurrentReopening},
	{"ContextEnded", testContextEnded},
}

// start is an instant at which a real clock could be, so that a backend that
// expires buckets in real time agrees with it.
func start() time.Time { return time.Now().Truncate(time.Second) }

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

func (f *fixture) check(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Check, []store.Request{r})[0]
}

func (f *fixture) charge(r store.Request) store.State {
	f.Helper()
	return f.answer(f.store.Charge, []store.Request{r})[0]
}

// answer returns the states of an operation, none of which may be a failure. It
// does not stop the test, because it is called from many goroutines.
func (f *fixture) answer(op operation, reqs []store.Request) []store.State {
	f.Helper()
	states := answers(f.Context(), op, reqs)
	for i, s := range states {
		if s.Err != nil {
			f.Errorf("request %d failed: %v", i, s.Err)
		}
	}
	return states
}

var errUnset = errors.New("the state was not set")

type operation = func(ctx context.Context, asks []*store.Ask)

// answers is [store.Answers], but lends states that have been used before.
func answers(ctx context.Context, op operation, reqs []store.Request) []store.State {
	used := store.State{
		Allowed: true, Replica: true, InFlight: true, IsHeld: true, Held: 1, Limit: 1, Used: 1, Remaining: 1, Reset: 1, ResetOtherwise: 1, RetryAfter: 1, Penalty: 1,
		Now: 1, Content: store.Content{1}, Receipt: store.Receipt{Period: 1}, Err: errUnset,
	}
	asks := store.Asks(reqs)
	for _, a := range asks {
		a.State = used
	}
	op(ctx, asks)
	return store.States(asks)
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

// micros returns d in the stores' unit.
func micros(d time.Duration) int64 { return d.Microseconds() }

// Clock is a clock that stands still until it is moved. It is safe for
// concurrent use.
type Clock struct {
	mu  sync.Mutex
	now time.Time
}

// Posts returns what an operation takes that nobody waits for, and which keeps it.
func Posts(reqs []store.Request) []*store.Request {
	posts := make([]*store.Request, len(reqs))
	for i := range reqs {
		posts[i] = &reqs[i]
	}
	return posts
}

// Posted returns the requests of such an operation.
func Posted(posts []*store.Request) []store.Request {
	reqs := make([]store.Request, len(posts))
	for i, r := range posts {
		reqs[i] = *r
	}
	return reqs
}

// NewClock returns a clock that shows start.
func NewClock(start time.Time) *Clock { return &Clock{now: start} }

// Now is what the clock shows.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance moves the clock forward by d.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}
