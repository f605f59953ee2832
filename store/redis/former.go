package redis

import (
	"context"
	"errors"
	"sync"
	"time"

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
