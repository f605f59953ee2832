package memory_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"
	"weak"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// maxBytesPerBucket is promised for client keys of 33 bytes.
const maxBytesPerBucket = 300

func TestMemoryPerBucket(t *testing.T) {
	if n := bytesPerBucket(200_000); n > maxBytesPerBucket {
		t.Errorf("%.0f bytes per bucket, want at most %d", n, maxBytesPerBucket)
	}
}

// TestFloodIsReclaimed: after a flood one returning client is enough.
func TestFloodIsReclaimed(t *testing.T) {
	const flood = 30_000
	f := newFixture(t, memory.DefaultMaxBuckets)
	f.charge(limit("other", 24*time.Hour), "client", 1)
	before := heap()
	minute := limit("minute", time.Minute)
	for i := range flood {
		f.charge(minute, clientKey(i), 1)
	}
	flooded := heap() - before

	// Stripes are swept at random, so the last one takes a few more.
	for i := 0; f.buckets.Len() > 2; i++ {
		f.clock.Advance(time.Minute)
		f.charge(minute, "client", 1)
		if i > 2*flood/memory.SweepSize {
			t.Fatalf("%d buckets are left after %d windows", f.buckets.Len(), i)
		}
	}
	if left := heap() - before; left > flooded/100 {
		t.Errorf("%d of %d bytes are left", left, flooded)
	}
}

// TestSweepKeepsUp: no client returns, and each insertion removes more expired buckets
// than it adds.
func TestSweepKeepsUp(t *testing.T) {
	const perWindow, windows = 2000, 10
	f := newFixture(t, memory.DefaultMaxBuckets)
	minute := limit("minute", time.Minute)
	for i := range perWindow * windows {
		f.charge(minute, clientKey(i), 1)
		f.clock.Advance(time.Minute / perWindow)
	}
	if n := f.buckets.Len(); n > perWindow*3/2 {
		t.Errorf("%d buckets, %d of them live", n, perWindow)
	}
}

// TestReopenedBucketsAreQueuedAnew: windows that are opened again end after those
// queued behind them.
func TestReopenedBucketsAreQueuedAnew(t *testing.T) {
	f := newFixture(t, memory.DefaultMaxBuckets)
	minute := limit("minute", time.Minute)
	for i := range 100 {
		f.charge(minute, clientKey(i), 1)
	}
	f.clock.Advance(time.Second)
	for i := range 1000 {
		f.charge(minute, clientKey(100+i), 1)
	}
	f.clock.Advance(time.Minute - time.Second)
	for i := range 100 {
		f.charge(minute, clientKey(i), 1)
	}
	// The fixture verifies the rest.
}

func TestBucketDoesNotPinRequest(t *testing.T) {
	f := newFixture(t, 10)
	hour := limit("hour", time.Hour)
	header := new([1 << 16]byte)
	pinned := weak.Make(header)
	f.charge(hour, unsafe.String(&header[100], 33), 1)
	f.charge(hour, unsafe.String(&header[100], store.MaxClientKey), 1)
	header = nil
	runtime.GC()
	if pinned.Value() != nil {
		t.Error("the memory around a client key is still held")
	}
	runtime.KeepAlive(f.buckets)
}

// TestLongKeysAreNotKept: their clients have shortened ones.
func TestLongKeysAreNotKept(t *testing.T) {
	const clients, length = 500, 20_000
	f := newFixture(t, clients)
	hour := limit("hour", time.Hour)
	padding := strings.Repeat("x", length)
	before := heap()
	for i := range clients {
		f.charge(hour, string(store.Shortened(fmt.Append(nil, i, padding))), 1)
	}
	if n := float64(heap()-before) / clients; n > 2*maxBytesPerBucket {
		t.Errorf("%.0f bytes per bucket of a client whose name has %d bytes", n, length)
	}
}

func TestAllocations(t *testing.T) {
	f := newFixture(t, 10)
	asks := store.Asks([]store.Request{{Limit: limit("hour", time.Hour), ClientKey: clientKey(1), Events: 5, Cost: 1}})
	for name, do := range map[string]operation{"Check": f.store.Check, "Charge": f.store.Charge} {
		if n := testing.AllocsPerRun(1000, func() { do(t.Context(), asks) }); n > 0 {
			t.Errorf("%s of an existing bucket: %v allocations", name, n)
		}
	}
}

// TestBucketsOfTheFutureAreReclaimed once they are over, if they are used when the clock is right
// again: nothing evicts them.
func TestBucketsOfTheFutureAreReclaimed(t *testing.T) {
	for a := range store.Algorithms {
		const clients, far = 100, 30 * 24 * time.Hour
		f := newFixture(t, memory.DefaultMaxBuckets)
		l := &store.Limit{Zone: "api", Algorithm: a, Window: time.Hour}
		charge := func(who string, i int) {
			client := fmt.Sprint(who, i)
			store.Answers(t.Context(), f.store.Charge, []store.Request{{Limit: l, ClientKey: client, Events: 10, Cost: 1, ID: client}})
		}
		for _, ahead := range []time.Duration{far, 0} {
			f.clock.Advance(ahead)
			for i := range clients {
				charge("future", i)
			}
			f.clock.Advance(-ahead)
		}
		f.clock.Advance(3 * l.Window)
		for i := 0; clientsOf(f, l, "future", clients) > 0; i++ {
			if charge("later", i); i > 10_000 {
				t.Fatalf("%s: %d buckets are left", a, clientsOf(f, l, "future", clients))
			}
		}
	}
}
