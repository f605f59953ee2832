package redis

import (
	"context"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// resetPatience bounds the removal of a bucket from a server, and the search
	// for the servers.
	resetPatience = 2 * time.Second
	// resetMark is how long a bucket that was reset is not brought from its former
	// owner: what other processes had read there before is on its way no longer.
	resetMark = time.Minute
)

// Reset implements [store.Resetter]. What other processes bring from the former
// shard meanwhile is removed as well, or kept away.
func (s *Store) Reset(ctx context.Context, r store.Request) error {
	// It is brought to its end although whoever asked for it leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetPatience)
	defer cancel()
	was := s.formerOf(r.ClientKey)
	if was != nil {
		if err := s.remove(ctx, was, &r, false); err != nil {
			return fmt.Errorf("reset at the former shard %s: %w", s.former.name(r.ClientKey), err)
		}
	}
	place := s.sharder.owner(r.ClientKey)
	if err := s.remove(ctx, s.shards[place], &r, was != nil); err != nil {
		return fmt.Errorf("reset at shard %s: %w", s.opts.Members[place].Name, err)
	}
	return nil
}

// remove removes a bucket from a shard, under whatever algorithm it is kept. If it
// had another owner, it is not brought from there for a while.
func (s *Store) remove(ctx context.Context, shard *Shard, r *store.Request, moved bool) error {
	at := s.at(ctx, shard, r.ClientKey)
	if at == nil {
		return notExecuted(errNoServers)
	}
	// One by one: while a slot moves, its keys can be on either node.
	var marks, dels []*command
	for _, limit := range rulesLike(r.Limit) {
		key := s.keyIn(shard, &store.Request{Limit: &limit, ClientKey: r.ClientKey})
		marks = append(marks, newPlain("set", s.keysIn(shard).markOf(key), "", "px", resetMark.Milliseconds()))
		del := newPlain("del", key)
		del.reads = false
		dels = append(dels, del)
	}
	if moved {
		// A server that is full takes no marks, and nothing that is brought either.
		if err := at.checks.doPlain(ctx, marks...); err != nil && !isRefusal(err) {
			return err
		}
	}
	return at.checks.doPlain(ctx, dels...)
}

// rulesLike are the limit and those of the same zone and window that count in
// another way: some processes may have a config in which the zone was, or will
// be, such a one.
func rulesLike(limit *store.Limit) (all []store.Limit) {
	like := *limit
	for _, like.Algorithm = range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA, store.Concurrency} {
		if like.Align = false; like.Algorithm == store.FixedWindow {
			aligned := like
			aligned.Align = true
			all = append(all, aligned)
		}
		all = append(all, like)
	}
	return all
}

var _ store.Resetter = (*Store)(nil)
