package clientkey_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

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

// TestShorthandsAreThoseOfCaddy, of the version that this module requires: each of its source, and texts that
// only look like one.
func TestShorthandsAreThoseOfCaddy(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile").Output()
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "shorthands.go"))
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, m := range regexp.MustCompile("\\t\"({[^\"]+})\", ").FindAllStringSubmatch(string(source), -1) {
		texts = append(texts, m[1], "tenant "+m[1])
	}
	families := 0
	for _, m := range regexp.MustCompile("MustCompile\\(`({[a-z_]+)").FindAllStringSubmatch(string(source), -1) {
		families++
		for _, end := range []string{".a}", ".X-Key_1}", ".}", ".a.b}", ".a b}", ".a", "}", "..}", ".é}"} {
			texts = append(texts, m[1]+end)
		}
	}
	if len(texts) < 160 || families < 12 {
		t.Fatalf("Caddy's source shows %d texts and %d families", len(texts), families)
	}
	caddys := httpcaddyfile.NewShorthandReplacer()
	for _, text := range append(texts, "{user}", "{Host}", "{http.request.host}", "{client_ip} {host}", "{header.A}{query.b}") {
		segment := caddyfile.Segment{{Text: text}}
		caddys.ApplyToSegment(&segment)
		if got, want := clientkey.Expand(text), segment[0].Text; got != want {
			t.Errorf("%s is %s, want %s", text, got, want)
		}
		if long := clientkey.Expand(text); clientkey.Expand(clientkey.Shorten(long)) != long {
			t.Errorf("%s is shortened to %s, which is another", long, clientkey.Shorten(long))
		}
	}
}
