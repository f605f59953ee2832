package limiter

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestMostRefusedClients are found among many that are seldom refused, with counts that
// are close and never too high.
func TestMostRefusedClients(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	c := newRefusedClients(now)
	const heavy, each, others = 20, 2000, 100_000
	keys := make([]string, 0, heavy*each+others)
	for i := range heavy {
		for range each + 100*i {
			keys = append(keys, fmt.Sprintf("heavy-%d", i))
		}
	}
	for i := range others {
		keys = append(keys, fmt.Sprintf("light-%d", i))
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(keys), func(i, k int) { keys[i], keys[k] = keys[k], keys[i] })
	for _, key := range keys {
		c.note(key, now)
	}
	top := c.top(heavy, "default", now)
	if len(top) != heavy {
		t.Fatalf("top has %d clients, want %d", len(top), heavy)
	}
	for _, client := range top {
		var i int
		if _, err := fmt.Sscanf(client.ClientKey, "heavy-%d", &i); err != nil {
			t.Errorf("%s is among the most refused", client.ClientKey)
			continue
		}
		if truth := int64(each + 100*i); client.Count > truth || client.Count < truth*9/10 {
			t.Errorf("%s was refused %d times, top says %d", client.ClientKey, truth, client.Count)
		}
	}
}

// TestRefusalsOfTheLastMinutes count, and no others.
func TestRefusalsOfTheLastMinutes(t *testing.T) {
	start := time.Unix(0, 1000*int64(refusedPeriod))
	c := newRefusedClients(start)
	for range 10 {
		c.note("alice", start)
	}
	for _, step := range []struct {
		after time.Duration
		since time.Duration
		count int64
	}{
		{0, 0, 10},
		{time.Minute, time.Minute, 10},
		{4*refusedPeriod - 1, 4*refusedPeriod - 1, 10},
		{4 * refusedPeriod, 3 * refusedPeriod, 0},
		{24 * time.Hour, 3 * refusedPeriod, 0},
	} {
		now := start.Add(step.after)
		if since := c.since(now); since != step.since {
			t.Errorf("after %v counts cover %v, want %v", step.after, since, step.since)
		}
		var count int64
		for _, client := range c.top(10, "", now) {
			count += client.Count
		}
		if count != step.count {
			t.Errorf("after %v alice was refused %d times, want %d", step.after, count, step.count)
		}
	}
	// A place is reused by a later period, never by an earlier one.
	c.note("bob", start.Add(4*refusedPeriod))
	c.note("alice", start)
	if top := c.top(10, "", start.Add(4*refusedPeriod)); len(top) != 1 || top[0].ClientKey != "bob" {
		t.Errorf("top is %v", top)
	}
}

// TestLastRefusals are remembered of a bounded number of clients, the latest first, and of
// each its own: 32 bits of a hash distinguish them.
func TestLastRefusals(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	c := newRefusedClients(start)
	const clients = 100 * refusedStripes * lastPlaces
	key := func(i int) string { return fmt.Sprintf("client-%d", i) }
	confused := 0
	for i := range clients {
		if c.lastOf(key(i)) != 0 {
			confused++
		}
		c.note(key(i), start.Add(time.Duration(i)*time.Second))
		if last := c.lastOf(key(i)); last != start.Unix()+int64(i) {
			t.Fatalf("client %d was refused at %d, want %d", i, last, start.Unix()+int64(i))
		}
	}
	known := 0
	for i := range clients {
		switch c.lastOf(key(i)) {
		case start.Unix() + int64(i):
			known++
		case 0:
		default:
			confused++
		}
	}
	// One test in thousands has one.
	if confused > 2 {
		t.Errorf("%d times a client was refused when another was", confused)
	}
	if known > refusedStripes*lastPlaces || known < refusedStripes*lastPlaces*9/10 {
		t.Errorf("%d clients are known, of %d places", known, refusedStripes*lastPlaces)
	}
	c.note(key(1), start.Add(-time.Hour))
	last := int64(0)
	for i := range c.stripes {
		last = max(last, c.stripes[i].lastAt)
	}
	if want := start.Add((clients - 1) * time.Second).UnixMicro(); last != want {
		t.Errorf("the last refusal of all was at %d, want %d", last, want)
	}
}

// TestRefusedMemoryIsBounded by the number that the constants promise.
func TestRefusedMemoryIsBounded(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	keys := make([]string, 2000)
	for i := range keys {
		keys[i] = canonicalKey(fmt.Sprintf("%s-%d", strings.Repeat("x", 10_000), i))
	}
	before := heap()
	zones := make([]*refusedClients, 10)
	for n := range zones {
		zones[n] = newRefusedClients(now)
		for period := range refusedPeriods {
			for _, key := range keys {
				// As each request has its own.
				zones[n].note(strings.Clone(key), now.Add(time.Duration(period)*refusedPeriod))
			}
		}
	}
	if each := (heap() - before) / uint64(len(zones)); each > 300_000 {
		t.Errorf("a zone takes %d bytes", each)
	} else {
		t.Logf("a zone takes %d bytes", each)
	}
	runtime.KeepAlive(zones)
	runtime.KeepAlive(keys)
}

// TestConcurrentRefusals all count, also beside readers.
func TestConcurrentRefusals(t *testing.T) {
	now := time.Now()
	c := newRefusedClients(now)
	var workers sync.WaitGroup
	const each = 2000
	for range 8 {
		workers.Go(func() {
			for i := range each {
				c.note("alice", now)
				if i%500 == 0 {
					c.top(10, "", now)
				}
			}
		})
	}
	workers.Wait()
	if top := c.top(1, "", now); len(top) != 1 || top[0].Count != 8*each {
		t.Errorf("top is %v", top)
	}
}

// BenchmarkRefusedClients measures what noting a refusal costs.
func BenchmarkRefusedClients(b *testing.B) {
	now := time.Now()
	for _, clients := range []int{1, 100, 100_000} {
		keys := make([]string, clients)
		for i := range keys {
			keys[i] = fmt.Sprintf("Q1x:10.0.%d.%d", i/256, i%256)
		}
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			c := newRefusedClients(now)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for i := rand.IntN(clients); pb.Next(); i += 7 {
					c.note(keys[i%clients], now)
				}
			})
		})
	}
}
