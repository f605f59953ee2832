package limiter

import (
	"testing"
)

// TestDue goes through what a store may have of a cost, and what it costs in the end.
func TestDue(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		phase       storePhase
		spent, cost int64
		want        due
	}{
		{phaseNone, 0, 0, dueNothing},
		{phaseNone, 0, 3, dueCharge},
		{phaseHeld, 0, 0, dueSettle},
		{phaseHeld, 0, 3, dueSettle},
		{phaseTaken, 3, 0, dueRefund},
		{phaseTaken, 3, 2, dueRefund},
		{phaseTaken, 3, 3, dueNothing},
		{phaseTaken, 3, 4, dueCharge},
		{phaseUncertain, 0, 0, dueRefund},
		{phaseUncertain, 0, 3, dueAgain},
	} {
		if got := row.phase.due(row.spent, row.cost); got != row.want {
			t.Errorf("phase %d, %d spent, %d in the end: %d is due, want %d", row.phase, row.spent, row.cost, got, row.want)
		}
	}
}

// TestPhases goes through what may happen to a cost, one after the other.
func TestPhases(t *testing.T) {
	t.Parallel()
	hold, take, doubt, lose := (*spend).hold, (*spend).take, (*spend).becomeUncertain, (*spend).lose
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
