package shardlimit

import (
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

func TestCostOfAPlaceholder(t *testing.T) {
	for name, test := range map[string]struct {
		cost string
		want int64
		bad  bool
	}{
		"number":         {cost: "25", want: 25},
		"one":            {cost: "1", want: 1},
		"zero":           {cost: "0", want: 0},
		"spaces":         {cost: " 25\t", want: 25},
		"leading zeros":  {cost: "007", want: 7},
		"largest":        {cost: "4503599627370496", want: store.MaxEvents},
		"too large":      {cost: "4503599627370497", want: 1, bad: true},
		"beyond 64 bits": {cost: "99999999999999999999", want: 1, bad: true},
		"empty":          {cost: "", want: 1, bad: true},
		"blank":          {cost: "  ", want: 1, bad: true},
		"text":           {cost: "much", want: 1, bad: true},
		"two numbers":    {cost: "1 2", want: 1, bad: true},
		"fraction":       {cost: "2.5", want: 1, bad: true},
		"exponent":       {cost: "1e3", want: 1, bad: true},
		"hexadecimal":    {cost: "0x10", want: 1, bad: true},
		"negative":       {cost: "-1", want: 1, bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			z := &compiledZone{Name: "test", Key: []string{"static"}, Events: Quantity{Number: 10}, Cost: Quantity{Text: "{" + headerA + "}"}}
			z.prepare()
			h, logs := keyHandler()
			repl := values{headerA: test.cost}.replacer()
			if got, bad := z.readCost(repl); got != test.want || (bad != "") != test.bad {
				t.Errorf("%q is read as %d, bad %q, want %d", test.cost, got, bad, test.want)
			}
			req, err := z.request(httptest.NewRequest("GET", "/", nil), repl, h)
			if err != nil || req.Cost != test.want {
				t.Errorf("%q costs %d, %v when the request comes, want %d", test.cost, req.Cost, err, test.want)
			}
			if logs.Len() != 0 {
				t.Errorf("before the response is there, %v is logged", logs.All())
			}
			if got := z.finalCost(repl, h); got != test.want {
				t.Errorf("%q costs %d in the end, want %d", test.cost, got, test.want)
			}
			if warned := logs.Len() == 1; warned != test.bad {
				t.Errorf("warnings: %v, want one: %v", logs.All(), test.bad)
			}
		})
	}
}

func TestCostWarnsOnceAMinute(t *testing.T) {
	z := &compiledZone{Name: "test", Cost: Quantity{Text: "{" + headerA + "}"}}
	h, logs := keyHandler()
	start := h.Now()
	repl := values{headerA: "2.5"}.replacer()
	for range 5 {
		z.finalCost(repl, h)
	}
	h.Now = func() time.Time { return start.Add(reportInterval) }
	z.finalCost(repl, h)
	if logs.Len() != 2 {
		t.Fatalf("%d warnings, want 2", logs.Len())
	}
	fields := logs.All()[1].ContextMap()
	if fields["zone"] != "test" || fields["cost"] != `"2.5"` || fields["times"] != int64(5) {
		t.Errorf("warning has %v, want zone test, cost \"2.5\" and times 5", fields)
	}
}

// TestWarningsOfLongTextsAreShort, whatever a client sends as its cost or plan.
func TestWarningsOfLongTextsAreShort(t *testing.T) {
	z := &compiledZone{Name: "test", Key: []string{"static"}, Events: Quantity{Text: "{" + headerA + "}", Number: 10}, Cost: Quantity{Text: "{" + headerA + "}"}}
	z.prepare()
	h, logs := keyHandler()
	repl := values{headerA: strings.Repeat("9", 19_000)}.replacer()
	z.eventsFor(repl, h)
	z.finalCost(repl, h)
	if logs.Len() != 2 {
		t.Fatalf("%d warnings, want 2", logs.Len())
	}
	for _, entry := range logs.All() {
		for name, value := range entry.ContextMap() {
			if text, ok := value.(string); ok && len(text) > 200 {
				t.Errorf("%s: %s has %d bytes", entry.Message, name, len(text))
			}
		}
	}
}

func TestCostThatIsTheSameForAll(t *testing.T) {
	for _, want := range []int64{0, 1, 7} {
		z := &compiledZone{Key: []string{"static"}, Events: Quantity{Number: 10}, Cost: Quantity{Number: want}}
		z.prepare()
		h, logs := keyHandler()
		req, err := z.request(httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if final := z.finalCost(values{}.replacer(), h); err != nil || req.Cost != want || final != want {
			t.Errorf("cost is %d, then %d, %v, want %d", req.Cost, final, err, want)
		}
		if logs.Len() != 0 {
			t.Errorf("cost %d logs %v", want, logs.All())
		}
	}
}

func TestCostOfSeveralPlaceholders(t *testing.T) {
	z := &compiledZone{Name: "test", Cost: Quantity{Text: "{" + headerA + "}{" + headerB + "}0"}}
	h, _ := keyHandler()
	if got := z.finalCost(values{headerA: "1", headerB: "2"}.replacer(), h); got != 120 {
		t.Errorf("cost is %d, want 120", got)
	}
}

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
			z := &compiledZone{
				Name: "test", Algorithm: "gcra", Events: Quantity{Text: "{" + headerA + "}", Number: 10},
				Burst: test.burst, Window: test.window,
			}
			h, logs := keyHandler()
			if got := z.eventsFor(values{headerA: test.plan}.replacer(), h); got != test.want {
				t.Errorf("events are %d, want %d", got, test.want)
			}
			if warned := logs.Len() == 1; warned != (strconv.FormatInt(test.want, 10) != test.plan) {
				t.Errorf("warnings: %v", logs.All())
			}
		})
	}
}

// TestBurstOfACentury: the slowest burst that loads is a limit; what would take
// longer to drain than an instant can tell would be none.
func TestBurstOfACentury(t *testing.T) {
	const burst = 100
	z := &compiledZone{
		Name: "test", Key: []string{"static"}, Algorithm: "gcra", Events: Quantity{Number: 1}, Burst: burst,
		Window: 365 * 24 * time.Hour,
	}
	z.prepare()
	h, _ := keyHandler()
	buckets := memory.New(memory.NewBuckets(), memory.Options{})
	for n := range 3 * burst {
		req, err := z.request(httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if err != nil {
			t.Fatal(err)
		}
		if st := buckets.Take(t.Context(), []store.Request{req})[0]; st.Allowed != (n < burst) {
			t.Fatalf("request %d is admitted: %v", n+1, st.Allowed)
		}
	}
}

func TestNewIDsAreShortAndDistinct(t *testing.T) {
	seen := map[string]bool{}
	for range 100_000 {
		id := newID()
		if len(id) != 11 || seen[id] {
			t.Fatalf("ID %q after %d others, want 11 characters and never the same", id, len(seen))
		}
		seen[id] = true
	}
}

func TestRequestsHaveAnIDWhereEventsAreKeptOneByOne(t *testing.T) {
	for algorithm, want := range map[store.Algorithm]bool{
		"fixed_window": false, "sliding_window": false, "gcra": false,
		"sliding_log": true, "concurrency": true,
	} {
		z := &compiledZone{Key: []string{"static"}, Events: Quantity{Number: 10}, Algorithm: algorithm}
		z.prepare()
		h, _ := keyHandler()
		req, err := z.request(httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if err != nil || (req.ID != "") != want {
			t.Errorf("%q: ID is %q, %v, want one: %v", algorithm, req.ID, err, want)
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
			z := &compiledZone{Name: "test", Events: Quantity{Text: "{" + headerA + "}", Number: 10}}
			h, logs := keyHandler()
			if got := z.eventsFor(values{headerA: test.quota}.replacer(), h); got != test.want {
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
		z := &compiledZone{Key: []string{"static"}, Events: Quantity{Number: 10}, Algorithm: test.algorithm, ChargeBefore: test.before}
		if z.prepare(); z.ChargeBefore != test.want {
			t.Errorf("algorithm %q, charge before %v: takes is %v, want %v", test.algorithm, test.before, z.ChargeBefore, test.want)
		}
	}
}
