package main

import (
	"slices"
	"time"
)

// latencies are how long concerned clients waited, in order.
func (o *outcome) latencies(p phase) (all []time.Duration) {
	for _, c := range o.concerned() {
		for _, r := range o.seen(c, p) {
			all = append(all, r.ended.Sub(r.begun))
		}
	}
	slices.Sort(all)
	return all
}

// added is by how much a quantile was higher while the fault lasted.
func (o *outcome) added(q float64) time.Duration {
	return quantile(o.latencies(meanwhile), q) - quantile(o.latencies(earlier), q)
}

// quantile is that of durations in order: the least of which at least so many are
// no longer.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
