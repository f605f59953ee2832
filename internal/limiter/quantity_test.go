package limiter

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// costZone is a zone whose cost is a sum, with a fallback.
func costZone(t *testing.T, sum string, fallback int64) *Zone {
	t.Helper()
	if _, rest, err := ParseSum(sum); err != nil || rest != "" {
		t.Fatalf("%s: %v, rest %q", sum, err, rest)
	}
	z := &Zone{Name: "test", Counts: new(telemetry.ZoneCounters), Key: []string{"static"}, Events: Quantity{Number: 10}, Cost: Quantity{Text: sum, Number: fallback}}
	z.prepare()
	return z
}

func TestCostOfAPlaceholder(t *testing.T) {
	for name, test := range map[string]struct {
		cost  string
		want  int64
		cause telemetry.Cause
	}{
		"number":           {cost: "25", want: 25},
		"one":              {cost: "1", want: 1},
		"zero":             {cost: "0", want: 0},
		"spaces":           {cost: " 25\t", want: 25},
		"leading zeros":    {cost: "007", want: 7},
		"largest":          {cost: "4503599627370496", want: store.MaxEvents},
		"too large":        {cost: "4503599627370497", want: store.MaxEvents},
		"beyond 64 bits":   {cost: "99999999999999999999", want: store.MaxEvents},
		"beyond floats":    {cost: "1e400", want: store.MaxEvents},
		"infinite":         {cost: "Inf", want: store.MaxEvents},
		"empty":            {cost: "", want: 3, cause: telemetry.NotFound},
		"blank":            {cost: "  ", want: 3, cause: telemetry.NotFound},
		"text":             {cost: "much", want: 3, cause: telemetry.NotFound},
		"two numbers":      {cost: "1 2", want: 3, cause: telemetry.NotFound},
		"hexadecimal":      {cost: "0x10", want: 3, cause: telemetry.NotFound},
		"grouped":          {cost: "1_000", want: 3, cause: telemetry.NotFound},
		"sum":              {cost: "1+1", want: 3, cause: telemetry.NotFound},
		"fraction":         {cost: "2.5", want: 3},
		"just above":       {cost: "2.000000000000000000000000000001", want: 3},
		"tiny":             {cost: "0.0000000000000000000000001", want: 1},
		"whole fraction":   {cost: "900.0", want: 900},
		"without a digit":  {cost: ".5", want: 1},
		"ends with a dot":  {cost: "5.", want: 5},
		"signed":           {cost: "+5", want: 5},
		"exponent":         {cost: "1e3", want: 1000},
		"small exponent":   {cost: "1e-300", want: 1},
		"zero, exponent":   {cost: "0e999999999", want: 0},
		"many digits":      {cost: "5." + strings.Repeat("0", 200), want: 5},
		"negative":         {cost: "-1", want: 3, cause: telemetry.OutOfRange},
		"negative, small":  {cost: "-0.1", want: 3, cause: telemetry.OutOfRange},
		"negative, large":  {cost: "-1e400", want: 3, cause: telemetry.OutOfRange},
		"negative zero":    {cost: "-0", want: 0},
		"not a number":     {cost: "NaN", want: 3, cause: telemetry.OutOfRange},
		"fraction at most": {cost: "4503599627370495.5", want: store.MaxEvents},
	} {
		t.Run(name, func(t *testing.T) {
			z := costZone(t, "{"+headerA+"}", 3)
			h, logs := keyHandler()
			repl := values{headerA: test.cost}.replacer()
			req, err := requestOf(z, httptest.NewRequest("GET", "/", nil), repl, h)
			if err != nil || req.Cost != test.want {
				t.Errorf("%q costs %d, %v when the request comes, want %d", test.cost, req.Cost, err, test.want)
			}
			if logs.Len() != 0 {
				t.Errorf("before the response is there, %v is logged", logs.All())
			}
			if got := z.finalCost(repl, h, nil); got != test.want {
				t.Errorf("%q costs %d in the end, want %d", test.cost, got, test.want)
			}
			if test.cause == telemetry.Known {
				if logs.Len() != 0 {
					t.Errorf("warnings: %v", logs.All())
				}
			} else if logs.Len() != 1 || logs.All()[0].ContextMap()["cause"] != test.cause.String() {
				t.Errorf("warnings: %v, want one about %v", logs.All(), test.cause)
			}
		})
	}
}

// TestCostThatIsNotKnownYet is no cost of 0, with which requests would pass a full bucket.
func TestCostThatIsNotKnownYet(t *testing.T) {
	z := costZone(t, "{"+headerA+"}", 0)
	h, _ := keyHandler()
	for text, want := range map[string]int64{"": 1, "many": 1, "0": 0, "2": 2} {
		repl := values{headerA: text}.replacer()
		req, err := requestOf(z, httptest.NewRequest("GET", "/", nil), repl, h)
		if err != nil || req.Cost != want {
			t.Errorf("%q costs %d, %v when the request comes, want %d", text, req.Cost, err, want)
		}
	}
}

func TestSums(t *testing.T) {
	const a, b = "{" + headerA + "}", "{" + headerB + "}"
	for sum, test := range map[string]struct {
		a, b string
		want int64
	}{
		a + " + " + b:              {"1", "2", 3},
		a + "+4*" + b:              {"10", "20", 90},
		a + " + " + b + " * 0.25":  {"1", "5", 3},
		"0.1*" + a + " + 0.2*" + b: {"1", "1", 1},
		"0.1 * " + a:               {"30", "", 3},
		"0*" + a + " + " + b:       {"5", "6", 6},
		a + " + 2.5":               {"1", "", 4},
		"3 + " + a:                 {"0.5", "", 4},
		a + b:                      {"", "7", 7},
		a + b + "*2 + " + a:        {"4", "", 12},
		a + " + 1":                 {"4503599627370496", "", store.MaxEvents},
		"4503599627370496*" + a:    {"4503599627370496", "", store.MaxEvents},
		// Where something is missing the fallback is 100, and what is known counts if it is more.
		a + " + 4*" + b:      {"10", "many", 100},
		a + " + 5*" + b:      {"many", "30", 150},
		"2*" + a + " + " + b: {"-1", "30", 100},
	} {
		z := costZone(t, sum, 100)
		h, logs := keyHandler()
		repl := values{headerA: test.a, headerB: test.b}.replacer()
		if got, first := z.finalCost(repl, h, nil), z.firstCost(repl); got != test.want || first != test.want {
			t.Errorf("%s of %q and %q is %d, and %d at first, want %d, %v", sum, test.a, test.b, got, first, test.want, logs.All())
		}
	}
}

func TestParseSum(t *testing.T) {
	for text, want := range map[string]struct{ sum, rest string }{
		"{a}":                {"{a}", ""},
		"{a} 5":              {"{a}", "5"},
		"{a}{b} 5":           {"{a}{b}", "5"},
		"{a} + 4*{b} 5":      {"{a} + 4*{b}", "5"},
		"{a}+{b}*4 5":        {"{a} + 4*{b}", "5"},
		"4 * {b}  +  1.50 7": {"4*{b} + 1.50", "7"},
		"{a} + 4":            {"{a} + 4", ""},
		"{a b} x y":          {"{a b}", "x y"},
	} {
		sum, rest, err := ParseSum(text)
		if err != nil || sum.String() != want.sum || rest != want.rest {
			t.Errorf("%s: %q, rest %q, %v, want %v", text, sum, rest, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                                     `must be a sum`,
		"{a} +":                                `must be a sum`,
		"{a} + + {b}":                          `must be a sum`,
		"{a}*{b}":                              `must be a sum`,
		"2*3*{b}":                              `must be a sum`,
		"-1*{a}":                               `must be a sum`,
		"{a} * x":                              `must be a sum`,
		"1.2.3*{a}":                            `has "1.2.3", which must be a number`,
		"5000000000000000*{a}":                 `has "5000000000000000", which must be a number`,
		"{}":                                   `has a placeholder without a name`,
		"{a}00":                                `has "00" behind`,
		"4{a}":                                 `has "{a}" behind`,
		"1.5e3*{a}":                            `has "e3*{a}" behind`,
		"{a} + {b":                             `has a placeholder without a name`,
		strings.Repeat("1", 65) + "*{a}":       `has a number of more than 64 digits`,
		"{http.rate_limit.response.sizes}":     `has {http.rate_limit.response.sizes}, which is unknown`,
		"1 + {http.rate_limit.response.json.}": `has {http.rate_limit.response.json.}, which is unknown`,
		"{http.rate_limit.response.json.@reverse.0.n}": `has {http.rate_limit.response.json.@reverse.0.n}, whose path has '@'`,
		"{http.rate_limit.response.json.a..b}":         `has {http.rate_limit.response.json.a..b}, whose path has an empty part`,
	} {
		if _, _, err := ParseSum(text); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// TestCostWarnsOnceAMinute of each cause.
func TestCostWarnsOnceAMinute(t *testing.T) {
	z := costZone(t, "{"+headerA+"}", 1)
	h, logs := keyHandler()
	start := h.Now()
	for range 5 {
		z.finalCost(values{headerA: "much"}.replacer(), h, nil)
		z.finalCost(values{headerA: "-1"}.replacer(), h, nil)
	}
	h.Now = func() time.Time { return start.Add(telemetry.ReportInterval) }
	z.finalCost(values{headerA: "more"}.replacer(), h, nil)
	if logs.Len() != 3 {
		t.Fatalf("%d warnings, want 3", logs.Len())
	}
	fields := logs.All()[2].ContextMap()
	if fields["zone"] != "test" || fields["cause"] != "not_found" || fields["cost"] != "more" || fields["charged"] != int64(1) || fields["times"] != int64(5) {
		t.Errorf("the last warning has %v", fields)
	}
}

// TestWarningsOfLongTextsAreShort, whatever a client sends as its cost or plan.
func TestWarningsOfLongTextsAreShort(t *testing.T) {
	z := costZone(t, "{"+headerA+"}", 1)
	z.Events = Quantity{Text: "{" + headerA + "}", Number: 10}
	h, logs := keyHandler()
	repl := values{headerA: "-" + strings.Repeat("9", 19_000)}.replacer()
	z.eventsFor(repl, h)
	z.finalCost(repl, h, nil)
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
		z := &Zone{Key: []string{"static"}, Events: Quantity{Number: 10}, Cost: Quantity{Number: want}}
		z.prepare()
		h, logs := keyHandler()
		req, err := requestOf(z, httptest.NewRequest("GET", "/", nil), values{}.replacer(), h)
		if final := z.finalCost(values{}.replacer(), h, nil); err != nil || req.Cost != want || final != want {
			t.Errorf("cost is %d, then %d, %v, want %d", req.Cost, final, err, want)
		}
		if logs.Len() != 0 {
			t.Errorf("cost %d logs %v", want, logs.All())
		}
	}
}
