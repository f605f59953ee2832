package service_test

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile("../" + file)
	caddytest.Must(t, "read", err)
	return string(text)
}

// block returns the fenced block of a document that has some text.
func block(t *testing.T, file, has string) string {
	t.Helper()
	for _, m := range regexp.MustCompile("(?s)\n```[a-z]*\n(.*?)\n```").FindAllStringSubmatch(read(t, file), -1) {
		if strings.Contains(m[1], has) {
			return m[1]
		}
	}
	t.Fatalf("%s has no block with %s", file, has)
	return ""
}

// documentedCaddy runs the Caddyfile of docs/envoy.md.
func documentedCaddy(t *testing.T) *caddytest.Caddy {
	t.Helper()
	text := block(t, "docs/envoy.md", "\trate_limit_service {")
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text+"\n"), map[string]any{"filename": "Caddyfile"})
	caddytest.Must(t, "adapt", err)
	caddytest.Must(t, "load", caddytest.Validate(config))
	return caddytest.Start(t, strings.NewReplacer("http://:8081", "{{site}}", "\tservers {", "\t{{global}}\n\tservers {").Replace(text))
}

// TestDocumentedCallIsReal compares the answer in docs/envoy.md with that to its call by JSON.
func TestDocumentedCallIsReal(t *testing.T) {
	t.Parallel()
	_, asked, _ := strings.Cut(block(t, "docs/envoy.md", "curl -s localhost:8081"+path), "-d '")
	asked, _, found := strings.Cut(asked, "'")
	caddytest.Must(t, "the call", caddytest.Want("having a message", found, true))
	code, got := post(t, documentedCaddy(t), asked)
	caddytest.Must(t, "post", caddytest.Want("status", code, 200))
	var want map[string]any
	caddytest.Must(t, "read", json.Unmarshal([]byte(block(t, "docs/envoy.md", `"overallCode"`)), &want))
	passing := regexp.MustCompile(`"durationUntilReset":"[0-9.]+s"|"key":"X-Ratelimit-Reset","value":"\d+"`)
	timeless := func(answer map[string]any) (same any) {
		text, err := json.Marshal(answer)
		caddytest.Must(t, "encode", err)
		caddytest.Must(t, "decode", json.Unmarshal(passing.ReplaceAll(text, []byte(`"time":"passes"`)), &same))
		return same
	}
	if got, want := timeless(got), timeless(want); !reflect.DeepEqual(got, want) {
		t.Errorf("documented is\n%v\nwant\n%v", want, got)
	}
}
