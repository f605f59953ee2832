package limiter

import (
	"errors"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestEventsForABurst: a plan so slow that the burst would not drain within a
// century becomes the slowest with which it does.
func TestEventsForABurst(t *testing.T) {
	const year = 365 * 24 * time.Hour
	for name, test := range map[string]struct {
		burst  int64
		window time.Duration
		plan   string
		want   int64
	}{
		"enough":           {200, year, "2", 2},
		"too few":          {200, year, "1", 2},
		"zero":             {5, time.Minute, "0", 0},
		"one":              {5, time.Minute, "1", 1},
		"one for a day":    {36500, 24 * time.Hour, "1", 1},
		"one more":         {36501, 24 * time.Hour, "1", 2},
		"without a burst":  {0, 100 * year, "1", 1},
		"largest products": {store.MaxEvents, 100 * year, "4503599627370495", store.MaxEvents},
		"largest":          {store.MaxEvents, 100 * year, "4503599627370496", store.MaxEvents},
	} {
		t.Run(name, func(t *testing.T) {
			z := &Zone{
				Counts: new(telemetry.ZoneCounters),
				Name:   "test", Algorithm: store.GCRA, Events: Quantity{Text: "{" + headerA + "}", Number: 10},
				Burst: Quantity{Number: test.burst}, Window: test.window,
			}
			h, logs := keyHandler()
			if got, _ := z.eventsFor(values{headerA: test.plan}.replacer(), h); got != test.want {
				t.Errorf("events are %d, want %d", got, test.want)
			}
			if warned := logs.Len() == 1; warned != (strconv.FormatInt(test.want, 10) != test.plan) {
				t.Errorf("warnings: %v", logs.All())
			}
		})
	}
}

// TestBurstByPlan reads the burst for each request. What is 0 or unlimited, of either, is
// the limit of the request.
func TestBurstByPlan(t *testing.T) {
	const year = 365 * 24 * time.Hour
	for _, test := range []struct {
		events, burst         string
		window                time.Duration
		wantEvents, wantBurst int64
		logged                int
	}{
		{"100", "20", time.Minute, 100, 20, 0},
		{"100", " 20 ", time.Minute, 100, 20, 0},
		{"100", "0", time.Minute, 0, 0, 0},
		{"0", "20", time.Minute, 0, 0, 0},
		{"100", UnlimitedWord, time.Minute, unlimited, 0, 0},
		{UnlimitedWord, "20", time.Minute, unlimited, 0, 0},
		{"0", UnlimitedWord, time.Minute, unlimited, 0, 0},
		{"100", "many", time.Minute, 100, 7, 1},
		{"100", "-1", time.Minute, 100, 7, 1},
		// It becomes the largest, with which the rate is too low.
		{"100", "9007199254740993", time.Minute, 85_684_925, store.MaxEvents, 2},
		// A burst that would take more than a century to come back raises the rate.
		{"1", "200", year, 2, 200, 1},
	} {
		z := &Zone{
			Counts: new(telemetry.ZoneCounters),
			Name:   "test", Algorithm: store.GCRA, Window: test.window,
			Events: Quantity{Text: "{" + headerA + "}", Number: 10}, Burst: Quantity{Text: "{" + headerB + "}", Number: 7},
		}
		h, logs := keyHandler()
		events, burst := z.eventsFor(values{headerA: test.events, headerB: test.burst}.replacer(), h)
		if events != test.wantEvents || burst != test.wantBurst || logs.Len() != test.logged {
			t.Errorf("events %q and burst %q are %d and %d, %d entries logged; want %d, %d and %d", test.events, test.burst, events, burst, logs.Len(),
				test.wantEvents, test.wantBurst, test.logged)
		}
	}
}

// TestBurstOfACentury: the slowest burst that loads still limits; a slower one would
// drain beyond the range of an instant.
func TestBurstOfACentury(t *testing.T) {
	const burst = 100
	z := &Zone{
		Counts: new(telemetry.ZoneCounters),
		Name:   "test", Key: []string{"static"}, Cost: Quantity{Number: 1}, Algorithm: store.GCRA, Events: Quantity{Number: 1}, Burst: Quantity{Number: burst},
		Window: 365 * 24 * time.Hour,
	}
	z.prepare()
	h, _ := keyHandler()
	buckets := memory.New(memory.NewBuckets(), memory.Options{})
	for n := range 3 * burst {
		req, err := requestOf(z, httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if err != nil {
			t.Fatal(err)
		}
		if st := store.Answers(t.Context(), buckets.Take, []store.Request{req})[0]; st.Allowed != (n < burst) {
			t.Fatalf("request %d is admitted: %v", n+1, st.Allowed)
		}
	}
}

func TestNewIDsAreShortAndDistinct(t *testing.T) {
	seen := map[string]bool{}
	for range 100_000 {
		id := identity.NewRequestID()
		if len(id) != 11 || seen[id] {
			t.Fatalf("ID %q after %d others, want 11 characters and never the same", id, len(seen))
		}
		seen[id] = true
	}
}

func TestRequestsHaveAnIDWhereEventsAreKeptOneByOne(t *testing.T) {
	for algorithm, want := range map[store.Algorithm]bool{
		store.FixedWindow: false, store.SlidingWindow: false, store.GCRA: false,
		store.SlidingLog: true, store.Concurrency: true,
	} {
		z := &Zone{Key: []string{"static"}, Events: Quantity{Number: 10}, Algorithm: algorithm}
		z.prepare()
		h, _ := keyHandler()
		req, err := requestOf(z, httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if err != nil || (req.ID != "") != want {
			t.Errorf("%s: ID is %q, %v, want one: %v", algorithm, req.ID, err, want)
		}
	}
}

func TestEventsForARequest(t *testing.T) {
	for name, test := range map[string]struct {
		quota  string
		want   int64
		logged string
	}{
		"number":              {"25", 25, ""},
		"largest":             {"4503599627370496", store.MaxEvents, ""},
		"zero":                {"0", 0, ""},
		"unlimited":           {"unlimited", unlimited, ""},
		"spaces":              {" 25\t", 25, ""},
		"unlimited, spaces":   {" unlimited\t", unlimited, ""},
		"missing":             {"", 10, "using the fallback"},
		"text":                {"many", 10, "using the fallback"},
		"another word":        {"Unlimited", 10, "using the fallback"},
		"fraction":            {"2.5", 10, "using the fallback"},
		"negative":            {"-1", 10, "using the fallback"},
		"negative, 64 bits":   {"-99999999999999999999", 10, "using the fallback"},
		"too large":           {"4503599627370497", store.MaxEvents, "using the nearest"},
		"beyond 64 bits":      {"99999999999999999999", store.MaxEvents, "using the nearest"},
		"number and the word": {"5 unlimited", 10, "using the fallback"},
	} {
		t.Run(name, func(t *testing.T) {
			z := &Zone{Name: "test", Counts: new(telemetry.ZoneCounters), Events: Quantity{Text: "{" + headerA + "}", Number: 10}}
			h, logs := keyHandler()
			if got, _ := z.eventsFor(values{headerA: test.quota}.replacer(), h); got != test.want {
				t.Errorf("events are %d, want %d", got, test.want)
			}
			if n := logs.FilterMessageSnippet(test.logged).Len(); n != logs.Len() || (n == 1) != (test.logged != "") {
				t.Errorf("warnings: %v, want %q", logs.All(), test.logged)
			}
			z.eventsFor(values{headerA: test.quota}.replacer(), h)
			if logs.Len() > 1 {
				t.Errorf("warnings: %v, want one a minute", logs.All())
			}
		})
	}
}

// TestZonesThatTake: concurrency does in any case.
func TestZonesThatTake(t *testing.T) {
	for _, test := range []struct {
		algorithm    store.Algorithm
		before, want bool
	}{
		{store.FixedWindow, false, false}, {store.GCRA, false, false}, {store.FixedWindow, true, true},
		{store.Concurrency, false, true}, {store.Concurrency, true, true},
	} {
		z := &Zone{Key: []string{"static"}, Events: Quantity{Number: 10}, Algorithm: test.algorithm, ChargeBefore: test.before}
		if z.prepare(); z.ChargeBefore != test.want {
			t.Errorf("algorithm %s, charge before %v: takes is %v, want %v", test.algorithm, test.before, z.ChargeBefore, test.want)
		}
	}
}

func TestShareIsRoundedUp(t *testing.T) {
	for _, test := range []struct{ n, percent, want int64 }{
		{100, 20, 20},
		{100, 0, 0},
		{100, 100, 100},
		{10, 25, 3},
		{10, 1, 1},
		{10, 99, 10},
		{1, 1, 1},
		{1, 100, 1},
		{3, 33, 1},
		{3, 34, 2},
		{101, 50, 51},
		{199, 1, 2},
		{store.MaxEvents, 100, store.MaxEvents},
		{store.MaxEvents, 50, store.MaxEvents / 2},
	} {
		if got := Share(test.n, test.percent); got != test.want {
			t.Errorf("%d percent of %d is %d, want %d", test.percent, test.n, got, test.want)
		}
	}
	for range 1000 {
		n, percent := rand.Int64N(store.MaxEvents)+1, rand.Int64N(101)
		want := new(big.Int).Mul(big.NewInt(n), big.NewInt(percent))
		want.Add(want, big.NewInt(99)).Div(want, big.NewInt(100))
		if got := Share(n, percent); got != want.Int64() {
			t.Errorf("%d percent of %d is %d, want %s", percent, n, got, want)
		}
	}
}

// brokenMatcher is a matcher that fails.
type brokenMatcher struct{}

var errBroken = errors.New("broken")

func (brokenMatcher) MatchWithError(*http.Request) (bool, error) { return false, errBroken }

// reserveFor is a reserve for requests of these methods, one matcher for each.
func reserveFor(percent int64, methods ...string) Reserve {
	r := Reserve{Percent: percent}
	for _, method := range methods {
		r.Matchers = append(r.Matchers, caddyhttp.MatcherSet{caddyhttp.MatchMethod{method}})
	}
	return r
}

func TestReservedFromTheLessImportant(t *testing.T) {
	z := &Zone{Reserves: []Reserve{reserveFor(10, "DELETE"), reserveFor(30, "POST", "PUT"), reserveFor(5, "GET")}}
	for method, want := range map[string]int64{
		"DELETE":  0,
		"POST":    10,
		"PUT":     10,
		"GET":     40,
		"OPTIONS": 45,
	} {
		got, err := z.reservedFrom(httptest.NewRequest(method, "/", nil))
		if err != nil || got != want {
			t.Errorf("%s must not use %d percent, %v, want %d", method, got, err, want)
		}
	}
	if got, err := new(Zone).reservedFrom(httptest.NewRequest("GET", "/", nil)); err != nil || got != 0 {
		t.Errorf("without reserves a request must not use %d percent, %v", got, err)
	}
}

func TestReservedFromAMatcherThatFails(t *testing.T) {
	broken := Reserve{Percent: 10, Matchers: caddyhttp.MatcherSets{{brokenMatcher{}}}}
	z := &Zone{Reserves: []Reserve{reserveFor(20, "POST"), broken}}
	if _, err := z.reservedFrom(httptest.NewRequest("GET", "/", nil)); !errors.Is(err, errBroken) {
		t.Errorf("error is %v, want the matcher's", err)
	}
	if got, err := z.reservedFrom(httptest.NewRequest("POST", "/", nil)); err != nil || got != 0 {
		t.Errorf("a request that matches an earlier reserve gets %d, %v", got, err)
	}
	h, _ := keyHandler()
	z.Key, z.Events = []string{"static"}, Quantity{Number: 10}
	z.prepare()
	if _, err := requestOf(z, httptest.NewRequest("GET", "/", nil), values{}.replacer(), h); !errors.Is(err, errBroken) {
		t.Errorf("request returns %v, want the matcher's error", err)
	}
}

func TestReservedOfARequest(t *testing.T) {
	for name, test := range map[string]struct {
		zone     *Zone
		quota    string
		reserved int64
	}{
		"events":              {zone: &Zone{Events: Quantity{Number: 10}}, reserved: 3},
		"events of the plan":  {zone: &Zone{Events: Quantity{Text: "{" + headerA + "}", Number: 10}}, quota: "1000", reserved: 250},
		"fallback":            {zone: &Zone{Events: Quantity{Text: "{" + headerA + "}", Number: 10}}, reserved: 3},
		"burst":               {zone: &Zone{Events: Quantity{Number: 10}, Algorithm: store.GCRA, Burst: Quantity{Number: 40}}, reserved: 10},
		"events without one":  {zone: &Zone{Events: Quantity{Number: 10}, Algorithm: store.GCRA}, reserved: 3},
		"concurrent requests": {zone: &Zone{Events: Quantity{Number: 8}, Algorithm: store.Concurrency}, reserved: 2},
	} {
		t.Run(name, func(t *testing.T) {
			z := test.zone
			z.Counts, z.Key, z.Reserves = new(telemetry.ZoneCounters), []string{"static"}, []Reserve{reserveFor(25, "POST")}
			z.prepare()
			h, _ := keyHandler()
			repl := values{headerA: test.quota}.replacer()
			for method, want := range map[string]int64{"GET": test.reserved, "POST": 0} {
				req, err := requestOf(z, httptest.NewRequest(method, "/", nil), repl, h)
				if err != nil || req.Reserved != want {
					t.Errorf("%s: %d reserved, %v, want %d", method, req.Reserved, err, want)
				}
			}
		})
	}
}

// seriesByName are the series that zones export: by zone and metric, what their other labels say.
func seriesByName(t *testing.T) map[string]map[string][]string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	if err := telemetry.Default.Register(registry); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string][]string{}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			zone, others := "", []string{}
			for _, label := range metric.GetLabel() {
				if label.GetName() == "zone" {
					zone = label.GetValue()
				} else {
					others = append(others, label.GetValue())
				}
			}
			if all[zone] == nil {
				all[zone] = map[string][]string{}
			}
			all[zone][family.GetName()] = append(all[zone][family.GetName()], strings.Join(others, " "))
		}
	}
	return all
}

// TestZoneStateLivesWithTheStore: a config takes the state over if the last user of the
// previous one has not left, and begins anew otherwise.
func TestZoneStateLivesWithTheStore(t *testing.T) {
	load := func(store string) *stores.Handle {
		u := &stores.Handle{Name: store, Module: deafModule{new(deafStore)}, Logger: zap.NewNop()}
		if _, err := u.Enter(); err != nil {
			t.Fatal(err)
		}
		return u
	}
	series := func() (n int) {
		for _, named := range seriesByName(t) {
			n += len(named["caddy_rate_limit_requests_total"])
		}
		return n
	}
	before := series()
	one, other := load("one"), load("other")
	state := acquireState(one, "lives")
	if acquireState(one, "lives") != state {
		t.Error("another handler's zone has another state")
	}
	if acquireState(other, "lives") == state || acquireState(one, "lives2") == state {
		t.Error("two zones share a state")
	}
	state.counts.Requests.Inc()

	next := load("one")
	if acquireState(next, "lives") != state {
		t.Error("a zone that is loaded again has another state")
	}
	if _, err := one.Enter(); err != nil {
		t.Fatal(err)
	}
	one.Unload()
	next.Unload()
	if findState(ZoneID{"one", "lives"}) == nil {
		t.Error("the state is gone while a request uses it")
	}
	one.Leave()
	if findState(ZoneID{"one", "lives"}) != nil {
		t.Error("the state outlives the store's last user")
	}
	if n := series() - before; n != 1 {
		t.Errorf("%d zones have metrics, want that of the other store", n)
	}
	if n := acquireState(other, "lives").counts.Requests.Value(); n != 1 {
		t.Errorf("%d requests are counted of the zone in both stores, want 1", n)
	}
	other.Unload()
	if n := series() - before; n != 0 {
		t.Errorf("%d unused zones have metrics", n)
	}
}
