package memory_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestStore(t *testing.T) {
	storetest.Run(t, open)
}

func open(_ *testing.T, clock *storetest.Clock) store.Store {
	return memory.New(memory.NewBuckets(), memory.Options{Now: clock.Now})
}

func TestViewsShareBuckets(t *testing.T) {
	f := newFixture(t, 10)
	hour := limit("hour", time.Hour)
	other := memory.New(f.buckets, memory.Options{
		Now: func() time.Time { return f.clock.Now().Add(time.Minute) },
	})
	first := store.Answers(t.Context(), f.store.Charge, []store.Request{{Limit: hour, ClientKey: "client", Events: 10, Cost: 3}})[0]
	second := store.Answers(t.Context(), other.Charge, []store.Request{{Limit: hour, ClientKey: "client", Events: 20, Cost: 4}})[0]
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
	state := store.Answers(t.Context(), s.Check, []store.Request{{Limit: limit("hour", time.Hour), Events: 1, Cost: 1}})[0]
	after := time.Now().UnixMicro()
	if state.Now < before || state.Now > after {
		t.Errorf("decided at %d, want an instant from %d to %d", state.Now, before, after)
	}
	if buckets.Len() != 1 {
		t.Errorf("%d buckets, want 1", buckets.Len())
	}
}

// TestClockStepsBack: after a correction of the clock open windows stay open, but not those
// of a clock that was far ahead. The buckets stay consistent.
func TestClockStepsBack(t *testing.T) {
	for back, kept := range map[time.Duration]int64{algorithm.Grace: 1, time.Hour: 0} {
		f := newFixture(t, 100)
		minute := limit("minute", time.Minute)
		for i := range 50 {
			f.charge(minute, clientKey(i), 1)
		}
		f.clock.Advance(-back)
		for i := range 100 {
			want := int64(1)
			if i < 50 {
				want += kept
			}
			if used := f.charge(minute, clientKey(i), 1); used != want {
				t.Errorf("back by %v, client %d: used %d, want %d", back, i, used, want)
			}
		}
	}
}

// TestWalk visits the buckets of the limits that are asked about, each once, however many
// there are.
func TestWalk(t *testing.T) {
	f := newFixture(t, 100_000)
	hour, day, other := limit("hour", time.Hour), limit("day", 24*time.Hour), limit("other", time.Hour)
	const clients = 50_000
	for i := range clients {
		f.charge(hour, clientKey(i), int64(1+i%7))
	}
	long := strings.Repeat("long", store.MaxClientKey/4)
	f.charge(day, long, 2)
	f.charge(other, "client", 1)
	used, rest := map[string]int64{}, 0
	asked := []store.Request{{Limit: day, Events: 5}, {Limit: hour, Events: 10}}
	f.store.Walk(asked, func(_ int, r *store.Request) bool { return r.Events > 0 && r.ClientKey != "" }, func(i int, clientKey string, st *store.State) {
		if i == 1 {
			if _, seen := used[clientKey]; seen || st.Limit != 10 {
				t.Errorf("client %s is visited again, with %+v", clientKey, st)
			}
			used[clientKey] = st.Used
			return
		}
		if rest++; clientKey != long || st.Used != 2 || st.Limit != 10 { // that of its last request
			t.Errorf("the long key is %q, with %+v", clientKey, st)
		}
	})
	if len(used) != clients || rest != 1 {
		t.Errorf("visited are %d and %d buckets", len(used), rest)
	}
	for i := range clients {
		if got := used[clientKey(i)]; got != int64(1+i%7) {
			t.Fatalf("client %d used %d", i, got)
		}
	}
	if n := f.buckets.Len(); n != clients+2 {
		t.Errorf("there are %d buckets after the walk", n)
	}
}

// fixture is one view of buckets and its clock.
type fixture struct {
	*testing.T
	clock   *storetest.Clock
	buckets *memory.Buckets
	store   *memory.Store
}

func newFixture(t *testing.T, maxBuckets int) *fixture {
	f := &fixture{T: t, clock: storetest.NewClock(time.Unix(1_700_000_000, 0)), buckets: memory.NewBuckets()}
	f.store = f.view(maxBuckets)
	t.Cleanup(func() {
		if err := f.buckets.Verify(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *fixture) view(maxBuckets int) *memory.Store {
	return memory.New(f.buckets, memory.Options{MaxBuckets: maxBuckets, Now: f.clock.Now})
}

// charge spends cost, and returns the use of the window.
func (f *fixture) charge(limit *store.Limit, client string, cost int64) int64 {
	return charge(f.store, limit, client, cost)
}

func charge(s *memory.Store, limit *store.Limit, client string, cost int64) int64 {
	return store.Answers(context.Background(), s.Charge, []store.Request{{Limit: limit, ClientKey: client, Events: 10, Cost: cost}})[0].Used
}

// wantOnly requires that exactly the listed clients have a bucket.
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

func TestRecords(t *testing.T) {
	storetest.RunRecords(t, func(_ *testing.T, clock *storetest.Clock) store.Records {
		return memory.New(memory.NewBuckets(), memory.Options{Now: clock.Now})
	})
}

// TestRecordsLeaveRoom: those with a common first line take at most three times the room that is left.
func TestRecordsLeaveRoom(t *testing.T) {
	s := memory.New(memory.NewBuckets(), memory.Options{})
	value := strings.Repeat("x", store.MaxRecord-150-len("a\n10000"))
	n := 10_000
	fill := func(first string) (all []store.Record) {
		for ; ; n++ {
			r, err := s.PutRecord(t.Context(), store.Record{ID: first + strconv.Itoa(n), Value: value})
			if err != nil {
				if !errors.Is(err, store.ErrRecordsFull) {
					t.Fatal(err)
				}
				return all
			}
			all = append(all, r)
		}
	}
	const room = store.MaxRecords / store.MaxRecord
	first := fill("a\n")
	for i, want := range []int{room * 3 / 4, room * 3 / 16} {
		if i > 0 {
			if n := len(fill("b\n")); n != want {
				t.Errorf("another one has %d, want %d", n, want)
			}
		} else if len(first) != want {
			t.Errorf("one alone has %d, want %d", len(first), want)
		}
	}
	for _, r := range first {
		r.Value = ""
		if _, err := s.PutRecord(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(fill("b\n")); n != room*3/4-room*3/16 {
		t.Errorf("once the first is gone, it has %d more", n)
	}
}

// TestRecordsAreBounded by their bytes, and have room again once some are gone.
func TestRecordsAreBounded(t *testing.T) {
	s := memory.New(memory.NewBuckets(), memory.Options{})
	put := func(id int, version, value string) (store.Record, error) {
		return s.PutRecord(t.Context(), store.Record{ID: strconv.Itoa(id), Version: version, Value: value})
	}
	large := strings.Repeat("x", store.MaxRecord)
	var last store.Record
	n := 0
	for ; n < store.MaxRecords/store.MaxRecord; n++ {
		r, err := put(n, "", large)
		if err != nil {
			break
		}
		last = r
	}
	if least := store.MaxRecords / (store.MaxRecord + 200); n < least {
		t.Errorf("there is room for %d, want %d", n, least)
	}
	if _, err := put(n, "", large); !errors.Is(err, store.ErrRecordsFull) || !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("one more: %v", err)
	}
	last, err := put(n-1, last.Version, large[1:])
	if err != nil {
		t.Errorf("a change: %v", err)
	}
	if _, err := put(n-1, last.Version, ""); err != nil {
		t.Errorf("a removal: %v", err)
	}
	if _, err := put(n, "", large); err != nil {
		t.Errorf("one more after that: %v", err)
	}
}
