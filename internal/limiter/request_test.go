package limiter

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestDues goes through what a store may have of a cost, and what the request costs in the end: row by
// row. Requests have spent something where it was taken only.
func TestDues(t *testing.T) {
	t.Parallel()
	type end struct {
		f    final
		want due
	}
	rows := [storePhases][]end{
		phaseNone:          {{costsSame, dueNothing}, {costsMore, dueCharge}, {empties, dueEmpty}},
		phaseHeld:          {{costsSame, dueEnd}, {costsMore, dueEnd}, {empties, dueEmpty}},
		phaseTaken:         {{costsLess, dueRefund}, {costsSame, dueNothing}, {costsMore, dueCharge}, {empties, dueEmpty}, {emptiesOwn, dueRefundFirst}},
		phaseUncertain:     {{costsSame, dueRefund}, {costsMore, dueRepeat}, {empties, dueEmpty}},
		phaseUncertainHeld: {{costsSame, dueRefund}, {costsMore, dueRepeat}, {empties, dueEmpty}},
		phaseLost:          {{costsSame, dueNothing}, {costsMore, dueNothing}, {empties, dueEmpty}},
		phaseLostHeld:      {{costsSame, dueNothing}, {costsMore, dueNothing}, {empties, dueEmpty}},
	}
	for phase, row := range rows {
		if len(row) == 0 {
			t.Errorf("phase %d has no row", phase)
		}
		for _, end := range row {
			// What is in flight ends in any case.
			var s settlement
			got := s.add(store.Request{Cost: 3}, storePhase(phase), end.f, 3, 3)
			if got != end.want {
				t.Errorf("phase %d, final %d: %d is due, want %d", phase, end.f, got, end.want)
			}
			ended, unknown := storePhase(phase) == phaseHeld, storePhase(phase) >= phaseUncertainHeld
			if (len(s.ended) == 1) != ended || (len(s.unknown) == 1) != unknown {
				t.Errorf("phase %d, final %d: ends %+v", phase, end.f, s)
			}
			calls := map[due]int{dueCharge: len(s.charges), dueRepeat: len(s.again), dueRefund: len(s.refunds)}
			for d, n := range calls {
				if (n == 1) != (d == end.want) {
					t.Errorf("phase %d, final %d: %+v", phase, end.f, s)
				}
			}
		}
	}
	// A request that is refused elsewhere leaves nothing in memory.
	for alone, refunds := range [...]int{localNone: 0, localMirrored: 1, localDecided: 0, localTaken: 1} {
		var s settlements
		z := &inZone{boundZone: &boundZone{Zone: &Zone{}}, ask: store.Ask{Request: store.Request{Cost: 3}}, spend: spend{alone: localPhase(alone)}}
		s.add(z, costsLess, 3, 0)
		if len(s.local.refunds) != refunds || len(s.local.ended)+len(s.local.charges) > 0 {
			t.Errorf("local phase %d: %+v", alone, s.local)
		}
	}
	for _, k := range []struct {
		spent, cost int64
		want        final
	}{{0, 0, costsSame}, {0, 3, costsMore}, {3, 0, costsLess}, {3, 2, costsLess}, {3, 3, costsSame}, {3, 4, costsMore}} {
		if got := finalOf(k.spent, k.cost); got != k.want {
			t.Errorf("%d spent, %d in the end is %d, want %d", k.spent, k.cost, got, k.want)
		}
	}
}

// TestAmountsDue goes through the calls that settle a request: what they charge and refund, and
// under which ID.
func TestAmountsDue(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		phase                       storePhase
		spent, cost                 int64
		ended, held                 int64
		charged, repeated, refunded int64
		hasNewID                    bool
	}{
		{phase: phaseNone, cost: 2, charged: 2},
		{phase: phaseHeld, cost: 2, ended: 2, held: 5},
		{phase: phaseTaken, spent: 5, cost: 7, charged: 2, hasNewID: true},
		{phase: phaseTaken, spent: 5, cost: 2, refunded: 3},
		{phase: phaseTaken, spent: 5, cost: 0, refunded: 5},
		{phase: phaseUncertain, cost: 7, repeated: 7},
		{phase: phaseUncertain, cost: 0, refunded: 5},
		{phase: phaseUncertainHeld, cost: 7, ended: 7, held: 5, repeated: 7},
		{phase: phaseLostHeld, cost: 7, ended: 7, held: 5},
	} {
		var s settlement
		s.add(store.Request{Cost: 5, ID: "id"}, row.phase, finalOf(row.spent, row.cost), row.spent, row.cost)
		costOf := func(reqs ...*store.Request) (sum int64) {
			for _, r := range reqs {
				sum += r.Cost
				if (r.ID != "id") != row.hasNewID {
					t.Errorf("%+v: ID %q", row, r.ID)
				}
			}
			return sum
		}
		held := int64(0)
		for _, h := range append(s.held, s.heldUnknown...) {
			held += h
		}
		if ended := costOf(append(s.ended, s.unknown...)...); ended != row.ended || held != row.held || costOf(s.charges...) != row.charged ||
			costOf(s.again...) != row.repeated || costOf(s.refunds...) != row.refunded {
			t.Errorf("%+v: %+v", row, s)
		}
	}
}

// TestPhases goes through what may happen to a cost, one after the other.
func TestPhases(t *testing.T) {
	t.Parallel()
	for phase, held := range inFlight {
		if held == phaseNone {
			t.Errorf("phase %d has no row", phase)
		}
	}
	hold, take, lose := (*spend).hold, (*spend).take, (*spend).lose
	unsure, loseTrack := func(s *spend) { s.becomeUncertain(true) }, func(s *spend) { s.becomeUncertain(false) }
	for _, row := range []struct {
		from spend
		acts []func(*spend)
		want spend
	}{
		{spend{}, []func(*spend){hold}, spend{stored: phaseHeld}},
		{spend{}, []func(*spend){take}, spend{stored: phaseTaken}},
		{spend{}, []func(*spend){unsure}, spend{stored: phaseUncertain}},
		{spend{}, []func(*spend){unsure, hold}, spend{stored: phaseUncertainHeld}},
		{spend{}, []func(*spend){hold, unsure}, spend{stored: phaseUncertainHeld}},
		{spend{}, []func(*spend){loseTrack}, spend{stored: phaseLost}},
		{spend{}, []func(*spend){loseTrack, hold}, spend{stored: phaseLostHeld}},
		{spend{}, []func(*spend){hold, loseTrack}, spend{stored: phaseLostHeld}},
		{spend{}, []func(*spend){take, lose}, spend{}},
		{spend{}, []func(*spend){hold, lose}, spend{stored: phaseHeld}},
		// An uncertain take, about which memory decides.
		{spend{alone: localTaken}, []func(*spend){unsure, take}, spend{phaseUncertain, localTaken}},
		{spend{alone: localTaken}, []func(*spend){unsure, take, lose}, spend{phaseUncertain, localDecided}},
		{spend{stored: phaseTaken, alone: localMirrored}, []func(*spend){lose}, spend{alone: localMirrored}},
	} {
		s := row.from
		for _, act := range row.acts {
			act(&s)
		}
		if s != row.want {
			t.Errorf("%+v becomes %+v, want %+v", row.from, s, row.want)
		}
	}
}
