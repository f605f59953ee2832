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
	OnUndelivered func(r *store.Request, op algorithm.Operation, err error)

	absences absences
}

// Observer receives a command: the role of the server, the operation, the time it
// took, waiting included, and the error, if any. Commands that were not made,
// because the server is left out or the queue is full, are not observed. It must
// be quick and safe for concurrent use.
type Observer func(role store.Role, op algorithm.Operation, took time.Duration, err error)

// Group is some of the requests of a call that nobody waits for, by their places.
type Group struct {
	Reqs []*store.Request
	// Places are those of the requests in question; nil for all.
	Places []int
}

// places holds 0, 1, 2 ... for groups of all requests, which most are.
var places = func() (n [16]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

// complete returns g with its places.
func (g Group) complete() Group {
	if g.Places != nil {
		return g
	}
	if len(g.Reqs) <= len(places) {
		return Group{g.Reqs, places[:len(g.Reqs):len(g.Reqs)]}
	}
	for i := range g.Reqs {
		g.Places = append(g.Places, i)
	}
	return g
}

// Run runs an operation on buckets that these servers hold, by the deadline, and sets the
// states. Replicas answer checks in turn; the primary answers where
// they cannot or see no open window. Without servers, nil, nothing runs.
func (a *Asker) Run(ctx context.Context, op algorithm.Operation, at *wire.Servers, asks []*store.Ask, deadline time.Time) {
	if at == nil {
		fail(asks, store.NotExecuted(wire.ErrNoServers))
		return
	}
	at.Checks.Sample(a.sample)
	switch op {
	case algorithm.Check:
		a.check(ctx, at, asks, deadline)
	case algorithm.Peek:
		a.peek(ctx, at, asks, deadline)
	case algorithm.Take:
		a.ask(ctx, at.Checks, asks, deadline, a.Writing(op, at))
	default:
		a.ask(ctx, at.Charges, asks, deadline, a.Writing(op, at))
	}
}

func (a *Asker) check(ctx context.Context, at *wire.Servers, asks []*store.Ask, deadline time.Time) {
	start := time.Now()
	half := start.Add(deadline.Sub(start) / 2)
	replica := a.replica(at)
	now, age := a.TimeAt(at, start)
	if replica != nil && age > wire.ClockTrust {
		a.refreshClock(at, start, asks[0])
	}
	switch {
	case replica == nil:
		a.checkPrimary(ctx, at, asks, deadline)
	case now == 0 || wantsPrimary(asks):
		// A replica that decides by its own clock is only a fallback.
		a.checkPrimary(ctx, at, asks, half)
		a.fallBack(ctx, replica, asks, deadline, Reading(algorithm.Check, store.RoleReplica, now))
	case a.absences.expects(asks):
		// The replica is not expected to know more, so it gets little of the time.
		a.checkPrimary(ctx, at, asks, start.Add(deadline.Sub(start)*7/8))
		a.fallBack(ctx, replica, asks, deadline, Reading(algorithm.Check, store.RoleReplica, now))
	default:
		// The other half of the time is the primary's.
		a.ask(ctx, replica, asks, half, Reading(algorithm.Check, store.RoleReplica, now))
		a.absences.note(asks)
		if left := unanswered(asks, at); len(left) > 0 && ctx.Err() == nil {
			a.checkPrimary(ctx, at, left, deadline)
		}
	}
}

// checkPrimary reads buckets at a primary if all their windows are known to be open, and opens
// windows of buckets that are not known. The script checks others, and what is not there.
func (a *Asker) checkPrimary(ctx context.Context, at *wire.Servers, asks []*store.Ask, deadline time.Time) {
	now, age := a.TimeAt(at, time.Now())
	hears := slices.ContainsFunc(asks, func(a *store.Ask) bool { return algorithm.Check.Hears(&a.Request) })
	isSure := now != 0 && age <= wire.ClockPeriod && !at.Checks.Scripted.Load() && !hears
	op := Reading(algorithm.Check, store.RolePrimary, now)
	mayOpen := canOpen(asks, a.CheckTimeout)
	switch {
	case isSure && areOpen(asks, now):
	case isSure && mayOpen && at.Checks.Opens():
		op = Opening(now, at.Clock)
	default:
		a.ask(ctx, at.Checks, asks, deadline, a.Writing(algorithm.Check, at))
		return
	}
	a.ask(ctx, at.Checks, asks, deadline, op)
	refused := where(asks, func(a *store.Ask) bool { return wire.Says(a.Err, wire.Lacking) })
	// A server that refuses writes, because it is full or has no replicas, refuses to open windows. The
	// script shows those that are open.
	closed := where(asks, func(a *store.Ask) bool {
		if a.Err == nil {
			return !a.Holds(a.Request.Limit)
		}
		return op.Opens && wire.IsReply(a.Err) && !wire.Says(a.Err, wire.Lacking)
	})
	asks = append(closed, refused...)
	if len(asks) == 0 || ctx.Err() != nil {
		return
	}
	a.ask(ctx, at.Checks, asks, deadline, a.Writing(algorithm.Check, at))
	if slices.ContainsFunc(refused, func(a *store.Ask) bool { return a.Err == nil }) {
		at.Checks.Scripted.Store(true)
	}
}

// sample returns a key that is none of a bucket, because no prefix contains a #, and that users may
// have who have those of buckets.
func (a *Asker) sample() string { return a.Keys.Prefix + ":#{sample}" }

// fallBack asks a replica for what the primary did not answer. Where the replica
// knows no open window either, the error stays.
func (a *Asker) fallBack(ctx context.Context, replica *wire.Lane, asks []*store.Ask, deadline time.Time, op Op) {
	left := unanswered(asks, nil)
	if len(left) == 0 || ctx.Err() != nil {
		return
	}
	a.askAgain(ctx, replica, left, deadline, op, lacksWindow)
}

// askAgain asks another server. A state does not change if that fails or its answer is
// worthless.
func (a *Asker) askAgain(ctx context.Context, l *wire.Lane, asks []*store.Ask, deadline time.Time, op Op, isWorthless func(a *store.Ask) bool) {
	before := make([]store.State, len(asks))
	for n, asked := range asks {
		before[n] = asked.State
	}
	a.ask(ctx, l, asks, deadline, op)
	for n, asked := range asks {
		if asked.Err != nil || isWorthless(asked) {
			asked.State = before[n]
		}
	}
}

// refreshClock checks one bucket at the primary, without waiting, to learn its time: no
// call may have reached it for long, as when all clients of the shard are refused.
func (a *Asker) refreshClock(at *wire.Servers, start time.Time, asked *store.Ask) {
	if at.Clock.ClaimObservation(start) {
		c := a.call(at.Checks, 1, func(int) (*store.Request, int) { return &asked.Request, 0 }, start.Add(a.CheckTimeout), a.Writing(algorithm.Check, at))
		c.Detached = (*wire.Call).Release
		at.Checks.Post(c)
	}
}

// peek reads from a replica, or from the primary if there is none or it is asked for.
func (a *Asker) peek(ctx context.Context, at *wire.Servers, asks []*store.Ask, deadline time.Time) {
	start := time.Now()
	now, _ := a.TimeAt(at, start)
	replica, primary := a.replica(at), Reading(algorithm.Peek, store.RolePrimary, now)
	if replica == nil || wantsPrimary(asks) {
		a.ask(ctx, at.Checks, asks, deadline, primary)
		return
	}
	half := start.Add(deadline.Sub(start) / 2)
	a.ask(ctx, replica, asks, half, Reading(algorithm.Peek, store.RoleReplica, now))
	left := where(asks, func(a *store.Ask) bool { return a.Err != nil || at.MayMiss(&a.State) })
	if len(left) > 0 && ctx.Err() == nil {
		a.askAgain(ctx, at.Checks, left, deadline, primary, func(*store.Ask) bool { return false })
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
	asked := store.Ask{Request: r}
	a.ask(ctx, l, []*store.Ask{&asked}, deadline, op)
	return asked.State
}

// ask runs op on every bucket in one round trip and sets the states.
func (a *Asker) ask(ctx context.Context, l *wire.Lane, asks []*store.Ask, deadline time.Time, op Op) {
	if op.Operation == algorithm.Refund {
		for _, take := range abandonedTakes(l.Shard, ids(asks)) {
			select {
			case <-take:
			case <-ctx.Done():
			}
		}
	}
	c := a.call(l, len(asks), func(n int) (*store.Request, int) { return &asks[n].Request, n }, deadline, op)
	observe, began := a.Observers[l.Shard], c.Began
	sent, err := l.Do(ctx, c)
	if err != nil {
		for range asks {
			observe.observe(op.Role, op.Operation, time.Since(began), err)
		}
		if sent && !op.reads() {
			err = fmt.Errorf("%w: %w", store.ErrUncertain, err)
		} else {
			err = store.NotExecuted(err)
		}
		fail(asks, err)
		if sent && (op.Operation == algorithm.Take || op.Operation == algorithm.Charge && len(ids(asks)) > 0) {
			abandon(l.Shard, c, asks, op)
		}
		return
	}
	observe.observeAll(op, c)
	for n, asked := range asks {
		asked.State, _ = op.Outcome(c.Cmds[n], &asked.Request)
	}
	c.Release()
}

// abandon makes the errors of takes, and of renewals of leases, that were sent tell how they end, which their
// caller does not await.
func abandon(shard *wire.Shard, c *wire.Call, asks []*store.Ask, op Op) {
	reqs, ends := make([]store.Request, len(asks)), make([]store.Late, len(asks))
	for n, asked := range asks {
		reqs[n] = asked.Request
		asked.Err = ends[n].Wrap(asked.Err)
	}
	shard.Abandoned.Add(c, ids(asks), func() {
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
// state of each request of g by its place. A refund waits for a take or renewal of its ID that is
// under way. Without servers, nil, nothing runs.
func (a *Asker) Post(op algorithm.Operation, at *wire.Servers, g Group, report func(i int, st store.State)) {
	g = g.complete()
	if at == nil {
		for _, i := range g.Places {
			a.Report(report, op, g.Reqs[i], i, store.State{Err: store.NotExecuted(wire.ErrNoServers)})
		}
		return
	}
	if op == algorithm.Refund {
		if takes := abandonedTakes(at.Charges.Shard, g.ids()); len(takes) > 0 {
			at.Charges.Shard.Abandoned.After(takes, func() { a.post(op, at, g, report) })
			return
		}
	}
	a.post(op, at, g, report)
}

// abandonedTakes returns what is closed when the takes of these IDs have ended that their callers do
// not await.
func abandonedTakes(shard *wire.Shard, ids []string) (ends []chan struct{}) {
	for _, id := range ids {
		if end := shard.Abandoned.Of(id); end != nil {
			ends = append(ends, end)
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
	c := a.call(at.Charges, len(g.Places), func(n int) (*store.Request, int) { return g.Reqs[g.Places[n]], g.Places[n] }, now.Add(a.ChargeTimeout), op)
	c.Detached = func(c *wire.Call) {
		a.Observers[at.Charges.Shard].observeAll(op, c)
		for _, cmd := range c.Cmds {
			r := g.Reqs[cmd.Place]
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

// call returns a call of op through a lane for each of n requests, with its place.
func (a *Asker) call(l *wire.Lane, n int, request func(n int) (r *store.Request, place int), deadline time.Time, op Op) *wire.Call {
	// A replica and the primary share the timeout, part of which is over when they
	// are asked.
	c := wire.NewCall(deadline, a.CheckTimeout*7/16)
	keys := a.Keys.In(l.Shard)
	for i := range n {
		room := &c.Room
		if i > 0 {
			room = nil
		}
		r, place := request(i)
		cmd := op.Command(keys, r, room)
		cmd.Place = place
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
	rest := repair.Rest(r)
	a.post(algorithm.Charge, at, Group{Reqs: []*store.Request{&rest}}.complete(), func(_ int, st store.State) {
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
		a.OnUndelivered(r, op, st.Err)
	}
}

// fail sets the states to an error.
func fail(asks []*store.Ask, err error) {
	for _, a := range asks {
		a.State = store.State{Err: err}
	}
}

func where(asks []*store.Ask, f func(a *store.Ask) bool) (some []*store.Ask) {
	for _, a := range asks {
		if f(a) {
			some = append(some, a)
		}
	}
	return some
}

// unanswered returns the asks that the primary has to answer: those that failed, whose
// window is not open, or that a replica may lack while a slot moves.
func unanswered(asks []*store.Ask, of *wire.Servers) []*store.Ask {
	return where(asks, func(a *store.Ask) bool { return a.Err != nil || lacksWindow(a) || of.MayMiss(&a.State) })
}

// lacksWindow reports whether the answer shows no open window where one is needed.
func lacksWindow(a *store.Ask) bool { return isUnopened(&a.Request, &a.State) }

func wantsPrimary(asks []*store.Ask) bool {
	return slices.ContainsFunc(asks, func(a *store.Ask) bool { return a.Primary })
}

// areOpen reports whether all windows are known to be open at now.
func areOpen(asks []*store.Ask, now int64) bool {
	return !slices.ContainsFunc(asks, func(a *store.Ask) bool {
		return a.Until <= now || !algorithm.Of(a.Request.Limit.Algorithm).Windowed()
	})
}

// canOpen reports whether all windows can be opened without a script.
func canOpen(asks []*store.Ask, takes time.Duration) bool {
	return !slices.ContainsFunc(asks, func(a *store.Ask) bool { return !CanOpen(&a.Request, takes) })
}

// ids returns the IDs of the asks that have one.
func ids(asks []*store.Ask) (ids []string) {
	for _, a := range asks {
		if a.ID != "" {
			ids = append(ids, a.ID)
		}
	}
	return ids
}

func (g Group) ids() (ids []string) {
	for _, i := range g.Places {
		if id := g.Reqs[i].ID; id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}
