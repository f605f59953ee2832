package shardlimit

import (
	"encoding/json"
	"slices"
	"testing"

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
		`["all"]`:             {"all"},
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
	for _, text := range []string{"", "0", "-304", "100", "199", "600", "304.5", "1xx", "6xx", "0xx", "xxx", "4x", "4xxx", "4XX", "teapot", "none", "all", "not"} {
		if _, err := (StatusList{text}).compile(); err == nil {
			t.Errorf("%q is taken for a status", text)
		}
	}
	for _, list := range []StatusList{{"all", "304"}, {"304", "all"}, {"all", "all"}} {
		if _, err := list.compile(); err == nil {
			t.Errorf("%q is taken for statuses", list)
		}
	}
}

func TestStatusSetComplement(t *testing.T) {
	for _, list := range []StatusList{nil, {"304"}, {"401", "403"}, {"4xx", "599"}, {"grpc:0", "grpc:16", "5xx"}, {"2xx", "3xx", "4xx", "5xx"}} {
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
		"not":          {&Zone{CountStatusNot: StatusList{"5xx"}}, []int{500, 503}, []int{200, 304, 404}},
		"all":          {&Zone{CountStatus: StatusList{"all"}}, nil, []int{101, 200, 304, 404, 500}},
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
		if c := z.compile(); c.Batch != want {
			t.Errorf("batch %q is %d, want %d", batch, c.Batch, want)
		}
	}
}
