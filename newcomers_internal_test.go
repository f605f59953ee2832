package shardlimit

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// boundedModule opens a store that bounds new buckets.
type boundedModule struct {
	store *memory.Store
	most  int
}

func (m boundedModule) OpenStore(string) (store.Store, error) { return m.store, nil }
func (boundedModule) CloseStore()                             {}
func (boundedModule) OnErrorDefault() string                  { return onErrorAllow }
func (m boundedModule) NewBuckets() int                       { return m.most }

// boundedWorld is a site whose store bounds new buckets, and whose clock stands
// still.
type boundedWorld struct {
	t     *testing.T
	now   time.Time
	store *memory.Store
	use   *storeUse
	zone  *compiledZone
}

// newBoundedWorld has a zone by the header A, that lets this many new clients in
// a second.
func newBoundedWorld(t *testing.T, most int, zone *compiledZone) *boundedWorld {
	t.Helper()
	w := &boundedWorld{t: t, now: time.Unix(1_700_000_000, 0), zone: zone}
	w.store = memory.New(memory.NewBuckets(), memory.Options{Now: func() time.Time { return w.now }})
	w.use = w.open(most)
	zone.Cost = Quantity{Number: 1}
	zone.Name, zone.Key = "test", []string{"{" + headerA + "}"}
	zone.prepare()
	zone.counts = metrics.zone(zone.Name)
	zone.countIn(ownStore, w.use)
	return w
}

// open opens the store as another config would, until the test ends.
func (w *boundedWorld) open(most int) *storeUse {
	use := &storeUse{name: w.t.Name(), module: boundedModule{w.store, most}, logger: zap.NewNop()}
	if _, err := use.enter(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if use.open.Load() != nil {
			use.unload()
		}
	})
	return use
}

// ask sends a request of a client through so many handlers with the zone, and
// returns the status.
func (w *boundedWorld) ask(client string, handlers int) int {
	w.t.Helper()
	h := &Limiter{Config: Config{Zones: []*compiledZone{w.zone}, Logger: zap.NewNop(), Now: func() time.Time { return w.now }, Store: w.use, LogRefusals: logNone}}
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
	repl.Set(headerA, client)
	r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), repl, response, nil)
	if err := next.ServeHTTP(response, r); err != nil {
		return statusOf(err)
	}
	return response.Code
}

// used is what is spent of a client's bucket.
func (w *boundedWorld) used(clientKey string) int64 {
	r := store.Request{Limit: &w.zone.limit, ClientKey: clientKey, Events: w.zone.Events.Number}
	return w.store.Peek(context.Background(), []store.Request{r})[0].Used
}

func (w *boundedWorld) keyOf(client string) string { return w.zone.templates[0].tag + ":" + client }

// TestRegularsAreNotNewcomers: a client that comes all the time is not refused
// because made-up keys come beside it, however many windows end meanwhile, and
// whatever becomes of the config.
func TestRegularsAreNotNewcomers(t *testing.T) {
	const (
		most   = 5
		step   = 100 * time.Millisecond
		madeUp = 23 // in each step
		steps  = 120
	)
	for name, zone := range map[string]*compiledZone{
		"fixed window, after":     {Events: Quantity{Number: 25}, Window: 2 * time.Second},
		"fixed window, before":    {Events: Quantity{Number: 25}, Window: 2 * time.Second, ChargeBefore: true},
		"aligned":                 {Events: Quantity{Number: 25}, Window: 2 * time.Second, Align: true},
		"shorter than the pauses": {Events: Quantity{Number: 5}, Window: 10 * time.Millisecond},
		"sliding window":          {Events: Quantity{Number: 25}, Window: 2 * time.Second, Algorithm: "sliding_window"},
		"gcra":                    {Events: Quantity{Number: 25}, Window: 2 * time.Second, Algorithm: "gcra"},
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
				w.now = w.now.Add(step)
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
					w.use.unload()
					w.use = next
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
	w := newBoundedWorld(t, 1, &compiledZone{Events: Quantity{Number: 1}, Window: time.Hour})
	// As another process does whose request still runs.
	w.store.Check(context.Background(), []store.Request{{Limit: &w.zone.limit, ClientKey: w.keyOf("alice"), Events: 1, Cost: 1}})
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

// TestDivertedRequestIsChargedOnce where two handlers have the zone, though a new
// client may have been let in between them.
func TestDivertedRequestIsChargedOnce(t *testing.T) {
	for _, charge := range []bool{false, true} {
		for _, handlers := range []int{1, 2, 3} {
			w := newBoundedWorld(t, 1, &compiledZone{Events: Quantity{Number: 100}, Window: time.Hour, ChargeBefore: charge})
			const clients = 10
			for n := range clients {
				if status := w.ask(strconv.Itoa(n), handlers); status != http.StatusOK {
					t.Fatalf("client %d got %d", n, status)
				}
			}
			if used := w.used(w.keyOf("0")); used != 1 {
				t.Errorf("charge before %v, %d handlers: the first client was charged %d, want 1", charge, handlers, used)
			}
			if used := w.used(overflowKey); used != clients-1 {
				t.Errorf("charge before %v, %d handlers: %d requests were diverted, charged are %d", charge, handlers, clients-1, used)
			}
			w.use.unload()
		}
	}
}

// TestAcquaintancesEndWithTheirStore, and not before its last config does.
func TestAcquaintancesEndWithTheirStore(t *testing.T) {
	w := newBoundedWorld(t, 1, &compiledZone{Events: Quantity{Number: 1}, Window: time.Hour})
	next := w.open(1)
	w.use.unload()
	if refs, ok := pool.References(acquaintancesKey(t.Name())); !ok || refs != 1 {
		t.Errorf("after a reload %d configs use them, want 1", refs)
	}
	next.unload()
	if refs, ok := pool.References(acquaintancesKey(t.Name())); ok {
		t.Errorf("after the last config %d use them", refs)
	}
}
