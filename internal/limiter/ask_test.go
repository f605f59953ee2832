package limiter

import (
	"context"
	"errors"
	"maps"
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
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestStoreThatDoesNotOpen, of the two of a rollout: all zones of the clients that count there follow on_error, and
// others do not notice.
func TestStoreThatDoesNotOpen(t *testing.T) {
	for _, broken := range []int{ownStore, rolloutStore} {
		for onError, status := range map[string]int{stores.OnErrorAllow: http.StatusOK, stores.OnErrorLocal: http.StatusOK, stores.OnErrorDeny: http.StatusServiceUnavailable} {
			for _, charge := range []bool{false, true} {
				for counts, percent := range []float64{ownStore: 0, rolloutStore: 100} {
					s := new(deafStore)
					modules := [maxStores]stores.Module{deafModule{s}, deafModule{s}}
					modules[broken] = brokenModule{}
					h, handles := newPairLimiter(t, modules, percent, func(z *Zone) { z.ChargeBefore, z.OnError, z.MaxWait = charge, onError, 1 })
					want, asked := status, []string(nil)
					if counts != broken {
						want = http.StatusOK
						if !charge {
							asked = []string{"charge 1", "charge 1"}
						}
					}
					got := h.answeredWith(http.StatusOK).Code
					if err := s.wasAsked(asked...); err != nil || got != want {
						t.Errorf("store %d does not open, %v%% count in the other one, on_error %s, charge before %v: status %d, want %d; %v",
							broken, percent, onError, charge, got, want, err)
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
}

// newPairLimiter is a limiter with the zones a and b and a rollout.
func newPairLimiter(t *testing.T, modules [maxStores]stores.Module, percent float64, complete func(*Zone)) (h *Limiter, handles [maxStores]*stores.Handle) {
	for in, module := range modules {
		handles[in] = &stores.Handle{Name: t.Name() + strconv.Itoa(in), Module: module, Logger: zap.NewNop()}
	}
	moved := rolloutTo(percent)
	moved.Store = handles[rolloutStore]
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
	return h, handles
}

// TestRequestCountsInOneStore: the client of the first zone decides, even if that zone does not match; in a service the
// first descriptor of a call does. The log names the zones with other clients.
func TestRequestCountsInOneStore(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	var modules [maxStores]stores.Module
	for in := range modules {
		modules[in] = deafModule{memory.New(memory.NewBuckets(), memory.Options{})}
	}
	h, _ := newPairLimiter(t, modules, 50, func(z *Zone) { z.Key = []string{"{" + map[string]string{"a": headerA, "b": headerB}[z.Name] + "}"} })
	h.Logger = zap.New(core)
	h.reportOtherClients()
	if all := logs.TakeAll(); len(all) != 1 || all[0].ContextMap()["zone"] != "b" {
		t.Errorf("logged %v, want that clients of zone b have two limits", all)
	}
	requestOf := func(client, group string) *http.Request {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("A", client)
		r.Header.Set("B", group)
		return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), nil)
	}
	h.IsService = true
	h.reportOtherClients()
	if all := logs.TakeAll(); len(all) != 1 || !strings.Contains(all[0].Message, "first descriptor") {
		t.Errorf("logged %v of a service", all)
	}
	New(Config{Rollout: h.Rollout, Logger: zap.NewNop(), IsService: true}) // a service may have no zones
	h.IsService = false
	in := map[string]int{}
	for i := range 40 {
		// The clients of zone b differ from those of zone a.
		client := "client-" + strconv.Itoa(i/2)
		r := requestOf(client, strconv.Itoa(i))
		if h.Zones[0].Matchers = nil; i%2 > 0 {
			h.Zones[0].Matchers = caddyhttp.MatcherSets{{caddyhttp.MatchPath{"/other"}}}
		}
		_, e, err := h.collect(nil, httptest.NewRecorder(), r)
		if err != nil || len(e.zones) != 2-i%2 {
			t.Fatalf("%v, error %v", e, err)
		}
		if i%2 == 0 {
			in[client] = e.zones[0].in
		}
		for _, z := range e.zones {
			if z.in != in[client] {
				t.Errorf("%s counts in store %d in zone %s, want %d", client, z.in, z.Name, in[client])
			}
		}
	}
	h.Zones[0].Matchers = nil
	for client, want := range in {
		first := requestOf(client, "")
		second := requestOf("client-0", "")
		p := &Passage{w: httptest.NewRecorder()}
		_, err := p.MeetEach(h, []Item{{Zone: h.Zones[0], Request: first, Hits: 1}, {Zone: h.Zones[1], Request: second, Hits: 1}})
		if err != nil {
			t.Fatal(err)
		}
		for _, z := range p.tracker.first.zones {
			if z.in != want {
				t.Errorf("a call about %s and then client-0 counts in store %d, want %d", client, z.in, want)
			}
		}
	}
	if n := len(slices.DeleteFunc(slices.Collect(maps.Values(in)), func(in int) bool { return in == ownStore })); n == 0 || n == len(in) {
		t.Errorf("%d of %d clients are moved, want half of them", n, len(in))
	}
}

// TestRefusalAtAFullLine shows the other zones without the cost that was refunded.
func TestRefusalAtAFullLine(t *testing.T) {
	open := func() stores.Module { return deafModule{memory.New(memory.NewBuckets(), memory.Options{})} }
	h, handles := newPairLimiter(t, [maxStores]stores.Module{open(), open()}, 0, func(z *Zone) {
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

// overtakenStore spends the room in a zone just before a take of that zone, and notes the zones of all takes.
type overtakenStore struct {
	*memory.Store
	in    string
	asked []string
}

func (s *overtakenStore) Take(ctx context.Context, asks []*store.Ask) {
	for _, a := range asks {
		other := a.Request
		other.Cost = other.Events
		if s.asked = append(s.asked, other.Limit.Zone); other.Limit.Zone == s.in {
			s.Charge(ctx, []*store.Ask{{Request: other}})
		}
	}
	s.Store.Take(ctx, asks)
}

// TestZoneThatIsWaitedForGoesFirst: a request that another client has overtaken takes nothing from other zones.
func TestZoneThatIsWaitedForGoesFirst(t *testing.T) {
	s := &overtakenStore{Store: memory.New(memory.NewBuckets(), memory.Options{}), in: "b"}
	h, _ := newPairLimiter(t, [maxStores]stores.Module{deafModule{s}, deafModule{s}}, 0, func(z *Zone) { z.ChargeBefore = true })
	w := httptest.NewRecorder()
	r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil)
	_, e, err := h.collect(nil, w, r)
	if err != nil {
		t.Fatal(err)
	}
	e.enter()
	defer e.release()
	if err = e.take(r, e.zones, e.zones[1]); err != nil || !slices.Equal(s.asked, []string{"b"}) {
		t.Errorf("%v, and the zones that were asked are %v", err, s.asked)
	}
}

// brokenModule is a store module whose stores do not open.
type brokenModule struct{ deafModule }

func (brokenModule) OpenStore(string) (store.Store, error) { return nil, errors.New("out of order") }

// boundedModule opens a store that bounds new buckets.
type boundedModule struct {
	store store.Store
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

// TestZonesAreObservedWhileErrorsAreHandled, of a store that could not be opened: for the race
// detector.
func TestZonesAreObservedWhileErrorsAreHandled(t *testing.T) {
	for range 50 {
		h, _ := newPairLimiter(t, [maxStores]stores.Module{brokenModule{}, brokenModule{}}, 0, func(z *Zone) { z.ChargeBefore = true; z.Forgives.Add(500); z.OnError = stores.OnErrorAllow })
		h.Zones[0].enforced = 0
		h.answeredWith(http.StatusOK)
	}
}
