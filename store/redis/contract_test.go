package redis

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

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
