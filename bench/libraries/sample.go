package main

import (
	"fmt"
	"runtime"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// scene is the circumstances of a comparison.
type scene struct {
	goroutines int
	// refused is set if nothing is admitted; otherwise everything is.
	refused bool
}

// The limits of the scenes, in events an hour: one that is used up by the first
// event, and one that is not used up.
const (
	scarce = 1
	plenty = 1_000_000
)

func (s scene) String() string {
	what := "admitted"
	if s.refused {
		what = "refused"
	}
	return fmt.Sprintf("%d, %s", s.goroutines, what)
}

// sample is what one limiter did in one round.
type sample struct {
	// rate is decisions per second.
	rate float64
	// client and server are CPU time per decision.
	client, server time.Duration
	p50, p99       time.Duration
}

// measure loads l with a server that knows every client, once.
func measure(l *limiter, s scene, load *load, server *redistest.Server, length time.Duration) (sample, error) {
	events, admitted := plenty, 1
	if s.refused {
		events, admitted = scarce, 0
	}
	d, err := l.limit(events)
	if err != nil {
		return sample{}, err
	}
	if err := empty(server); err != nil {
		return sample{}, err
	}
	if err := touch(d); err != nil {
		return sample{}, err
	}
	// All connections are made, and the batches are what they will be.
	if _, err := load.run(d, length/10); err != nil {
		return sample{}, err
	}
	// What the limiter before has left is not this one's to clean up.
	runtime.GC()

	clientBefore, serverBefore, err := cpuTimes(server)
	if err != nil {
		return sample{}, err
	}
	o, err := load.run(d, length)
	if err != nil {
		return sample{}, err
	}
	clientAfter, serverAfter, err := cpuTimes(server)
	if err != nil {
		return sample{}, err
	}
	if want := admitted * o.decisions; o.admitted != want {
		return sample{}, fmt.Errorf("%d of %d decisions admit, want %d", o.admitted, o.decisions, want)
	}
	return sample{
		rate:   float64(o.decisions) / o.elapsed.Seconds(),
		client: (clientAfter - clientBefore) / time.Duration(o.decisions),
		server: (serverAfter - serverBefore) / time.Duration(o.decisions),
		p50:    o.quantile(0.5),
		p99:    o.quantile(0.99),
	}, nil
}

// cpuTimes returns the processor time, user and system, that this program and
// the server have used.
func cpuTimes(s *redistest.Server) (client, server time.Duration, err error) {
	if server, err = s.CPU(); err != nil {
		return 0, 0, err
	}
	var used syscall.Rusage
	if err = syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0, 0, fmt.Errorf("get the used processor time: %w", err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), server, nil
}
