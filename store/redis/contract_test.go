package redis

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// TestScriptsAgreeWithAlgorithm holds the Lua scripts and what is read without
// them to the arithmetic in Go, on every field of every answer.
func TestScriptsAgreeWithAlgorithm(t *testing.T) {
	shard := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	for _, limit := range storetest.Limits {
		name := string(limit.Algorithm)
		if limit.Align {
			name += "/align"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.History{Limit: limit, Operations: 50_000}.Run(t, func(_ *testing.T, clock *storetest.Clock) store.Store {
				return New(Options{
					LocalClock: true, Now: clock.Now, CheckTimeout: patience, ChargeTimeout: patience,
					Members: []Member{{Name: "a", Shard: shard}},
				})
			})
		})
	}
}

// TestRestsAddUpExactly where their sum is more than a double holds.
func TestRestsAddUpExactly(t *testing.T) {
	const events = store.MaxInteger
	now := time.UnixMicro(1_795_258_977_534_988)
	s := newStore(t, newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()}), func(o *Options) {
		o.LocalClock, o.Now = true, func() time.Time { return now }
	})
	limit := &store.Limit{Zone: "rests", Algorithm: store.GCRA, Window: time.Minute + time.Microsecond}
	for i := range 300 {
		bucket := algorithm.New(limit)
		for n := range 4 {
			r := store.Request{Limit: limit, ClientKey: fmt.Sprint(i), Events: events, Cost: 2_398_311_873_043 + int64(i*n), ID: "id"}
			want := algorithm.Take.Run(bucket, &r, now.UnixMicro())
			got := s.Take(t.Context(), []store.Request{r})[0]
			if got.Err != nil || got.Content != want.Content || got.Used != want.Used {
				t.Fatalf("take %d of %d: got %+v, want %+v", n, i, got, want)
			}
		}
	}
}

func TestContract(t *testing.T) {
	server := redistest.Start(t)
	other := redistest.Start(t)
	for name, build := range map[string]func(t *testing.T, o *Options){
		"Pipelining": func(t *testing.T, o *Options) {
			o.Members = []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}}
		},
		"Plain": func(t *testing.T, o *Options) {
			o.Members = []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: true})}}
		},
		"TwoShardsAndSecret": func(t *testing.T, o *Options) {
			o.KeySecret = []byte("secret")
			o.Members = []Member{
				{Name: "a", Shard: newShard(t, ShardOptions{Primary: server.Addr()})},
				{Name: "b", Shard: newShard(t, ShardOptions{Primary: other.Addr()})},
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T, clock *storetest.Clock) store.Store {
				opts := Options{LocalClock: true, Now: clock.Now, CheckTimeout: patience, ChargeTimeout: patience}
				build(t, &opts)
				return New(opts)
			})
		})
	}
}
