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
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
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
	for _, limit := range Limits {
		t.Run("History/"+string(limit.Algorithm), func(t *testing.T) {
			t.Parallel()
			History{Limit: limit}.Run(t, open)
		})
	}
}

// Limits are one limit, without a zone, for each way of counting.
var Limits = []store.Limit{
	{Algorithm: store.FixedWindow, Window: time.Minute},
	{Algorithm: store.FixedWindow, Window: time.Minute, Align: true},
	{Algorithm: store.SlidingWindow, Window: time.Minute},
	{Algorithm: store.SlidingLog, Window: time.Minute},
	{Algorithm: store.GCRA, Window: time.Minute},
	{Algorithm: store.Concurrency, Window: time.Minute},
}

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
	{"Saturation", testSaturation},
	{"RetryAfter", testRetryAfter},

	{"TakeSpendsWhatFits", testTakeSpendsWhatFits},
	{"TakeIsAllOrNothing", testTakeIsAllOrNothing},
	{"RefundGivesBack", testRefundGivesBack},
	{"RefundOfAnotherTime", testRefundOfAnotherTime},
	{"Reserved", testReserved},
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
