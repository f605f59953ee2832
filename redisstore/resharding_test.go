package redisstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestRandomReshardings: whatever steps are made, and undone, while two processes have different configs, each
// client gets exactly its limit, with every algorithm.
func TestRandomReshardings(t *testing.T) {
	t.Parallel()
	const (
		events  = 10
		steps   = 5
		clients = 8
		patient = time.Minute
	)
	shards := map[string]*redis.Shard{}
	for _, name := range []string{"a", "b", "c"} {
		shard := redis.NewShard(redis.ShardOptions{Primary: redistest.Start(t).Addr()})
		t.Cleanup(func() { shard.Close(context.Background()) })
		shards[name] = shard
	}
	rng := rand.New(rand.NewPCG(uint64(steps), 3))
	for _, limit := range storetest.Limits {
		limit.Zone, limit.Window = fmt.Sprint("zone-", limit.Algorithm, limit.Align), 10_000*time.Hour
		// configs are the shards of each config, and those of the configs before it, the latest first.
		var configs [][][]redis.Member
		var registries [2]*ledger.Registry
		var owners [2]*ledger.Owners
		load := func(process int, config [][]redis.Member) {
			l := ledger.New(registries[process], redis.New(redis.Options{
				Members: config[0], Previous: config[1:], CheckTimeout: patient, ChargeTimeout: patient,
			}), ledger.Options{Timeout: patient})
			l.Run()
			if before := owners[process]; before != nil {
				before.Stop()
				before.Leave()
			}
			owners[process] = ledger.NewOwners(l)
		}
		taken, next := map[string]int{}, 0
		take := func(client string) bool {
			next++
			o := owners[rng.IntN(2)]
			a := &store.Ask{Request: store.Request{Limit: &limit, ClientKey: client, Events: events, Cost: 1, ID: fmt.Sprint(next)}}
			o.Take(t.Context(), []*store.Ask{a})
			redistest.Must(t, a.Err)
			if !a.Allowed {
				return false
			}
			taken[client]++
			if rng.IntN(5) == 0 {
				done := make(chan error)
				r := a.Request
				r.Receipt = a.State.Receipt
				go o.RefundReported(r, func(st store.State) { done <- st.Err })
				redistest.Must(t, <-done)
				taken[client]--
			}
			return true
		}
		for step := range steps {
			var config [][]redis.Member
			if step > 1 && rng.IntN(3) == 0 {
				config = configs[rng.IntN(len(configs))]
			} else {
				var members []redis.Member
				for len(members) == 0 {
					for name, shard := range shards {
						if weight := rng.IntN(3); weight > 0 {
							members = append(members, redis.Member{Name: name, Weight: weight, Shard: shard})
						}
					}
				}
				config = [][]redis.Member{members}
				for _, earlier := range slices.Backward(configs) {
					config = append(config, earlier[0])
				}
				configs = append(configs, config)
			}
			for process := range owners {
				if registries[process] == nil {
					registries[process] = ledger.NewRegistry(nil)
				}
				load(process, config)
				if step == 0 {
					continue
				}
				for client := range clients {
					take(fmt.Sprint("client-", client))
				}
			}
		}
		for client := range clients {
			name := fmt.Sprint("client-", client)
			for refused := 0; refused < 3; {
				if !take(name) {
					refused++
				}
			}
			if taken[name] != events {
				t.Errorf("%s, aligned %v: %s has taken %d of %d", limit.Algorithm, limit.Align, name, taken[name], events)
			}
		}
		for _, o := range owners {
			o.Stop()
			o.Flush(t.Context())
			o.Leave()
		}
	}
}

// TestRefundWithoutAFormerOwner: what was taken there has gone with it, which is no error, and the present owner gives
// back what it gave.
func TestRefundWithoutAFormerOwner(t *testing.T) {
	t.Parallel()
	var steps [][]redis.Member
	for _, name := range []string{"a", "b"} {
		shard := redis.NewShard(redis.ShardOptions{Primary: redistest.Start(t).Addr()})
		t.Cleanup(func() { shard.Close(context.Background()) })
		steps = append(steps, []redis.Member{{Name: name, Shard: shard}})
	}
	registry := ledger.NewRegistry(nil)
	open := func(members []redis.Member, previous ...[]redis.Member) *ledger.Owners {
		l := ledger.New(registry, redis.New(redis.Options{
			Members: members, Previous: previous, CheckTimeout: time.Minute, ChargeTimeout: time.Minute,
		}), ledger.Options{})
		l.Run()
		t.Cleanup(l.Leave)
		return ledger.NewOwners(l)
	}
	r := store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Hour}, ClientKey: "k", Events: 9, Cost: 2}
	var taken []*store.Ask
	for _, o := range []*ledger.Owners{open(steps[0]), open(steps[1], steps[0])} {
		a := &store.Ask{Request: r}
		o.Take(t.Context(), []*store.Ask{a})
		redistest.Must(t, a.Err)
		taken = append(taken, a)
	}
	after := open(steps[1])
	for _, a := range taken {
		done, back := make(chan error, 1), a.Request
		back.Receipt = a.State.Receipt
		after.RefundReported(back, func(st store.State) { done <- st.Err })
		redistest.Must(t, <-done)
	}
	if st := store.Answers(t.Context(), after.Peek, []store.Request{r})[0]; st.Err != nil || st.Used != 0 {
		t.Errorf("the present owner has %d, %v", st.Used, st.Err)
	}
}
