package redis

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// These are short, as nearly every line of a test has one.
var (
	must       = redistest.Must
	eventually = redistest.Eventually
	soon       = redistest.Soon
)

const waitTimeout = redistest.WaitTimeout

// newStore returns a store on one shard with generous timeouts.
func newStore(t testing.TB, shard *Shard, change func(*Options)) *Store {
	t.Helper()
	opts := Options{
		Members:       []Member{{Name: "a", Shard: shard}},
		CheckTimeout:  waitTimeout,
		ChargeTimeout: waitTimeout,
	}
	if change != nil {
		change(&opts)
	}
	return New(opts)
}

// newShard returns a shard that is closed when the test ends.
func newShard(t testing.TB, opts ShardOptions) *Shard {
	t.Helper()
	if opts.DialTimeout == 0 {
		opts.DialTimeout = waitTimeout
	}
	s := NewShard(opts)
	redistest.CloseAtEnd(t, s)
	return s
}

// undone makes the server pass to other tests although this one changes users or maxmemory.
func undone(t testing.TB, server *redistest.Server) *redistest.Server {
	t.Helper()
	t.Cleanup(func() {
		for _, words := range [][]any{
			{"ACL", "DELUSER", "limiter"}, {"ACL", "SETUSER", "default", "+@all"}, {"CONFIG", "SET", "maxmemory", "0"},
		} {
			must(t, server.Client().Do(context.Background(), words...).Err())
		}
	})
	return server
}

// These are those of package wire: the most calls in a pipeline, and buckets in a bundle.
const (
	maxBatch  = 300
	maxBundle = 100
)

// hidden returns a field that package wire does not export, at the end of a path of fields
// from v: a few tests look into the lanes of a store.
func hidden[T any](v any, path ...string) *T {
	at := reflect.ValueOf(v)
	for _, name := range path {
		at = reflect.Indirect(at).FieldByName(name)
	}
	return (*T)(at.Addr().UnsafePointer())
}

// clientOf returns the connections of a lane.
func clientOf(l *wire.Lane) *goredis.Client {
	return hidden[atomic.Pointer[goredis.Client]](l, "client").Load()
}

// laneAt returns the lane to a server for charges, or nil if there is none yet.
func laneAt(s *Shard, addr string) *wire.Lane {
	mu := hidden[sync.Mutex](s.Shard, "mu")
	mu.Lock()
	defer mu.Unlock()
	lanes := reflect.ValueOf(s.Shard).Elem().FieldByName("lanes").MapRange()
	for lanes.Next() {
		if key := lanes.Key(); key.FieldByName("addr").String() == addr && key.FieldByName("persistent").Bool() {
			return (*wire.Lane)(lanes.Value().UnsafePointer())
		}
	}
	return nil
}

func login(username, password string) wire.Credentials {
	return func(context.Context) (string, string, error) { return username, password, nil }
}

// shardOf connects to a shard that redistest started.
func shardOf(t testing.TB, sh *redistest.Shard) *Shard {
	t.Helper()
	opts := ShardOptions{Primary: sh.Primary.Addr()}
	for _, r := range sh.Replicas {
		opts.Replicas = append(opts.Replicas, r.Addr())
	}
	return newShard(t, opts)
}

// endless is a window that ends during hardly any test: an aligned one ends once in 14 months. An
// aligned or sliding window of an hour ends in every test that runs across a full hour.
const endless = 10_000 * time.Hour

var hourly = &store.Limit{Zone: "hourly", Algorithm: store.FixedWindow, Window: time.Hour}

// oneOf returns one request with events 10 and cost 1.
func oneOf(key string) []store.Request {
	return []store.Request{{Limit: hourly, ClientKey: key, Events: 10, Cost: 1}}
}

// stored returns the count of a bucket in Redis, -1 if there is none.
func stored(t testing.TB, server *redistest.Server, key string) int64 {
	t.Helper()
	n, err := server.Client().HGet(t.Context(), ask.Keys{Prefix: DefaultKeyPrefix}.Key(hourly, key), "c").Int64()
	if err != nil {
		return -1
	}
	return n
}

// used ends the test unless an answer has no error and shows that much used.
func used(t testing.TB, what string, st store.State, want int64) {
	t.Helper()
	if st.Err != nil || st.Used != want {
		t.Fatalf("%s: %+v, want %d used", what, st, want)
	}
}

func waitForCount(t testing.TB, server *redistest.Server, key string, want int64) {
	t.Helper()
	eventually(t, "the count is there", func() error {
		if got := stored(t, server, key); got != want {
			return fmt.Errorf("count is %d, want %d", got, want)
		}
		return nil
	})
}
