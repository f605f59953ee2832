package stores

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func requestOf(client string) *store.Request {
	return &store.Request{Limit: &store.Limit{Zone: "test", Window: time.Hour}, ClientKey: client}
}

// TestKnownClientsLastWhileTheyAreUsed, and end three windows after that.
func TestKnownClientsLastWhileTheyAreUsed(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	known := newKnownClients(1000, now)
	alice := requestOf("alice")
	known.add(alice, now)
	for range 10 {
		now = now.Add(knownWindows*time.Hour - 1)
		if !known.renew(alice, now) {
			t.Fatal("a client that comes is forgotten")
		}
	}
	if known.renew(alice, now.Add(knownWindows*time.Hour)) {
		t.Error("a client that has not come for three windows is remembered")
	}
	// Zones remember their clients separately.
	known.add(alice, now)
	other := *alice.Limit
	other.Zone = "other"
	if known.renew(&store.Request{Limit: &other, ClientKey: "alice"}, now) {
		t.Error("a client is remembered in a zone that it never used")
	}
	long := *alice.Limit
	long.Window = store.MaxWindow
	known.add(&store.Request{Limit: &long, ClientKey: "bob"}, now)
	if !known.renew(&store.Request{Limit: &long, ClientKey: "bob"}, now.Add(store.MaxWindow/2)) {
		t.Error("a client is forgotten before the longest window is over")
	}
}

// TestNewcomersAreBoundedWhateverTheOrderOfTheirTimes covers requests that read the clock
// in one order and reach the bound in another.
func TestNewcomersAreBoundedWhateverTheOrderOfTheirTimes(t *testing.T) {
	const most, seconds = 10, 60
	n := &newcomers{most: most}
	start := time.Unix(1_700_000_000, 0)
	admitted := 0
	for i := range seconds * most * 10 {
		now := start.Add(time.Duration(i) * time.Second / (most * 10))
		if i%2 == 1 {
			now = now.Add(-time.Second)
		}
		if n.rateOf("test").spend(now) {
			admitted++
		}
	}
	if least, bound := most*seconds, most*(seconds+1); admitted < least || admitted > bound {
		t.Errorf("%d new clients were let in within %d s, want between %d and %d", admitted, seconds, least, bound)
	}
}

// TestClientsWithoutALimitUseUpNoBound: they need no bucket, so others are let in.
func TestClientsWithoutALimitUseUpNoBound(t *testing.T) {
	n := &newcomers{most: 1, known: newKnownClients(1000, time.Unix(1_700_000_000, 0))}
	none, limited := store.Ask{Request: *requestOf("none")}, store.Ask{Request: *requestOf("alice")}
	limited.Events = 5
	if beyond := n.overflow(t.Context(), []*store.Ask{&none, &limited}, time.Unix(1_700_000_000, 0), false); len(beyond) != 0 {
		t.Errorf("%+v count in a shared bucket", beyond)
	}
}

// TestMadeUpKeysEvictNoClient that is remembered, and take bounded memory. After them
// there is room again.
func TestMadeUpKeysEvictNoClient(t *testing.T) {
	const most, regulars, bytesEach = 50_000, 1000, 50
	now := time.Unix(1_700_000_000, 0)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	known := newKnownClients(most, now)
	for n := range regulars {
		known.add(requestOf(strconv.Itoa(n)), now)
	}
	lost := func() (lost int) {
		for n := range regulars {
			if !known.renew(requestOf(strconv.Itoa(n)), now) {
				lost++
			}
		}
		return lost
	}
	for range 3 {
		for range most {
			known.add(requestOf(fmt.Sprint("made-up-", rand.Uint64())), now)
		}
		now = now.Add(time.Hour)
		if lost := lost(); lost > 0 {
			t.Fatalf("%d of %d regulars are forgotten", lost, regulars)
		}
	}
	if each := (heap() - before) / most; each > bytesEach {
		t.Errorf("a client takes %d bytes, want at most %d", each, bytesEach)
	} else {
		t.Logf("a client takes %d bytes", each)
	}
	// Clients that stay away make room.
	now = now.Add(2 * time.Hour)
	if lost := lost(); lost > 0 {
		t.Fatalf("%d of %d regulars are forgotten", lost, regulars)
	}
	missing := 0
	for n := range most / 2 {
		r := requestOf(fmt.Sprint("new-", n))
		if known.add(r, now); !known.renew(r, now) {
			missing++
		}
	}
	if missing > most/100 {
		t.Errorf("%d of %d new clients are not remembered, although there is room", missing, most/2)
	}
	runtime.KeepAlive(known)
}

// boundedModule opens stores that bound new buckets.
type boundedModule struct{ countingModule }

func (*boundedModule) NewBuckets() int { return 1 }

// TestKnownClientsEndWithTheirStore, and not before its last config does.
func TestKnownClientsEndWithTheirStore(t *testing.T) {
	load := func() *Handle {
		h := &Handle{Name: t.Name(), Module: new(boundedModule), Logger: zap.NewNop()}
		if _, err := h.Enter(); err != nil {
			t.Fatal(err)
		}
		return h
	}
	before, next := load(), load()
	before.Unload()
	if refs, ok := Pool.References(knownClientsKey(t.Name())); !ok || refs != 1 {
		t.Errorf("after a reload %d configs use them, want 1", refs)
	}
	next.Unload()
	if refs, ok := Pool.References(knownClientsKey(t.Name())); ok {
		t.Errorf("after the last config %d use them", refs)
	}
}
