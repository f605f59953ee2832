package clientkey_test

import (
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestTemplates with equal placeholders have equal keys, and texts that differ never.
func TestTemplates(t *testing.T) {
	key := func(text, value string) string {
		parsed, err := clientkey.ParseTemplate(text)
		if err != nil {
			t.Fatal(err)
		}
		got, applies := parsed.Key(value)
		if hasNone := !strings.Contains(text, "{"); applies != (hasNone || strings.Trim(value, " \t") != "") {
			t.Errorf("%q applies to %q: %v", text, value, applies)
		}
		return got
	}
	for _, same := range [][4]string{
		{"{header.X-Key}", "a", "{http.request.header.X-Key}", " a\t"},
		{"{client_ip}", "::ffff:10.0.0.1", "{http.vars.client_ip}", "10.0.0.1"},
		{"{host}", "Example.com.:80", "{http.request.host}", "example.com"},
		{"{header.Authorization}", "BEARER  x", "{header.Authorization}", "bearer x"},
		{"{cookie.id}", "a%20b", "{http.request.cookie.id}", "a b"},
		{"{cookie.id}", " a ", "{cookie.id}", "a"},
		{"{query.id}", "a\t", "{http.request.uri.query.id}", "a"},
		{"{header.X-Key}", " ", "{header.X-Key}", ""},
		{"{path.0}", "a", "{http.request.uri.path.0}", "a"},
		{"static", "a", "static", "b"},
	} {
		if a, b := key(same[0], same[1]), key(same[2], same[3]); a != b {
			t.Errorf("%q: %q and %q are different keys", same, a, b)
		}
	}
	seen := map[string]string{}
	for _, text := range []string{"{header.A}", "{header.B}", "{cookie.A}", "static", "other", "", "tenant {header.A}"} {
		for _, value := range []string{"", "a", "A", "b", strings.Repeat("long", 100), strings.Repeat("long", 101)} {
			got, id := key(text, value), text+"|"+value
			if !strings.Contains(text, "{") {
				id = text
			}
			if len(got) > store.MaxClientKey {
				t.Errorf("the key of %.20q has %d bytes", id, len(got))
			}
			if other, ok := seen[got]; ok && other != id {
				t.Errorf("%.20q and %.20q have one key", other, id)
			}
			seen[got] = id
		}
	}
	for _, bad := range []string{"{", "}", "{}", "{a", "a}", "{a}{b}", "{a} b}", "{{a}}", "}a{"} {
		if _, err := clientkey.ParseTemplate(bad); err == nil {
			t.Errorf("%q is a template", bad)
		}
	}
}
