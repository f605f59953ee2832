package simulation

import (
	"context"
	"math"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
)

// repeat makes something happen again and again, after a pause of at most that long: it calls then when it is over.
func (s *Run) repeat(happens bool, most time.Duration, name string, f func(rng *stream, then func())) {
	if !happens {
		return
	}
	rng := s.stream(name, 0)
	var next func()
	next = func() {
		s.after(rng.between(0, most), func() {
			if s.now() < s.end && s.failure == "" {
				f(rng, next)
			}
		})
	}
	next()
}

// reload makes a process reload its config.
func (s *Run) reload(rng *stream, then func()) {
	p := s.caddys[rng.IntN(len(s.caddys))]
	s.note("%s reloads", p.name)
	p.reload()
	then()
}

// The faults.
const (
	down = iota
	away
	lossy
	slow
	flaky
	faultKinds
)

// fault begins one, for a while.
func (s *Run) fault(rng *stream, then func()) {
	length := rng.between(10*time.Millisecond, oneOf(rng, 200*time.Millisecond, 3*time.Second, s.window()))
	kind := rng.IntN(faultKinds)
	if s.sequential && rng.chance(0.5) {
		kind = flaky
	}
	n := s.net
	n.faults++
	switch kind {
	case down:
		n.down = true
	case away:
		n.away = true
	case lossy:
		n.lossy = oneOf(rng, 0.02, 0.2)
	case slow:
		// A late message may be refused.
		n.slow, n.flaky = oneOf(rng, 0.05, 0.5), oneOf(rng, 0, 0.2)
	case flaky:
		n.flaky = oneOf(rng, 0.02, 0.2, 0.5)
	}
	s.note("down %v, away %v, lossy %v, slow %v, flaky %v for %v", n.down, n.away, n.lossy, n.slow, n.flaky, length)
	s.after(length, func() {
		n.heal()
		s.note("well again")
		then()
	})
}

// isWell reports whether nothing fails.
func (n *network) isWell() bool {
	return !n.down && !n.away && n.lossy == 0 && n.slow == 0 && n.flaky == 0
}

// heal ends a fault.
func (n *network) heal() { n.down, n.away, n.lossy, n.slow, n.flaky = false, false, 0, 0, 0 }

// restart ends a process, with or without delivering what is left, and begins another one.
func (s *Run) restart(rng *stream, then func()) {
	i, isKilled := rng.IntN(len(s.caddys)), rng.chance(0.5)
	p := s.caddys[i]
	s.note("%s restarts, killed %v", p.name, isKilled)
	s.caddys[i] = s.newProcess(p.name, rng)
	s.former = append(s.former, p)
	for _, c := range s.clients {
		c.forget(p)
	}
	p.exit(isKilled)
	then()
}

// olderAnswers is the part of a window, as its divisor, for which a process that had a client to
// itself relies on an older answer once.
const olderAnswers = 10

// reset lets an operator reset a client.
func (s *Run) reset(rng *stream, then func()) {
	c := s.clients[rng.IntN(len(s.clients))]
	c.reset = math.MaxInt64
	v := s.caddys[rng.IntN(len(s.caddys))].view
	go func() {
		_ = v.Reset(context.Background(), c.some())
		s.mu.Lock()
		defer s.mu.Unlock()
		s.note("%s is reset", c.key)
		// Replicas and other processes see it later, and what runs is charged anew.
		c.reset = s.now() + (s.net.lag + 2*ledger.DefaultTrust + 2*longestService + s.window()/olderAnswers).Microseconds()
		if s.takes || s.mixed {
			// A cost taken before the reset and refunded after it is refunded to this window too.
			c.reset += s.window().Microseconds()
		}
		c.admitted, c.truth = nil, nil
		clear(c.resets)
		then()
	}()
}
