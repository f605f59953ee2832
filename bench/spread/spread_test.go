package spread

import (
	"slices"
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
		if got := Of(c.values); got != c.want {
			t.Errorf("%v: %v, want %v", c.values, got, c.want)
		}
	}
}

func TestOfKeepsTheOrderOfRounds(t *testing.T) {
	values := []float64{3, 1, 2}
	if Of(values); !slices.Equal(values, []float64{3, 1, 2}) {
		t.Errorf("the rounds are %v", values)
	}
}

func TestText(t *testing.T) {
	if got, want := (Spread{1.234, 1, 2}).Text("%.2f"), "1.23 (1.00 to 2.00)"; got != want {
		t.Errorf("the text is %q, want %q", got, want)
	}
}
