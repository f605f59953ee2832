package shardlimit

import (
	"sync/atomic"
	"time"
)

// reportInterval is how often a condition that may hold for every request is
// logged.
const reportInterval = time.Minute

// throttle thins out reports of one condition to one a reportInterval, and
// counts those it holds back. The zero value is ready for use.
type throttle struct {
	next atomic.Int64
	held atomic.Int64
}

// report tells whether the condition is to be logged at the instant at, and
// how often it was met since the last time it was, this time included.
func (t *throttle) report(at time.Time) (times int64, log bool) {
	t.held.Add(1)
	next, now := t.next.Load(), at.UnixNano()
	if now < next || !t.next.CompareAndSwap(next, now+int64(reportInterval)) {
		return 0, false
	}
	return t.held.Swap(0), true
}
