package shardlimit

import (
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

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
			z := &Zone{Name: "test", Key: Texts{"static"}, Events: "10", Cost: "{" + headerA + "}"}
			z.compile()
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
	z := &Zone{Name: "test", Cost: "{" + headerA + "}"}
	h, logs := keyHandler()
	start := h.now()
	repl := values{headerA: "2.5"}.replacer()
	for range 5 {
		z.finalCost(repl, h)
	}
	h.now = func() time.Time { return start.Add(reportInterval) }
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
	z := &Zone{Name: "test", Key: Texts{"static"}, Events: "{" + headerA + "}", EventsFallback: 10, Cost: "{" + headerA + "}"}
	z.compile()
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
	for cost, want := range map[Amount]int64{"": 1, "1": 1, "0": 0, "7": 7, "007": 7} {
		z := &Zone{Key: Texts{"static"}, Events: "10", Cost: cost}
		z.compile()
		h, logs := keyHandler()
		req, err := z.request(httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if final := z.finalCost(values{}.replacer(), h); err != nil || req.Cost != want || final != want {
			t.Errorf("cost %q is %d, then %d, %v, want %d", cost, req.Cost, final, err, want)
		}
		if logs.Len() != 0 {
			t.Errorf("cost %q logs %v", cost, logs.All())
		}
	}
}

func TestCostOfSeveralPlaceholders(t *testing.T) {
	z := &Zone{Name: "test", Cost: "{" + headerA + "}{" + headerB + "}0"}
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
			z := &Zone{
				Name: "test", Algorithm: "gcra", Events: "{" + headerA + "}", EventsFallback: 10,
				Burst: test.burst, Window: caddy.Duration(test.window), events: 10,
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
	z := &Zone{
		Name: "test", Key: Texts{"static"}, Algorithm: "gcra", Events: "1", Burst: burst,
		Window: caddy.Duration(365 * 24 * time.Hour),
	}
	if err := z.validate(); err != nil {
		t.Fatal(err)
	}
	z.compile()
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
	for algorithm, want := range map[string]bool{
		"": false, "fixed_window": false, "sliding_window": false, "gcra": false,
		"sliding_log": true, "concurrency": true,
	} {
		z := &Zone{Key: Texts{"static"}, Events: "10", Algorithm: algorithm}
		z.compile()
		h, _ := keyHandler()
		req, err := z.request(httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if err != nil || (req.ID != "") != want {
			t.Errorf("%q: ID is %q, %v, want one: %v", algorithm, req.ID, err, want)
		}
	}
}

// TestZonesThatTake: concurrency does in any case.
func TestZonesThatTake(t *testing.T) {
	for _, test := range []struct {
		algorithm, charge string
		want              bool
	}{
		{"", "", false}, {"gcra", "after", false}, {"", "before", true},
		{"concurrency", "", true}, {"concurrency", "before", true},
	} {
		z := &Zone{Key: Texts{"static"}, Events: "10", Algorithm: test.algorithm, Charge: test.charge}
		z.compile()
		if z.takes != test.want {
			t.Errorf("algorithm %q, charge %q: takes is %v, want %v", test.algorithm, test.charge, z.takes, test.want)
		}
	}
}
