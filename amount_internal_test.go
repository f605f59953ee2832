package shardlimit

import (
	"encoding/json"
	"testing"
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

// TestCostWithoutPlaceholder compiles to a number.
func TestCostWithoutPlaceholder(t *testing.T) {
	for cost, want := range map[Amount]int64{"": 1, "1": 1, "0": 0, "7": 7, "007": 7} {
		z := &Zone{Key: Texts{"static"}, Events: "10", Cost: cost}
		if got := z.compile().Cost; got != (Quantity{Number: want}) {
			t.Errorf("cost %q is %v, want %d", cost, got, want)
		}
	}
}
