package limiter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestPenaltyNeverLandsOnASharedBucket: after a flood of made-up keys new clients are served
// again, whatever the penalty. A client that has a bucket is penalized.
func TestPenaltyNeverLandsOnASharedBucket(t *testing.T) {
	for _, before := range []bool{false, true} {
		for _, algorithm := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.GCRA} {
			w := newBoundedWorld(t, 1, &Zone{
				Algorithm: algorithm, Events: Quantity{Number: 5}, Window: 2 * time.Second, Penalty: time.Hour, ChargeBefore: before,
			})
			refused := 0
			for n := range 40 {
				if w.ask("made-up-"+strconv.Itoa(n), 1) == http.StatusTooManyRequests {
					refused++
				}
			}
			for range 10 {
				w.ask("made-up-0", 1)
			}
			w.clock.Advance(10 * time.Second)
			for n := range 4 {
				if status := w.ask("new-"+strconv.Itoa(n), 1); status != http.StatusOK {
					t.Errorf("%s, charge before %t: new client %d got %d after the flood", algorithm, before, n, status)
				}
			}
			if status := w.ask("made-up-0", 1); status != http.StatusTooManyRequests || refused == 0 {
				t.Errorf("%s, charge before %t: a penalized client got %d; %d of the flood were refused", algorithm, before, status, refused)
			}
			w.handle.Unload()
		}
	}
}

// TestGrantStaysWithItsClient: one whose client counts in a shared bucket admits no more there.
func TestGrantStaysWithItsClient(t *testing.T) {
	w := newBoundedWorld(t, 1, &Zone{Events: Quantity{Number: 3}, Window: time.Hour, ChargeBefore: true})
	for _, client := range []string{"first", "granted"} {
		grant := store.Override{
			Kind: store.OverrideGrant, Zone: "test", ClientKey: w.keyOf(client), Events: 10, Until: w.clock.Now().Add(time.Hour).UnixMicro(),
		}
		if err := w.handle.SetOverride(t.Context(), grant); err != nil {
			t.Fatal(err)
		}
	}
	passed := func(client string) (n int) {
		for range 20 {
			if w.ask(client, 1) == http.StatusOK {
				n++
			}
		}
		return n
	}
	// The only new bucket of this second is that of the first client.
	if n := passed("first"); n != 13 {
		t.Errorf("%d requests of a client with a bucket and a grant passed, want 13", n)
	}
	if n, used := passed("granted"), w.used(stores.OverflowKey); n != 3 || used != 3 {
		t.Errorf("%d requests passed in the shared bucket, and %d are counted, want 3", n, used)
	}
}

// TestReserveOfASharedBucket is a part of the zone's limit, also for clients with a limit of their own.
func TestReserveOfASharedBucket(t *testing.T) {
	for _, kind := range []store.OverrideKind{store.OverrideLimit, store.OverrideGrant} {
		for _, most := range []int{1, 10} {
			zone := &Zone{
				Events: Quantity{Number: 10}, Window: time.Hour, ChargeBefore: true,
				Reserves: []Reserve{{Percent: 45, Matchers: caddyhttp.MatcherSets{{caddyhttp.MatchMethod{http.MethodPost}}}}},
			}
			w := newBoundedWorld(t, most, zone)
			w.ask("first", 1)
			o := store.Override{Kind: kind, Zone: "test", ClientKey: w.keyOf("alice"), Events: 30, Until: w.clock.Now().Add(time.Hour).UnixMicro()}
			if err := w.handle.SetOverride(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			passed := 0
			for range 50 {
				if w.ask("alice", 1) == http.StatusOK {
					passed++
				}
			}
			// 5 of 10 are kept, or 14 of 30.
			want := map[bool]int64{true: 5, false: map[store.OverrideKind]int64{store.OverrideLimit: 16, store.OverrideGrant: 35}[kind]}[most == 1]
			if int64(passed) != want {
				t.Errorf("%s, %d new buckets: %d requests passed, want %d", kind, most, passed, want)
			}
			w.handle.Unload()
		}
	}
}

// lossyStore takes, and its answers are lost. last is the client key of the last take.
type lossyStore struct {
	*memory.Store
	last string
}

func (s *lossyStore) Take(ctx context.Context, asks []*store.Ask) {
	s.last = asks[0].ClientKey
	s.Store.Take(ctx, asks)
	setAll(asks, store.State{Err: store.ErrUncertain})
}

// TestUncertainTakeOfASharedBucket is refunded there: a free request takes no room from new clients.
func TestUncertainTakeOfASharedBucket(t *testing.T) {
	zone := &Zone{Algorithm: store.SlidingLog, Events: Quantity{Number: 5}, Window: time.Hour, ChargeBefore: true, OnError: stores.OnErrorAllow}
	w := newBoundedWorld(t, 1, zone)
	w.ask("first", 1)
	zone.Free.Add(http.StatusOK)
	taken := &lossyStore{Store: w.store}
	lossy := &stores.Handle{Name: w.handle.Name, Module: boundedModule{taken, 1}, Logger: w.handle.Logger}
	if _, err := lossy.Enter(); err != nil {
		t.Fatal(err)
	}
	defer lossy.Unload()
	w.handle = lossy
	zone.countIn(ownStore, lossy)
	// The only new bucket of this second.
	w.ask("another", 1)
	status := w.ask("second", 1)
	if used := w.used(stores.OverflowKey); status != http.StatusOK || taken.last != stores.OverflowKey || used != 0 {
		t.Errorf("status %d, the take was of %s, and %d are used of what new clients share", status, taken.last, used)
	}
}

// TestDeciderWithoutTheStore is the ledger for a client's own bucket, and memory for slots, which the ledger does not
// give back, and for clients of a shared bucket.
func TestDeciderWithoutTheStore(t *testing.T) {
	open := &stores.Opened{IsRemote: true}
	open.Local.Opened = new(stores.Opened)
	for _, c := range []struct {
		isLease bool
		bucket  bucket
		want    *stores.Opened
	}{{false, ownBucket, open}, {true, ownBucket, open.Local.Opened}, {false, overflowBucket, open.Local.Opened}} {
		z := &inZone{boundZone: &boundZone{Zone: &Zone{isLease: c.isLease}}, of: &evaluation{open: open}, bucket: c.bucket, rare: new(rareZone)}
		if got, _ := z.decider(); got != c.want {
			t.Errorf("slots %t, bucket %d: the ledger decides: %t", c.isLease, c.bucket, got == open)
		}
	}
}

// TestTakeInMemoryIsTheClientsOwn, whatever bucket it shares in the store: it goes with its own bucket.
func TestTakeInMemoryIsTheClientsOwn(t *testing.T) {
	own := store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Hour}, ClientKey: "alice"}
	shared := own
	shared.ClientKey = stores.UnknownKey
	z := &inZone{
		boundZone: &boundZone{zoneState: new(zoneState)}, ask: store.Ask{Request: shared}, bucket: unknownBucket,
		spend: spend{alone: localTaken}, rare: &rareZone{own: ownRequest{clientKey: own.ClientKey}},
	}
	z.beginTake()
	if z.running.empty(&own); !z.running.isVoid(z.rare.taken) {
		t.Error("a take stands although the client's bucket is emptied")
	}
}

// TestFirstOfABucketAndWindow: what is logged once is remembered by bucket and window. A
// reload to another window, or the next window, begins anew; other events do not.
func TestFirstOfABucketAndWindow(t *testing.T) {
	c, now := new(recentClients), time.Now()
	day := store.Limit{Zone: "z", Window: 24 * time.Hour}
	second := day
	second.Window = time.Second
	for n, s := range []struct {
		about  uint32
		limit  *store.Limit
		client string
		reset  int64
		want   bool
	}{
		{aboutRefusal, &day, "alice", 100, true},
		{aboutRefusal, &day, "alice", 100, false},
		{aboutNearness, &day, "alice", 100, true},
		{aboutRefusal, &day, "bob", 100, true},
		{aboutRefusal, &second, "alice", 100, true},
		{aboutRefusal, &second, "alice", 101, true},
		{aboutRefusal, &second, "alice", 101, false},
		{aboutRefusal, &day, "alice", 100, false},
		{aboutBlock, &day, "alice", 0, true},
		{aboutBlock, &day, "alice", 0, false},
	} {
		if got := c.isFirst(c.idOf(s.about, s.limit, s.client), logged{reset: s.reset, until: now.Add(time.Hour)}, now); got != s.want {
			t.Errorf("%d: first %t, want %t", n, got, s.want)
		}
	}
}

var errTest = errors.New("the store is silent")

// TestRunningTakes: whether a bucket was emptied since a take is known for as long as its
// request runs, however many others were emptied, and costs nothing afterwards.
func TestRunningTakes(t *testing.T) {
	var running runningTakes
	limit := store.Limit{Zone: "z", Window: time.Second}
	of := func(n int) *store.Request { return &store.Request{Limit: &limit, ClientKey: fmt.Sprint(n)} }
	const others = 3 * maxRecentClients
	first := running.begin(of(0))
	running.empty(of(0))
	later := running.begin(of(0))
	all := make([]take, 0, others)
	for n := 1; n <= others; n++ {
		all = append(all, running.begin(of(n)))
		running.empty(of(n))
	}
	if !running.isVoid(first) || running.isVoid(later) {
		t.Errorf("the take before is void: %t, the one after: %t", running.isVoid(first), running.isVoid(later))
	}
	running.empty(of(0))(errTest)
	if running.isVoid(later) {
		t.Error("a take is void although the bucket could not be emptied")
	}
	firstFailed, secondFailed := running.empty(of(0)), running.empty(of(0))
	firstFailed(errTest)
	secondFailed(errTest)
	if running.isVoid(later) {
		t.Error("a take is void although the bucket could not be emptied twice")
	}
	last := running.begin(of(0))
	running.empty(of(0))
	if !running.isVoid(last) || !running.isVoid(later) {
		t.Error("a take is not void although the bucket was emptied after that")
	}
	running.end(last)
	// A bucket from which nobody has taken is not remembered.
	running.empty(of(-1))(nil)
	for _, k := range append(all, first, later) {
		running.end(k)
	}
	if n := len(running.buckets); n != 0 {
		t.Errorf("%d buckets are remembered", n)
	}
}

// TestRunningTakesKeepNoHistory: what is kept of a bucket is about what is under way, however often
// it was emptied, or could not be, while a request of its client runs; in whatever order that ends.
func TestRunningTakesKeepNoHistory(t *testing.T) {
	var running runningTakes
	r := &store.Request{Limit: &store.Limit{Zone: "z", Window: time.Second}, ClientKey: "alice"}
	longest := running.begin(r)
	for n := range 1000 {
		first, second := running.empty(r), running.empty(r)
		between := running.begin(r)
		if running.isVoid(between) {
			t.Fatal("a take is void that came later")
		}
		second(errTest)
		first(errTest)
		if running.isVoid(longest) || running.isVoid(between) {
			t.Fatalf("a take is void although the bucket could not be emptied %d times", 2*n)
		}
		running.end(between)
	}
	if n := len(longest.bucket.underWay); n != 0 {
		t.Errorf("%d resets are remembered that are over", n)
	}
	succeeds, fails := running.empty(r), running.empty(r)
	between := running.begin(r)
	succeeds(nil)
	fails(errTest)
	after := running.begin(r)
	if !running.isVoid(longest) || running.isVoid(between) || running.isVoid(after) {
		t.Errorf("void are the take before: %t, and those after: %t, %t", running.isVoid(longest), running.isVoid(between), running.isVoid(after))
	}
	if n := cap(longest.bucket.underWay); n > 8 {
		t.Errorf("there is room for %d resets", n)
	}
}
