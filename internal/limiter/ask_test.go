package limiter

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestStoreThatDoesNotOpen, of two that a request needs: its zones follow on_error, and
// those of the other store are checked and settled as usual.
func TestStoreThatDoesNotOpen(t *testing.T) {
	for _, broken := range []int{ownStore, rolloutStore} {
		for onError, status := range map[string]int{stores.OnErrorAllow: http.StatusOK, stores.OnErrorLocal: http.StatusOK, stores.OnErrorDeny: http.StatusServiceUnavailable} {
			for _, charge := range []bool{false, true} {
				s := new(deafStore)
				modules := [maxStores]stores.Module{deafModule{s}, deafModule{s}}
				modules[broken] = brokenModule{}
				h, handles := newSplitLimiter(t, modules, func(z *Zone) { z.ChargeBefore, z.OnError, z.MaxWait = charge, onError, 1 })
				got := h.answeredWith(http.StatusOK).Code
				var asked []string
				switch {
				case charge && status == http.StatusServiceUnavailable:
					asked = []string{"refund 1"}
				case !charge && status == http.StatusOK:
					asked = []string{"charge 1"}
				}
				if err := s.wasAsked(asked...); err != nil || got != status {
					t.Errorf("store %d does not open, on_error %s, charge before %v: status %d, want %d; %v", broken, onError, charge, got, status, err)
				}
				for in, handle := range handles {
					if handle.EnterOpen() != nil {
						t.Errorf("store %d is open at the end", in)
					}
				}
			}
		}
	}
}

// newSplitLimiter is a limiter with two zones, each of which counts in a store of its own.
func newSplitLimiter(t *testing.T, modules [maxStores]stores.Module, complete func(*Zone)) (h *Limiter, handles [maxStores]*stores.Handle) {
	for in, module := range modules {
		handles[in] = &stores.Handle{Name: t.Name(), Module: module, Logger: zap.NewNop()}
	}
	moved := &Rollout{Store: handles[rolloutStore]}
	h = &Limiter{arrived: new(arrivals), Config: Config{Logger: zap.NewNop(), Now: time.Now, Store: handles[ownStore], Rollout: moved}}
	for _, name := range []string{"a", "b"} {
		z := &Zone{Name: name, Key: []string{name}, Events: Quantity{Number: 10}, Cost: Quantity{Number: 1}, Window: time.Hour, Counts: telemetry.Default.Zone(name)}
		complete(z)
		z.prepare()
		for in, handle := range handles {
			z.countIn(in, handle)
		}
		h.Zones = append(h.Zones, z)
	}
	// The clients are the same for all requests, and one is moved.
	place := func(z *Zone) uint64 {
		key, _ := z.clientKey(nil, caddy.NewReplacer(), h, true)
		return cohortOf(rolloutSalt, key)
	}
	slices.SortFunc(h.Zones, func(a, b *Zone) int { return cmp.Compare(place(a), place(b)) })
	moved.moved = place(h.Zones[1])
	return h, handles
}

// TestRefusalAtAFullLine shows the other zones without the cost that was refunded.
func TestRefusalAtAFullLine(t *testing.T) {
	open := func() stores.Module { return deafModule{memory.New(memory.NewBuckets(), memory.Options{})} }
	h, handles := newSplitLimiter(t, [maxStores]stores.Module{open(), open()}, func(z *Zone) {
		if z.ChargeBefore = true; z.Name == "b" {
			z.Events.Number, z.MaxWait = 1, 2*time.Hour
		}
	})
	h.Headers, h.LogRefusals = HeadersIETF, LogNone
	for _, handle := range handles {
		if _, err := handle.Enter(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(handle.Unload)
	}
	for _, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
		w := h.answeredWith(http.StatusOK)
		if got := w.Header().Get(limitField); w.Code != want || !strings.Contains(got, `"a";r=9`) {
			t.Errorf("status %d, want %d, and limits %s, want 9 left in a", w.Code, want, got)
		}
	}
}

// brokenModule is a store module whose stores do not open.
type brokenModule struct{ deafModule }

func (brokenModule) OpenStore(string) (store.Store, error) { return nil, errors.New("out of order") }

// boundedModule opens a store that bounds new buckets.
type boundedModule struct {
	store *memory.Store
	most  int
}

func (m boundedModule) OpenStore(string) (store.Store, error) { return m.store, nil }
func (boundedModule) CloseStore()                             {}
func (boundedModule) OnErrorDefault() string                  { return stores.OnErrorAllow }
func (m boundedModule) NewBuckets() int                       { return m.most }

// boundedWorld is a site whose store bounds new buckets, and whose clock stands
// still.
type boundedWorld struct {
	t      *testing.T
	clock  *storetest.Clock
	store  *memory.Store
	handle *stores.Handle
	zone   *Zone
}

// newBoundedWorld returns a site with a zone by the header A, which admits that many
// new clients a second.
func newBoundedWorld(t *testing.T, most int, zone *Zone) *boundedWorld {
	t.Helper()
	w := &boundedWorld{t: t, clock: storetest.NewClock(time.Unix(1_700_000_000, 0)), zone: zone}
	w.store = memory.New(memory.NewBuckets(), memory.Options{Now: w.clock.Now})
	w.handle = w.open(most)
	zone.Cost = Quantity{Number: 1}
	zone.Name, zone.Key = "test", []string{"{" + headerA + "}"}
	zone.prepare()
	zone.Counts = telemetry.Default.Zone(zone.Name)
	zone.countIn(ownStore, w.handle)
	return w
}

// open opens the store as another config would, until the test ends.
func (w *boundedWorld) open(most int) *stores.Handle {
	handle := &stores.Handle{Name: w.t.Name(), Module: boundedModule{w.store, most}, Logger: zap.NewNop()}
	if _, err := handle.Enter(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if handle.EnterOpen() != nil {
			handle.Leave()
			handle.Unload()
		}
	})
	return handle
}

// ask sends a client's request through a number of handlers with the zone, and returns
// the status.
func (w *boundedWorld) ask(client string, handlers int) int {
	w.t.Helper()
	h := &Limiter{arrived: new(arrivals), Config: Config{Zones: []*Zone{w.zone}, Logger: zap.NewNop(), Now: w.clock.Now, Store: w.handle, LogRefusals: LogNone}}
	next := caddyhttp.Handler(caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		return nil
	}))
	for range handlers {
		inner := next
		next = caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error { return h.ServeHTTP(w, r, inner) })
	}
	response := httptest.NewRecorder()
	repl := caddy.NewReplacer()
	sent := httptest.NewRequest(http.MethodGet, "/", nil)
	sent.Header.Set("A", client)
	r := caddyhttp.PrepareRequest(sent, repl, response, nil)
	if err := next.ServeHTTP(response, r); err != nil {
		return statusOf(err)
	}
	return response.Code
}

// used returns the count of a client's bucket.
func (w *boundedWorld) used(clientKey string) int64 {
	r := store.Request{Limit: &w.zone.limit, ClientKey: clientKey, Events: w.zone.Events.Number}
	return store.Answers(context.Background(), w.store.Peek, []store.Request{r})[0].Used
}

func (w *boundedWorld) keyOf(client string) string { return w.zone.templates[0].tag + ":" + client }

// TestRegularsAreNotNewcomers: a client that keeps coming is not refused because of
// made-up keys, however many windows end and whatever happens to the config.
func TestRegularsAreNotNewcomers(t *testing.T) {
	const (
		most   = 5
		step   = 100 * time.Millisecond
		madeUp = 23 // in each step
		steps  = 120
	)
	for name, zone := range map[string]*Zone{
		"fixed window, after":     {Events: Quantity{Number: 25}, Window: 2 * time.Second},
		"fixed window, before":    {Events: Quantity{Number: 25}, Window: 2 * time.Second, ChargeBefore: true},
		"aligned":                 {Events: Quantity{Number: 25}, Window: 2 * time.Second, Align: true},
		"shorter than the pauses": {Events: Quantity{Number: 5}, Window: 10 * time.Millisecond},
		"sliding window":          {Events: Quantity{Number: 25}, Window: 2 * time.Second, Algorithm: store.SlidingWindow},
		"gcra":                    {Events: Quantity{Number: 25}, Window: 2 * time.Second, Algorithm: store.GCRA},
		"longer pauses":           {Events: Quantity{Number: 25}, Window: 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			every := 1
			if name == "longer pauses" {
				every = 30
			}
			w := newBoundedWorld(t, most, zone)
			if status := w.ask("alice", 1); status != http.StatusOK {
				t.Fatalf("the first request got %d", status)
			}
			n, passed, refused, asked := 0, 0, 0, 0
			for i := range steps {
				w.clock.Advance(step)
				for range madeUp {
					if n++; w.ask("made-up-"+strconv.Itoa(n), 1) == http.StatusOK {
						passed++
					}
				}
				if i%every == every-1 {
					if asked++; w.ask("alice", 1) != http.StatusOK {
						refused++
					}
				}
				if i == steps/2 {
					next := w.open(most)
					w.handle.Unload()
					w.handle = next
					zone.countIn(ownStore, next)
				}
			}
			if refused > 0 {
				t.Errorf("%d of %d requests of a regular client were refused", refused, asked)
			}
			if n < 10*passed && zone.Window > time.Second {
				t.Errorf("%d of %d requests with made-up keys passed", passed, n)
			}
		})
	}
}

// TestOpenWindowIsABucket, although nothing has been spent in it yet.
func TestOpenWindowIsABucket(t *testing.T) {
	w := newBoundedWorld(t, 1, &Zone{Events: Quantity{Number: 1}, Window: time.Hour})
	// Another process opens the window, by a request that still runs.
	store.Answers(context.Background(), w.store.Check, []store.Request{{Limit: &w.zone.limit, ClientKey: w.keyOf("alice"), Events: 1, Cost: 1}})
	for _, client := range []string{"first", "second"} {
		if status := w.ask(client, 1); status != http.StatusOK {
			t.Fatalf("%s got %d", client, status)
		}
	}
	if status := w.ask("third", 1); status != http.StatusTooManyRequests {
		t.Fatalf("a new client beyond the bound got %d", status)
	}
	if status := w.ask("alice", 1); status != http.StatusOK || w.used(w.keyOf("alice")) != 1 {
		t.Errorf("a client with an open window got %d, and %d are counted in that", status, w.used(w.keyOf("alice")))
	}
}

// TestOverflowIsChargedOnce where two handlers have the zone, although a new
// client may have been admitted in between.
func TestOverflowIsChargedOnce(t *testing.T) {
	for _, charge := range []bool{false, true} {
		for _, handlers := range []int{1, 2, 3} {
			w := newBoundedWorld(t, 1, &Zone{Events: Quantity{Number: 100}, Window: time.Hour, ChargeBefore: charge})
			const clients = 10
			for n := range clients {
				if status := w.ask(strconv.Itoa(n), handlers); status != http.StatusOK {
					t.Fatalf("client %d got %d", n, status)
				}
			}
			if used := w.used(w.keyOf("0")); used != 1 {
				t.Errorf("charge before %v, %d handlers: the first client was charged %d, want 1", charge, handlers, used)
			}
			if used := w.used(stores.OverflowKey); used != clients-1 {
				t.Errorf("charge before %v, %d handlers: %d requests overflowed, %d were charged", charge, handlers, clients-1, used)
			}
			w.handle.Unload()
		}
	}
}

// TestZonesAreObservedWhileSlotsAreGivenBack: for the race detector.
func TestZonesAreObservedWhileSlotsAreGivenBack(t *testing.T) {
	handle := &stores.Handle{Name: t.Name(), Module: deafModule{memory.New(memory.NewBuckets(), memory.Options{})}, Logger: zap.NewNop()}
	h := &Limiter{arrived: new(arrivals), Config: Config{Logger: zap.NewNop(), Now: time.Now, Store: handle, LogRefusals: LogNone}}
	for _, name := range []string{"a", "b"} {
		z := &Zone{Name: name, Key: []string{name}, Events: Quantity{Number: 1}, Cost: Quantity{Number: 1}, Window: time.Hour, Counts: telemetry.Default.Zone(name)}
		if name == "a" {
			z.Algorithm = store.Concurrency
		} else {
			z.Enforce = new(float64)
		}
		z.prepare()
		z.countIn(ownStore, handle)
		h.Zones = append(h.Zones, z)
	}
	key, _ := h.Zones[0].clientKey(nil, caddy.NewReplacer(), h, true)
	h.Zones[0].bound[ownStore].aborted.note(key, 5, time.Now(), time.Hour)
	for range 200 {
		if got := h.answeredWith(http.StatusOK).Code; got != 429 {
			t.Fatal(got)
		}
	}
}

// TestZonesAreObservedWhileTakesAreNoted, in a store that could not be opened: for the race
// detector.
func TestZonesAreObservedWhileTakesAreNoted(t *testing.T) {
	for range 50 {
		open := deafModule{memory.New(memory.NewBuckets(), memory.Options{})}
		h, _ := newSplitLimiter(t, [maxStores]stores.Module{open, brokenModule{}}, func(z *Zone) { z.ChargeBefore = true; z.Forgives.Add(500); z.OnError = stores.OnErrorAllow })
		h.Zones[0].enforced = 0
		h.answeredWith(http.StatusOK)
	}
}
