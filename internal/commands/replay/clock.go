package replay

import (
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

// clock is the time of the log. It has what is to happen next, and moves when that does.
type clock struct {
	// now is in nanoseconds since the epoch; 0 before anything has happened. What is read in parallel
	// may look at it.
	now   atomic.Int64
	queue queue
	// count numbers what is scheduled: of one instant, what came first is first.
	count uint64
}

// event is what happens at an instant, in nanoseconds since the epoch.
type event struct {
	at int64
	// rank orders what happens at one instant.
	rank uint64
	do   happening
}

// happening is an arrival, an end or a timer.
type happening interface{ happen() }

// arrivals have this in their rank: at the same instant responses end first, because a client that
// waits for one sends the next request later.
const arrivals = 1 << 63

// Now returns the time of the log.
func (c *clock) Now() time.Time { return time.Unix(0, c.now.Load()) }

// hasPassed reports whether an instant is over.
func (c *clock) hasPassed(at int64) bool { return at < c.now.Load() }

// schedule makes something happen, now at the earliest.
func (c *clock) schedule(at int64, isArrival bool, do happening) {
	c.count++
	e := event{max(at, c.now.Load()), c.count, do}
	if isArrival {
		e.rank |= arrivals
	}
	c.queue.push(e)
}

// step makes what is next happen.
func (c *clock) step() {
	e := c.queue.remove(0)
	c.now.Store(e.at)
	e.do.happen()
}

// next returns the instant of what is next. Something is scheduled.
func (c *clock) next() int64 { return c.queue[0].at }

// AfterFunc is [time.AfterFunc] by this clock.
func (c *clock) AfterFunc(d time.Duration, f func()) limiter.Timer {
	t := &timer{clock: c, f: f, place: stopped}
	t.Reset(d)
	return t
}

// timer calls a function at an instant of the log.
type timer struct {
	clock *clock
	f     func()
	// place is where in the queue it is, or stopped.
	place int
}

const stopped = -1

func (t *timer) happen() { t.f() }

// Stop implements [limiter.Timer].
func (t *timer) Stop() bool {
	if t.place == stopped {
		return false
	}
	t.clock.queue.remove(t.place)
	return true
}

// Reset implements [limiter.Timer].
func (t *timer) Reset(d time.Duration) bool {
	was := t.Stop()
	t.clock.schedule(t.clock.now.Load()+int64(d), false, t)
	return was
}

// queue is a heap of events. That of container/heap, of pointers, takes twice as long.
type queue []event

func (a *event) isBefore(b *event) bool {
	return a.at < b.at || a.at == b.at && a.rank < b.rank
}

// children is how many each place has.
const children = 4

// set puts an event into a place.
func (q queue) set(i int, e event) {
	q[i] = e
	if t, ok := e.do.(*timer); ok {
		t.place = i
	}
}

func (q *queue) push(e event) {
	*q = append(*q, e)
	q.up(len(*q)-1, e)
}

// up puts an event into a free place or above it.
func (q queue) up(i int, e event) {
	for i > 0 {
		parent := (i - 1) / children
		if !e.isBefore(&q[parent]) {
			break
		}
		q.set(i, q[parent])
		i = parent
	}
	q.set(i, e)
}

// remove takes the event at a place.
func (q *queue) remove(i int) event {
	all := *q
	gone, last := all[i], all[len(all)-1]
	all[len(all)-1] = event{}
	*q = all[:len(all)-1]
	if t, ok := gone.do.(*timer); ok {
		t.place = stopped
	}
	if i == len(*q) {
		return gone
	}
	for {
		least := q.leastChild(i)
		if least == 0 || !all[least].isBefore(&last) {
			break
		}
		q.set(i, all[least])
		i = least
	}
	// What was at the end may belong above a place in the middle.
	q.up(i, last)
	return gone
}

// leastChild returns the first child of a place, or 0.
func (q queue) leastChild(i int) (least int) {
	for child := i*children + 1; child <= i*children+children && child < len(q); child++ {
		if least == 0 || q[child].isBefore(&q[least]) {
			least = child
		}
	}
	return least
}
