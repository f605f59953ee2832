package main

import (
	"slices"
	"time"
)

// deviation is a promise that is known not to be kept, and why.
type deviation struct {
	promise promise
	// concerns tells whether that is what an outcome breaches.
	concerns func(o *outcome) bool
	text     string
}

// deviations are all that are known.
var deviations = []deviation{
	{
		promise: responses,
		concerns: func(o *outcome) bool {
			return o.charge == after && slices.Contains(successions, o.fault.name) && o.mostStrays() <= int(2*time.Second/pace)
		},
		text: "when a primary is restarted or replaced, replicas that do not follow it yet are left out as if they were another's, and Sentinel closes connections; for up to a second `on_error` then decides requests about open windows, although there are replicas.",
	},
}

// mostStrays is how many requests of one client the store did not decide although
// what decides about it was there.
func (o *outcome) mostStrays() (most int) {
	for _, c := range o.concerned() {
		n := 0
		for _, r := range c.responses() {
			if o.decides(c) == there && !o.isNormal(c, &r) {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// knownAs returns the number of the deviation that b is, from 1, or 0.
func (o *outcome) knownAs(b breach) int {
	for i, d := range deviations {
		if d.promise == b.promise && d.concerns(o) {
			return i + 1
		}
	}
	return 0
}

// unknown are the breaches that are no known deviations.
func (o *outcome) unknown() (all []breach) {
	for _, b := range o.breaches() {
		if o.knownAs(b) == 0 {
			all = append(all, b)
		}
	}
	return all
}

// known are the numbers of the known deviations that were seen.
func (o *outcome) known() (all []int) {
	for _, b := range o.breaches() {
		if n := o.knownAs(b); n > 0 && !slices.Contains(all, n) {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}
