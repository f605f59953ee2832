//go:build check

package sweep

import (
	"slices"
	"testing"
)

func TestOf(t *testing.T) {
	cases := make([]int, 20)
	for i := range cases {
		cases[i] = i
	}
	for _, test := range []struct {
		sweep string
		want  int
	}{{"", 3}, {"more", 9}, {"all", 20}} {
		t.Setenv("SWEEP", test.sweep)
		if IsWhole() != (test.want == len(cases)) {
			t.Errorf("SWEEP=%s: whole is %v", test.sweep, IsWhole())
		}
		seen := map[int]bool{}
		for _, seed := range []string{"", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "20", "21", "22"} {
			t.Setenv("SWEEP_SEED", seed)
			some := Of(t, cases, 3)
			if len(some) != test.want || !slices.IsSorted(some) || len(slices.Compact(slices.Clone(some))) != test.want {
				t.Errorf("SWEEP=%s, seed %s: got %v, want %d different cases in order", test.sweep, seed, some, test.want)
			}
			if !slices.Equal(some, Of(t, cases, 3)) {
				t.Errorf("SWEEP=%s, seed %s: another sample the second time", test.sweep, seed)
			}
			for _, c := range some {
				seen[c] = true
			}
		}
		if len(seen) < 18 {
			t.Errorf("SWEEP=%s: 22 seeds reach %d of 20 cases", test.sweep, len(seen))
		}
	}
	t.Setenv("SWEEP", "")
	if got := Size(5, 3); got != 3 {
		t.Errorf("5 of 3 cases are %d", got)
	}
}

func TestWrongSettingsAreRefused(t *testing.T) {
	for name, value := range map[string]string{"SWEEP": "some", "SWEEP_SEED": "x"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SWEEP", "")
			t.Setenv(name, value)
			defer func() {
				if recover() == nil {
					t.Error("it is accepted")
				}
			}()
			Of(t, []int{1, 2}, 1)
		})
	}
}
