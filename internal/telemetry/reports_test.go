package telemetry

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestThrottleReportsOnceAnInterval(t *testing.T) {
	var th LogThrottle
	start := time.Unix(1_000_000, 0)
	for i, step := range []struct {
		after time.Duration
		times int64
		log   bool
	}{
		{0, 1, true},
		{0, 0, false},
		{time.Second, 0, false},
		{ReportInterval - 1, 0, false},
		{ReportInterval, 4, true},
		{ReportInterval + 1, 0, false},
		{10 * ReportInterval, 2, true},
		{0, 0, false}, // a clock that was set back
	} {
		if times, log := th.Report(start.Add(step.after)); times != step.times || log != step.log {
			t.Errorf("step %d: report returns %d, %v, want %d, %v", i, times, log, step.times, step.log)
		}
	}
}

func TestThrottleReportsOnceOfManyAtATime(t *testing.T) {
	var (
		th      LogThrottle
		reports atomic.Int64
		counted atomic.Int64
		wg      sync.WaitGroup
	)
	at := time.Unix(1_000_000, 0)
	for range 100 {
		wg.Go(func() {
			if times, log := th.Report(at); log {
				reports.Add(1)
				counted.Add(times)
			}
		})
	}
	wg.Wait()
	times, log := th.Report(at.Add(ReportInterval))
	if reports.Load() != 1 || !log || counted.Load()+times != 101 {
		t.Errorf("%d reports counted %d, and the next %d, %v; want 1 report and 101 in all", reports.Load(), counted.Load(), times, log)
	}
}
