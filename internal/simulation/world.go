// Package simulation runs one or two Caddys, a primary, a lagging replica and a network that loses
// and delays, in the virtual time of a bubble of testing/synctest. Package ledger itself serves, settles,
// retries and reloads, and the scripts of the store count, as in production; the network between them is simulated.
//
// A [Run] is the history of a seed, and checks the promises of the documents at every step. The fate of a message and
// the next step of a client depend on the seed and on the message or request, but not on other events of the same
// instant, so a history hardly depends on the order in which goroutines run.
package simulation

import (
	"math/rand/v2"
	"sync"
	"time"
)

// world has the time, the lock and the random numbers of a history.
type world struct {
	// mu is held by all simulated code. Callers of a ledger hold it too, unless the call waits.
	mu    sync.Mutex
	seed  uint64
	began time.Time
	// rng decides at the beginning, before anything happens.
	rng *stream
}

func newWorld(seed uint64) *world {
	w := &world{seed: seed, began: time.Now()}
	w.rng = w.stream("world", 0)
	return w
}

// now is the age of the world in microseconds, from 1 on.
func (w *world) now() int64 { return time.Since(w.began).Microseconds() + 1 }

// epoch is when the world began, in microseconds since 1970.
func (w *world) epoch() int64 { return w.began.UnixMicro() - 1 }

// after makes f happen later, with mu held.
func (w *world) after(d time.Duration, f func()) *time.Timer {
	return time.AfterFunc(d, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		f()
	})
}

// stream is a source of random numbers.
type stream struct{ *rand.Rand }

// stream returns the numbers of the nth thing with a name.
func (w *world) stream(name string, n int) *stream {
	hash := uint64(14695981039346656037)
	for i := range len(name) {
		hash = (hash ^ uint64(name[i])) * 1099511628211
	}
	return &stream{rand.New(rand.NewPCG(w.seed, hash+uint64(n)*0x9e3779b97f4a7c15))} //nolint:gosec // not negative
}

func (s *stream) chance(p float64) bool { return p > 0 && s.Float64() < p }

// between returns a random duration, which is hardly ever the same twice.
func (s *stream) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.Int64N(int64(most-least)+1))
}

func oneOf[T any](s *stream, all ...T) T { return all[s.IntN(len(all))] }
