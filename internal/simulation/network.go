package simulation

import (
	"context"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// servers are a primary and its replica. Instants are by their clock, in microseconds since 1970.
type servers interface {
	// run runs an operation at the primary, at an instant.
	run(op algorithm.Operation, r store.Request, now int64) store.State
	// look reads the bucket, at the replica if that is asked for.
	look(r store.Request, now int64, replica bool) store.State
	// empty removes the bucket.
	empty(r store.Request, now int64)
	// replicate makes the replica have what the primary has had until an instant.
	replicate(until int64)
}

// Servers makes the servers of a history, whose clock is so far ahead.
type Servers func(skew time.Duration) servers

// network is the way of processes to the servers. Each message takes a random time; some are
// lost, and in an outage none arrives.
type network struct {
	*world
	servers servers
	// skew is how far the primary's clock is ahead.
	skew time.Duration
	// lag is how far the replica is behind.
	lag time.Duration
	// lossy is the part of messages that are lost, each way.
	lossy float64
	// slow is the part of messages that take long, up to more than any timeout.
	slow float64
	// flaky is the part of writes that the primary does not execute, and says so.
	flaky float64
	// down: no server answers; away: the primary does not.
	down, away bool
	// faults is how many faults have begun.
	faults int
	// ran is told of each write that the primary executes.
	ran func(op algorithm.Operation, r *store.Request, st *store.State)
	// sent counts the messages of each name.
	sent map[string]int
}

var (
	errDown = fmt.Errorf("%w: simulated outage", store.ErrNotExecuted)
	errLost = fmt.Errorf("%w: simulated loss", store.ErrUncertain)
	// errRefused is how a take ends that was refused, and so has spent nothing.
	errRefused = fmt.Errorf("%w: it was refused", store.ErrNotExecuted)

	// The errors of a client that has left: of a take that was not sent, or was.
	errLeftBefore = store.NotExecuted(context.Canceled)
	errLeftSince  = fmt.Errorf("%w: %w", store.ErrUncertain, context.Canceled)
)

const checkTimeout = 50 * time.Millisecond

// message is a call about one bucket on its way to a server, and its answer on the way back.
type message struct {
	*network
	rng *stream
	r   store.Request
	// timer is when nobody waits for the answer any more.
	timer *time.Timer
	reply func(st store.State)
}

// send begins a message, which gets one answer: with that error if it takes too long.
func (n *network) send(from string, op algorithm.Operation, r *store.Request, timeout time.Duration, late error, reply func(st store.State)) *message {
	name := from + " " + op.String() + " " + r.ID + " " + keyOf(r)
	n.sent[name]++
	m := &message{network: n, rng: n.stream(name, n.sent[name]), r: *r, reply: reply}
	// Events of one instant happen in a random order, so no two timers may end at the same instant.
	timeout += m.rng.between(0, time.Millisecond)
	m.timer = n.after(timeout, func() { m.reply(store.State{Err: late}) })
	return m
}

// answer gives the answer, unless it is too late.
func (m *message) answer(st store.State) {
	if m.timer.Stop() {
		m.reply(st)
	}
}

// travels makes f happen once the message, or its answer, has arrived.
func (m *message) travels(f func()) {
	d := m.rng.between(20*time.Microsecond, 800*time.Microsecond)
	if m.rng.chance(m.slow) {
		d = m.rng.between(time.Millisecond, 100*time.Millisecond)
	}
	m.after(d, f)
}

func (n *network) clock() int64 { return n.serverTime(n.now()) }

// serverTime is an instant of the world by the clock of the primary.
func (n *network) serverTime(at int64) int64 { return n.epoch() + n.skew.Microseconds() + at }

// write runs an operation at the primary, and gives the answer or an error to reply, once. ended, if it is not nil, is
// told how a take has ended.
func (n *network) write(from string, op algorithm.Operation, r *store.Request, ended func(err error), reply func(st store.State)) {
	timeout := 20 * checkTimeout
	if op == opTake {
		// Somebody waits for it.
		timeout = checkTimeout
	}
	if ended == nil {
		ended = func(error) {}
	}
	m := n.send(from, op, r, timeout, errLost, reply)
	refuse := func() {
		m.travels(func() {
			ended(errDown)
			m.answer(store.State{Err: errDown})
		})
	}
	switch {
	case n.down || n.away:
		refuse()
		return
	case m.rng.chance(n.lossy):
		n.after(20*checkTimeout, func() { ended(errLost) })
		return
	}
	m.travels(func() {
		if n.down || n.away || m.rng.chance(n.flaky) {
			// It was refused on arrival.
			refuse()
			return
		}
		st := n.servers.run(op, m.r, n.clock())
		if st.Err == nil {
			n.ran(op, &m.r, &st)
		}
		if m.rng.chance(n.lossy) {
			n.after(20*checkTimeout, func() { ended(errLost) })
			return
		}
		end := st.Err
		if end == nil && !st.Allowed {
			end = errRefused
		}
		m.travels(func() {
			ended(end)
			m.answer(st)
		})
	})
}

// check asks whether a request fits: the replica, or the primary if that is asked for, or if the
// replica shows no open window.
func (n *network) check(from string, r *store.Request, reply func(st store.State)) {
	m := n.send(from, algorithm.Check, r, checkTimeout, errDown, reply)
	m.travels(func() {
		if st, ok := m.checked(); ok && !m.rng.chance(n.lossy) {
			m.travels(func() { m.answer(st) })
		}
	})
}

func (m *message) checked() (st store.State, ok bool) {
	if m.down || m.rng.chance(m.lossy) {
		return st, false
	}
	m.servers.replicate(m.clock() - m.lag.Microseconds())
	if !m.r.Primary || m.away {
		if st = m.servers.look(m.r, m.clock(), true); st.Err == nil && st.Reset != 0 {
			st.Replica = true
			return st, true
		}
	}
	if m.away {
		return st, false
	}
	return m.servers.run(algorithm.Check, m.r, m.clock()), true
}

// empty empties a bucket at the primary.
func (n *network) empty(from string, r *store.Request, reply func(st store.State)) {
	m := n.send(from, algorithm.Peek, r, time.Hour, errLost, reply)
	m.travels(func() {
		if n.down || n.away {
			m.answer(store.State{Err: errDown})
			return
		}
		n.servers.empty(*r, n.clock())
		m.travels(func() { m.answer(store.State{}) })
	})
}
