package limiter

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// TestShorthands are those of the Caddyfile.
func TestShorthands(t *testing.T) {
	for _, short := range []string{
		"{client_ip}", "{remote_host}", "{remote}", "{host}", "{method}", "{uri}", "{path}",
		"{header.X-Api-Key}", "{cookie.session}", "{query.user}", "{labels.1}", "{vars.tenant}", "a {header.X}|{client_ip}", "{custom.name}",
	} {
		segment := caddyfile.Segment{{Text: short}}
		httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&segment)
		if got := clientkey.Shorten(segment[0].Text); got != short {
			t.Errorf("%s is %s in a config, which is shown as %s", short, segment[0].Text, got)
		}
	}
}

// TestClientOf explains client keys, and finds the clients as they are shown.
func TestClientOf(t *testing.T) {
	const long = "a very long value "
	z := keyZone("{http.request.header.X-Key}", "{a}|{b}|{a}", "{c}")
	for _, test := range []struct {
		v                      values
		template, values, note string
	}{
		{values{"http.request.header.X-Key": "alice"}, "{header.X-Key}", `["alice"]`, ""},
		{values{"http.request.header.X-Key": "a b:3"}, "{header.X-Key}", `["a b:3"]`, ""},
		{values{"a": "left", "b": "right:5"}, "{a}|{b}|{a}", `["left" "right:5"]`, ""},
		{values{"b": "right"}, "{a}|{b}|{a}", `["" "right"]`, ""},
		{values{"c": "3"}, "{c}", `["3"]`, ""},
		{values{ipVar: "192.0.2.1"}, "{client_ip}", `["192.0.2.1"]`, ""},
		{values{"c": strings.Repeat(long, 10)}, "{c}", "", noteLong},
		{values{"a": strings.Repeat(long, 10), "b": "right"}, "{a}|{b}|{a}", "", noteLong},
	} {
		key := keyFor(z, test.v)
		c := z.ClientOf(key)
		if c.ClientKey != key || c.Template != test.template || c.Note != test.note || test.note == "" && fmt.Sprintf("%q", c.Values) != test.values {
			t.Errorf("%v is shown as %+v", test.v, c)
		}
		for how, values := range map[string][]string{
			"as shown": append([]string{c.Template}, c.Values...), "by its values": c.Values,
		} {
			buckets, err := z.BucketsOf(values, nil)
			if !slices.ContainsFunc(buckets, func(b Bucket) bool { return b.ClientKey == key }) {
				t.Errorf("%v %s: found are %v, %v", test.v, how, buckets, err)
			}
			if how == "as shown" && len(buckets) != 1 {
				t.Errorf("%v %s: found are %v, want one", test.v, how, buckets)
			}
		}
		for _, text := range []string{key, c.Template + " " + strings.Join(c.Values, " ")} {
			// A value that is empty cannot be typed.
			if buckets := z.Find(text); (len(buckets) == 0 || buckets[0].Key != key) && !slices.Contains(c.Values, "") {
				t.Errorf("%q finds %v, want %q", text, buckets, key)
			}
		}
	}
}

// TestUnknownClientKeys are shown as they are, with what they are.
func TestUnknownClientKeys(t *testing.T) {
	z := keyZone("{a}{b}", "everybody")
	tag := z.templates[0].tag
	for key, note := range map[string]string{
		stores.OverflowKey: noteOverflow, stores.UnknownKey: noteUnknown, "$digest": noteSecret, "#digest": noteBinary,
		"": noteNoText, "xyz:alice": noteNoText, tag: noteNoText, tag + ":ab": noteNoText, tag + ":ab:3": noteNoText, tag + ":ab:x": noteNoText,
		z.templates[1].tag + ":x": noteNoText,
	} {
		c := z.ClientOf(key)
		if c.ClientKey != key || c.Template != "" || c.Values != nil || c.Note != note {
			t.Errorf("%s is shown as %+v, want %s", key, c, note)
		}
		if _, err := z.BucketsOf(nil, []string{key}); c.Unknown != (err != nil) {
			t.Errorf("%s is shown as %+v, and looked up with error %v", key, c, err)
		}
	}
	if c := z.ClientOf(keyFor(keyZone("everybody"), nil)); c.Template != "everybody" || c.Values != nil || c.Note != "" {
		t.Errorf("the only client is shown as %+v", c)
	}
}

// TestFind takes what operators type.
func TestFind(t *testing.T) {
	z := keyZone("{http.request.header.X-Key}", "{a}|{b}")
	z.IPv6Prefix = 64
	for text, want := range map[string]string{
		"alice":                          "{header.X-Key} [alice]",
		"left right":                     "{header.X-Key} [left right], {a}|{b} [left right]",
		"{header.X-Key} left right":      "{header.X-Key} [left right]",
		"{http.request.header.X-Key} me": "{header.X-Key} [me]",
		"{a}|{b} left right":             "{a}|{b} [left right]",
		"192.0.2.1":                      "{header.X-Key} [192.0.2.1], {client_ip} [192.0.2.1]",
		"{client_ip} 2001:db8::/64":      "{client_ip} [2001:db8::/64]",
		"2001:db8::/64":                  "{header.X-Key} [2001:db8::/64], {client_ip} [2001:db8::/64]",
		"192.0.2.0/24":                   "{header.X-Key} [192.0.2.0/24]",
		"{header.X-Key}":                 "",
		"{header.X-Key} {header.X-Key}":  "{header.X-Key} [{header.X-Key}]",
		"{header.X-Key} 'Bearer abc='":   "{header.X-Key} ['Bearer abc='], {header.X-Key} [Bearer abc=]",
		`{header.X-Key} 'it'\''s'`:       `{header.X-Key} ['it'\''s'], {header.X-Key} [it's]`,
		"-- {header.X-Key} '--to=x'":     "{header.X-Key} [-- {header.X-Key} '--to=x'], {header.X-Key} [--to=x]",
		"'{a}|{b}' 'x y' z":              "{header.X-Key} ['{a}|{b}' 'x y' z], {a}|{b} [x y z]",
		"it's":                           "{header.X-Key} [it's]",
		stores.OverflowKey:               " [], {header.X-Key} [*overflow]",
		z.templates[1].tag + ":x:0":      "{a}|{b} [ x], {header.X-Key} [" + z.templates[1].tag + ":x:0]",
	} {
		var got []string
		for _, b := range z.Find(text) {
			got = append(got, fmt.Sprint(b.Template, " ", b.Values))
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("%s finds %s, want %s", text, got, want)
		}
	}
	if buckets := keyZone("everybody").Find("everybody"); len(buckets) != 1 || buckets[0].Template != "everybody" {
		t.Errorf("the only client is %v", buckets)
	}
	if buckets := keyZone("{http.vars.client_ip}").Find("alice"); buckets != nil {
		t.Errorf("alice is %v in a zone that counts addresses", buckets)
	}
	if buckets := keyZone("everybody").Find("203.0.113.7"); buckets != nil {
		t.Errorf("the address of a client that is counted by a text finds %+v", buckets)
	}
	if buckets := keyZone("everybody").Find("alice"); buckets != nil {
		t.Errorf("alice is %v in a zone that counts everybody", buckets)
	}
}

// TestValuesNameNoOtherClient, though clients choose them: only an argument of its own is
// a template.
func TestValuesNameNoOtherClient(t *testing.T) {
	z := keyZone("{http.request.header.X-Key}", "{http.vars.client_ip}")
	for _, value := range []string{"{client_ip} 198.51.100.9", "{header.X-Key} victim", "{http.request.header.X-Key} victim"} {
		buckets, err := z.BucketsOf([]string{value}, nil)
		if err != nil || len(buckets) == 0 {
			t.Errorf("%s finds %v, %v", value, buckets, err)
		}
		for _, b := range buckets {
			if !slices.Equal(b.Values, []string{value}) {
				t.Errorf("%s names %s %q", value, b.Template, b.Values)
			}
		}
	}
}

// TestValuesAreNotForgotten: the text of a key without its values names nobody.
func TestValuesAreNotForgotten(t *testing.T) {
	z := keyZone("{http.request.header.X-Key}", "{a}|{b}", "everybody")
	for _, values := range [][]string{{"{header.X-Key}"}, {"{http.request.header.X-Key}"}, {"{header.X-Key}", "a", "b"}, {"{a}|{b}", "x"}} {
		if buckets, err := z.BucketsOf(values, nil); err == nil || !strings.Contains(err.Error(), "write the value of each") {
			t.Errorf("%q: %v, %v", values, buckets, err)
		}
	}
}

// FuzzClientOf requires that values come back from a client key, addresses in their usual form, and
// that the client is found by them.
func FuzzClientOf(f *testing.F) {
	f.Add("a", "b", "c")
	f.Add("", ":1", "1:1")
	f.Add("", "::0", "0")
	f.Add("{a}{b}{c}", "b", "")
	f.Add("a", "\xff", "")
	f.Add("\xc3", "\xa9", "")
	f.Add(strings.Repeat("\xff", 200), "", "")
	z := keyZone("{a}{b}{c}")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if a+b+c == "" {
			return
		}
		key := keyFor(z, values{"a": a, "b": b, "c": c})
		client := z.ClientOf(key)
		spelled := []string{a, b, c}
		for i, name := range []string{"a", "b", "c"} {
			spelled[i] = string(clientkey.Append(nil, spelled[i], clientkey.SpellingOf(name), clientkey.Networks{}))
		}
		if client.Note == "" && !slices.Equal(client.Values, spelled) {
			t.Errorf("%q, %q, %q are shown as %+v", a, b, c, client)
		}
		// The admin API's answers are JSON.
		text, err := json.Marshal(client)
		if err == nil {
			client = Client{}
			err = json.Unmarshal(text, &client)
		}
		if err != nil {
			t.Fatal(err)
		}
		values, keys := append([]string{client.Template}, client.Values...), []string(nil)
		if client.Note == noteBase64 || client.Note == noteParts {
			values, keys = nil, []string{client.ClientKey}
		}
		buckets, err := z.BucketsOf(values, keys)
		if err != nil || len(buckets) != 1 || buckets[0].Key != key || !utf8.ValidString(client.ClientKey) {
			t.Errorf("%+v finds %v, %v", client, buckets, err)
		}
	})
}
