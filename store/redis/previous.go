package redis

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/maypok86/otter/v2"
	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// former are the shards before a resharding. A bucket whose client key has
// another owner now is copied from its former one before it is first used, and
// goes on there.
type former struct {
	sharder    *rendezvous
	shards     []*Shard
	names      []string
	migrations *Migrations
}

func newFormer(members []Member, migrations *Migrations) *former {
	if migrations == nil {
		migrations = NewMigrations()
	}
	f := &former{migrations: migrations}
	f.sharder, f.shards = shardersOf(members)
	for _, m := range members {
		f.names = append(f.names, m.Name)
	}
	return f
}

// name is that of the shard that owned a client key.
func (f *former) name(clientKey string) string { return f.names[f.sharder.owner(clientKey)] }

// shardersOf returns what chooses one of the members for a client key, and their
// shards.
func shardersOf(members []Member) (*rendezvous, []*Shard) {
	var names []string
	var weights []int
	var shards []*Shard
	for _, m := range members {
		names = append(names, m.Name)
		weights = append(weights, max(m.Weight, 1))
		shards = append(shards, m.Shard)
	}
	return newRendezvous(names, weights), shards
}

// formerOf returns the shard that owned a client key before, or nil if that is
// the one that owns it now.
func (s *Store) formerOf(clientKey string) *Shard {
	if s.former == nil {
		return nil
	}
	was := s.former.shards[s.former.sharder.owner(clientKey)]
	if was == s.shards[s.sharder.owner(clientKey)] {
		return nil
	}
	return was
}

// moved asks about requests some of which are about buckets that had another
// owner, once these have been brought to the new one, all before the deadline.
// Leases are not brought, for they end one by one: those at the former owner are
// counted there.
func (s *Store) moved(ctx context.Context, op algorithm.Operation, reqs []store.Request, deadline time.Time, ask func(context.Context, []store.Request, time.Time) []store.State) []store.State {
	arriving, lent := s.arriving(reqs), s.anyLent(op, reqs)
	if arriving == nil && !lent {
		return ask(ctx, reqs, deadline)
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	elsewhere, failed := s.lent(ctx, op, reqs)
	ready, places := awaitAll(ctx, arriving, reqs, failed)
	states := make([]store.State, len(reqs))
	for i, err := range failed {
		states[i] = store.State{Err: err}
	}
	if len(ready) == 0 {
		return states
	}
	for n, i := range places {
		ready[n].Reserved += elsewhere[i]
	}
	for n, st := range ask(ctx, ready, deadline) {
		if st.Err == nil {
			st.Used += elsewhere[places[n]]
			st.Limit += elsewhere[places[n]]
		}
		states[places[n]] = st
	}
	return states
}

// arriving returns the migrations of the buckets that are not at their owner yet,
// each at its request's place, having begun those that had not; nil if there are
// none.
func (s *Store) arriving(reqs []store.Request) (all []*migration) {
	for i := range reqs {
		was := s.formerOf(reqs[i].ClientKey)
		if was == nil || reqs[i].Limit.Algorithm == store.Concurrency {
			continue
		}
		if m := s.bring(was, &reqs[i]); m != nil {
			if all == nil {
				all = make([]*migration, len(reqs))
			}
			all[i] = m
		}
	}
	return all
}

// awaitAll waits for buckets that are on their way, notes which failed, and returns
// the requests that did not, with their places.
func awaitAll(ctx context.Context, arriving []*migration, reqs []store.Request, failed []error) (ready []store.Request, places []int) {
	for i := range reqs {
		if failed[i] == nil && arriving != nil {
			failed[i] = arriving[i].wait(ctx)
		}
		if failed[i] == nil {
			ready, places = append(ready, reqs[i]), append(places, i)
		}
	}
	return ready, places
}

// lends reports whether a former owner is to be asked for leases. Those that the
// new owner has end there, whatever the former one says.
func (s *Store) lends(op algorithm.Operation, r *store.Request) bool {
	return r.Limit.Algorithm == store.Concurrency && op != algorithm.Refund && s.formerOf(r.ClientKey) != nil
}

func (s *Store) anyLent(op algorithm.Operation, reqs []store.Request) bool {
	for i := range reqs {
		if s.lends(op, &reqs[i]) {
			return true
		}
	}
	return false
}

// lent returns how many leases there are at former owners, and what went wrong.
func (s *Store) lent(ctx context.Context, op algorithm.Operation, reqs []store.Request) (elsewhere []int64, failed []error) {
	elsewhere, failed = make([]int64, len(reqs)), make([]error, len(reqs))
	var wg sync.WaitGroup
	for i := range reqs {
		if !s.lends(op, &reqs[i]) {
			continue
		}
		wg.Go(func() {
			var err error
			if elsewhere[i], err = s.leasesAt(ctx, s.formerOf(reqs[i].ClientKey), &reqs[i]); op != algorithm.Charge {
				failed[i] = err
			}
		})
	}
	wg.Wait()
	return elsewhere, failed
}

// leasesAt is how many leases there are at a former owner.
func (s *Store) leasesAt(ctx context.Context, was *Shard, r *store.Request) (int64, error) {
	at := s.at(ctx, was, r.ClientKey)
	if at == nil {
		return 0, notExecuted(errNoServers)
	}
	states := make([]store.State, 1)
	deadline, _ := ctx.Deadline()
	s.ask(ctx, at.checks, whole([]store.Request{*r}, states), deadline, s.writing(algorithm.Check, at))
	return states[0].Used, states[0].Err
}

// at returns the servers in a shard that hold a client key's buckets, or nil if
// they are not found before ctx ends.
func (s *Store) at(ctx context.Context, shard *Shard, clientKey string) *servers {
	if !shard.isFound() {
		shard.await(ctx)
	}
	return s.serversOf(shard, clientKey)
}

// serversOf is at without waiting.
func (s *Store) serversOf(shard *Shard, clientKey string) *servers {
	if shard.cluster == nil {
		return shard.owner(0)
	}
	return shard.owner(s.keys.slot(clientKey))
}

// keysIn builds the keys of a shard.
func (s *Store) keysIn(shard *Shard) bucketKeys {
	keys := s.keys
	keys.tagged = shard.cluster != nil
	return keys
}

func (s *Store) keyIn(shard *Shard, r *store.Request) string {
	return s.keysIn(shard).key(r.Limit, r.ClientKey)
}

// detachArriving is detach for requests some of which are about buckets that are
// on their way to their owner. A migration that failed is begun again while there is
// time for that; what has arrived does not wait for it.
func (s *Store) detachArriving(arriving []*migration, what algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	deadline := time.Now().Add(s.opts.ChargeTimeout)
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for tries := 0; ; tries++ {
		failed := make([]error, len(reqs))
		ready, places := awaitAll(ctx, arriving, reqs, failed)
		s.detachReady(what, ready, reportAt(report, places))
		after, hasTime := nextTry(tries, deadline)
		var again []store.Request
		var openPlaces []int
		for i, err := range failed {
			switch {
			case err == nil:
			case hasTime && !errors.Is(err, store.ErrFinal):
				again, openPlaces = append(again, reqs[i]), append(openPlaces, i)
			case report != nil:
				report(i, store.State{Err: err})
			case s.opts.OnUndelivered != nil:
				s.opts.OnUndelivered(s.Owner(reqs[i].ClientKey), what, err)
			}
		}
		if len(again) == 0 {
			return
		}
		pause(ctx, after)
		arriving, reqs, report = s.arriving(again), again, reportAt(report, openPlaces)
	}
}

// reportAt returns what reports the requests that are at these places among those
// of report.
func reportAt(report func(i int, st store.State), places []int) func(n int, st store.State) {
	if report == nil {
		return nil
	}
	return func(n int, st store.State) { report(places[n], st) }
}

// maxMigrated bounds how many buckets are remembered, at about 110 bytes each. To
// forget one costs a call.
const maxMigrated = 1_000_000

// Migrations are the buckets that are being brought from former owners, each once
// whoever wants it, and those for which that is done. Stores may share them that
// have the same members and the same former members.
type Migrations struct {
	seed maphash.Seed
	// done holds, by a hash of their key, the buckets that were brought or of which
	// there was nothing to bring, and for how long to believe that.
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

// Close ends what is done in the background. What is running goes on.
func (m *Migrations) Close() { m.done.StopAllGoroutines() }

// join returns the migration of a bucket, which the caller has to start if it is
// new, or nil if there is nothing to do.
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
	// It may have ended just now.
	if _, ok := m.done.GetIfPresent(hash); ok {
		return nil, false
	}
	running = &migration{target: target, ended: make(chan struct{})}
	m.running[target] = running
	return running, true
}

// migration is a bucket on its way to its new owner: dumped at the former one, and
// restored unless it is there. It goes on whoever stops waiting for it, and joins
// the queues of checks, so that many leave in one pipeline.
type migration struct {
	store          *Store
	was, now       *Shard
	clientKey      string
	source, target string
	// marks is set if the bucket may end before the former copy, which is then not
	// to be brought again.
	marks bool
	// lasting is how long it is remembered that this is done.
	lasting time.Duration

	ended chan struct{}
	// err is what went wrong, once it has ended.
	err error
}

// bring returns the migration of a bucket from its former owner, or nil if it is
// done. Other processes may bring the bucket at the same time.
func (s *Store) bring(was *Shard, r *store.Request) *migration {
	now := s.shards[s.sharder.owner(r.ClientKey)]
	m, isNew := s.former.migrations.join(s.keyIn(now, r))
	if !isNew {
		return m
	}
	m.store, m.was, m.now = s, was, now
	m.clientKey, m.source = r.ClientKey, s.keyIn(was, r)
	m.marks = layoutOf(r.Limit.Algorithm).endsEarly
	// A bucket that was not there for a window cannot come back.
	m.lasting = max(r.Limit.Window, time.Second)
	if was.isFound() && now.isFound() {
		m.dump()
	} else {
		go m.find()
	}
	return m
}

// find starts once it is known who the servers are.
func (m *migration) find() {
	ctx, cancel := context.WithTimeout(context.Background(), m.store.opts.CheckTimeout)
	defer cancel()
	m.was.await(ctx)
	m.now.await(ctx)
	m.dump()
}

func (m *migration) dump() {
	m.ask(m.was, newScriptCall(scriptDump, wordEvalSHARO, []string{m.source}), func(reply string, err error) {
		if err != nil {
			m.end(err)
			return
		}
		expiry, content := reply[:min(8, len(reply))], reply[min(8, len(reply)):]
		at, err := unpack(expiry)
		switch {
		case err != nil || len(at) != 1:
			m.end(errReply)
		case content == "" || at[0] < 0:
			m.end(nil)
		default:
			m.restore(at[0], content, true)
		}
	})
}

// restore makes the bucket. marked is set if the mark counts.
func (m *migration) restore(expiry int64, content string, marked bool) {
	keys := []string{m.target}
	if marked {
		keys = append(keys, m.store.keysIn(m.now).markOf(m.target))
	}
	var marks int64
	if m.marks {
		marks = 1
	}
	m.ask(m.now, newScriptCall(scriptRestore, wordEvalSHA, keys, appendPacked(nil, expiry, marks), content), func(_ string, err error) {
		if marked && says(err, oneKey) {
			// A node of a Redis Cluster takes one key at a time while it gets the slot.
			m.restore(expiry, content, false)
			return
		}
		m.end(err)
	})
}

// ask makes a shard's primary run cmd, and tells then of the reply.
func (m *migration) ask(shard *Shard, cmd *command, then func(reply string, err error)) {
	at := m.store.serversOf(shard, m.clientKey)
	if at == nil {
		then("", errNoServers)
		return
	}
	if !at.checks.isUp() {
		then("", at.checks.down())
		return
	}
	c := newCall(time.Now().Add(m.store.opts.CheckTimeout))
	c.fair = m.store.opts.CheckTimeout
	c.cmds = append(c.cmds, cmd)
	c.detached = func(c *call) {
		err := cmd.outcome
		c.release()
		if err != nil {
			then("", err)
			return
		}
		then(cmd.Cmder.(*goredis.StringCmd).Val(), nil)
	}
	at.checks.post(c)
}

// end tells all who wait.
func (m *migration) end(err error) {
	all := m.store.former.migrations
	if err == nil {
		all.done.Set(maphash.String(all.seed, m.target), m.lasting)
	} else {
		m.err = notExecuted(fmt.Errorf("bring a bucket from its former shard: %w", err))
	}
	all.mu.Lock()
	delete(all.running, m.target)
	all.mu.Unlock()
	close(m.ended)
}

// wait returns nil once the bucket is at its owner. A nil migration is one that is
// done.
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
		err = ErrTimeout
	}
	return notExecuted(fmt.Errorf("bring a bucket from its former shard: %w", err))
}
