package report

import (
	"slices"
	"strconv"
	"testing"
)

func TestOf(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   Spread
	}{
		{nil, Spread{}},
		{[]float64{3}, Spread{3, 3, 3}},
		{[]float64{3, 1, 2}, Spread{2, 1, 3}},
		{[]float64{4, 1, 2, 8}, Spread{3, 1, 8}},
		{[]float64{3, 1, 2, 5, 4}, Spread{3, 1, 5}},
	} {
		if got := SpreadOf(c.values); got != c.want {
			t.Errorf("%v: %v, want %v", c.values, got, c.want)
		}
	}
}

func TestOfKeepsTheOrderOfRounds(t *testing.T) {
	values := []float64{3, 1, 2}
	if SpreadOf(values); !slices.Equal(values, []float64{3, 1, 2}) {
		t.Errorf("the rounds are %v", values)
	}
}

func TestText(t *testing.T) {
	for _, c := range []struct {
		spread       Spread
		format, want string
	}{
		{Spread{1.234, 1, 2}, "%.2f", "1.23 (1.00 to 2.00)"},
		{Spread{1.234, 1.23, 1.24}, "%.2f", "1.23 (1.23 to 1.24)"},
		{Spread{1.234, 1.23, 1.24}, "%.1f", "1.2"},
		{Spread{0, -1, 1}, "%.0f", "0 (-1 to 1)"},
		{Spread{}, "%.0f", "0"},
	} {
		if got := c.spread.Text(c.format); got != c.want {
			t.Errorf("%v as %s is %q, want %q", c.spread, c.format, got, c.want)
		}
	}
}

func TestAs(t *testing.T) {
	percent := func(f float64) string { return strconv.Itoa(int(100*f)) + " %" }
	if got, want := (Spread{0.5, 0.25, 0.75}).As(percent), "50 % (25 % to 75 %)"; got != want {
		t.Errorf("the text is %q, want %q", got, want)
	}
}
