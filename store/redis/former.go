package redis

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/maypok86/otter/v2"
	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// maxInherited bounds the memory for buckets that were looked for at their
// former owner: to forget one costs a call.
const maxInherited = 1_000_000

// former are the shards before a resharding. A bucket whose client key has
// another owner now is copied from its former one before it is first used, and
// goes on there.
type former struct {
	sharder *rendezvous
	shards  []*Shard
	// seen are the buckets, by their key, that were copied or were not there.
	seen *otter.Cache[string, time.Duration]
}

func newFormer(members []Member) *former {
	f := &former{seen: otter.Must(&otter.Options[string, time.Duration]{
		MaximumSize: maxInherited,
		// A bucket that was not there for a window cannot come back.
		ExpiryCalculator: otter.ExpiryCreatingFunc(func(e otter.Entry[string, time.Duration]) time.Duration { return e.Value }),
	})}
	f.sharder, f.shards = shardersOf(members)
	return f
}

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

// anyMoved tells whether some of the client keys had another owner.
func (s *Store) anyMoved(reqs []store.Request) bool {
	for i := range reqs {
		if s.formerOf(reqs[i].ClientKey) != nil {
			return true
		}
	}
	return false
}

// moved asks about requests some of which are about buckets that had another
// owner, once these have been brought to the new one. Leases are not brought,
// for they end one by one: those at the former owner are counted there.
func (s *Store) moved(ctx context.Context, reqs []store.Request, timeout time.Duration, ask func([]store.Request) []store.State) []store.State {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	elsewhere, failed := s.inherit(ctx, reqs)
	var places []int
	var ready []store.Request
	for i := range reqs {
		if failed[i] != nil {
			continue
		}
		r := reqs[i]
		r.Reserved += elsewhere[i]
		places, ready = append(places, i), append(ready, r)
	}
	states := make([]store.State, len(reqs))
	for i, err := range failed {
		states[i] = store.State{Err: err}
	}
	if len(ready) == 0 {
		return states
	}
	for n, st := range ask(ready) {
		if st.Err == nil {
			st.Used += elsewhere[places[n]]
			st.Limit += elsewhere[places[n]]
		}
		states[places[n]] = st
	}
	return states
}

// inherit brings buckets from their former owners, and returns how many leases
// there are still, and what went wrong.
func (s *Store) inherit(ctx context.Context, reqs []store.Request) (elsewhere []int64, failed []error) {
	elsewhere, failed = make([]int64, len(reqs)), make([]error, len(reqs))
	var wg sync.WaitGroup
	for i := range reqs {
		r := &reqs[i]
		was := s.formerOf(r.ClientKey)
		switch {
		case was == nil:
		case r.Limit.Algorithm == store.Concurrency:
			wg.Go(func() { elsewhere[i], failed[i] = s.leasesAt(ctx, was, r) })
		default:
			wg.Go(func() { failed[i] = s.bring(ctx, was, r) })
		}
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
	if shard.cluster == nil {
		return shard.owner(0)
	}
	return shard.owner(s.keys.slot(clientKey))
}

// bring copies a bucket, unless the new owner has it already. Other processes
// may do so at the same time.
func (s *Store) bring(ctx context.Context, was *Shard, r *store.Request) error {
	now := s.shards[s.sharder.owner(r.ClientKey)]
	source, target := s.keyIn(was, r), s.keyIn(now, r)
	if _, ok := s.former.seen.GetIfPresent(target); ok {
		return nil
	}
	from, err := was.direct(s.at(ctx, was, r.ClientKey))
	if err != nil {
		return err
	}
	to, err := now.direct(s.at(ctx, now, r.ClientKey))
	if err != nil {
		return err
	}
	if err := copyKey(ctx, from, source, to, target); err != nil {
		return notExecuted(fmt.Errorf("bring a bucket from its former shard: %w", err))
	}
	s.former.seen.Set(target, max(r.Limit.Window, time.Second))
	return nil
}

func (s *Store) keyIn(shard *Shard, r *store.Request) string {
	keys := s.keys
	keys.tagged = shard.cluster != nil
	return keys.key(r.Limit, r.ClientKey)
}

// direct is the way to single commands for a primary.
func (s *Shard) direct(at *servers) (goredis.UniversalClient, error) {
	switch {
	case at == nil:
		return nil, notExecuted(errNoServers)
	case s.cluster != nil:
		return s.cluster.redirects, nil
	case !at.checks.isUp():
		return nil, notExecuted(at.checks.down())
	default:
		return at.checks.client, nil
	}
}

// copyKey copies a key with its expiry, unless it is there already. A key that
// is not there is not copied.
func copyKey(ctx context.Context, from goredis.UniversalClient, source string, to goredis.UniversalClient, target string) error {
	content, err := from.Dump(ctx, source).Result()
	switch {
	case errors.Is(err, goredis.Nil):
		return nil
	case err != nil:
		return err
	}
	expiry, err := from.PExpireTime(ctx, source).Result()
	if err != nil {
		return err
	}
	// -2: it has expired meanwhile.
	if expiry < 0 {
		return nil
	}
	err = to.Do(ctx, "RESTORE", target, expiry.Milliseconds(), content, "ABSTTL").Err()
	if goredis.HasErrorPrefix(err, "BUSYKEY") {
		return nil
	}
	return err
}

// detachMoved is detach for requests some of which are about buckets that had
// another owner.
func (s *Store) detachMoved(what algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	ctx, cancel := context.WithTimeout(context.Background(), s.opts.ChargeTimeout)
	defer cancel()
	_, failed := s.inherit(ctx, reqs)
	var places []int
	var ready []store.Request
	for i := range reqs {
		switch {
		case failed[i] == nil:
			places, ready = append(places, i), append(ready, reqs[i])
		case report != nil:
			report(i, store.State{Err: failed[i]})
		case s.opts.OnUndelivered != nil:
			s.opts.OnUndelivered(s.Owner(reqs[i].ClientKey), what, failed[i])
		}
	}
	told := report
	if report != nil {
		told = func(n int, st store.State) { report(places[n], st) }
	}
	s.detachReady(what, ready, told)
}
