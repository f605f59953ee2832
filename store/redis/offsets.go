package redis

import (
	"slices"
	"sync"
	"time"
)

// offsets are how much a primary had written, and when: what tells how old the
// data of a replica is.
type offsets struct {
	mu      sync.Mutex
	history []string
	samples []sample
}

type sample struct {
	at     time.Time
	offset int64
}

// note notes that a primary has written so much of its history at an instant. It
// forgets what is older than keep, apart from one.
func (o *offsets) note(i info, at time.Time, keep time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if id := i["master_replid"]; !slices.Contains(o.history, id) {
		o.samples = nil
	}
	o.history = i.history()
	for len(o.samples) > 1 && at.Sub(o.samples[1].at) > keep {
		o.samples = o.samples[1:]
	}
	o.samples = append(o.samples, sample{at, i.offset()})
}

// lag is how old the data of a replica is, at most; known tells whether that can
// be said. While the primary does not answer nothing is added to it.
func (o *offsets) lag(i info) (lag time.Duration, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.samples) == 0 || i.offset() < 0 {
		return 0, false
	}
	if !slices.Contains(o.history, i["master_replid"]) {
		// It has another primary.
		return foreign, true
	}
	has := i.offset()
	last := o.samples[len(o.samples)-1]
	if has >= last.offset {
		return 0, true
	}
	for n := len(o.samples) - 1; n >= 0; n-- {
		if o.samples[n].offset <= has {
			return last.at.Sub(o.samples[n].at), true
		}
	}
	return last.at.Sub(o.samples[0].at), true
}

// foreign is the lag of a replica that has nothing of its primary.
const foreign = time.Duration(1<<63 - 1)
