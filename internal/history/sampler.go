package history

import (
	"sync"
	"time"
)

// sampler is the goroutine of a history that reads the counters. There is one while anybody has started
// it and not stopped it.
type sampler struct {
	mu    sync.Mutex
	users int
	stop  chan struct{}
}

// Start samples what read returns every ten seconds, until the returned function is called. While several
// have started it, the one that began counts for all: there is one goroutine. Nothing is known of the
// time in which nobody has.
func (h *History) Start(read func() Reading) (stop func()) {
	s := &h.sampler
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users++; s.users == 1 {
		s.stop = make(chan struct{})
		go h.run(read, s.stop)
	}
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.users--; s.users == 0 {
			close(s.stop)
		}
	})
}

func (h *History) run(read func() Reading, stop chan struct{}) {
	began := time.Now()
	sample := func() {
		now := time.Now()
		h.sample(Instant{Wall: now, Running: now.Sub(began)}, read())
	}
	h.begin()
	sample()
	for {
		// The steps begin at whole tens of seconds.
		timer := time.NewTimer(time.Until(time.Now().Truncate(fineStep).Add(fineStep)))
		select {
		case <-timer.C:
			sample()
		case <-stop:
			timer.Stop()
			return
		}
	}
}

// begin makes the next sample the first one.
func (h *History) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last, h.lastAt = Reading{}, Instant{}
}
