package limiter

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
)

// TestTemplatesExpandAsCaddyDoes: each shorthand of the source of Caddy, of the version that this module requires,
// and texts that only look like one.
func TestTemplatesExpandAsCaddyDoes(t *testing.T) {
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
