package option_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// sample has an option of each kind.
type sample struct {
	Color  string          `json:"color,omitempty"`
	Texts  []string        `json:"texts,omitempty"`
	Count  int             `json:"count,omitempty"`
	Wait   caddy.Duration  `json:"wait,omitempty"`
	Switch bool            `json:"switch,omitempty"`
	Share  float64         `json:"share,omitempty"`
	Parts  []*part         `json:"parts,omitempty"`
	ByName map[string]part `json:"by_name,omitempty"`
	inner  string
}

type part struct {
	Size int `json:"size,omitempty"`
}

func (s *sample) UnmarshalJSON(text []byte) error {
	type plain sample
	return option.Decode(text, (*plain)(s))
}

func (s *sample) rows() []option.Row {
	inner := option.Row{Name: "inner", Args: "<text>", Field: option.Text(&s.inner), Section: "Two", Default: "none", Doc: "Inside."}
	return []option.Row{
		{Name: "color", Args: "red|green|blue", Field: option.Choice(&s.Color), Section: "One", Default: "`red`", Doc: "The color."},
		{Name: "texts", Args: "<text>...", Field: option.List(&s.Texts), Repeats: true, Section: "One", Doc: "Texts."},
		{
			Name: "block", Block: []option.Row{inner, {Name: "switch", Field: option.Flag(&s.Switch), Section: "One"}},
			Field: option.Field{Set: func(p *option.Parser) error {
				return option.NewParser(p.Dispenser).Table(&option.Table{Rows: []option.Row{inner}, Elsewhere: []string{"color"}, Place: "the block outside"})
			}},
			Section: "One", Default: "off", Doc: "A block.",
		},
		inner,
		{Name: "count", Args: "<n>", Field: option.Positive(&s.Count), Section: "Two", Default: "10", Doc: "How many.", Check: func() error {
			if s.Count > 100 {
				return option.Errorf("count", "%d: it must be at most 100", s.Count)
			}
			return nil
		}},
		{Name: "wait", Args: "<duration>", Field: option.Duration(&s.Wait), Section: "Two"},
		{Name: "share", Args: "<percent>", Field: option.Number(&s.Share, " of percent"), Section: "Two"},
	}
}

func (s *sample) parse(text string) error {
	d := caddyfile.NewTestDispenser("sample {\n" + text + "\n}")
	d.Next()
	p := option.NewParser(d)
	also := option.Row{Name: "old", Field: option.Flag(new(bool))}
	if err := p.Table(&option.Table{Rows: s.rows(), Also: []option.Row{also}}); err != nil {
		return err
	}
	if err := option.Check(s.rows()); err != nil {
		return p.At(err)
	}
	return nil
}

func TestRowsParse(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "",
		"color red\ncount 10":                  "",
		"color blue":                           "color blue",
		"texts a\ntexts b \"c d\"":             "texts a b \"c d\"",
		"old\nwait 90s\nshare 12.5\ncount 010": "wait 1m30s, share 12.5",
		"block {\n inner x\n}\ncount 11":       "inner x, count 11",
	} {
		var s sample
		if err := s.parse(text); err != nil {
			t.Errorf("%q: %v", text, err)
		}
		if got := option.Definition(s.rows()); got != want {
			t.Errorf("%q is defined as %q, want %q", text, got, want)
		}
	}
}

func TestRowsRefuse(t *testing.T) {
	for text, want := range map[string]string{
		"color pink":              `color "pink": it must be red, green or blue, at Testfile:2`,
		"color red\ncolor red":    `color is given twice, first in line 2: remove one, at Testfile:3`,
		"count 10\n\ncount 5":     `count is given twice, first in line 2: remove one, at Testfile:4`,
		"texts a\ncount 101":      `count 101: it must be at most 100, at Testfile:3`,
		"cuont 5":                 `unknown option cuont: it must be one of color, texts, block, inner, count, wait, share, did you mean count?, at Testfile:2`,
		"dry_run":                 `unknown option dry_run: write enforce 0, at Testfile:2`,
		"color red {\n}":          `the option before { takes no block: remove it, at Testfile:2`,
		"count 5 6":               `count takes one argument, not 2, at Testfile:2`,
		"block {\n\tcolor red\n}": `color belongs in the block outside, at Testfile:3`,
		"wait 0":                  `wait "0": it must be a time span above zero, such as 250ms, 10s, 1m, 1h or 1d, at Testfile:2`,
		"share much":              `share "much": it must be a number of percent, at Testfile:2`,
	} {
		if err := new(sample).parse(text); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func TestRowsAsDocumentation(t *testing.T) {
	rows := new(sample).rows()
	const grammar = `color red|green|blue
texts <text>...
block {
	inner  <text>
	switch
}
inner <text>
count <n>
wait  <duration>
share <percent>`
	if got := strings.Join(option.Grammar(rows), "\n"); got != grammar {
		t.Errorf("the grammar is\n%s\nwant\n%s", got, grammar)
	}
	for section, want := range map[string]string{
		"One":   "| `color` | The color. | `red` |\n| `texts` | Texts. | |\n| `block`, `switch` | A block. | off |\n",
		"Two":   "| `inner` | Inside. | none |\n| `count`, `wait`, `share` | How many. | 10 |\n",
		"Three": "",
	} {
		if want != "" {
			want = "| option | meaning | default |\n|---|---|---|\n" + want
		}
		if got := option.Reference(rows, section); got != want {
			t.Errorf("section %s is\n%s\nwant\n%s", section, got, want)
		}
	}
}

func TestDecode(t *testing.T) {
	for text, want := range map[string]string{
		`{"color": "red", "count": 5}`:     ``,
		`{"Color": "red"}`:                 ``,
		`{"wait": 5000, "texts": null}`:    ``,
		`{"count": 5.0, "wait": 5e3}`:      ``,
		`{"color": "1.0\"", "count": 5E0}`: ``,
		`{"count": 1e300}`:                 `count: it must be a whole number`,
		`{"colour": "red"}`:                `colour: unknown field, did you mean color?`,
		`{"zzz": 1}`:                       `zzz: unknown field: it must be one of color, texts, count, wait, switch, share, parts, by_name`,
		`{"dry_run": true}`:                `dry_run: unknown field: write "enforce": 0`,
		`{"color": 5}`:                     `color: it must be a text, in quotes`,
		`{"texts": "a"}`:                   `texts: it must be a list, in [ ]`,
		`{"texts": ["a", 5]}`:              `texts[1]: it must be a text, in quotes`,
		`{"count": "5"}`:                   `count: it must be a whole number`,
		`{"count": 5.5}`:                   `count: it must be a whole number`,
		`{"wait": 5}`:                      `wait: 5 nanoseconds: write a text with the unit, such as "5s"`,
		`{"parts": [{"color": "red"}]}`:    `parts[0].color: unknown field: it belongs beside parts, outside of it`,
		`{"size": 1}`:                      `size: unknown field: it belongs in parts`,
		`{"wait": "5"}`:                    `wait: it must be a time span, such as "250ms", "10s" or "1d", or a number of nanoseconds`,
		`{"switch": "on"}`:                 `switch: it must be true or false`,
		`{"share": true}`:                  `share: it must be a number`,
		`{"parts": {}}`:                    `parts: it must be a list, in [ ]`,
		`{"parts": [null, 5]}`:             `parts[1]: it must be an object, in { }`,
		`{"parts": [{}, {"sise": 1}]}`:     `parts[1].sise: unknown field, did you mean size?`,
		`{"by_name": {"a": {"size": ""}}}`: `by_name.a.size: it must be a whole number`,
		`[]`:                               `it must be an object, in { }`,
	} {
		err := new(sample).UnmarshalJSON([]byte(text))
		if err == nil {
			err = errors.New("")
		}
		if err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestInJSON(t *testing.T) {
	bad := option.Errorf("reserve", "20 has no matchers").Field("reserves[1].match").JSONf("is missing")
	for want, test := range map[string]struct {
		err  error
		line string
	}{
		"reserves[1].match is missing":                       {bad, "reserve 20 has no matchers"},
		"zones[2].reserves[1].match is missing, in zone api": {option.In("zone api", "zones[2]", bad), "zone api: reserve 20 has no matchers"},
		"zones[2].reserves[1].match is null, in zone api":    {option.In("zone api", "zones[2]", option.In("reserve 20", "reserves[1]", option.Errorf("match", "is null"))), "zone api: reserve 20: match is null"},
		"tls.cert has no key":                                {option.In("tls", "tls", option.Errorf("cert", "has no key")), "tls: cert has no key"},
		"shards[0].tls.cert has no key, in shard a":          {option.In("shard a", "shards[0]", option.In("tls", "tls", option.Errorf("cert", "has no key"))), "shard a: tls: cert has no key"},
		"shards[0]: address x is given twice, in shard a":    {option.In("shard a", "shards[0]", errors.New("address x is given twice")), "shard a: address x is given twice"},
		"what is in no option stays as it is":                {errors.New("what is in no option stays as it is"), "what is in no option stays as it is"},
	} {
		if got := option.InJSON(test.err); got.Error() != want || test.err.Error() != test.line {
			t.Errorf("%q in JSON is %q, want %q and %q", test.err, got, test.line, want)
		}
	}
	if err := option.InJSON(nil); err != nil {
		t.Error("no error is", err)
	}
}
