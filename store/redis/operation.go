package redis

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// operation is what is asked about every bucket of a group.
type operation struct {
	algorithm.Operation
	// tagged is set if it is asked in a Redis Cluster.
	tagged bool
	// replica is set if a replica is asked; readOnly, if nothing may be written,
	// as there.
	replica, readOnly bool
	// now is the instant that decides; 0 leaves it to the clock of the server that
	// is asked.
	now int64
	// clock, if that of a primary decides, learns the time from the reply.
	clock *primaryClock
}

// writing is an operation for a primary.
func (s *Store) writing(op algorithm.Operation, at *servers) operation {
	if s.opts.LocalClock {
		return operation{Operation: op, tagged: at.tagged, now: s.opts.Now().UnixMicro()}
	}
	return operation{Operation: op, tagged: at.tagged, clock: at.clock}
}

// reading is a check or peek at a replica.
func reading(op algorithm.Operation, at *servers, now int64) operation {
	return operation{Operation: op, replica: true, readOnly: true, tagged: at.tagged, now: now}
}

// peeking is a peek at a primary.
func peeking(at *servers, now int64) operation {
	return operation{Operation: algorithm.Peek, readOnly: true, tagged: at.tagged, now: now}
}

// reads tells whether the operation spends nothing and gives nothing back.
func (op operation) reads() bool {
	return op.Operation == algorithm.Check || op.Operation == algorithm.Peek
}

// role is that of the server that is asked.
func (op operation) role() store.Role {
	if op.replica {
		return store.RoleReplica
	}
	return store.RolePrimary
}

// command is what asks about one bucket. A call of a script is put where c is.
func (op operation) command(keys bucketKeys, r *store.Request, c *scriptCommand) *command {
	keys.tagged = op.tagged
	key := keys.key(r.Limit, r.ClientKey)
	l := layoutOf(r.Limit.Algorithm)
	if op.readOnly && op.now != 0 && l.read != nil {
		return l.read(key)
	}
	c.begin(l.script, op.Operation, op.readOnly, key)
	c.clock, c.reads = op.clock, op.reads()
	c.add(op.now)
	l.arguments(c, op.Operation, r)
	c.renew()
	return &c.command
}

// state is what the outcome of cmd means to r.
func (op operation) state(cmd *command, r *store.Request) store.State {
	if cmd.outcome != nil {
		return store.State{Err: cmd.outcome}
	}
	st := op.outcome(cmd, r)
	st.Replica = op.replica
	if st.Err != nil && !op.reads() {
		// It ran, but what it did is not known.
		st.Err = fmt.Errorf("%w: %w", store.ErrUncertain, st.Err)
	}
	return st
}

func (op operation) outcome(cmd *command, r *store.Request) store.State {
	l := layoutOf(r.Limit.Algorithm)
	if cmd.script == nil {
		numbers, err := l.numbers(cmd.texts())
		if err != nil {
			return store.State{Err: err}
		}
		return l.state(r, op.now, false, numbers)
	}
	// A script that did without the clock was told an instant it has passed.
	return op.reply(l, r, cmd.integers(), -cmd.ints[placeOfNow])
}

// reply is what a script's reply means to r. about is the instant for a script
// that did not need to know it.
func (op operation) reply(l *layout, r *store.Request, reply []int64, about int64) store.State {
	if len(reply) < 2 {
		return store.State{Err: fmt.Errorf("%w: a reply of %d numbers", errReply, len(reply))}
	}
	now := reply[placeOfNow]
	if now == 0 {
		now = about
	}
	st := l.state(r, now, reply[1] == 1, reply[2:])
	if st.Err == nil && op.opens() && isUnopened(r, &st) {
		st = store.State{Err: fmt.Errorf("%w: no window is open in %d", errReply, reply)}
	}
	return st
}

// opens tells whether a window is open after the operation.
func (op operation) opens() bool {
	switch op.Operation {
	case algorithm.Check, algorithm.Charge, algorithm.Take:
		return !op.readOnly
	default:
		return false
	}
}

// state is what the numbers of a bucket mean to r.
func (l *layout) state(r *store.Request, now int64, spent bool, numbers []int64) store.State {
	if err := l.check(now, numbers); err != nil {
		return store.State{Err: err}
	}
	return l.view(numbers, r, now, spent)
}

// isUnopened tells whether st shows that a window has to be opened.
func isUnopened(r *store.Request, st *store.State) bool {
	return st.Reset == 0 && r.Limit.Algorithm == store.FixedWindow
}

// fairTime is the least that a server is given to answer a check or take. A replica
// and the primary share the timeout, and a little of it is over when they are asked.
func (s *Store) fairTime() time.Duration { return s.opts.CheckTimeout * 7 / 16 }

func (s *Store) call(g group, deadline time.Time, op operation) *call {
	c := newCall(deadline)
	c.fair = s.fairTime()
	for n, i := range g.members {
		room := &c.room
		if n > 0 {
			room = new(scriptCommand)
		}
		cmd := op.command(s.keys, &g.reqs[i], room)
		cmd.place = i
		c.cmds = append(c.cmds, cmd)
	}
	return c
}

// ask runs op on every bucket of g in one round trip and sets their states.
func (s *Store) ask(ctx context.Context, l *lane, g group, deadline time.Time, op operation) {
	l.shard.strays.await(ctx, op.Operation, g)
	c := s.call(g, deadline, op)
	watch, began := s.observers[l.shard], c.began
	sent, err := l.do(ctx, c)
	if err != nil {
		for range g.members {
			watch.tell(op.role(), op.Operation, began, err)
		}
		if sent && op.Operation == algorithm.Take {
			l.shard.strays.add(c, g)
		}
		if sent && !op.reads() {
			err = fmt.Errorf("%w: %w", store.ErrUncertain, err)
		} else {
			err = notExecuted(err)
		}
		for _, i := range g.members {
			g.states[i] = store.State{Err: err}
		}
		return
	}
	watch.tellAll(op.role(), op.Operation, c)
	for n, i := range g.members {
		g.states[i] = op.state(c.cmds[n], &g.reqs[i])
	}
	c.release()
}

// group is those of some requests that are asked together.
type group struct {
	reqs    []store.Request
	states  []store.State
	members []int
}

// first holds 0, 1, 2 ... for groups of all requests, which most are.
var first = func() (n [16]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

func whole(reqs []store.Request, states []store.State) group {
	if len(reqs) <= len(first) {
		return group{reqs, states, first[:len(reqs):len(reqs)]}
	}
	members := make([]int, len(reqs))
	for i := range members {
		members[i] = i
	}
	return group{reqs, states, members}
}

// unanswered returns the members that failed, or whose window has to be opened,
// or of which replicas of these servers know nothing.
func (g group) unanswered(of *servers) (members []int) {
	for _, i := range g.members {
		if st := &g.states[i]; st.Err != nil || isUnopened(&g.reqs[i], st) || of.mayMiss(st) {
			members = append(members, i)
		}
	}
	return members
}

// asksPrimary tells whether some member is about the primary's word.
func (g group) asksPrimary() bool {
	for _, i := range g.members {
		if g.reqs[i].Primary {
			return true
		}
	}
	return false
}

// owner is who holds a bucket: a shard, by its place, and servers of it, nil
// while none are known.
type owner struct {
	shard   int
	servers *servers
}

func (s *Store) ownerOf(clientKey string) owner {
	shard := s.sharder.owner(clientKey)
	if s.shards[shard].cluster == nil {
		return owner{shard, s.shards[shard].owner(0)}
	}
	return owner{shard, s.shards[shard].owner(s.keys.slot(clientKey))}
}

// onlyOwner returns the owner of all of reqs' buckets, if there is one.
func (s *Store) onlyOwner(reqs []store.Request) (only owner, ok bool) {
	if len(reqs) == 0 {
		return owner{}, false
	}
	only = s.ownerOf(reqs[0].ClientKey)
	for i := 1; i < len(reqs); i++ {
		if reqs[i].ClientKey != reqs[0].ClientKey && s.ownerOf(reqs[i].ClientKey) != only {
			return owner{}, false
		}
	}
	return only, true
}

// perOwner calls f for each owner of some of reqs' buckets, at the same time,
// and waits.
func (s *Store) perOwner(reqs []store.Request, states []store.State, f func(at owner, g group)) {
	owned := map[owner][]int{}
	for i := range reqs {
		at := s.ownerOf(reqs[i].ClientKey)
		owned[at] = append(owned[at], i)
	}
	var wg sync.WaitGroup
	for at, members := range owned {
		wg.Go(func() { f(at, group{reqs, states, members}) })
	}
	wg.Wait()
}

// fail sets an error as the answer to all.
func (g group) fail(err error) {
	for _, i := range g.members {
		g.states[i] = store.State{Err: err}
	}
}

// awaitServers waits, for as long as there is time, until it is known who the
// servers of the buckets are.
func (s *Store) awaitServers(ctx context.Context, reqs []store.Request, deadline time.Time) {
	if s.fixed {
		return
	}
	var patient context.Context
	for i := range reqs {
		shard := s.shards[s.sharder.owner(reqs[i].ClientKey)]
		if shard.isFound() {
			continue
		}
		if patient == nil {
			var cancel context.CancelFunc
			patient, cancel = context.WithDeadline(ctx, deadline)
			defer cancel()
		}
		shard.await(patient)
	}
}
