package shardlimit_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
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
	"docs/grpc.md", "docs/llm-gateway.md", "docs/troubleshooting.md",
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

// TestReadmeNamesTheCommands: these two commands are the whole set-up.
func TestReadmeNamesTheCommands(t *testing.T) {
	text, err := os.ReadFile("README.md")
	must(t, "read", err)
	head := strings.Join(strings.SplitN(string(text), "\n", 31)[:30], "\n")
	for _, command := range []string{"go run ./cmd/caddy run --config Caddyfile.example", "make test"} {
		if !strings.Contains(head, command) {
			t.Errorf("the README's first screen does not name %s", command)
		}
	}
}

// TestReadmeNamesTheOldestVersions: `make contrib` builds with the Go and the Caddy of go.mod.
func TestReadmeNamesTheOldestVersions(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	must(t, "read", err)
	module, err := os.ReadFile("go.mod")
	must(t, "read", err)
	needs := regexp.MustCompile(`(?s)\ngo (\d+\.\d+)\.0\n.*\n\tgithub\.com/caddyserver/caddy/v2 v(\S+)\n`).FindSubmatch(module)
	if needs == nil {
		t.Fatal("go.mod has no oldest Go and Caddy")
	}
	sentence := fmt.Sprintf("\nGo %s, Caddy %s and Redis 7.0, or later, or Valkey", needs[1], needs[2])
	must(t, "the README", want("naming the versions of go.mod", strings.Contains(string(readme), sentence), true))
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

// TestReadmeComparesInShort: the whole comparison is docs/comparison.md, whose cells are too long for
// the width of a code host. Here each limiter has a row, and each of six rows there a column.
func TestReadmeComparesInShort(t *testing.T) {
	text, err := os.ReadFile("README.md")
	must(t, "read", err)
	full, err := os.ReadFile("docs/comparison.md")
	must(t, "read", err)
	limiters, _, _ := strings.Cut(string(full[strings.Index(string(full), "\n| |"):]), "\n|--")
	_, section, _ := strings.Cut(string(text), "\n## Why this one\n")
	section, _, _ = strings.Cut(section, "\n## ")
	link := regexp.MustCompile(`\]\([^)]*\)`)
	var rows []string
	for _, row := range regexp.MustCompile(`(?m)^\| .* \|$`).FindAllString(section, -1) {
		cells := strings.Split(strings.Trim(link.ReplaceAllString(row, ""), "|"), "|")
		must(t, row, want("columns", len(cells), 7))
		for i, cell := range cells {
			if words := strings.Fields(cell); len(words) > 6 {
				t.Errorf("the README's comparison has a cell of %d words: %s", len(words), cell)
			}
			if name := strings.TrimSpace(cell); len(rows) == 0 && i > 0 && !strings.Contains(string(full), "\n| "+name+" |") {
				t.Errorf("docs/comparison.md has no row %s", name)
			}
		}
		name := strings.TrimSpace(cells[0])
		rows = append(rows, name)
		if !strings.Contains(limiters, name) {
			t.Errorf("docs/comparison.md has no column %s", name)
		}
	}
	must(t, "the README's comparison", want("limiters", strings.Join(rows, ","), ",shardlimit,caddy-ratelimit,envoyproxy/ratelimit,Kong,Traefik,Limitador,APISIX,LiteLLM"))
	must(t, "the README's comparison", want("first question", strings.Contains(section, "\n| | can a client exceed the limit? |"), true))
}

// TestLinksToSectionsResolve checks that links between documents name files and headings that
// exist.
func TestLinksToSectionsResolve(t *testing.T) {
	links := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/evidence/*.md", "examples/*.md", "contrib/*.md"} {
		for _, file := range documents(t, pattern) {
			text, err := os.ReadFile(file)
			must(t, "read", err)
			inline := regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]+))?\)`).FindAllStringSubmatch(string(text), -1)
			definitions := regexp.MustCompile(`(?m)^\[[^\]]+\]: ([^#\s]*)(?:#(\S+))?$`).FindAllStringSubmatch(string(text), -1)
			for _, m := range append(inline, definitions...) {
				if strings.HasPrefix(m[1], "http") {
					continue
				}
				target := file
				if m[1] != "" {
					target = path.Join(path.Dir(file), m[1])
				}
				links++
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s: %v", file, err)
				} else if m[2] != "" && !hasSection(t, target, m[2]) {
					t.Errorf("%s: %s has no section %s", file, target, m[2])
				}
			}
		}
	}
	if links < 20 {
		t.Errorf("found %d links", links)
	}
}

// hasSection reports whether a document has a heading with that anchor on GitHub.
func hasSection(t *testing.T, file, anchor string) bool {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read", err)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		plain := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		if strings.ReplaceAll(plain, " ", "-") == anchor {
			return true
		}
	}
	return false
}

// TestTableOfPlacesNamesFiles checks that the files exist that CONTRIBUTING.md names for something
// new.
func TestTableOfPlacesNamesFiles(t *testing.T) {
	text, err := os.ReadFile("CONTRIBUTING.md")
	must(t, "read", err)
	_, rest, _ := strings.Cut(string(text), "\n| a new | goes into |\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	files := 0
	for row := range strings.Lines(table) {
		_, places, _ := strings.Cut(strings.TrimPrefix(row, "|"), "|")
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(places, -1) {
			files++
			if _, err := os.Stat(m[1]); err != nil {
				t.Errorf("the table of CONTRIBUTING.md: %v", err)
			}
		}
	}
	if files < 60 {
		t.Errorf("found %d files in the table of CONTRIBUTING.md", files)
	}
}

// testName matches the names of tests, benchmarks and fuzz targets.
var testName = regexp.MustCompile(`\b(?:Test|Benchmark|Fuzz)[A-Z]\w*`)

// TestNamedTestsExist checks that the tests exist that the documents name, in this module or
// the laboratory's.
func TestNamedTestsExist(t *testing.T) {
	exists := map[string]bool{}
	definition := regexp.MustCompile(`(?m)^func (` + testName.String() + `)\(`)
	must(t, "find the tests", filepath.WalkDir(".", func(file string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		for _, m := range definition.FindAllSubmatch(text, -1) {
			exists[string(m[1])] = true
		}
		return err
	}))
	names := 0
	for _, pattern := range []string{"docs/*.md", "docs/evidence/*.md"} {
		for _, file := range documents(t, pattern) {
			text, err := os.ReadFile(file)
			must(t, "read", err)
			for _, name := range testName.FindAllString(string(text), -1) {
				names++
				if !exists[name] {
					t.Errorf("%s names %s, which does not exist", file, name)
				}
			}
		}
	}
	if names < 200 {
		t.Errorf("found %d names of tests", names)
	}
}

// TestPromisesNameTheirDocuments checks that each row of the table of promises links a
// document and names a test.
func TestPromisesNameTheirDocuments(t *testing.T) {
	text, err := os.ReadFile("docs/evidence/promises.md")
	must(t, "read", err)
	_, rest, _ := strings.Cut(string(text), "\n| promise | document | tests |\n|---|---|---|\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	rows := 0
	for row := range strings.Lines(table) {
		rows++
		cells := strings.Split(strings.Trim(strings.TrimSpace(row), "| "), " | ")
		if len(cells) != 3 || !strings.Contains(cells[1], ".md") || !testName.MatchString(cells[2]) {
			t.Errorf("the table of promises has the row %s", row)
		}
	}
	if rows < 90 {
		t.Errorf("found %d promises", rows)
	}
}

const evidence = "docs/evidence.md"

// operatorsDocuments are the documents of those who run the limiter.
func operatorsDocuments(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(append([]string{"README.md"}, documents(t, "docs/*.md")...), func(file string) bool {
		return file == "docs/design.md" || file == evidence
	})
}

func documents(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	must(t, "find documents", err)
	return files
}

// TestOperatorsDocumentsNameNoTests: the table of promises names them, for the documents of
// evidence too.
func TestOperatorsDocumentsNameNoTests(t *testing.T) {
	const promises = "docs/evidence/promises.md"
	files := append(operatorsDocuments(t), "SECURITY.md", evidence)
	for _, file := range append(files, documents(t, "docs/evidence/*.md")...) {
		if file == promises {
			continue
		}
		text, err := os.ReadFile(file)
		must(t, "read", err)
		for _, name := range testName.FindAllString(string(text), -1) {
			t.Errorf("%s names %s; name it in %s", file, name, promises)
		}
	}
}

// checkSection returns the section on check in the operators' documents.
func checkSection(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("docs/operating.md")
	must(t, "read", err)
	_, section, _ := strings.Cut(string(text), "\n### Check\n")
	section, _, _ = strings.Cut(section, "\n## ")
	return section
}

// TestDocumentedCheckIsReal compares the documented report with one that a check printed.
func TestDocumentedCheckIsReal(t *testing.T) {
	golden, err := os.ReadFile("e2e/testdata/check.json")
	must(t, "read the golden", err)
	_, example, _ := strings.Cut(checkSection(t), "\n```json\n")
	example, _, _ = strings.Cut(example, "\n```")
	example = strings.NewReplacer("10.0.0.1:6379", "PRIMARY", "10.0.0.2:6379", "REPLICA", "10.0.0.3:6379", "DOWN", "7.0.15", "7.0.N").Replace(example)
	measured := regexp.MustCompile(`_seconds": [N0-9.]+`)
	read := func(text string) (report any) {
		must(t, "read the report", json.Unmarshal([]byte(measured.ReplaceAllString(text, `_seconds": 0`)), &report))
		return report
	}
	if got, want := read(example), read(string(golden)); !reflect.DeepEqual(got, want) {
		t.Errorf("documented is\n%v\nwant\n%v", got, want)
	}
}

// TestCodesOfFindingsAreDocumented compares those in the code with those in the table.
func TestCodesOfFindingsAreDocumented(t *testing.T) {
	codes := func(pattern, text string) (found []string) {
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			found = append(found, m[1])
		}
		return found
	}
	var want []string
	for _, pattern := range []string{"store/*.go", "store/*/*.go", "store/*/*/*.go", "internal/admin/*.go"} {
		for _, file := range documents(t, pattern) {
			text, err := os.ReadFile(file)
			must(t, "read", err)
			if !strings.HasSuffix(file, "_test.go") {
				want = append(want, codes(`(?m)(?:^\tcode[A-Z]\w* += |\bCode: )"(\w+)"`, string(text))...)
			}
		}
	}
	_, table, _ := strings.Cut(checkSection(t), "\n| Codes |")
	table, _, _ = strings.Cut(table, "\n\n")
	got := codes("`(\\w+)`", table)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) || len(want) < 20 {
		t.Errorf("documented are %v, want %v", got, want)
	}
}

// The most words of the operators' documents together, of README.md, and of the evidence.
const (
	mostWords         = 18_000
	mostReadmeWords   = 600
	mostEvidenceWords = 2_500
)

// TestEvidenceNamesItsSources requires that the commands of the evidence are targets of make,
// that the page has one picture, and that its commits are named where it says what was measured.
func TestEvidenceNamesItsSources(t *testing.T) {
	page, err := os.ReadFile(evidence)
	must(t, "read", err)
	text := string(page)
	if words := len(strings.Fields(text)); words > mostEvidenceWords {
		t.Errorf("%s has %d words, at most %d should be", evidence, words, mostEvidenceWords)
	}
	if n := strings.Count(text, "!["); n != 1 {
		t.Errorf("%s has %d pictures", evidence, n)
	}
	makefile, err := os.ReadFile("Makefile")
	must(t, "read", err)
	_, sources, _ := strings.Cut(text, "\n| figures | command |")
	sources, _, _ = strings.Cut(sources, "\n\n")
	commands := regexp.MustCompile("`make ([a-z-]+)`").FindAllStringSubmatch(text, -1)
	for _, m := range commands {
		if !strings.Contains(string(makefile), "\n"+m[1]+": ") {
			t.Errorf("%s names make %s, which is no target", evidence, m[1])
		}
	}
	rows := regexp.MustCompile("(?m)^\\|.*\\| `make [a-z]+` \\|.*(?: [0-9a-f]{7} \\||computed from this page \\|)").FindAllString(sources, -1)
	if len(rows) != 6 || len(commands) < 7 {
		t.Errorf("%s has %d sources with their commits, and %d commands", evidence, len(rows), len(commands))
	}
}

// TestOperatorsDocumentsAreShort counts words outside fenced code blocks: fields with a letter
// or a digit.
func TestOperatorsDocumentsAreShort(t *testing.T) {
	fenced := regexp.MustCompile("(?ms)^```.*?^```$")
	isWord := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }
	sum := 0
	for _, file := range operatorsDocuments(t) {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		words := 0
		for _, field := range strings.Fields(fenced.ReplaceAllString(string(text), "")) {
			if strings.ContainsFunc(field, isWord) {
				words++
			}
		}
		t.Logf("%s: %d words", file, words)
		if sum += words; file == "README.md" && words > mostReadmeWords {
			t.Errorf("%s has %d words, at most %d should be", file, words, mostReadmeWords)
		}
	}
	if sum > mostWords {
		t.Errorf("the documents of operators have %d words, at most %d should be", sum, mostWords)
	}
}

// The most words of docs/design.md, and of one of its paragraphs.
const (
	mostDesignWords    = 5_700
	mostParagraphWords = 90
)

// TestDesignIsShort counts all fields of docs/design.md as words. An item of a list and a row of
// a table are paragraphs.
func TestDesignIsShort(t *testing.T) {
	text, err := os.ReadFile("docs/design.md")
	must(t, "read", err)
	if words := len(strings.Fields(string(text))); words > mostDesignWords {
		t.Errorf("docs/design.md has %d words, at most %d should be", words, mostDesignWords)
	}
	paragraphs := regexp.MustCompile(`\n\s*\n|\n\s*(?:[-*] |\||\d+\. )`).Split(string(text), -1)
	for _, paragraph := range paragraphs {
		if words := len(strings.Fields(paragraph)); words > mostParagraphWords {
			t.Errorf("docs/design.md has a paragraph of %d words, at most %d should be: %s", words, mostParagraphWords, paragraph)
		}
	}
	if len(paragraphs) < 100 {
		t.Errorf("found %d paragraphs in docs/design.md", len(paragraphs))
	}
	// The table of promises names them.
	for _, name := range testName.FindAllString(string(text), -1) {
		t.Errorf("docs/design.md names %s", name)
	}
}
