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
	// before is the history that the primary had until it was changed, as when it
	// restarts, and forgiven is until when replicas may have that still.
	before   []string
	forgiven time.Time
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
	if !shareHistory(o.history, i.history()) {
		o.before, o.forgiven, o.samples = o.history, at.Add(keep/2), nil
	}
	o.history = i.history()
	for len(o.samples) > 1 && at.Sub(o.samples[1].at) > keep {
		o.samples = o.samples[1:]
	}
	o.samples = append(o.samples, sample{at, i.offset()})
}

// age is how old the data of a replica is.
type age struct {
	// least is that it is at least so old.
	least time.Duration
	// isKnown is set if it is not older.
	isKnown bool
}

// ageOf tells how old the data of a replica is, if that can be said. While the
// primary does not answer nothing is added to it.
func (o *offsets) ageOf(i info) (a age, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.samples) == 0 || i.offset() < 0 {
		return age{}, false
	}
	last := o.samples[len(o.samples)-1]
	// In a failover a replica may follow the new primary before that is known
	// here: it tells the old history as well.
	if !shareHistory(o.history, i.history()) {
		return age{foreign, true}, !shareHistory(o.before, i.history()) || last.at.After(o.forgiven)
	}
	has := i.offset()
	for n := len(o.samples) - 1; n >= 0; n-- {
		if o.samples[n].offset <= has {
			return age{last.at.Sub(o.samples[n].at), true}, true
		}
	}
	return age{last.at.Sub(o.samples[0].at), false}, true
}

// noHistory is what servers say that have had one history only.
const noHistory = "0000000000000000000000000000000000000000"

// shareHistory tells whether two servers' offsets are about the same.
func shareHistory(one, other []string) bool {
	return slices.ContainsFunc(one, func(id string) bool { return id != noHistory && id != "" && slices.Contains(other, id) })
}

// foreign is the age of a replica's data that is not its primary's.
const foreign = time.Duration(1<<63 - 1)

// unknownLag is the lag of a replica of which nothing is known.
const unknownLag = time.Duration(-1)
