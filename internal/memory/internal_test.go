package memory

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Tests check these bounds.
const (
	SampleSize = sampleSize
	SweepSize  = sweepSize
	TrimSize   = trimSize
)

// Has reports whether the bucket exists, and opens none.
func (b *Buckets) Has(limit *store.Limit, clientKey string) bool {
	id := identity.ID{Limit: b.limits.Number(limit), Key: clientKey}
	s := &b.stripes[b.stripeOf(id)]
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.find(id) != nil
}

// Verify reports contradictions between the parts of b, which is not in use.
func (b *Buckets) Verify() error {
	var errs []error
	total := 0
	for i := range b.stripes {
		s := &b.stripes[i]
		total += len(s.queue)
		if err := s.verify(); err != nil {
			errs = append(errs, fmt.Errorf("stripe %d: %w", i, err))
		}
	}
	if n := b.Len(); n != total {
		errs = append(errs, fmt.Errorf("length is %d, but there are %d buckets", n, total))
	}
	return errors.Join(errs...)
}

func (s *stripe) verify() error {
	indexed := 0
	for _, x := range s.indexes {
		indexed += len(x.buckets)
		if x.peak < len(x.buckets) {
			return fmt.Errorf("index of %d buckets has a peak of %d", len(x.buckets), x.peak)
		}
	}
	if indexed != len(s.queue) {
		return fmt.Errorf("%d buckets are indexed and %d queued", indexed, len(s.queue))
	}
	if err := s.queue.verify(); err != nil {
		return err
	}
	nearest := int64(never)
	for _, b := range s.queue {
		nearest = min(nearest, b.due)
		if s.find(identity.ID{Limit: b.limit, Key: b.key}) != b {
			return fmt.Errorf("bucket of %q is not found", b.key)
		}
	}
	if n := s.nearest.Load(); n != nearest {
		return fmt.Errorf("nearest due is published as %d and is %d", n, nearest)
	}
	return nil
}

func (q queue) verify() error {
	for i, b := range q {
		if int(b.place) != i {
			return fmt.Errorf("bucket at %d has place %d", i, b.place)
		}
		if parent := q[max(i-1, 0)/2]; parent.due > b.due {
			return fmt.Errorf("due %d at %d is below %d", b.due, i, parent.due)
		}
	}
	return nil
}

// TestStripesShareWork: zones that count all clients together do not share one lock.
func TestStripesShareWork(t *testing.T) {
	const zones = 256
	b := NewBuckets()
	stripes := map[uint64]int{}
	for z := range uint32(zones) {
		stripes[b.stripeOf(identity.ID{Limit: z, Key: ""})]++
	}
	for s, n := range stripes {
		if n > zones/8 {
			t.Errorf("stripe %d has %d of %d buckets", s, n, zones)
		}
	}
}

func TestIndexGivesMemoryBack(t *testing.T) {
	const most = 10_000
	var x index
	buckets := make([]*bucket, most)
	for i := range buckets {
		buckets[i] = &bucket{key: strconv.Itoa(i)}
		x.add(buckets[i])
	}
	for i, b := range buckets {
		x.remove(b)
		left := most - 1 - i
		if len(x.buckets) != left {
			t.Fatalf("%d buckets, want %d", len(x.buckets), left)
		}
		if x.peak >= minIndex && x.peak >= 4*max(left, 1) {
			t.Fatalf("memory for %d buckets is held by %d", x.peak, left)
		}
		if left > 0 && x.buckets[buckets[most-1].key] != buckets[most-1] {
			t.Fatalf("with %d buckets left, the last is not found", left)
		}
	}
	if x.buckets != nil {
		t.Error("an empty index holds a map")
	}
}

// TestQueue compares the queue with a plain slice.
func TestQueue(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var q queue
		var model []*bucket
		for range 50 {
			due, what := rng.Int64N(21), rng.IntN(3)
			switch {
			case what == 0 || len(model) == 0:
				b := &bucket{}
				b.due = due
				heap.Push(&q, b)
				model = append(model, b)
			case what == 1:
				b := model[rng.IntN(len(model))]
				b.due = due
				heap.Fix(&q, int(b.place))
			default:
				i := rng.IntN(len(model))
				b := model[i]
				heap.Remove(&q, int(b.place))
				model = slices.Delete(model, i, i+1)
				if b.place != removed {
					t.Fatalf("seed %d: removed bucket has place %d", seed, b.place)
				}
			}
			if err := q.verify(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if len(q) != len(model) {
				t.Fatalf("seed %d: %d buckets, want %d", seed, len(q), len(model))
			}
		}
	}
}

func TestQueueGivesMemoryBack(t *testing.T) {
	var q queue
	for i := range 10_000 {
		heap.Push(&q, &bucket{due: int64(i)})
	}
	for i := 0; len(q) > 0; i++ {
		if q[0].due != int64(i) {
			t.Fatalf("due %d comes first, want %d", q[0].due, i)
		}
		heap.Remove(&q, 0)
		if c := cap(q); c >= minQueue && c > 4*len(q) {
			t.Fatalf("capacity %d for %d buckets", c, len(q))
		}
	}
}

// TestClockThatIsSet is noticed, forwards and backwards, and one that drifts is not.
func TestClockThatIsSet(t *testing.T) {
	var c wallClock
	at := time.Now()
	if by := c.observe(at); by != 0 {
		t.Fatalf("the first reading is a jump by %v", by)
	}
	for n, s := range []struct{ wall, want time.Duration }{
		{0, 0}, {4 * time.Second, 0}, {30 * 24 * time.Hour, 30 * 24 * time.Hour}, {30*24*time.Hour + time.Second, 0},
		{0, -30 * 24 * time.Hour}, {-time.Hour, -time.Hour}, {0, time.Hour},
	} {
		passed := time.Duration(n) * time.Minute
		if by := c.compare(at, passed+s.wall, passed); by != s.want {
			t.Errorf("reading %d: a jump by %v, want %v", n, by, s.want)
		}
	}
	if by, when := c.lastJump(); by != time.Hour || !when.Equal(at) {
		t.Errorf("the last jump is by %v at %v", by, when)
	}
}

// TestLimitsOfThePastLeaveNothing: limits without buckets give up their numbers, and concurrent requests do not mix these up.
func TestLimitsOfThePastLeaveNothing(t *testing.T) {
	const rounds, together, churned, most = 500, 4, 50, 256
	b := NewBuckets()
	b.limits.Pause = 0
	var now atomic.Int64
	s := New(b, Options{Now: func() time.Time { return time.UnixMicro(now.Load()) }})
	kept := &store.Limit{Zone: "kept", Window: 24 * time.Hour}
	for round := range rounds {
		now.Add(time.Second.Microseconds())
		limits := []*store.Limit{{Zone: strconv.Itoa(round), Window: time.Second}, kept}
		var all sync.WaitGroup
		// Numbers end meanwhile.
		all.Go(func() {
			for n := range churned {
				b.limits.Of(&store.Limit{Zone: fmt.Sprint("churn", round, n), Window: time.Second}, true)
			}
		})
		for range together {
			all.Go(func() {
				for _, limit := range limits {
					store.Answers(t.Context(), s.Take, []store.Request{{Limit: limit, Events: rounds * together, Cost: 1}})
				}
			})
		}
		all.Wait()
		for _, limit := range limits {
			want := int64(together)
			if limit == kept {
				want *= int64(round + 1)
			}
			if st := store.Answers(t.Context(), s.Peek, []store.Request{{Limit: limit, Events: rounds * together, Cost: 1}})[0]; st.Used != want {
				t.Fatalf("round %d: %d events of zone %s are counted, want %d", round, st.Used, limit.Zone, want)
			}
		}
	}
	for i := range b.stripes {
		if n := len(b.stripes[i].indexes); n > most {
			t.Fatalf("%d limits have indexes in a stripe after %d, want %d at most", n, rounds, most)
		}
	}
	if err := b.Verify(); err != nil {
		t.Error(err)
	}
}

// TestRequestIsOvertaken by the end of its limit's number before it inserts its bucket: another limit gets the number.
func TestRequestIsOvertaken(t *testing.T) {
	b := NewBuckets()
	b.limits.InUse, b.limits.Pause = func(func(uint32)) {}, 0
	s := New(b, Options{MaxBuckets: 1, OnEvict: func(string) {
		// The request makes room, and inserts once the stripes are unlocked.
		for i := range b.stripes {
			b.stripes[i].mu.Lock()
		}
	}})
	requestsOf := func(zone string) []store.Request {
		return []store.Request{{Limit: &store.Limit{Zone: zone, Window: time.Hour}, Events: 10, Cost: 1}}
	}
	store.Answers(t.Context(), s.Take, requestsOf("before"))
	taken := make(chan []store.State)
	go func() { taken <- store.Answers(t.Context(), s.Take, requestsOf("overtaken")) }()
	storetest.AwaitLock(t, "TestRequestIsOvertaken", "(*Buckets).lock")
	for n := range 1000 {
		b.limits.Of(requestsOf(strconv.Itoa(n))[0].Limit, true)
	}
	for i := range b.stripes {
		b.stripes[i].mu.Unlock()
	}
	<-taken
	if st := store.Answers(t.Context(), s.Peek, requestsOf("overtaken"))[0]; st.Used != 1 {
		t.Errorf("%d events of the zone are counted, want 1", st.Used)
	}
}
