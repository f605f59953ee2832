package libraries

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// sample is what one limiter did in one round.
type sample struct {
	// rate is decisions per second.
	rate float64
	// client and server are microseconds of CPU time per decision.
	client, server float64
	// allocations, their bytes and calls are per decision too.
	allocations, bytes, calls float64
	// p50 and p99 are milliseconds.
	p50, p99 float64
}

// measure loads l, which knows every client, once.
func measure(l *limiter, s scene, load *load, server *redistest.Server, length time.Duration) (sample, error) {
	d, err := l.limit(s.events())
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
	if _, err := load.run(d, l.settled, length/10); err != nil {
		return sample{}, err
	}
	// What the limiter before has left is not this one's to clean up.
	runtime.GC()

	// The program's own usage is read last and first, so that reading the
	// server's is not part of it.
	serverBefore, err := readServer(server, l.kind.commands)
	if err != nil {
		return sample{}, err
	}
	before, err := readClient()
	if err != nil {
		return sample{}, err
	}
	elapsed, err := load.run(d, l.settled, length)
	if err != nil {
		return sample{}, err
	}
	after, err := readClient()
	if err != nil {
		return sample{}, err
	}
	serverAfter, err := readServer(server, l.kind.commands)
	if err != nil {
		return sample{}, err
	}

	decisions, admitted := load.counts()
	if decisions == 0 {
		return sample{}, errors.New("no decision in time")
	}
	if want := s.admitted(decisions); admitted != want {
		return sample{}, fmt.Errorf("%d of %d decisions admit, want %d", admitted, decisions, want)
	}
	n, latencies := float64(decisions), load.quantiles(0.5, 0.99)
	return sample{
		rate:        n / elapsed.Seconds(),
		client:      micros(after.cpu-before.cpu) / n,
		server:      micros(serverAfter.cpu-serverBefore.cpu) / n,
		allocations: float64(after.allocations-before.allocations) / n,
		bytes:       float64(after.bytes-before.bytes) / n,
		calls:       float64(serverAfter.calls-serverBefore.calls) / n,
		p50:         micros(latencies[0]) / 1e3,
		p99:         micros(latencies[1]) / 1e3,
	}, nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
