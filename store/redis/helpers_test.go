package redis

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// must is short, as nearly every line of a test has one.
var must = redistest.Must

// waitTimeout bounds every wait, and replaces the timeouts that a test does not cover.
const waitTimeout = time.Minute

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
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		s.Close(ctx)
	})
	return s
}

func login(username, password string) Credentials {
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

// ask returns one request with events 10 and cost 1.
func ask(key string) []store.Request {
	return []store.Request{{Limit: hourly, ClientKey: key, Events: 10, Cost: 1}}
}

// stored returns the count of a bucket in Redis, -1 if there is none.
func stored(t testing.TB, server *redistest.Server, key string) int64 {
	t.Helper()
	n, err := server.Client().HGet(t.Context(), bucketKeys{prefix: DefaultKeyPrefix}.key(hourly, key), "c").Int64()
	if err != nil {
		return -1
	}
	return n
}

// eventually polls until f returns nil.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(waitTimeout)
	for err := f(); err != nil; err = f() {
		if time.Now().After(deadline) {
			t.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// soon calls f and fails the test if f does not return within waitTimeout.
func soon(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(waitTimeout):
		t.Fatalf("%s takes more than %v", what, waitTimeout)
	}
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

var layoutFixedWindow = layoutOf(store.FixedWindow)
