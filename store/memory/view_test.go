package memory_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

func TestViewsShareBuckets(t *testing.T) {
	f := newFixture(t, 10)
	hour := limit("hour", time.Hour)
	other := memory.New(f.buckets, memory.Options{
		Now: func() time.Time { return f.clock.Now().Add(time.Minute) },
	})
	first := f.store.Charge(t.Context(), []store.Request{{Limit: hour, ClientKey: "client", Events: 10, Cost: 3}})[0]
	second := other.Charge(t.Context(), []store.Request{{Limit: hour, ClientKey: "client", Events: 20, Cost: 4}})[0]
	want := store.State{
		Allowed: true, Limit: 20, Used: 7, Remaining: 13, Reset: first.Reset, ResetOtherwise: first.Reset,
		Receipt: first.Receipt, Content: store.Content{7, first.Reset}, Now: first.Now + time.Minute.Microseconds(),
	}
	if second != want {
		t.Errorf("charge through the other view:\n got %+v\nwant %+v", second, want)
	}
}

func TestBucketsOutliveViews(t *testing.T) {
	f := newFixture(t, 10)
	hour := limit("hour", time.Hour)
	for used := int64(1); used <= 3; used++ {
		f.store = f.view(100)
		if got := f.charge(hour, "client", 1); got != used {
			t.Errorf("view %d: used %d", used, got)
		}
	}
}

func TestDefaults(t *testing.T) {
	buckets := memory.NewBuckets()
	s := memory.New(buckets, memory.Options{})
	before := time.Now().UnixMicro()
	state := s.Check(t.Context(), []store.Request{{Limit: limit("hour", time.Hour), Events: 1, Cost: 1}})[0]
	after := time.Now().UnixMicro()
	if state.Now < before || state.Now > after {
		t.Errorf("decided at %d, want an instant from %d to %d", state.Now, before, after)
	}
	if buckets.Len() != 1 {
		t.Errorf("%d buckets, want 1", buckets.Len())
	}
}

// TestClockStepsBack has the clock corrected: what is open stays, and what is
// stored stays consistent.
func TestClockStepsBack(t *testing.T) {
	f := newFixture(t, 100)
	minute := limit("minute", time.Minute)
	for i := range 50 {
		f.charge(minute, clientKey(i), 1)
	}
	f.clock.Advance(-time.Hour)
	for i := range 100 {
		want := int64(1)
		if i < 50 {
			want = 2
		}
		if used := f.charge(minute, clientKey(i), 1); used != want {
			t.Errorf("client %d: used %d, want %d", i, used, want)
		}
	}
}
