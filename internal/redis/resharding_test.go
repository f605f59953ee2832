package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// resharding has shards of which one is added or removed.
type resharding struct {
	members []Member
	servers map[string]*redistest.Server
}

func newResharding(t *testing.T) *resharding { return newReshardingOf(t, ShardOptions{}) }

// newReshardingOf starts the shards and connects to them with opts.
func newReshardingOf(t *testing.T, opts ShardOptions) *resharding {
	r := &resharding{servers: map[string]*redistest.Server{}}
	for _, name := range []string{"a", "b", "c"} {
		server := redistest.Start(t)
		r.servers[name] = server
		opts.Primary = server.Addr()
		r.members = append(r.members, Member{Name: name, Shard: newShard(t, opts)})
	}
	return r
}

func (r *resharding) store(members, before []Member) *Store {
	return New(Options{Members: members, Previous: steps(before), CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
}

// steps are those of a resharding that has one, or none.
func steps(before []Member) [][]Member {
	if before == nil {
		return nil
	}
	return [][]Member{before}
}

// moving returns client keys that have another owner in the second store.
func moving(before, after *Store, n int) (clients []string) {
	for i := 0; len(clients) < n; i++ {
		if client := fmt.Sprint("client-", i); before.Owner(client) != after.Owner(client) {
			clients = append(clients, client)
		}
	}
	return clients
}

// TestOwnersOfAMovedClient are those before each step, in the order of their names, and the present one.
func TestOwnersOfAMovedClient(t *testing.T) {
	r := newResharding(t)
	of := func(places ...int) (members []Member) {
		for _, place := range places {
			members = append(members, r.members[place])
		}
		return members
	}
	s := New(Options{Members: of(2), Previous: [][]Member{of(1), of(0), of(2, 2)}})
	if got := s.Owners("k"); !slices.Equal(got, []string{"a", "b", "c"}) || s.Owner("k") != "c" {
		t.Errorf("the owners are %v, and the present one %s", got, s.Owner("k"))
	}
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	moved := 0
	for i := range 300 {
		client := fmt.Sprint("client-", i)
		want := []string{before.Owner(client)}
		if now := after.Owner(client); now != want[0] {
			want, moved = append(want, now), moved+1
		}
		if got := after.Owners(client); !slices.Equal(got, want) {
			t.Errorf("%s has the owners %v, want %v", client, got, want)
		}
	}
	if moved < 60 || moved > 140 {
		t.Errorf("%d of 300 clients have moved, want a third", moved)
	}
}

// TestRequestNamesItsShard: its bucket is the one there. That of a shard that is gone is the present owner's, which is
// not charged twice, and gets nothing back that was spent elsewhere.
func TestRequestNamesItsShard(t *testing.T) {
	r := newResharding(t)
	s := r.store(r.members, r.members[:2])
	at := func(shard string, cost int64) store.Request {
		q := oneOf("k")[0]
		q.At, q.Cost = &store.Place{Shard: shard}, cost
		return q
	}
	reqs := []store.Request{at("a", 1), at("b", 2), at("c", 3)}
	for i, st := range store.Answers(t.Context(), s.Take, reqs) {
		used(t, reqs[i].Shard(), st, int64(i)+1)
		reqs[i].Receipt = st.Receipt
	}
	reported := make(chan store.State, len(reqs))
	s.ChargeReported(storetest.Posts(reqs), func(_ int, st store.State) { reported <- st })
	sum := int64(0)
	for range reqs {
		sum += (<-reported).Used
	}
	if sum != 12 {
		t.Errorf("the shards have %d, want 12", sum)
	}
	owner := s.Owner("k")
	was := inspected(t, s, at(owner, 0)).Copies[0].State.Used
	used(t, "a shard that is gone", store.Answers(t.Context(), s.Charge, []store.Request{at("gone", 1)})[0], was+1)
	gone := at("gone", 1)
	gone.Shared, gone.Receipt = true, reqs[slices.Index([]string{"a", "b", "c"}, owner)].Receipt
	some := []store.Request{at("a", 0), gone}
	for _, st := range [][]store.State{store.Answers(t.Context(), s.Refund, some), store.Answers(t.Context(), s.Charge, some)} {
		if must(t, st[0].Err); !errors.Is(st[1].Err, store.ErrGone) {
			t.Errorf("at a shard that is gone: %+v", st[1])
		}
	}
	posted := make([]store.State, len(some))
	for _, post := range []func([]*store.Request, func(int, store.State)){s.RefundReported, s.ChargeReported} {
		var all sync.WaitGroup
		all.Add(len(some))
		post(storetest.Posts(some), func(i int, st store.State) {
			posted[i] = st
			all.Done()
		})
		all.Wait()
		if must(t, posted[0].Err); !errors.Is(posted[1].Err, store.ErrGone) {
			t.Errorf("at a shard that is gone: %+v", posted[1])
		}
	}
	resets(t, s, at("b", 0))
	for _, shard := range []string{"a", "b", "c"} {
		if found := inspected(t, s, at(shard, 0)); found.Shard != shard || found.Copies[0].Exists != (shard != "b") {
			t.Errorf("after the reset of one bucket: %+v", found)
		}
	}
}

// TestCancelledCallsDoNotOpenTheBreaker of a slow server, under any operation.
func TestCancelledCallsDoNotOpenTheBreaker(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		r := newReshardingOf(t, ShardOptions{NoPipelining: plain, PoolSize: 2})
		before, client := r.store(r.members[:2], nil), "k"
		must(t, store.Answers(t.Context(), before.Charge, oneOf(client))[0].Err)
		was := r.servers[before.Owner(client)]
		must(t, was.Pause())
		for i := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%4)*5*time.Millisecond)
			if i%5 == 0 {
				cancel()
			}
			for name, call := range map[string]func(context.Context, []*store.Ask){
				"check": before.Check, "take": before.Take, "charge": before.Charge,
			} {
				if err := store.Answers(ctx, call, oneOf(client))[0].Err; err == nil {
					t.Errorf("%s: a paused server has answered", name)
				} else if errors.Is(err, wire.ErrShardDown) {
					t.Errorf("%s: %v", name, err)
				}
			}
			cancel()
		}
		must(t, was.Resume())
		must(t, store.Answers(t.Context(), before.Check, oneOf(client))[0].Err)
		for _, m := range r.members {
			for _, at := range m.Shard.Servers() {
				for _, l := range append([]*wire.Lane{at.Checks, at.Charges}, at.Replicas...) {
					breaker := *hidden[*gobreaker.TwoStepCircuitBreaker[any]](l, "breaker")
					if counts := breaker.Counts(); counts.TotalFailures > 0 {
						t.Errorf("%d failures are counted against %s", counts.TotalFailures, l.Addr)
					}
				}
			}
		}
	})
}
