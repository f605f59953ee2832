// Package simulation runs two Caddys, a primary, a lagging replica and a network that loses
// and delays, in virtual time: one thread, one random source, so that a seed is a history
// that happens again in each run. The core of the ledger decides and the scripts of the
// store count as in production; only the driver is another one, without goroutines.
//
// A [Run] checks the promises of the documents at every step.
package simulation

import (
	"container/heap"
	"math/rand/v2"
)

// world has the time, and what happens next. Instants are microseconds.
type world struct {
	rng   *rand.Rand
	now   int64
	queue events
	count int64
}

type event struct {
	at, number int64
	happen     func()
}

// events are a heap by time; of one instant, in the order in which they were planned.
type events []event

func (q events) Len() int      { return len(q) }
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q events) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].number < q[j].number
}
func (q *events) Push(x any) { *q = append(*q, x.(event)) }
func (q *events) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func newWorld(seed uint64) *world {
	return &world{rng: rand.New(rand.NewPCG(seed, 1)), now: 1}
}

// after plans an event.
func (w *world) after(d int64, happen func()) {
	w.count++
	heap.Push(&w.queue, event{w.now + max(d, 0), w.count, happen})
}

// run lets things happen until the end, or until nothing does.
func (w *world) run(end int64) {
	for len(w.queue) > 0 && w.queue[0].at <= end {
		next := heap.Pop(&w.queue).(event)
		w.now = next.at
		next.happen()
	}
}

func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

// between returns a random duration.
func (w *world) between(least, most int64) int64 { return least + w.rng.Int64N(most-least+1) }

func oneOf[T any](w *world, all ...T) T { return all[w.rng.IntN(len(all))] }
