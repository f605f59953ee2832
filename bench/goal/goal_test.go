package goal

import (
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	for _, test := range []struct {
		goal Goal
		want string
	}{
		{Goal{What: "memory", Bound: 1.06, Median: 1.05, Min: 1, Max: 1.2}, "| memory | ≤ 1.06 | 1.05 (1.00 to 1.20) | yes |"},
		{Goal{What: "memory", Bound: 1.06, Median: 1.061, Min: 1, Max: 1.2}, "| memory | ≤ 1.06 | 1.06 (1.00 to 1.20) | **no** |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Median: 1.8, Min: 1.5, Max: 2}, "| take | ≥ 1.80 | 1.80 (1.50 to 2.00) | yes |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Median: 1.5, Min: 1.5, Max: 2}, "| take | ≥ 1.80 | 1.50 (1.50 to 2.00) | **no** |"},
		{Goal{What: "redis", Bound: 9, Unit: " µs", Median: 12.34, Min: 0.0004, Max: 1234}, "| redis | ≤ 9.00 µs | 12.3 µs (0.00040 to 1234) | **no** |"},
	} {
		if lines := strings.Split(Table([]Goal{test.goal}), "\n"); lines[2] != test.want {
			t.Errorf("%q, want %q", lines[2], test.want)
		}
	}
}
