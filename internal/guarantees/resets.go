package main

import (
	"maps"
	"slices"
	"time"
)

// hasReset tells whether all responses of a window have to tell the same reset:
// it is the end of the window, or, of a sliding window, of the next.
func (l limit) hasReset() bool { return l.algorithm == fixedWindow || l.algorithm == slidingWindow }

// wobble is in how many windows the responses were, and how many resets those of
// one window told at most. Resets that are less than a window apart are of one
// window.
func wobble(seen []response, window time.Duration) (windows, most int64) {
	resets := map[int64]bool{}
	for _, r := range seen {
		if r.isAdmitted() || r.isRefused() {
			resets[r.reset] = true
		}
	}
	first, n := int64(0), int64(0)
	for i, reset := range slices.Sorted(maps.Keys(resets)) {
		if i == 0 || time.Duration(reset-first)*time.Second >= window {
			windows++
			first, n = reset, 0
		}
		n++
		most = max(most, n)
	}
	return windows, most
}
