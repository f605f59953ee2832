package shardlimit

import (
	"encoding/json"
	"slices"
	"testing"
)

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
	for _, text := range []string{`304`, `"304"`, `{}`, `[true]`, `[null]`, `[[304]]`} {
		var got StatusList
		if err := json.Unmarshal([]byte(text), &got); err == nil {
			t.Errorf("%s is %q, want an error", text, got)
		}
	}
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
			if !set.contains(code) {
				t.Errorf("%q lacks %d", test.list, code)
			}
		}
		for _, code := range append(test.out, -1, 0, 101, 600, 999, 1<<40) {
			if set.contains(code) {
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
	for _, list := range []StatusList{nil, {"none"}, {"401", "403"}, {"4xx", "599"}, {"2xx", "3xx", "4xx", "5xx"}} {
		set, err := list.compile()
		if err != nil {
			t.Fatal(err)
		}
		others := set.complement()
		for code := range 1000 {
			if set.contains(code) == others.contains(code) {
				t.Errorf("%q: %d is in the set and in its complement, or in none", list, code)
			}
		}
		for _, code := range []int{-1, 1000, 1024, 1 << 40} {
			if others.contains(code) {
				t.Errorf("the complement of %q contains %d", list, code)
			}
		}
		if others.complement() != set {
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
			if !free.contains(code) {
				t.Errorf("%s: %d is charged", name, code)
			}
		}
		for _, code := range test.charged {
			if free.contains(code) {
				t.Errorf("%s: %d is free", name, code)
			}
		}
	}
}
