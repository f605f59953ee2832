package main

import "slices"

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
		promise: omissions,
		// At most each of those that are let through while the store does not answer.
		concerns: func(o *outcome) bool {
			return o.charge == after && o.onError != deny && o.missing()-o.mostMissing() <= o.letThrough()
		},
		text: "A request whose check was on its way when the connection broke is let through, but not charged, and no metric tells.",
	},
	{
		promise:  responses,
		concerns: func(o *outcome) bool { return o.charge == after && slices.Contains(successions, o.fault.name) },
		text:     "When a primary is restarted or replaced, replicas are left out for a moment as if they were another primary's, and Sentinel closes connections; `on_error` then decides some requests about open windows, although there are replicas.",
	},
}

// letThrough is how many requests on_error let pass.
func (o *outcome) letThrough() (n int64) {
	for _, c := range o.concerned() {
		for _, r := range c.responses() {
			if !o.isNormal(c, &r) {
				n++
			}
		}
	}
	return n
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
