package examples

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
)

// codeBlocks returns the fenced blocks of a document.
func codeBlocks(t *testing.T, file string) (blocks []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read the document", err)
	for _, m := range regexp.MustCompile("(?s)\n```[a-z]*\n(.*?)\n```").FindAllSubmatch(text, -1) {
		blocks = append(blocks, string(m[1]))
	}
	return blocks
}

// pagesWithConfigs are the documents with whole configs to copy.
var pagesWithConfigs = []string{
	"README.md", "docs/getting-started.md", "docs/configuration.md", "docs/behind-proxies.md", "docs/choosing.md", "docs/from-other-gateways.md",
	"docs/grpc.md", "docs/json.md", "docs/llm-gateway.md", "docs/troubleshooting.md", "docs/with-other-plugins.md",
}

// TestDocumentedConfigsLoad checks the configs that readers copy.
func TestDocumentedConfigsLoad(t *testing.T) {
	t.Setenv("REDIS_PASSWORD", "secret")
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	adapter := caddyconfig.GetAdapter("caddyfile")
	caddyfiles, jsons := 0, 0
	adapt := func(name, text string) {
		adapted, _, err := adapter.Adapt([]byte(text), map[string]any{"filename": name})
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, text)
			return
		}
		if err := caddytest.Validate(adapted); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, w := range lint.Config(adapted) {
			t.Errorf("%s: %s\n%s", name, w.Text(), text)
		}
		caddyfiles++
	}
	example, err := os.ReadFile("Caddyfile.example")
	must(t, "read the example", err)
	adapt("Caddyfile.example", string(example))
	uncommented := regexp.MustCompile(`(?m)^\t# ?`).ReplaceAllString(string(example), "\t")
	if uncommented == string(example) {
		t.Error("Caddyfile.example has no store to take the comment marks off")
	}
	adapt("Caddyfile.example without comment marks", uncommented)
	for _, file := range pagesWithConfigs {
		for _, block := range codeBlocks(t, file) {
			switch {
			case strings.HasPrefix(block, "labels:"): // TestDocumentedLabels has these
			case strings.HasPrefix(block, "{\n\t\"apps\""):
				if err := caddytest.Validate([]byte(block)); err != nil {
					t.Errorf("%s: %v", file, err)
				}
				jsons++
			case strings.Contains(block, "reverse_proxy"), strings.Contains(block, "\trespond \""), strings.HasPrefix(block, "{\n\trate_limit {\n\t\tstore redis {"):
				adapt(file, block)
			}
		}
	}
	if caddyfiles < 15 || jsons < 1 {
		t.Errorf("found %d Caddyfiles and %d JSON configs in the documents", caddyfiles, jsons)
	}
}

// TestDocumentedOrders have no order in which a limit does nothing.
func TestDocumentedOrders(t *testing.T) {
	for _, block := range codeBlocks(t, "docs/with-other-plugins.md") {
		if !strings.Contains(block, "\trate_limit") {
			continue
		}
		config, err := adapt(block)
		must(t, "adapt "+block, err)
		warnings, err := caddytest.Warnings(t, config)
		must(t, "load", err)
		must(t, block, want("warning in "+warnings, strings.Contains(warnings, `"rule"`), false))
	}
}

// label is a label of a container, which names a directive by those around it.
type label struct {
	value string
	inner map[string]*label
}

// write writes the block of a label as a Caddyfile has it.
func (l *label) write(b *strings.Builder, name string) {
	b.WriteString(strings.TrimSpace(name + " " + l.value))
	if len(l.inner) > 0 {
		b.WriteString(" {\n")
		for _, inner := range slices.Sorted(maps.Keys(l.inner)) {
			l.inner[inner].write(b, inner)
		}
		b.WriteString("}")
	}
	b.WriteString("\n")
}

// TestDocumentedLabels make a Caddyfile, as caddy-docker-proxy makes it, that loads.
func TestDocumentedLabels(t *testing.T) {
	blocks := codeBlocks(t, "docs/with-other-plugins.md")
	top := map[string]*label{}
	for line := range strings.Lines(blocks[len(blocks)-1]) {
		path, value, isLabel := strings.Cut(strings.TrimSpace(line), ": ")
		if !isLabel {
			continue
		}
		at, in := (*label)(nil), top
		for name := range strings.SplitSeq(path, ".") {
			if in[name] == nil {
				in[name] = &label{inner: map[string]*label{}}
			}
			at = in[name]
			in = at.inner
		}
		at.value = strings.Trim(value, `"`)
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(top)) {
		top[name].write(&text, "")
	}
	config, err := adapt(text.String())
	must(t, "adapt "+text.String(), err)
	must(t, "load", caddytest.Validate(config))
	must(t, "labels", want("blocks", len(top), 2))
}

// TestDocumentedStoresAdapt does not load the stores, which needs the files that they name.
func TestDocumentedStoresAdapt(t *testing.T) {
	stores := 0
	for _, block := range codeBlocks(t, "docs/redis.md") {
		if !strings.HasPrefix(block, "{\n") {
			continue
		}
		if _, err := adapt(block + "\n"); err != nil {
			t.Errorf("%v\n%s", err, block)
		}
		stores++
	}
	if stores < 4 {
		t.Errorf("found %d stores in docs/redis.md", stores)
	}
}

// TestReadmeShowsTheFirstAnswer compares the answer in the README with that of Caddyfile.example.
func TestReadmeShowsTheFirstAnswer(t *testing.T) {
	text, err := os.ReadFile("Caddyfile.example")
	must(t, "read", err)
	c := caddytest.Start(t, strings.NewReplacer("\n{\n", "\n{\n\t{{global}}\n", "\n:8080 {", "\n{{site}} {").Replace(string(text)))
	shown := codeBlocks(t, "README.md")[1]
	head, body, _ := strings.Cut(shown, "\n\n")
	lines := strings.Split(head, "\n")
	must(t, "the README", want("command", lines[0], "$ curl -i localhost:8080"))
	response := c.Get("/")
	must(t, "the README", want("status", lines[1], response.Proto+" "+response.Status))
	names := 0
	for _, line := range lines[2:] {
		name, value, _ := strings.Cut(line, ": ")
		if names++; name == "Date" || name == "X-Ratelimit-Reset" {
			value = response.Header.Get(name)
		}
		must(t, "the README", want(name, response.Header.Get(name), value))
	}
	must(t, "the README", want("headers", names, len(response.Header)))
	must(t, "the README", want("length", response.Header.Get("Content-Length"), fmt.Sprint(len(body+"\n"))))
}
