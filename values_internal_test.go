package shardlimit

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// inJSON checks what a text decodes to, and what that encodes to.
func inJSON[T comparable](t *testing.T, text string, want T, again string) {
	t.Helper()
	var got T
	if err := json.Unmarshal([]byte(text), &got); err != nil || got != want {
		t.Errorf("%s is %q, %v, want %q", text, any(got), err, any(want))
	}
	if b, err := json.Marshal(got); err != nil || string(b) != again {
		t.Errorf("%s becomes %s, %v, want %s", text, b, err, again)
	}
}

func refusedInJSON[T any](t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		var got T
		if err := json.Unmarshal([]byte(text), &got); err == nil {
			t.Errorf("%s is %q, want an error", text, any(got))
		}
	}
}

func TestAmountInJSON(t *testing.T) {
	for text, want := range map[string]struct {
		amount Amount
		again  string
	}{
		`10`:                  {"10", `10`},
		`"10"`:                {"10", `10`},
		`-1`:                  {"-1", `-1`},
		`9007199254740993`:    {"9007199254740993", `9007199254740993`},
		`"{http.vars.quota}"`: {"{http.vars.quota}", `"{http.vars.quota}"`},
		`""`:                  {"", `""`},
		`1.5`:                 {"1.5", `"1.5"`},
		`"many"`:              {"many", `"many"`},
	} {
		inJSON(t, text, want.amount, want.again)
	}
	refusedInJSON[Amount](t, `true`, `null`, `[]`, `{}`)
}

func TestAmountIsANumberOrDynamic(t *testing.T) {
	for amount, want := range map[Amount]struct {
		number  int64
		ok      bool
		dynamic bool
	}{
		"10":                  {10, true, false},
		"-5":                  {-5, true, false},
		"":                    {0, false, false},
		"many":                {0, false, false},
		"1.5":                 {0, false, false},
		"9223372036854775808": {0, false, false},
		"{http.vars.quota}":   {0, false, true},
		"1{http.vars.suffix}": {0, false, true},
	} {
		n, err := amount.number()
		if n != want.number || (err == nil) != want.ok {
			t.Errorf("%q is the number %d, %v, want %d, %v", amount, n, err, want.number, want.ok)
		}
		if got := amount.isDynamic(); got != want.dynamic {
			t.Errorf("%q is dynamic: %v, want %v", amount, got, want.dynamic)
		}
	}
}

// TestCostWithoutPlaceholder compiles to a number.
func TestCostWithoutPlaceholder(t *testing.T) {
	for cost, want := range map[Amount]int64{"": 1, "1": 1, "0": 0, "7": 7, "007": 7} {
		z := &Zone{Key: Texts{"static"}, Events: "10", Cost: cost}
		if got := z.compile().Cost; got != (limiter.Quantity{Number: want}) {
			t.Errorf("cost %q is %v, want %d", cost, got, want)
		}
	}
}

func TestStatusListFromJSON(t *testing.T) {
	for text, want := range map[string]StatusList{
		`[304]`:               {"304"},
		`["304"]`:             {"304"},
		`[304, "404", "5xx"]`: {"304", "404", "5xx"},
		`["none"]`:            {"none"},
		`[]`:                  {},
		`null`:                {},
	} {
		var got StatusList
		if err := json.Unmarshal([]byte(text), &got); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s is %q, %v, want %q", text, got, err, want)
		}
	}
	refusedInJSON[StatusList](t, `304`, `"304"`, `{}`, `[true]`, `[null]`, `[[304]]`)
}

func TestStatusListCompiles(t *testing.T) {
	for _, test := range []struct {
		list    StatusList
		in, out []int
	}{
		{nil, nil, []int{200, 304, 500}},
		{StatusList{"none"}, nil, []int{200, 304, 500}},
		{StatusList{"304"}, []int{304}, []int{200, 303, 305, 404}},
		{StatusList{"200", "599"}, []int{200, 599}, []int{201, 598}},
		{StatusList{"4xx"}, []int{400, 450, 499}, []int{399, 500}},
		{StatusList{"2xx", "304", "5xx"}, []int{200, 299, 304, 500, 599}, []int{300, 404}},
		{StatusList{"304", "304"}, []int{304}, []int{200}},
	} {
		set, err := test.list.compile()
		if err != nil {
			t.Errorf("%q: %v", test.list, err)
			continue
		}
		for _, code := range test.in {
			if !set.Contains(code) {
				t.Errorf("%q lacks %d", test.list, code)
			}
		}
		for _, code := range append(test.out, -1, 0, 101, 600, 999, 1<<40) {
			if set.Contains(code) {
				t.Errorf("%q contains %d", test.list, code)
			}
		}
	}
}

func TestStatusListRefuses(t *testing.T) {
	for _, text := range []string{"", "0", "-304", "100", "199", "600", "304.5", "1xx", "6xx", "0xx", "xxx", "4x", "4xxx", "4XX", "teapot"} {
		if _, err := (StatusList{text}).compile(); err == nil {
			t.Errorf("%q is taken for a status", text)
		}
	}
	for _, list := range []StatusList{{"none", "304"}, {"304", "none"}, {"none", "none"}} {
		if _, err := list.compile(); err == nil {
			t.Errorf("%q is taken for statuses", list)
		}
	}
}

func TestStatusSetComplement(t *testing.T) {
	for _, list := range []StatusList{nil, {"none"}, {"401", "403"}, {"4xx", "599"}, {"grpc:0", "grpc:16", "5xx"}, {"2xx", "3xx", "4xx", "5xx"}} {
		set, err := list.compile()
		if err != nil {
			t.Fatal(err)
		}
		others := set.Complement()
		for code := range limiter.StatusGRPC + 24 {
			if set.Contains(code) == others.Contains(code) {
				t.Errorf("%q: %d is in the set and in its complement, or in none", list, code)
			}
		}
		for _, code := range []int{-1, limiter.StatusGRPC + 24, 1 << 40} {
			if others.Contains(code) {
				t.Errorf("the complement of %q contains %d", list, code)
			}
		}
		if others.Complement() != set {
			t.Errorf("the complement of the complement of %q is another set", list)
		}
	}
}

func TestStatusesThatAreFree(t *testing.T) {
	for name, test := range map[string]struct {
		zone          *Zone
		free, charged []int
	}{
		"by default":   {&Zone{}, []int{304}, []int{200, 303, 404, 500}},
		"free_status":  {&Zone{FreeStatus: StatusList{"5xx"}}, []int{500, 503}, []int{200, 304, 404}},
		"none":         {&Zone{FreeStatus: StatusList{"none"}}, nil, []int{200, 304, 404, 500}},
		"count_status": {&Zone{CountStatus: StatusList{"401", "403"}}, []int{101, 200, 304, 402, 500}, []int{401, 403}},
	} {
		z := test.zone
		z.Key, z.Events = Texts{"static"}, "10"
		free := z.compile().Free
		for _, code := range test.free {
			if !free.Contains(code) {
				t.Errorf("%s: %d is charged", name, code)
			}
		}
		for _, code := range test.charged {
			if free.Contains(code) {
				t.Errorf("%s: %d is free", name, code)
			}
		}
	}
}

func TestBatchInJSON(t *testing.T) {
	for text, want := range map[string]struct {
		batch Batch
		again string
	}{
		`10`:     {"10", `10`},
		`"10"`:   {"10", `10`},
		`"auto"`: {"auto", `"auto"`},
		`"off"`:  {"off", `"off"`},
		`""`:     {"", `""`},
		`1.5`:    {"1.5", `"1.5"`},
	} {
		inJSON(t, text, want.batch, want.again)
	}
	refusedInJSON[Batch](t, `true`, `null`, `[]`, `{}`)
}

func TestBatchOfAZone(t *testing.T) {
	for batch, want := range map[Batch]int64{
		"": 0, "off": 0, "auto": store.BatchAuto, "1": 1, "0010": 10, "9007199254740991": store.MaxInteger,
	} {
		z := &Zone{Name: "test", Key: Texts{"k"}, Events: "10", Batch: batch}
		if c := z.compile(); c.Batch != want || c.BatchShare != defaultBatchShare {
			t.Errorf("batch %q is %d with a share of %d percent, want %d and %d", batch, c.Batch, c.BatchShare, want, defaultBatchShare)
		}
	}
	z := &Zone{Name: "test", Key: Texts{"k"}, Events: "10", Batch: "auto", BatchShare: 25}
	if c := z.compile(); c.BatchShare != 25 {
		t.Errorf("batch_share 25 is %d", c.BatchShare)
	}
}

func TestDefinition(t *testing.T) {
	const second, minute = caddy.Duration(time.Second), caddy.Duration(time.Minute)
	match := caddyhttp.RawMatcherSets{caddy.ModuleMap{"method": []byte(`["GET"]`)}}
	for want, zones := range map[string][]Zone{
		"key k, events 10, window 1m0s": {
			{Key: Texts{"k"}, Events: "10", Window: minute},
			{Key: Texts{"k"}, Events: "0010", Window: minute, Algorithm: "fixed_window", Charge: "after", Cost: "01"},
			{Key: Texts{"k"}, Events: "10", Window: minute, FreeStatus: StatusList{"304"}, MaxWaitQueue: limiter.DefaultMaxWaitQueue, Batch: "off"},
			{Key: Texts{"k"}, Events: "10", Window: minute, Name: "n", MatcherSetsRaw: match},
		},
		`key a "b c", events {x} 5, window 1s, algorithm sliding_window`: {
			{Key: Texts{"a", "b c"}, Events: "{x}", EventsFallback: 5, Window: second, Algorithm: "sliding_window"},
		},
		"key k, events 10, window 1s, align, cost {x}, charge before, free_status 304 5xx": {
			{Key: Texts{"k"}, Events: "10", Window: second, Align: true, Cost: "{x}", Charge: "before", FreeStatus: StatusList{"5xx", "304", "5xx"}},
		},
		"key k, events 10, window day": {
			{Key: Texts{"k"}, Events: "10", Calendar: "day"},
			{Key: Texts{"k"}, Events: "10", Calendar: "day", TimeZone: "UTC"},
		},
		"key k, events 10, window week, time_zone Asia/Tokyo": {
			{Key: Texts{"k"}, Events: "10", Calendar: "week", TimeZone: "Asia/Tokyo", WeekStarts: "monday"},
		},
		"key k, events 10, window week, week_starts sunday": {
			{Key: Texts{"k"}, Events: "10", Calendar: "week", WeekStarts: "sunday"},
		},
		"key k, events 10, window 1s, charge before, batch 5": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "5"},
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "05"},
		},
		"key k, events 10, window 1s, charge before, batch auto": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto"},
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto", BatchShare: defaultBatchShare},
		},
		"key k, events 10, window 1s, charge before, batch auto, batch_share 20": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto", BatchShare: 20},
		},
		"key k, events 10, window 1s, cost 0, free_status none": {
			{Key: Texts{"k"}, Events: "10", Window: second, Cost: "0", FreeStatus: StatusList{"none"}},
		},
		"key k, events 10, window 1s, algorithm gcra": {
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra"},
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra", Burst: "10"},
		},
		"key k, events 10, window 1s, algorithm gcra, burst 11": {
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra", Burst: "11"},
		},
		"key k, events {x} 10, window 1s, algorithm gcra, burst 10": {
			{Key: Texts{"k"}, Events: "{x}", EventsFallback: 10, Window: second, Algorithm: "gcra", Burst: "10"},
		},
		"key k, events 10, algorithm concurrency": {
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency"},
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency", Charge: "before", Window: caddy.Duration(defaultLease)},
		},
		"key k, events 10, window 1s, algorithm concurrency": {
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency", Window: second},
		},
		"key k, events 10, window 1s, count_status 401 403, max_wait 1s, max_wait_queue 5, penalty 1m0s": {
			{Key: Texts{"k"}, Events: "10", Window: second, CountStatus: StatusList{"403", "401"}, MaxWait: second, MaxWaitQueue: 5, Penalty: minute},
		},
		"key k, events 10, window 1s, reserve 10, reserve 5": {
			{Key: Texts{"k"}, Events: "10", Window: second, Reserves: []*Reserve{{Percent: 10}, {Percent: 5}}},
			{Key: Texts{"k"}, Events: "10", Window: second, Reserves: []*Reserve{{Percent: 10, MatcherSetsRaw: match}, {Percent: 5}}},
		},
		"key k, events 10, window 1s, ipv4_prefix 24, ipv6_prefix 64, on_error deny": {
			{Key: Texts{"k"}, Events: "10", Window: second, IPv4Prefix: 24, IPv6Prefix: 64, OnError: "deny"},
		},
	} {
		for i := range zones {
			if got := zones[i].definition(); got != want {
				t.Errorf("definition is\n%s, want\n%s", got, want)
			}
		}
	}
}
