package wire

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestFullPipelineOfChargesLeavesAtOnce: otherwise a lane could send no more than a pipeline a
// pause, and its queue would overflow although the server has time.
func TestFullPipelineOfChargesLeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &Lane{queue: newQueue(queueLimit), batch: maxBatch, persistent: true, life: t.Context()}
		for _, step := range []struct {
			more, calls int
			after       time.Duration
		}{{maxBatch + 1, maxBatch, 0}, {maxBatch - 1, maxBatch, 0}, {maxBatch - 1, maxBatch - 1, linger}} {
			for range step.more {
				redistest.Must(t, l.queue.put(new(Call)))
			}
			start := time.Now()
			if batch, _ := l.gather(nil); len(batch) != step.calls || time.Since(start) != step.after {
				t.Errorf("%d calls after %v, want %d after %v", len(batch), time.Since(start), step.calls, step.after)
			}
		}
	})
}

// TestQuickestOutlastsABusyPeriod: what counts is the least time of this period and of the one
// before, not of an earlier one.
func TestQuickestOutlastsABusyPeriod(t *testing.T) {
	var q quickest
	at := time.Now()
	for i, step := range []struct {
		after, took, least time.Duration
	}{
		{0, 5 * time.Millisecond, 5 * time.Millisecond},
		{quickestPeriod / 2, time.Millisecond, time.Millisecond},
		{0, 9 * time.Millisecond, time.Millisecond},
		{quickestPeriod / 2, 8 * time.Millisecond, time.Millisecond},
		{quickestPeriod / 2, 7 * time.Millisecond, time.Millisecond},
		{quickestPeriod / 2, 9 * time.Millisecond, 7 * time.Millisecond},
		{2 * quickestPeriod, 20 * time.Millisecond, 20 * time.Millisecond},
	} {
		at = at.Add(step.after)
		q.note(step.took, at)
		if least := q.least(); least != step.least {
			t.Errorf("step %d: %v, want %v", i, least, step.least)
		}
	}
}
