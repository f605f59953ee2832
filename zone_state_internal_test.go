package shardlimit

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// TestZoneStateLivesWithTheStore: a config that comes before the last user of the
// one before has left takes the state over, and one that comes later begins anew.
func TestZoneStateLivesWithTheStore(t *testing.T) {
	load := func(store string) *storeUse {
		u := &storeUse{name: store, module: new(countingModule), logger: zap.NewNop()}
		if _, err := u.enter(); err != nil {
			t.Fatal(err)
		}
		return u
	}
	series := func() (n int) {
		found := make(chan prometheus.Metric)
		go func() {
			metrics.requests.Collect(found)
			close(found)
		}()
		for range found {
			n++
		}
		return n
	}
	before := series()
	one, other := load("one"), load("other")
	state := acquireState(one, "zone")
	if acquireState(one, "zone") != state {
		t.Error("another handler's zone has another state")
	}
	if acquireState(other, "zone") == state || acquireState(one, "zone2") == state {
		t.Error("two zones share a state")
	}
	state.counts.requests.Inc()

	next := load("one")
	if acquireState(next, "zone") != state {
		t.Error("a zone that is loaded again has another state")
	}
	if _, err := one.enter(); err != nil {
		t.Fatal(err)
	}
	one.unload()
	next.unload()
	if _, ok := zoneStates.find(zoneID{"one", "zone"}); !ok {
		t.Error("the state is gone while a request uses it")
	}
	one.leave()
	if _, ok := zoneStates.find(zoneID{"one", "zone"}); ok {
		t.Error("the state outlives the store's last user")
	}
	if n := series() - before; n != 1 {
		t.Errorf("%d zones have metrics, want that of the other store", n)
	}
	if n := valueOf(acquireState(other, "zone").counts.requests); n != 1 {
		t.Errorf("%d requests are counted of the zone in both stores, want 1", n)
	}
	other.unload()
	if n := series() - before; n != 0 {
		t.Errorf("%d zones have metrics that are used by none", n)
	}
}
