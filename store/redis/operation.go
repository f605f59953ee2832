package redis

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// operation is what a call does with every bucket of a group.
type operation struct {
	algorithm.Operation
	// role is that of the server that is asked.
	role store.Role
	// readOnly is set if it must not write.
	readOnly bool
	// now is the instant that decides; 0 leaves it to the server's clock.
	now int64
	// clock, if a primary's clock decides, learns the time from the reply.
	clock *primaryClock
	// latest is the latest instant at which the operation can run, or 0. A window
	// that ends later can be charged without a script.
	latest int64
}

func (s *Store) writing(op algorithm.Operation, at *servers) operation {
	if s.opts.clock != nil {
		return operation{Operation: op, role: store.RolePrimary, now: s.opts.clock().UnixMicro()}
	}
	return operation{Operation: op, role: store.RolePrimary, clock: at.clock}
}

func reading(op algorithm.Operation, role store.Role, now int64) operation {
	return operation{Operation: op, role: role, readOnly: true, now: now}
}

// reads reports whether the operation neither spends nor gives back.
func (op operation) reads() bool {
	return op.Operation == algorithm.Check || op.Operation == algorithm.Peek
}

// command returns the command for one bucket. A call of a script uses the room of
// c, or its own if that is nil.
func (op operation) command(keys bucketKeys, r *store.Request, c *scriptCommand) *command {
	key := keys.key(r.Limit, r.ClientKey)
	l := layoutOf(r.Limit.Algorithm)
	if op.latest != 0 && l.isHash && r.Until > op.latest && r.Cost > 0 {
		return newPlainCharge(key, r, op.now, op.clock)
	}
	// With an instant to judge by, the bucket is read, and layout.state judges it.
	// Without one, the script runs for the server's own time.
	if op.readOnly && op.now != 0 && !l.isSet {
		return l.read(key)
	}
	if c == nil {
		c = new(scriptCommand)
	}
	c.begin(l.script, op.Operation, op.readOnly, key)
	c.clock, c.reads = op.clock, op.reads()
	c.add(op.now)
	l.arguments(c, op.Operation, r)
	c.renew()
	return &c.command
}

// state is what the outcome of cmd means to r.
func (op operation) state(cmd *command, r *store.Request) (st store.State) {
	if cmd.outcome != nil {
		return store.State{Err: cmd.outcome}
	}
	l := layoutOf(r.Limit.Algorithm)
	if cmd.charge != nil {
		st = op.charged(l, r, cmd)
	} else if cmd.script != nil {
		// A script that did without the clock was given an instant that has passed.
		st = op.reply(l, r, cmd.integers(), -cmd.ints[placeOfNow])
	} else if numbers, err := l.numbers(cmd.texts()); err != nil {
		st.Err = err
	} else {
		st = l.state(r, op.now, false, numbers)
	}
	st.Replica = op.role == store.RoleReplica
	if st.Err != nil && !op.reads() {
		// It ran, with an unknown effect.
		st.Err = fmt.Errorf("%w: %w", store.ErrUncertain, st.Err)
	}
	return st
}

// reply is what a script's reply means to r. fallback is the instant of a script
// that did not need to know it.
func (op operation) reply(l *layout, r *store.Request, reply []int64, fallback int64) store.State {
	if len(reply) < 2 {
		return store.State{Err: fmt.Errorf("%w: a reply of %d numbers", errReply, len(reply))}
	}
	now := reply[placeOfNow]
	switch {
	case op.readOnly && op.now != 0:
		// The reply can only repeat it.
		now = op.now
	case now == 0:
		now = fallback
	}
	st := l.state(r, now, reply[1] == 1, reply[2:])
	switch op.Operation {
	case algorithm.Check, algorithm.Charge, algorithm.Take:
		if st.Err == nil && !op.readOnly && isUnopened(r, &st) {
			st = store.State{Err: fmt.Errorf("%w: no window is open in %d", errReply, reply)}
		}
	}
	return st
}

// isUnopened reports whether st shows no open window where one is needed.
func isUnopened(r *store.Request, st *store.State) bool {
	return st.Reset == 0 && algorithm.Of(r.Limit.Algorithm).Windowed
}

// call returns a call of op in a shard for every bucket of g.
func (s *Store) call(shard *Shard, g group, deadline time.Time, op operation) *call {
	c, keys := newCall(deadline), s.keysIn(shard)
	// A replica and the primary share the timeout, part of which is over when they
	// are asked.
	c.fair = s.opts.CheckTimeout * 7 / 16
	for n, i := range g.members {
		room := &c.room
		if n > 0 {
			room = nil
		}
		cmd := op.command(keys, &g.reqs[i], room)
		cmd.place = i
		c.cmds = append(c.cmds, cmd)
	}
	return c
}

// ask runs op on every bucket of g in one round trip and sets their states.
func (s *Store) ask(ctx context.Context, l *lane, g group, deadline time.Time, op operation) {
	l.shard.abandoned.await(ctx, op.Operation, g)
	c := s.call(l.shard, g, deadline, op)
	observe, began := s.observers[l.shard], c.began
	sent, err := l.do(ctx, c)
	if err != nil {
		for range g.members {
			observe.observe(op.role, op.Operation, time.Since(began), err)
		}
		if sent && op.Operation == algorithm.Take {
			l.shard.abandoned.add(c, g)
		}
		if sent && !op.reads() {
			err = fmt.Errorf("%w: %w", store.ErrUncertain, err)
		} else {
			err = notExecuted(err)
		}
		g.fail(err)
		return
	}
	observe.observeAll(op.role, op.Operation, c)
	for n, i := range g.members {
		g.states[i] = op.state(c.cmds[n], &g.reqs[i])
	}
	c.release()
}

func (s *Store) askOne(ctx context.Context, l *lane, r store.Request, deadline time.Time, op operation) store.State {
	states := make([]store.State, 1)
	s.ask(ctx, l, whole([]store.Request{r}, states), deadline, op)
	return states[0]
}

// group is some of the requests of a call, by their places.
type group struct {
	reqs    []store.Request
	states  []store.State
	members []int
}

// places holds 0, 1, 2 ... for groups of all requests, which most are.
var places = func() (n [16]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

func whole(reqs []store.Request, states []store.State) group {
	if len(reqs) <= len(places) {
		return group{reqs, states, places[:len(reqs):len(reqs)]}
	}
	members := make([]int, len(reqs))
	for i := range members {
		members[i] = i
	}
	return group{reqs, states, members}
}

func (g group) fail(err error) {
	for _, i := range g.members {
		g.states[i] = store.State{Err: err}
	}
}

func (g group) where(f func(i int) bool) (members []int) {
	for _, i := range g.members {
		if f(i) {
			members = append(members, i)
		}
	}
	return members
}

// unanswered returns the members to ask the primary about: those that failed, whose
// window is not open, or that a replica may lack while a slot moves.
func (g group) unanswered(of *servers) []int {
	return g.where(func(i int) bool {
		st := &g.states[i]
		return st.Err != nil || isUnopened(&g.reqs[i], st) || of.mayMiss(st)
	})
}

func (g group) wantsPrimary() bool {
	return slices.ContainsFunc(g.members, func(i int) bool { return g.reqs[i].Primary })
}

// areOpen reports whether the windows of all members are known to be open at now.
func (g group) areOpen(now int64) bool {
	return !slices.ContainsFunc(g.members, func(i int) bool {
		return g.reqs[i].Until <= now || !algorithm.Of(g.reqs[i].Limit.Algorithm).Windowed
	})
}

// owner is the place of the member that owns a bucket, and its servers that hold
// the bucket; nil while none are known.
type owner struct {
	member  int
	servers *servers
}

func (s *Store) ownerOf(clientKey string) owner {
	member := s.sharder.owner(clientKey)
	return owner{member, s.serversOf(s.opts.Members[member].Shard, clientKey)}
}

// serversOf returns the servers in a shard that hold a client key's buckets, or
// nil while none are known.
func (s *Store) serversOf(shard *Shard, clientKey string) *servers {
	if !shard.isCluster() {
		return shard.owner(0)
	}
	return shard.owner(s.keys.slot(clientKey))
}

// awaitServersOf is serversOf after waiting for discovery, until ctx ends.
func (s *Store) awaitServersOf(ctx context.Context, shard *Shard, clientKey string) *servers {
	shard.await(ctx)
	return s.serversOf(shard, clientKey)
}

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

// perOwner calls f concurrently, once for each owner of buckets, and waits.
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

// awaitServers waits until the servers of all buckets have been found, or the
// deadline passes.
func (s *Store) awaitServers(ctx context.Context, reqs []store.Request, deadline time.Time) {
	if s.static {
		return
	}
	for i := range reqs {
		shard := s.opts.Members[s.sharder.owner(reqs[i].ClientKey)].Shard
		if shard.isFound() {
			continue
		}
		ctx, cancel := context.WithDeadline(ctx, deadline)
		shard.await(ctx)
		cancel()
	}
}
