package redis

import (
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// TestBucketsMoveBetweenProducts, each to each, while requests are made: what is spent stays
// spent, and each copy expires.
func TestBucketsMoveBetweenProducts(t *testing.T) {
	t.Parallel()
	programs, err := redistest.Family()
	must(t, err)
	for _, from := range programs {
		for _, to := range programs {
			t.Run(filepath.Base(from)+" to "+filepath.Base(to), func(t *testing.T) {
				source, target := redistest.Start(t, redistest.Program(from)), redistest.Start(t, redistest.Program(to))
				was := []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: source.Addr()})}}
				now := []Member{{Name: "b", Shard: newShard(t, ShardOptions{Primary: target.Addr()})}}
				before := New(Options{Members: was, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
				after := New(Options{Members: now, Previous: was, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
				for _, limit := range storetest.Limits {
					if algorithm.Of(limit.Algorithm).Lease {
						continue
					}
					limit.Zone, limit.Window = "moves", endless
					for client := range 5 {
						moves(t, before, after, store.Request{Limit: &limit, ClientKey: fmt.Sprint("client-", client), Events: 10, Cost: 1})
					}
				}
				for _, key := range target.Client().Keys(t.Context(), "*").Val() {
					if left := target.Client().PTTL(t.Context(), key).Val(); left <= 0 {
						t.Errorf("%s never expires: %v", key, left)
					}
				}
			})
		}
	}
}

// moves spends 7 of 10 at a store, and requires that another one allows 3 of 10 that come at once.
func moves(t *testing.T, before, after *Store, r store.Request) {
	t.Helper()
	was := store.State{}
	for i := range 7 {
		r.ID = fmt.Sprint("before-", i)
		was = store.Answers(t.Context(), before.Charge, []store.Request{r})[0]
		must(t, was.Err)
	}
	var allowed atomic.Int64
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			one := r
			one.ID = fmt.Sprint("after-", i)
			if store.Answers(t.Context(), after.Take, []store.Request{one})[0].Allowed {
				allowed.Add(1)
			}
		})
	}
	all.Wait()
	st := store.Answers(t.Context(), after.Check, []store.Request{r})[0]
	if allowed.Load() != 3 || st.Used != 10 || r.Limit.Algorithm == store.FixedWindow && st.Reset != was.Reset {
		t.Errorf("%s, %v: %d of 3 are allowed, then %+v, was %+v", r.ClientKey, r.Limit.Algorithm, allowed.Load(), st, was)
	}
}
