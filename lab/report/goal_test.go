package report

import (
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	for _, test := range []struct {
		goal Goal
		want string
	}{
		{Goal{What: "memory", Bound: 1.06, Spread: Spread{Median: 1.05, Least: 1, Most: 1.2}}, "| memory | ≤ 1.06 | 1.05 (1.00 to 1.20) | yes |"},
		{Goal{What: "memory", Bound: 1.06, Spread: Spread{Median: 1.061, Least: 1, Most: 1.2}}, "| memory | ≤ 1.06 | 1.06 (1.00 to 1.20) | **no** |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Spread: Spread{Median: 1.8, Least: 1.5, Most: 2}}, "| take | ≥ 1.80 | 1.80 (1.50 to 2.00) | yes |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Spread: Spread{Median: 1.5, Least: 1.5, Most: 2}}, "| take | ≥ 1.80 | 1.50 (1.50 to 2.00) | **no** |"},
		{Goal{What: "redis", Bound: 9, Unit: " µs", Spread: Spread{Median: 12.34, Least: 0.0004, Most: 1234}}, "| redis | ≤ 9.00 µs | 12.3 (0.00040 to 1234) µs | **no** |"},
		{Goal{What: "calls", Bound: 2, Spread: Spread{Median: 1.001, Least: 1, Most: 1.004}}, "| calls | ≤ 2.00 | 1.00 | yes |"},
	} {
		if lines := strings.Split(Goals([]Goal{test.goal}), "\n"); lines[2] != test.want {
			t.Errorf("%q, want %q", lines[2], test.want)
		}
	}
}
