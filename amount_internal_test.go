package shardlimit

import (
	"encoding/json"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

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
		var got Amount
		if err := json.Unmarshal([]byte(text), &got); err != nil || got != want.amount {
			t.Errorf("%s is %q, %v, want %q", text, got, err, want.amount)
		}
		if again, err := json.Marshal(got); err != nil || string(again) != want.again {
			t.Errorf("%s becomes %s, %v, want %s", text, again, err, want.again)
		}
	}
	for _, text := range []string{`true`, `null`, `[]`, `{}`} {
		var got Amount
		if err := json.Unmarshal([]byte(text), &got); err == nil {
			t.Errorf("%s is %q, want an error", text, got)
		}
	}
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
			z := &Zone{Name: "test", Events: "{" + headerA + "}", EventsFallback: 10, events: 10}
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
