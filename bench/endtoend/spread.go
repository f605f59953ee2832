package endtoend

import (
	"fmt"
	"slices"
)

// spread are the figures of several rounds in short.
type spread struct{ median, least, most float64 }

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return spread{(sorted[(n-1)/2] + sorted[n/2]) / 2, sorted[0], sorted[n-1]}
}

// text writes it with a format such as %.2f.
func (s spread) text(format string) string {
	return fmt.Sprintf(format+" ("+format+" to "+format+")", s.median, s.least, s.most)
}
