package report

import "testing"

func TestStolenSince(t *testing.T) {
	before := parseTimes("cpu  100 0 50 800 0 0 0 50 10 0\ncpu0 1 2 3\n")
	after := parseTimes("cpu  150 0 100 850 0 0 0 100 20 0\ncpu0 1 2 3\n")
	if got := after.StolenSince(before); got != 0.25 {
		t.Errorf("%v, want a quarter", got)
	}
	for _, stat := range []string{"", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "cpu 1 2 3 4 5 6 7 x 9"} {
		if got := parseTimes(stat); got != (Times{}) {
			t.Errorf("%q: %+v", stat, got)
		}
		if got := parseTimes(stat).StolenSince(after); got != 0 {
			t.Errorf("%q: %v", stat, got)
		}
	}
	if ReadTimes().StolenSince(Times{}) < 0 {
		t.Error("less than nothing was stolen")
	}
}
