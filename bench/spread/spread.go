// Package spread tells what several rounds measured, in short.
package spread

import (
	"fmt"
	"slices"
)

// Spread is some rounds' values of one figure.
type Spread struct{ Median, Least, Most float64 }

// Of returns that of some values. It is zero if there are none.
func Of(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return Spread{Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Least: sorted[0], Most: sorted[n-1]}
}

// Text writes it with a format such as %.2f.
func (s Spread) Text(format string) string {
	return s.As(func(f float64) string { return fmt.Sprintf(format, f) })
}

// As writes it as "median (min to max)". What is the same in all rounds, to the
// digits that are written, stands alone.
func (s Spread) As(write func(float64) string) string {
	median, least, most := write(s.Median), write(s.Least), write(s.Most)
	if least == most {
		return median
	}
	return median + " (" + least + " to " + most + ")"
}
