package memory_test

import (
	"context"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// fixture is one view of buckets and its clock.
type fixture struct {
	*testing.T
	clock   *storetest.Clock
	buckets *memory.Buckets
	store   *memory.Store
}

func newFixture(t *testing.T, maxKeys int) *fixture {
	f := &fixture{T: t, clock: storetest.NewClock(time.Unix(1_700_000_000, 0)), buckets: memory.NewBuckets()}
	f.store = f.view(maxKeys)
	t.Cleanup(func() {
		if err := f.buckets.Verify(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *fixture) view(maxKeys int) *memory.Store {
	return memory.New(f.buckets, memory.Options{MaxKeys: maxKeys, Now: f.clock.Now})
}

// charge spends cost and returns what the window then has.
func (f *fixture) charge(limit *store.Limit, client string, cost int64) int64 {
	return charge(f.store, limit, client, cost)
}

func charge(s *memory.Store, limit *store.Limit, client string, cost int64) int64 {
	return s.Charge(context.Background(), []store.Request{{Limit: limit, ClientKey: client, Events: 10, Cost: cost}})[0].Used
}

// wantOnly requires that of the clients those listed have a bucket.
func (f *fixture) wantOnly(limit *store.Limit, clients []string, have ...string) {
	f.Helper()
	want := map[string]bool{}
	for _, c := range have {
		want[c] = true
	}
	for _, c := range clients {
		if got := f.buckets.Has(limit, c); got != want[c] {
			f.Errorf("bucket of %q exists: %t, want %t", c, got, want[c])
		}
	}
}

func limit(zone string, window time.Duration) *store.Limit {
	return &store.Limit{Zone: zone, Algorithm: store.FixedWindow, Window: window}
}
