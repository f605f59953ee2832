package shardlimit

import (
	"errors"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

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
		if got := share(test.n, test.percent); got != test.want {
			t.Errorf("%d percent of %d is %d, want %d", test.percent, test.n, got, test.want)
		}
	}
	for range 1000 {
		n, percent := rand.Int64N(store.MaxEvents)+1, rand.Int64N(101)
		want := new(big.Int).Mul(big.NewInt(n), big.NewInt(percent))
		want.Add(want, big.NewInt(99)).Div(want, big.NewInt(100))
		if got := share(n, percent); got != want.Int64() {
			t.Errorf("%d percent of %d is %d, want %s", percent, n, got, want)
		}
	}
}

// brokenMatcher is a matcher that fails.
type brokenMatcher struct{}

var errBroken = errors.New("broken")

func (brokenMatcher) MatchWithError(*http.Request) (bool, error) { return false, errBroken }

// reserveFor is a reserve for requests of these methods, one matcher for each.
func reserveFor(percent int64, methods ...string) compiledReserve {
	r := compiledReserve{Percent: percent}
	for _, method := range methods {
		r.Matchers = append(r.Matchers, caddyhttp.MatcherSet{caddyhttp.MatchMethod{method}})
	}
	return r
}

func TestReservedFromTheLessImportant(t *testing.T) {
	z := &compiledZone{Reserves: []compiledReserve{reserveFor(10, "DELETE"), reserveFor(30, "POST", "PUT"), reserveFor(5, "GET")}}
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
	if got, err := new(compiledZone).reservedFrom(httptest.NewRequest("GET", "/", nil)); err != nil || got != 0 {
		t.Errorf("without reserves a request must not use %d percent, %v", got, err)
	}
}

func TestReservedFromAMatcherThatFails(t *testing.T) {
	broken := compiledReserve{Percent: 10, Matchers: caddyhttp.MatcherSets{{brokenMatcher{}}}}
	z := &compiledZone{Reserves: []compiledReserve{reserveFor(20, "POST"), broken}}
	if _, err := z.reservedFrom(httptest.NewRequest("GET", "/", nil)); !errors.Is(err, errBroken) {
		t.Errorf("error is %v, want the matcher's", err)
	}
	if got, err := z.reservedFrom(httptest.NewRequest("POST", "/", nil)); err != nil || got != 0 {
		t.Errorf("a request that matches before it is told %d, %v", got, err)
	}
	h, _ := keyHandler()
	z.Key, z.Events = []string{"static"}, Quantity{Number: 10}
	z.prepare()
	if _, err := z.request(httptest.NewRequest("GET", "/", nil), values{}.replacer(), h); !errors.Is(err, errBroken) {
		t.Errorf("request returns %v, want the matcher's error", err)
	}
}

func TestReservedOfARequest(t *testing.T) {
	for name, test := range map[string]struct {
		zone     *compiledZone
		quota    string
		reserved int64
	}{
		"events":              {zone: &compiledZone{Events: Quantity{Number: 10}}, reserved: 3},
		"events of the plan":  {zone: &compiledZone{Events: Quantity{Text: "{" + headerA + "}", Number: 10}}, quota: "1000", reserved: 250},
		"fallback":            {zone: &compiledZone{Events: Quantity{Text: "{" + headerA + "}", Number: 10}}, reserved: 3},
		"burst":               {zone: &compiledZone{Events: Quantity{Number: 10}, Algorithm: "gcra", Burst: 40}, reserved: 10},
		"events without one":  {zone: &compiledZone{Events: Quantity{Number: 10}, Algorithm: "gcra"}, reserved: 3},
		"concurrent requests": {zone: &compiledZone{Events: Quantity{Number: 8}, Algorithm: "concurrency"}, reserved: 2},
	} {
		t.Run(name, func(t *testing.T) {
			z := test.zone
			z.Key, z.Reserves = []string{"static"}, []compiledReserve{reserveFor(25, "POST")}
			z.prepare()
			h, _ := keyHandler()
			repl := values{headerA: test.quota}.replacer()
			for method, want := range map[string]int64{"GET": test.reserved, "POST": 0} {
				req, err := z.request(httptest.NewRequest(method, "/", nil), repl, h)
				if err != nil || req.Reserved != want {
					t.Errorf("%s: %d reserved, %v, want %d", method, req.Reserved, err, want)
				}
			}
		})
	}
}
