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
