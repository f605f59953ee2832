package redis

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// A server loads these when the first bucket migrates.
var (
	scriptDump    = wire.NewScript(luascripts.Dump, "")
	scriptRestore = wire.NewScript(luascripts.Restore, "")
)

// maxMigrated bounds the buckets that are remembered as migrated, at about 110
// bytes each. Forgetting one costs a call.
const maxMigrated = 1_000_000

// Migrations are the buckets that migrate from previous owners, each once however
// many requests need it, and those that have migrated. Stores with the same
// members and previous members may share it.
type Migrations struct {
	seed maphash.Seed
	// done holds, by a hash of the key, the buckets that have migrated or did not
	// exist, and for how long to remember them.
	done *otter.Cache[uint64, time.Duration]

	mu sync.Mutex
	// running are by the bucket's key.
	running map[string]*migration
}

// NewMigrations returns Migrations of which none has begun.
func NewMigrations() *Migrations {
	return &Migrations{
		seed:    maphash.MakeSeed(),
		running: map[string]*migration{},
		done: otter.Must(&otter.Options[uint64, time.Duration]{
			MaximumSize:      maxMigrated,
			ExpiryCalculator: otter.ExpiryCreatingFunc(func(e otter.Entry[uint64, time.Duration]) time.Duration { return e.Value }),
		}),
	}
}

// Close ends the work in the background. Running migrations go on.
func (m *Migrations) Close() { m.done.StopAllGoroutines() }

// join returns the migration of a bucket, or nil if it is done. The caller starts
// a new one.
func (m *Migrations) join(target string) (running *migration, isNew bool) {
	hash := maphash.String(m.seed, target)
	if _, ok := m.done.GetIfPresent(hash); ok {
		return nil, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if running = m.running[target]; running != nil {
		return running, false
	}
	// It may have ended in between.
	if _, ok := m.done.GetIfPresent(hash); ok {
		return nil, false
	}
	running = &migration{target: target, ended: make(chan struct{})}
	m.running[target] = running
	return running, true
}

// migration copies a bucket to its new owner: a dump at the previous owner, and a
// restore unless the bucket exists. It goes on when its requests stop waiting, and
// joins the queues of checks, so that many migrations share a pipeline.
type migration struct {
	store          *Store
	was, now       *Shard
	clientKey      string
	source, target string
	limit          store.Limit

	ended chan struct{}
	// err is the failure, once it has ended.
	err error
}

// migrate returns the migration of a bucket from its previous owner, or nil if it
// is done. Other processes may migrate the bucket at the same time.
func (s *Store) migrate(was *Shard, r *store.Request) *migration {
	now := s.owner(r.ClientKey).Shard
	m, isNew := s.opts.Migrations.join(s.asker.Keys.In(now.Shard).Key(r.Limit, r.ClientKey))
	if !isNew {
		return m
	}
	m.store, m.was, m.now = s, was, now
	m.clientKey, m.limit, m.source = r.ClientKey, *r.Limit, s.asker.Keys.In(was.Shard).Key(r.Limit, r.ClientKey)
	if was.IsFound() && now.IsFound() {
		m.dump()
	} else {
		go m.find()
	}
	return m
}

// find starts the migration once the servers have been found.
func (m *migration) find() {
	ctx, cancel := context.WithTimeout(context.Background(), m.store.opts.CheckTimeout)
	defer cancel()
	m.was.Await(ctx)
	m.now.Await(ctx)
	m.dump()
}

func (m *migration) dump() {
	m.ask(m.was, wire.NewEval(scriptDump, false, []any{m.source}, ask.TypeOf(m.limit.Algorithm)), func(reply string, err error) {
		if err != nil {
			m.end(err)
			return
		}
		expiry, content := reply[:min(8, len(reply))], reply[min(8, len(reply)):]
		at, err := wire.Unpack(nil, expiry)
		switch {
		case err != nil || len(at) != 1:
			m.end(wire.ErrReply)
		case content == "":
			m.end(nil)
		default:
			m.restore(m.lifeOf(at[0]), content, true)
		}
	})
}

// life is when a copy expires, in milliseconds since 1970, and what reset a count without a window
// gets, or 0: its own copy would be no orphan.
type life struct{ expiry, reset int64 }

// lifeOf returns the life of the copy of a bucket that expires at an instant, less than 0 for one
// that never does: a plain opening, or a plain charge, was cut short.
func (m *migration) lifeOf(expiry int64) life {
	now := time.Now()
	if expiry >= 0 {
		return life{expiry: min(expiry, now.Add(store.MaxWindow).UnixMilli())}
	}
	// A sliding window counts in the next one.
	l := life{expiry: now.Add(2*m.limit.Window + algorithm.Grace).UnixMilli()}
	if algorithm.Of(m.limit.Algorithm).Windowed() {
		opened := algorithm.New(&m.limit)
		opened.Charge(&store.Request{Limit: &m.limit}, now.UnixMicro())
		l.reset = opened.Expiry(&m.limit)
	}
	return l
}

// restore makes the bucket, unless marked is set and the mark forbids it.
func (m *migration) restore(l life, content string, marked bool) {
	keys := []any{m.target}
	if marked {
		keys = append(keys, m.store.asker.Keys.In(m.now.Shard).Mark(m.target))
	}
	var marks int64
	if ask.EndsEarly(m.limit.Algorithm) {
		marks = 1
	}
	m.ask(m.now, wire.NewEval(scriptRestore, false, keys, wire.AppendPacked(nil, l.expiry, marks, l.reset), ask.TypeOf(m.limit.Algorithm), content), func(_ string, err error) {
		if marked && wire.Says(err, wire.OneKey) {
			// A node of a Redis Cluster that imports the slot takes one key at a time.
			m.restore(l, content, false)
			return
		}
		m.end(err)
	})
}

func (m *migration) ask(shard *Shard, cmd *wire.Command, then func(reply string, err error)) {
	at := m.store.asker.Keys.Servers(shard.Shard, m.clientKey)
	if at == nil {
		then("", wire.ErrNoServers)
		return
	}
	if !at.Checks.IsUp() {
		then("", at.Checks.Down())
		return
	}
	// Requests stop waiting sooner. But a long log takes a server longer than they wait, and a reply
	// that nobody awaits would have each of them begin anew.
	patience := max(m.store.opts.CheckTimeout, wire.ReplyTimeout)
	c := wire.NewCall(time.Now().Add(patience), patience)
	c.Cmds = append(c.Cmds, cmd)
	c.Detached = func(c *wire.Call) {
		err := cmd.Outcome
		c.Release()
		if err != nil {
			then("", err)
			return
		}
		then(cmd.Result())
	}
	at.Checks.Post(c)
}

func (m *migration) end(err error) {
	all := m.store.opts.Migrations
	if err == nil {
		// A bucket that was missing for a window cannot come back.
		all.done.Set(maphash.String(all.seed, m.target), max(m.limit.Window, time.Second))
	} else {
		m.err = notMigrated(err)
	}
	all.mu.Lock()
	delete(all.running, m.target)
	all.mu.Unlock()
	close(m.ended)
}

// wait returns nil once the bucket is at its owner. A nil migration is done.
func (m *migration) wait(ctx context.Context) error {
	if m == nil {
		return nil
	}
	select {
	case <-m.ended:
		return m.err
	case <-ctx.Done():
	}
	err := ctx.Err()
	if errors.Is(err, context.DeadlineExceeded) {
		err = wire.ErrTimeout
	}
	return notMigrated(err)
}

func notMigrated(err error) error {
	return wire.NotExecuted(fmt.Errorf("migrate a bucket from its previous shard: %w", err))
}

// previousOwner returns the member that owned a client key, or nil if its shard
// owns the key now.
func (s *Store) previousOwner(clientKey string) *Member {
	if s.previous == nil {
		return nil
	}
	was := &s.opts.Previous[s.previous.owner(clientKey)]
	if was.Shard == s.owner(clientKey).Shard {
		return nil
	}
	return was
}

// runMigrating runs an operation once all buckets have migrated. Leases end one by one,
// so they do not migrate: those at the previous owner are counted there.
func (s *Store) runMigrating(ctx context.Context, op algorithm.Operation, asks []*store.Ask, deadline time.Time) {
	migrating := s.migrating(len(asks), func(i int) *store.Request { return &asks[i].Request })
	leases := func(a *store.Ask) bool {
		return op != algorithm.Refund && algorithm.Of(a.Request.Limit.Algorithm).Lease && s.previousOwner(a.ClientKey) != nil
	}
	if migrating == nil && !slices.ContainsFunc(asks, leases) {
		s.runMigrated(ctx, op, asks, deadline)
		return
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	elsewhere, failed := s.countLeases(ctx, op, asks, deadline)
	places := awaitAll(ctx, migrating, failed)
	for i, err := range failed {
		asks[i].State = store.State{Err: err}
	}
	ready := make([]*store.Ask, len(places))
	for n, i := range places {
		ready[n] = &store.Ask{Request: asks[i].Request}
		ready[n].Reserved += elsewhere[i]
	}
	s.runMigrated(ctx, op, ready, deadline)
	for n, i := range places {
		st := ready[n].State
		if st.Err == nil {
			st.Used += elsewhere[i]
			st.Limit += elsewhere[i]
		}
		asks[i].State = st
	}
}

// migrating returns the migrations that the requests have to wait for, each at its
// request's place, and starts those that do not run; nil if there are none.
func (s *Store) migrating(n int, request func(i int) *store.Request) (all []*migration) {
	for i := range n {
		r := request(i)
		was := s.previousOwner(r.ClientKey)
		if was == nil || algorithm.Of(r.Limit.Algorithm).Lease {
			continue
		}
		if m := s.migrate(was.Shard, r); m != nil {
			if all == nil {
				all = make([]*migration, n)
			}
			all[i] = m
		}
	}
	return all
}

// requestsIn returns what migrating asks for.
func requestsIn(reqs []*store.Request) (n int, request func(i int) *store.Request) {
	return len(reqs), func(i int) *store.Request { return reqs[i] }
}

// awaitAll waits for migrations, records the failures, and returns the places of the other
// requests.
func awaitAll(ctx context.Context, migrating []*migration, failed []error) (ready []int) {
	for i := range failed {
		if failed[i] == nil && migrating != nil {
			failed[i] = migrating[i].wait(ctx)
		}
		if failed[i] == nil {
			ready = append(ready, i)
		}
	}
	return ready
}

// countLeases returns the numbers of leases at previous owners, and the failures. A
// refund needs none: it concerns the new owner's leases only.
func (s *Store) countLeases(ctx context.Context, op algorithm.Operation, asks []*store.Ask, deadline time.Time) (elsewhere []int64, failed []error) {
	elsewhere, failed = make([]int64, len(asks)), make([]error, len(asks))
	var wg sync.WaitGroup
	for i, a := range asks {
		was := s.previousOwner(a.ClientKey)
		if was == nil || !algorithm.Of(a.Request.Limit.Algorithm).Lease || op == algorithm.Refund {
			continue
		}
		wg.Go(func() {
			st := store.State{Err: wire.NotExecuted(wire.ErrNoServers)}
			was.Shard.Await(ctx)
			if at := s.asker.Keys.Servers(was.Shard.Shard, a.ClientKey); at != nil {
				st = s.asker.AskOne(ctx, at.Checks, a.Request, deadline, s.asker.Writing(algorithm.Check, at))
			}
			if elsewhere[i] = st.Used; op != algorithm.Charge {
				failed[i] = st.Err
			}
		})
	}
	wg.Wait()
	return elsewhere, failed
}

// detachMigrating is detach for buckets some of which have to migrate. A failed
// migration is tried again while there is time; other requests do not wait for it.
func (s *Store) detachMigrating(migrating []*migration, op algorithm.Operation, reqs []*store.Request, report func(i int, st store.State)) {
	deadline := time.Now().Add(s.opts.ChargeTimeout)
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for tries := 0; ; tries++ {
		failed := make([]error, len(reqs))
		places := awaitAll(ctx, migrating, failed)
		ready := make([]*store.Request, len(places))
		for n, i := range places {
			ready[n] = reqs[i]
		}
		s.detachMigrated(op, ready, reportAt(report, places))
		after, hasTime := wire.NextTry(tries, deadline)
		var again []*store.Request
		var againPlaces []int
		for i, err := range failed {
			switch {
			case err == nil:
			case hasTime && !errors.Is(err, store.ErrFinal):
				again, againPlaces = append(again, reqs[i]), append(againPlaces, i)
			default:
				report(i, store.State{Err: err})
			}
		}
		if len(again) == 0 {
			return
		}
		wire.Pause(ctx, after)
		migrating, reqs, report = s.migrating(requestsIn(again)), again, reportAt(report, againPlaces)
	}
}

// reportAt returns a report for the requests at these places among those of report.
func reportAt(report func(i int, st store.State), places []int) func(n int, st store.State) {
	return func(n int, st store.State) { report(places[n], st) }
}
