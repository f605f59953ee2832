package limiter

import (
	"testing"
)

// TestDues goes through what a store may have of a cost, and what the request costs in the end: row by
// row. Requests have spent something where it was taken only.
func TestDues(t *testing.T) {
	t.Parallel()
	type end struct {
		f      final
		flight flightDue
		then   due
	}
	rows := [storePhases][]end{
		phaseNone: {
			{costsNothing, flightStays, dueNothing},
			{costsMore, flightStays, dueCharge},
			{empties, flightStays, dueEmpty},
		},
		phaseHeld: {
			{costsNothing, flightCharged, dueNothing},
			{costsMore, flightCharged, dueNothing},
			{empties, flightCharged, dueEmpty},
		},
		phaseTaken: {
			{costsNothing, flightStays, dueNothing},
			{costsLess, flightStays, dueRefund},
			{costsSame, flightStays, dueNothing},
			{costsMore, flightStays, dueCharge},
			{empties, flightStays, dueEmpty},
			{emptiesOwn, flightStays, dueRefundFirst},
		},
		phaseUncertain: {
			{costsNothing, flightStays, dueRefund},
			{costsMore, flightStays, dueRepeat},
			{empties, flightStays, dueEmpty},
		},
		phaseUncertainHeld: {
			{costsNothing, flightDropped, dueRefund},
			{costsMore, flightDropped, dueRepeat},
			{empties, flightDropped, dueEmpty},
		},
		phaseLost: {
			{costsNothing, flightStays, dueNothing},
			{costsMore, flightStays, dueNothing},
			{empties, flightStays, dueEmpty},
		},
		phaseLostHeld: {
			{costsNothing, flightDropped, dueNothing},
			{costsMore, flightDropped, dueNothing},
			{empties, flightDropped, dueEmpty},
		},
	}
	for phase, row := range rows {
		if len(row) == 0 {
			t.Errorf("phase %d has no row", phase)
		}
		for _, want := range row {
			if got := dues[phase][want.f]; got.flight != want.flight || got.then != want.then {
				t.Errorf("phase %d, final %d: %+v is due, want %+v", phase, want.f, got, want)
			}
		}
	}
	for _, k := range []struct {
		spent, cost int64
		want        final
	}{{0, 0, costsNothing}, {0, 3, costsMore}, {3, 0, costsLess}, {3, 2, costsLess}, {3, 3, costsSame}, {3, 4, costsMore}} {
		if got := finalOf(k.spent, k.cost); got != k.want {
			t.Errorf("%d spent, %d in the end is %d, want %d", k.spent, k.cost, got, k.want)
		}
	}
}

// TestPhases goes through what may happen to a cost, one after the other.
func TestPhases(t *testing.T) {
	t.Parallel()
	hold, take, lose := (*spend).hold, (*spend).take, (*spend).lose
	doubt, loseTrack := func(s *spend) { s.becomeUncertain(true) }, func(s *spend) { s.becomeUncertain(false) }
	for _, row := range []struct {
		from spend
		acts []func(*spend)
		want spend
	}{
		{spend{}, []func(*spend){hold}, spend{stored: phaseHeld}},
		{spend{}, []func(*spend){take}, spend{stored: phaseTaken}},
		{spend{}, []func(*spend){doubt}, spend{stored: phaseUncertain}},
		{spend{}, []func(*spend){doubt, hold}, spend{stored: phaseUncertainHeld}},
		{spend{}, []func(*spend){hold, doubt}, spend{stored: phaseUncertainHeld}},
		{spend{}, []func(*spend){loseTrack}, spend{stored: phaseLost}},
		{spend{}, []func(*spend){loseTrack, hold}, spend{stored: phaseLostHeld}},
		{spend{}, []func(*spend){hold, loseTrack}, spend{stored: phaseLostHeld}},
		{spend{}, []func(*spend){take, lose}, spend{}},
		{spend{}, []func(*spend){hold, lose}, spend{stored: phaseHeld}},
		// A take of unknown outcome, which the local counts decide.
		{spend{alone: localDecided}, []func(*spend){doubt, hold, take}, spend{phaseUncertainHeld, localTaken}},
		{spend{alone: localDecided}, []func(*spend){hold, take, lose}, spend{phaseHeld, localDecided}},
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
