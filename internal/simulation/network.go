package simulation

import (
	"fmt"
	"maps"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// epoch is when a simulation begins, in microseconds since 1970.
const epoch = 1_700_000_000_000_000

const (
	opCharge   = algorithm.Charge
	opTake     = algorithm.Take
	opRefund   = algorithm.Refund
	opPenalize = algorithm.Penalize
)

// servers are a primary and its replica.
type servers interface {
	// run runs an operation at the primary, at an instant of its clock.
	run(op algorithm.Operation, r store.Request, now int64) store.State
	// look reads the bucket, at the replica if that is asked for.
	look(r store.Request, now int64, replica bool) store.State
	// empty removes the bucket.
	empty(r store.Request, now int64)
	// replicate makes the replica have what the primary has had until an instant.
	replicate(until int64)
}

// Servers makes the servers of a history, whose clock is so many microseconds ahead.
type Servers func(w *world, skew int64) servers

// network is the way of a process to the servers. Each message takes a random time; some are
// lost, and in an outage none arrives.
type network struct {
	*world
	servers servers
	// skew is how far the primary's clock is ahead.
	skew int64
	// lag is how far the replica is behind.
	lag int64
	// lossy is the part of messages that are lost, each way.
	lossy float64
	// slow is the part of messages that take long, up to more than any timeout.
	slow float64
	// flaky is the part of writes that the primary does not execute, and says so.
	flaky float64
	// down: no server answers; away: the primary does not.
	down, away bool
	// ran is told of each write that the primary executes.
	ran func(op algorithm.Operation, r *store.Request, st *store.State)
}

var (
	errDown = fmt.Errorf("%w: simulated outage", store.ErrNotExecuted)
	errLost = fmt.Errorf("%w: simulated loss", store.ErrUncertain)
)

func (n *network) travel() int64 {
	if n.chance(n.slow) {
		return n.between(1000, 100_000)
	}
	return n.between(20, 800)
}

func (n *network) clock() int64 { return epoch + n.skew + n.now }

// write runs an operation at the primary, and gives the answer or an error to reply, once.
func (n *network) write(op algorithm.Operation, r store.Request, reply func(st store.State)) {
	answered := false
	answer := func(st store.State) {
		if !answered {
			answered = true
			reply(st)
		}
	}
	if n.down || n.away {
		n.after(n.travel(), func() { answer(store.State{Err: errDown}) })
		return
	}
	timeout := int64(checkTimeout)
	if op != opTake {
		// Nobody waits for it.
		timeout *= 20
	}
	n.after(timeout, func() { answer(store.State{Err: errLost}) })
	if n.chance(n.lossy) {
		return
	}
	n.after(n.travel(), func() {
		if n.down || n.away || n.chance(n.flaky) {
			// It was refused on arrival.
			n.after(n.travel(), func() { answer(store.State{Err: errDown}) })
			return
		}
		st := n.servers.run(op, r, n.clock())
		if st.Err == nil {
			n.ran(op, &r, &st)
		}
		if !n.chance(n.lossy) {
			n.after(n.travel(), func() { answer(st) })
		}
	})
}

// check asks whether a request fits: the replica, or the primary if that is asked for, or if the
// replica shows no open window.
func (n *network) check(r store.Request, reply func(st store.State)) {
	answered := false
	answer := func(st store.State) {
		if !answered {
			answered = true
			reply(st)
		}
	}
	n.after(checkTimeout, func() { answer(store.State{Err: errDown}) })
	n.after(n.travel(), func() {
		st, ok := n.checked(r)
		if ok && !n.chance(n.lossy) {
			n.after(n.travel(), func() { answer(st) })
		}
	})
}

func (n *network) checked(r store.Request) (st store.State, ok bool) {
	if n.down || n.chance(n.lossy) {
		return st, false
	}
	n.servers.replicate(n.clock() - n.lag)
	if !r.Primary || n.away {
		if st = n.servers.look(r, n.clock(), true); st.Err == nil && st.Reset != 0 {
			st.Replica = true
			return st, true
		}
	}
	if n.away {
		return st, false
	}
	st = n.servers.run(algorithm.Check, r, n.clock())
	return st, true
}

// empty empties a bucket at the primary.
func (n *network) empty(r store.Request, reply func(err error)) {
	n.after(n.travel(), func() {
		if n.down || n.away {
			reply(errDown)
			return
		}
		n.servers.empty(r, n.clock())
		n.after(n.travel(), func() { reply(nil) })
	})
}

// Arithmetic makes servers that run package algorithm, which is quicker than scripts.
func Arithmetic() Servers {
	return func(*world, int64) servers { return newArithmetic() }
}

// arithmetic are servers that run package algorithm.
type arithmetic struct {
	primary, replica map[string]algorithm.Bucket
	// held is what takes hold at the primary.
	held map[string]*algorithm.Held
	// effects have not reached the replica.
	effects []effect
}

type effect struct {
	at     int64
	happen func(buckets map[string]algorithm.Bucket)
}

func newArithmetic() *arithmetic {
	return &arithmetic{primary: map[string]algorithm.Bucket{}, replica: map[string]algorithm.Bucket{}, held: map[string]*algorithm.Held{}}
}

func keyOf(r *store.Request) string { return r.Limit.Zone + "/" + r.ClientKey }

func bucketIn(m map[string]algorithm.Bucket, r *store.Request) algorithm.Bucket {
	key := keyOf(r)
	b, ok := m[key]
	if !ok {
		b = algorithm.New(r.Limit)
		m[key] = b
	}
	return b
}

func (s *arithmetic) run(op algorithm.Operation, r store.Request, now int64) store.State {
	s.effects = append(s.effects, effect{now, func(b map[string]algorithm.Bucket) { op.Run(bucketIn(b, &r), &r, now) }})
	st := op.Run(bucketIn(s.primary, &r), &r, now)
	s.held[keyOf(&r)] = s.held[keyOf(&r)].After(op, &r, &st)
	return st
}

func (s *arithmetic) look(r store.Request, now int64, replica bool) store.State {
	if replica {
		return bucketIn(s.replica, &r).View(&r, now, false)
	}
	st := bucketIn(s.primary, &r).View(&r, now, false)
	s.held[keyOf(&r)].After(algorithm.Peek, &r, &st)
	return st
}

func (s *arithmetic) empty(r store.Request, now int64) {
	key := keyOf(&r)
	delete(s.primary, key)
	delete(s.held, key)
	s.effects = append(s.effects, effect{now, func(b map[string]algorithm.Bucket) { delete(b, key) }})
}

func (s *arithmetic) replicate(until int64) {
	for len(s.effects) > 0 && s.effects[0].at <= until {
		s.effects[0].happen(s.replica)
		s.effects = s.effects[1:]
	}
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
