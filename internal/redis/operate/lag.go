package operate

import (
	"slices"
	"sync"
	"time"
)

// offsets are the positions of a primary in its history over time. They date the
// data of a replica.
type offsets struct {
	mu      sync.Mutex
	history history
	samples []sample
	// before is the primary's previous history, as before a restart; until
	// forgiven, replicas may still have it.
	before   history
	forgiven time.Time
	// isAway is set while the primary does not answer, or is none.
	isAway bool
}

type sample struct {
	at     time.Time
	offset int64
}

// note adds a primary's position at an instant. It keeps one sample that is older
// than keep.
func (o *offsets) note(i info, at time.Time, keep time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.samples) > 0 && !i.history().has(o.samples[len(o.samples)-1].offset, o.history) {
		o.before, o.forgiven, o.samples = o.history, at.Add(keep/2), nil
	}
	o.history, o.isAway = i.history(), false
	for len(o.samples) > 1 && at.Sub(o.samples[1].at) > keep {
		o.samples = o.samples[1:]
	}
	o.samples = append(o.samples, sample{at, i.offset()})
}

// leave notes that the primary does not answer.
func (o *offsets) leave() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.isAway = true
}

const (
	// foreign is the lag of a replica with another primary's data.
	foreign = time.Duration(1<<63 - 1)
	// unsynced is the lag of a replica with other data than the primary's whose link is
	// down, as it is while it copies the primary's for the first time.
	unsynced = foreign - 1
)

// lagOf returns the least lag of a replica, if it can be known. The lag does not
// grow while the primary does not answer.
func (o *offsets) lagOf(i info) (lag time.Duration, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	has := i.offset()
	if len(o.samples) == 0 || has < 0 {
		return 0, false
	}
	last := o.samples[len(o.samples)-1]
	if history := i.history(); !o.history.has(has, history) {
		if lag = foreign; i.isDetached() {
			lag = unsynced
		}
		// In a failover a replica may follow the new primary before this process knows
		// it: it then has the previous history as well. While its primary answers, it was
		// promoted without this process, or follows one that was.
		isKnown := !o.history.shares(history) || !o.isAway
		return lag, isKnown && (!o.before.shares(history) || last.at.After(o.forgiven))
	}
	for _, s := range slices.Backward(o.samples) {
		if s.offset <= has {
			return last.at.Sub(s.at), true
		}
	}
	return last.at.Sub(o.samples[0].at), true
}
