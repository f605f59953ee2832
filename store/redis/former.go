package redis

import (
	"context"
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

// mostCopies is how many buckets are brought at the same time: fewer than there
// are connections, for checks go on meanwhile.
const mostCopies = DefaultPoolSize / 2

// former are the shards before a resharding. A bucket whose client key has
// another owner now is copied from its former one before it is first used, and
// goes on there.
type former struct {
	sharder *rendezvous
	shards  []*Shard
	names   []string
	// copying is full while as many buckets are brought as connections can be
	// spared for that.
	copying chan struct{}
	// seen are the buckets, by their key, that were copied or were not there.
	seen *otter.Cache[string, time.Duration]
}

func newFormer(members []Member) *former {
	f := &former{copying: make(chan struct{}, mostCopies), seen: otter.Must(&otter.Options[string, time.Duration]{
		MaximumSize: maxInherited,
		// A bucket that was not there for a window cannot come back.
		ExpiryCalculator: otter.ExpiryCreatingFunc(func(e otter.Entry[string, time.Duration]) time.Duration { return e.Value }),
	})}
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
func (s *Store) moved(ctx context.Context, op algorithm.Operation, reqs []store.Request, timeout time.Duration, ask func([]store.Request) []store.State) []store.State {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	elsewhere, failed := s.inherit(ctx, op, reqs)
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
func (s *Store) inherit(ctx context.Context, op algorithm.Operation, reqs []store.Request) (elsewhere []int64, failed []error) {
	elsewhere, failed = make([]int64, len(reqs)), make([]error, len(reqs))
	var wg sync.WaitGroup
	for i := range reqs {
		r := &reqs[i]
		was := s.formerOf(r.ClientKey)
		switch {
		case was == nil:
		case r.Limit.Algorithm == store.Concurrency && op == algorithm.Refund:
			// Leases that the new owner has end there, whatever the former one says.
		case r.Limit.Algorithm == store.Concurrency:
			wg.Go(func() {
				var err error
				if elsewhere[i], err = s.leasesAt(ctx, was, r); op != algorithm.Charge {
					failed[i] = err
				}
			})
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
	select {
	case s.former.copying <- struct{}{}:
		defer func() { <-s.former.copying }()
	case <-ctx.Done():
		return notExecuted(fmt.Errorf("bring a bucket from its former shard: %w", ErrTimeout))
	}
	from, to := s.at(ctx, was, r.ClientKey), s.at(ctx, now, r.ClientKey)
	if from == nil || to == nil {
		return notExecuted(errNoServers)
	}
	content, expiry, err := dump(ctx, from.checks, source)
	// -2: it has expired meanwhile.
	if err == nil && content != "" && expiry >= 0 {
		err = restore(ctx, to.checks, target, content, expiry)
	}
	if err != nil {
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

// dump returns the content of a key, empty if it is not there, and the instant,
// in milliseconds, at which it expires.
func dump(ctx context.Context, l *lane, key string) (content string, expiry int64, err error) {
	dumped, expires := newPlain("dump", key), newPlain("pexpiretime", key)
	if err := l.doPlain(ctx, dumped, expires); err != nil {
		return "", 0, err
	}
	content, _ = dumped.Cmder.(*goredis.Cmd).Val().(string)
	expiry, _ = expires.Cmder.(*goredis.Cmd).Val().(int64)
	return content, expiry, nil
}

// restore makes a key, unless it is there already.
func restore(ctx context.Context, l *lane, key, content string, expiry int64) error {
	err := l.doPlain(ctx, newPlain("restore", key, expiry, content, "absttl"))
	if isBusyKey(err) {
		return nil
	}
	return err
}

var isBusyKey = hasPrefix("BUSYKEY")

// detachMoved is detach for requests some of which are about buckets that had
// another owner.
func (s *Store) detachMoved(what algorithm.Operation, reqs []store.Request, report func(i int, st store.State)) {
	ctx, cancel := context.WithTimeout(context.Background(), s.opts.ChargeTimeout)
	defer cancel()
	_, failed := s.inherit(ctx, what, reqs)
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
