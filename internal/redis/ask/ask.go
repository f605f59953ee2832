// Package ask knows what is asked of Redis about buckets, and what the replies mean: an
// [Op] encodes a request into a command, a script call or a plain one, and decodes the
// reply into a state, with or without a server. An [Asker] has package wire carry the
// commands of a store.
package ask

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Asker asks servers about the buckets of one store. It is safe for concurrent use.
type Asker struct {
	// Keys are those of the buckets, without hash tags.
	Keys Keys
	// CheckTimeout is how long callers give checks and takes.
	CheckTimeout time.Duration
	// ChargeTimeout bounds the retries of what Post sends.
	ChargeTimeout time.Duration
	// ReadPrimary sends checks to the primary instead of the replicas.
	ReadPrimary bool
	// Time, in tests, takes the place of the primary's clock; nil for none.
	Time func() time.Time
	// Observers receive the commands that Run, AskOne and Post send to a shard.
	Observers map[*wire.Shard]Observer
	// OnUndelivered, if set, receives the failures of what is posted without a report.
	OnUndelivered func(clientKey string, op algorithm.Operation, err error)

	absences absences
}

// Observer receives a command: the role of the server, the operation, the time it
// took, waiting included, and the error, if any. Commands that were not made,
// because the server is left out or the queue is full, are not observed. It must
// be quick and safe for concurrent use.
type Observer func(role store.Role, op algorithm.Operation, took time.Duration, err error)

// Group is some of the requests of a call, by their places.
type Group struct {
	Reqs []store.Request
	// States are those of all requests; nil for what Post sends.
	States []store.State
	// Members are the places of the requests in question; nil for all.
	Members []int
}

// places holds 0, 1, 2 ... for groups of all requests, which most are.
var places = func() (n [16]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

// complete returns g with its members.
func (g Group) complete() Group {
	if g.Members != nil {
		return g
	}
	return whole(g.Reqs, g.States)
}

func whole(reqs []store.Request, states []store.State) Group {
	if len(reqs) <= len(places) {
		return Group{reqs, states, places[:len(reqs):len(reqs)]}
	}
	members := make([]int, len(reqs))
	for i := range members {
		members[i] = i
	}
	return Group{reqs, states, members}
}

// Run runs an operation on the buckets of a group, which these servers hold, by the
// deadline, and sets the states. Replicas answer checks in turn; the primary answers where
// they cannot or see no open window. Without servers, nil, nothing runs.
func (a *Asker) Run(ctx context.Context, op algorithm.Operation, at *wire.Servers, g Group, deadline time.Time) {
	g = g.complete()
	if at == nil {
		g.fail(wire.NotExecuted(wire.ErrNoServers))
		return
	}
	at.Checks.Sample(a.sample)
	switch op {
	case algorithm.Check:
		a.check(ctx, at, g, deadline)
	case algorithm.Peek:
		a.peek(ctx, at, g, deadline)
	case algorithm.Take:
		a.ask(ctx, at.Checks, g, deadline, a.Writing(op, at))
	default:
		a.ask(ctx, at.Charges, g, deadline, a.Writing(op, at))
	}
}

func (a *Asker) check(ctx context.Context, at *wire.Servers, g Group, deadline time.Time) {
	start := time.Now()
	half := start.Add(deadline.Sub(start) / 2)
	replica := a.replica(at)
	now, age := a.TimeAt(at, start)
	if replica != nil && age > wire.ClockTrust {
		a.refreshClock(at, start, g)
	}
	switch {
	case replica == nil:
		a.checkPrimary(ctx, at, g, deadline)
	case now == 0 || g.wantsPrimary():
		// A replica that decides by its own clock is only a fallback.
		a.checkPrimary(ctx, at, g, half)
		a.fallBack(ctx, replica, g, deadline, Reading(algorithm.Check, store.RoleReplica, now))
	case a.absences.expects(g):
		// The replica is not expected to know more, so it gets little of the time.
		a.checkPrimary(ctx, at, g, start.Add(deadline.Sub(start)*7/8))
		a.fallBack(ctx, replica, g, deadline, Reading(algorithm.Check, store.RoleReplica, now))
	default:
		// The other half of the time is the primary's.
		a.ask(ctx, replica, g, half, Reading(algorithm.Check, store.RoleReplica, now))
		a.absences.note(g)
		if g.Members = g.unanswered(at); len(g.Members) > 0 && ctx.Err() == nil {
			a.checkPrimary(ctx, at, g, deadline)
		}
	}
}

// checkPrimary reads buckets at a primary if all their windows are known to be open, and opens
// windows of buckets that are not known. The script checks others, and what is not there.
func (a *Asker) checkPrimary(ctx context.Context, at *wire.Servers, g Group, deadline time.Time) {
	now, age := a.TimeAt(at, time.Now())
	isSure := now != 0 && age <= wire.ClockPeriod && !at.Checks.Scripted.Load()
	op := Reading(algorithm.Check, store.RolePrimary, now)
	canOpen := g.canOpen(a.CheckTimeout)
	switch {
	case isSure && g.areOpen(now):
	case isSure && canOpen && at.Checks.Opens():
		op = Opening(now, at.Clock)
	default:
		a.ask(ctx, at.Checks, g, deadline, a.Writing(algorithm.Check, at))
		return
	}
	a.ask(ctx, at.Checks, g, deadline, op)
	refused := g.where(func(i int) bool { return wire.Says(g.States[i].Err, wire.Lacking) })
	// A server that refuses writes, because it is full or has no replicas, refuses to open windows. The
	// script shows those that are open.
	closed := g.where(func(i int) bool {
		st := &g.States[i]
		if st.Err == nil {
			return !st.Holds(g.Reqs[i].Limit)
		}
		return op.Opens && wire.IsReply(st.Err) && !wire.Says(st.Err, wire.Lacking)
	})
	g.Members = append(closed, refused...)
	if len(g.Members) == 0 || ctx.Err() != nil {
		return
	}
	a.ask(ctx, at.Checks, g, deadline, a.Writing(algorithm.Check, at))
	if slices.ContainsFunc(refused, func(i int) bool { return g.States[i].Err == nil }) {
		at.Checks.Scripted.Store(true)
	}
}

// sample returns a key that is none of a bucket, and that users may have who have those of buckets.
func (a *Asker) sample() string { return a.Keys.Mark("sample") }

// fallBack asks a replica for what the primary did not answer. Where the replica
// knows no open window either, the error stays.
func (a *Asker) fallBack(ctx context.Context, replica *wire.Lane, g Group, deadline time.Time, op Op) {
	if g.Members = g.unanswered(nil); len(g.Members) == 0 || ctx.Err() != nil {
		return
	}
	a.askAgain(ctx, replica, g, deadline, op, func(i int) bool { return isUnopened(&g.Reqs[i], &g.States[i]) })
}

// askAgain asks another server. A state does not change if that fails or its answer is
// worthless.
func (a *Asker) askAgain(ctx context.Context, l *wire.Lane, g Group, deadline time.Time, op Op, isWorthless func(i int) bool) {
	before := make([]store.State, len(g.Members))
	for n, i := range g.Members {
		before[n] = g.States[i]
	}
	a.ask(ctx, l, g, deadline, op)
	for n, i := range g.Members {
		if g.States[i].Err != nil || isWorthless(i) {
			g.States[i] = before[n]
		}
	}
}

// refreshClock checks one bucket at the primary, without waiting, to learn its time: no
// call may have reached it for long, as when all clients of the shard are refused.
func (a *Asker) refreshClock(at *wire.Servers, start time.Time, g Group) {
	if at.Clock.ClaimObservation(start) {
		c := a.call(at.Checks, Group{g.Reqs, nil, g.Members[:1]}, start.Add(a.CheckTimeout), a.Writing(algorithm.Check, at))
		c.Detached = (*wire.Call).Release
		at.Checks.Post(c)
	}
}

// peek reads from a replica, or from the primary if there is none.
func (a *Asker) peek(ctx context.Context, at *wire.Servers, g Group, deadline time.Time) {
	start := time.Now()
	now, _ := a.TimeAt(at, start)
	replica, primary := a.replica(at), Reading(algorithm.Peek, store.RolePrimary, now)
	if replica == nil {
		a.ask(ctx, at.Checks, g, deadline, primary)
		return
	}
	half := start.Add(deadline.Sub(start) / 2)
	a.ask(ctx, replica, g, half, Reading(algorithm.Peek, store.RoleReplica, now))
	g.Members = g.where(func(i int) bool { return g.States[i].Err != nil || at.MayMiss(&g.States[i]) })
	if len(g.Members) > 0 && ctx.Err() == nil {
		a.askAgain(ctx, at.Checks, g, deadline, primary, func(int) bool { return false })
	}
}

func (a *Asker) replica(at *wire.Servers) *wire.Lane {
	if a.ReadPrimary {
		return nil
	}
	return at.Replica()
}

// AskOne runs op on one bucket.
func (a *Asker) AskOne(ctx context.Context, l *wire.Lane, r store.Request, deadline time.Time, op Op) store.State {
	states := make([]store.State, 1)
	a.ask(ctx, l, whole([]store.Request{r}, states), deadline, op)
	return states[0]
}

// ask runs op on every bucket of g in one round trip and sets their states.
func (a *Asker) ask(ctx context.Context, l *wire.Lane, g Group, deadline time.Time, op Op) {
	for _, take := range abandonedTakes(l.Shard, op.Operation, g) {
		select {
		case <-take:
		case <-ctx.Done():
		}
	}
	c := a.call(l, g, deadline, op)
	observe, began := a.Observers[l.Shard], c.Began
	sent, err := l.Do(ctx, c)
	if err != nil {
		for range g.Members {
			observe.observe(op.Role, op.Operation, time.Since(began), err)
		}
		if sent && !op.reads() {
			err = fmt.Errorf("%w: %w", store.ErrUncertain, err)
		} else {
			err = wire.NotExecuted(err)
		}
		g.fail(err)
		if sent && op.Operation == algorithm.Take {
			abandon(l.Shard, c, g, op)
		}
		return
	}
	observe.observeAll(op, c)
	for n, i := range g.Members {
		g.States[i], _ = op.Outcome(c.Cmds[n], &g.Reqs[i])
	}
	c.Release()
}

// abandon makes the errors of takes that were sent tell how they end, which their caller does not await.
func abandon(shard *wire.Shard, c *wire.Call, g Group, op Op) {
	reqs, ends := make([]store.Request, len(g.Members)), make([]store.Late, len(g.Members))
	for n, i := range g.Members {
		reqs[n] = g.Reqs[i]
		g.States[i].Err = ends[n].Wrap(g.States[i].Err)
	}
	shard.Abandoned.Add(c, g.ids(), func() {
		for n := range ends {
			st, _ := op.Outcome(c.Cmds[n], &reqs[n])
			if st.Err == nil && !st.Allowed {
				st.Err = fmt.Errorf("%w: it was refused", store.ErrNotExecuted)
			}
			ends[n].End(st.Err)
		}
	})
}

// Post runs an operation at a primary without waiting. report, unless it is nil, receives the
// state of each member of g by its place. A refund waits for a take of its ID that is under
// way. Without servers, nil, nothing runs.
func (a *Asker) Post(op algorithm.Operation, at *wire.Servers, g Group, report func(i int, st store.State)) {
	g = g.complete()
	if at == nil {
		for _, i := range g.Members {
			a.Report(report, op, &g.Reqs[i], i, store.State{Err: wire.NotExecuted(wire.ErrNoServers)})
		}
		return
	}
	if takes := abandonedTakes(at.Charges.Shard, op, g); len(takes) > 0 {
		at.Charges.Shard.Abandoned.After(takes, func() { a.post(op, at, g, report) })
		return
	}
	a.post(op, at, g, report)
}

// abandonedTakes returns what is closed when the takes of these refunds have ended that
// their callers do not await.
func abandonedTakes(shard *wire.Shard, op algorithm.Operation, g Group) (ends []chan struct{}) {
	if op != algorithm.Refund {
		return nil
	}
	for _, i := range g.Members {
		if id := g.Reqs[i].ID; id != "" {
			if end := shard.Abandoned.Of(id); end != nil {
				ends = append(ends, end)
			}
		}
	}
	return ends
}

func (a *Asker) post(what algorithm.Operation, at *wire.Servers, g Group, report func(i int, st store.State)) {
	op, now := a.Writing(what, at), time.Now()
	if what == algorithm.Charge && !at.Charges.Scripted.Load() {
		// Without a recent reading of the primary's clock no instant is sure.
		if by, age := a.TimeAt(at, now); by != 0 && age <= wire.ClockPeriod {
			op.Latest = by + (a.ChargeTimeout + wire.ReplyTimeout).Microseconds()
		}
	}
	c := a.call(at.Charges, g, now.Add(a.ChargeTimeout), op)
	c.Detached = func(c *wire.Call) {
		a.Observers[at.Charges.Shard].observeAll(op, c)
		for _, cmd := range c.Cmds {
			r := &g.Reqs[cmd.Place]
			st, repair := op.Outcome(cmd, r)
			if repair.Needed {
				a.repair(at, r, cmd.Place, repair, report)
				continue
			}
			a.Report(report, what, r, cmd.Place, st)
		}
		c.Release()
	}
	at.Charges.Post(c)
}

// Writing returns an operation that may write, by the clock of the primary.
func (a *Asker) Writing(op algorithm.Operation, at *wire.Servers) Op {
	if a.Time != nil {
		return Op{Operation: op, Role: store.RolePrimary, Now: a.Time().UnixMicro()}
	}
	return Op{Operation: op, Role: store.RolePrimary, Clock: at.Clock}
}

// TimeAt returns the time that decides which windows are over at servers, and how
// long ago their primary reported it; 0 before the primary's first reply.
func (a *Asker) TimeAt(at *wire.Servers, start time.Time) (now int64, age time.Duration) {
	if a.Time != nil {
		return a.Time().UnixMicro(), 0
	}
	now, age, ok := at.Clock.Estimate(start)
	if !ok {
		return 0, 0
	}
	return now, age
}

// call returns a call of op through a lane for every bucket of g.
func (a *Asker) call(l *wire.Lane, g Group, deadline time.Time, op Op) *wire.Call {
	// A replica and the primary share the timeout, part of which is over when they
	// are asked.
	c := wire.NewCall(deadline, a.CheckTimeout*7/16)
	keys := a.Keys.In(l.Shard)
	for n, i := range g.Members {
		room := &c.Room
		if n > 0 {
			room = nil
		}
		cmd := op.Command(keys, &g.Reqs[i], room)
		cmd.Place = i
		c.Cmds = append(c.Cmds, cmd)
	}
	return c
}

// observe observes one command, if it was made, or tried.
func (o Observer) observe(role store.Role, op algorithm.Operation, took time.Duration, err error) {
	if o != nil && !errors.Is(err, wire.ErrShardDown) && !errors.Is(err, wire.ErrUnfit) && !errors.Is(err, wire.ErrOverload) && !errors.Is(err, wire.ErrClosed) {
		o(role, op, took, err)
	}
}

func (o Observer) observeAll(op Op, c *wire.Call) {
	took := time.Since(c.Began)
	for _, cmd := range c.Cmds {
		o.observe(op.Role, op.Operation, took, cmd.Outcome)
	}
}

// repair charges by the script what a plain charge of r has left. In an orphan the charge
// counts already, so an error leaves its outcome unknown.
func (a *Asker) repair(at *wire.Servers, r *store.Request, place int, repair Repair, report func(i int, st store.State)) {
	a.post(algorithm.Charge, at, whole([]store.Request{repair.Rest(r)}, nil), func(_ int, st store.State) {
		if st.Err != nil && repair.left == 0 && !errors.Is(st.Err, store.ErrUncertain) {
			st.Err = fmt.Errorf("%w: give a bucket its window: %s", store.ErrUncertain, st.Err.Error())
		}
		if repair.isHidden && st.Err == nil {
			at.Charges.Scripted.Store(true)
		}
		a.Report(report, algorithm.Charge, r, place, st)
	})
}

// Report passes the state of r, at place i, to report or, if that is nil, a failure to
// OnUndelivered. Most detached operations have no report, and so need no function of
// their own.
func (a *Asker) Report(report func(i int, st store.State), op algorithm.Operation, r *store.Request, i int, st store.State) {
	switch {
	case report != nil:
		report(i, st)
	case st.Err != nil && a.OnUndelivered != nil:
		a.OnUndelivered(r.ClientKey, op, st.Err)
	}
}

// fail sets the states of the members to an error.
func (g Group) fail(err error) {
	for _, i := range g.Members {
		g.States[i] = store.State{Err: err}
	}
}

func (g Group) where(f func(i int) bool) (members []int) {
	for _, i := range g.Members {
		if f(i) {
			members = append(members, i)
		}
	}
	return members
}

// unanswered returns the members to ask the primary about: those that failed, whose
// window is not open, or that a replica may lack while a slot moves.
func (g Group) unanswered(of *wire.Servers) []int {
	return g.where(func(i int) bool {
		st := &g.States[i]
		return st.Err != nil || isUnopened(&g.Reqs[i], st) || of.MayMiss(st)
	})
}

func (g Group) wantsPrimary() bool {
	return slices.ContainsFunc(g.Members, func(i int) bool { return g.Reqs[i].Primary })
}

// areOpen reports whether the windows of all members are known to be open at now.
func (g Group) areOpen(now int64) bool {
	return !slices.ContainsFunc(g.Members, func(i int) bool {
		return g.Reqs[i].Until <= now || !algorithm.Of(g.Reqs[i].Limit.Algorithm).Windowed()
	})
}

// canOpen reports whether the windows of all members can be opened without a script.
func (g Group) canOpen(takes time.Duration) bool {
	return !slices.ContainsFunc(g.Members, func(i int) bool { return !CanOpen(&g.Reqs[i], takes) })
}

// ids returns the IDs of the members that have one.
func (g Group) ids() (ids []string) {
	for _, i := range g.Members {
		if id := g.Reqs[i].ID; id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}
