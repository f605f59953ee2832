//go:build check

package redis

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestBehindTwemproxy, which spreads the keys over two servers, closes connections on commands
// that it does not know, and knows neither SCRIPT nor INFO.
func TestBehindTwemproxy(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	countsAt(t, redistest.StartTwemproxy(t, servers[0].Addr(), servers[1].Addr()))
	for _, server := range servers {
		if n := server.Client().DBSize(t.Context()).Val(); n == 0 {
			t.Errorf("%s has no bucket", server.Addr())
		}
	}
}

// TestBucketsOfACallBehindTwemproxy are counted at their own servers, though these have the scripts of
// calls for several buckets, which twemproxy sends to the server of the first.
func TestBucketsOfACallBehindTwemproxy(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	for _, server := range servers {
		newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil).Warm(t.Context())
	}
	proxy := redistest.StartTwemproxy(t, servers[0].Addr(), servers[1].Addr())
	refusing := redistest.StartFilter(t, proxy, redistest.Refusing("-ERR unknown command", "script", "info")).Addr()
	for name, opts := range map[string]ShardOptions{
		"closes": {Primary: proxy}, "refuses": {Primary: refusing},
		"behind a proxy that spreads keys over servers, write pipelining off": {Primary: proxy, NoPipelining: true},
	} {
		t.Run(name, func(t *testing.T) {
			shard := newShard(t, opts)
			s := newStore(t, shard, nil)
			s.Warm(t.Context())
			limit := &store.Limit{Zone: name, Algorithm: store.FixedWindow, Window: endless}
			reqs := takes(limit, 40)
			must(t, anyError(store.Answers(t.Context(), s.Take, reqs)))
			through := clientOf(shard.Owner(0).Checks)
			for _, r := range reqs {
				key := ask.Keys{Prefix: DefaultKeyPrefix}.Key(limit, r.ClientKey)
				if n, err := through.HGet(t.Context(), key, "c").Int(); err != nil || n != 1 {
					t.Errorf("%s: %d, %v", key, n, err)
				}
			}
		})
	}
}

// TestBehindHAProxy, which passes bytes.
func TestBehindHAProxy(t *testing.T) {
	t.Parallel()
	countsAt(t, redistest.StartHAProxy(t, redistest.Start(t).Addr()))
}
