package main

import (
	"time"
)

// beyond is how much more than a limit was surely admitted at once: the most, over
// all instants, that the bucket would have to hold more than its capacity. Each
// request that was admitted counts at the worst place for that claim that its
// two instants leave. Of concurrency it is what the backend saw.
func (l limit) beyond(seen []response, peak int64) int64 {
	admitted := byEnd(those(seen, (*response).isAdmitted))
	most := int64(0)
	switch l.algorithm {
	case fixedWindow:
		most = l.mostOfWindow(admitted)
	case slidingWindow:
		most = l.mostEstimated(admitted)
	case slidingLog:
		most = l.mostLogged(admitted)
	case gcra:
		most = l.mostUndrained(admitted)
	case concurrency:
		most = peak
	}
	return max(most-l.capacity(), 0)
}

// mostOfWindow is what was admitted in one window, which the resets tell apart.
func (l limit) mostOfWindow(admitted []response) (most int64) {
	of := map[int64]int64{}
	for _, r := range admitted {
		of[r.reset]++
		most = max(most, of[r.reset])
	}
	return most
}

// mostLogged is what was admitted within a window's length.
func (l limit) mostLogged(admitted []response) (most int64) {
	for i := range admitted {
		from := admitted[i].begun
		most = max(most, count(admitted, func(r *response) bool {
			return !r.begun.Before(from) && r.ended.Before(from.Add(l.window))
		}))
	}
	return most
}

// mostUndrained is what was admitted in some time and cannot have drained in it.
func (l limit) mostUndrained(admitted []response) (most int64) {
	for i := range admitted {
		from, n := admitted[i].begun, int64(0)
		for j := range admitted {
			if !admitted[j].begun.Before(from) {
				n++
				most = max(most, n-int64(l.drained(admitted[j].ended.Sub(from))))
			}
		}
	}
	return most
}

// drained is how much drains of a gcra bucket in some time, which is not empty
// meanwhile.
func (l limit) drained(d time.Duration) float64 {
	return max(d.Seconds(), 0) / l.window.Seconds() * float64(l.events)
}

// mostEstimated is the most that a sliding window must have added up: what was
// admitted in a window of the clock, and the part of the one before that still
// overlaps when the last of that is admitted.
func (l limit) mostEstimated(admitted []response) (most int64) {
	for i := range admitted {
		until := admitted[i].ended
		start, earlier := l.windowOf(until), int64(0)
		now := count(admitted, func(r *response) bool { return !r.begun.Before(start) && !r.ended.After(until) })
		if now > 0 {
			earlier = count(admitted, func(r *response) bool {
				return !r.begun.Before(start.Add(-l.window)) && r.ended.Before(start)
			})
		}
		most = max(most, now+int64(l.overlap(until)*float64(earlier)))
	}
	return most
}

// windowOf is when the window of the clock began in which an instant is.
func (l limit) windowOf(t time.Time) time.Time {
	micros := t.UnixMicro()
	return time.UnixMicro(micros - micros%l.window.Microseconds())
}

// overlap is the part of the window before that still counts.
func (l limit) overlap(t time.Time) float64 {
	return 1 - t.Sub(l.windowOf(t)).Seconds()/l.window.Seconds()
}
