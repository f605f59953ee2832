package docs

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// TestReadmeNamesTheCommands: these two commands are the whole set-up.
func TestReadmeNamesTheCommands(t *testing.T) {
	text := read(t, "README.md")
	head := strings.Join(strings.SplitN(text, "\n", 31)[:30], "\n")
	for _, command := range []string{"go run ./cmd/caddy run --config Caddyfile.example", "make test"} {
		if !strings.Contains(head, command) {
			t.Errorf("the README's first screen does not name %s", command)
		}
	}
}

// TestReadmeNamesTheOldestVersions: `make contrib` builds with the Go and the Caddy of go.mod.
func TestReadmeNamesTheOldestVersions(t *testing.T) {
	readme := read(t, "README.md")
	module := read(t, "go.mod")
	needs := regexp.MustCompile(`(?s)\ngo (\d+\.\d+)\.0\n.*\n\tgithub\.com/caddyserver/caddy/v2 v(\S+)\n`).FindStringSubmatch(module)
	if needs == nil {
		t.Fatal("go.mod has no oldest Go and Caddy")
	}
	sentence := fmt.Sprintf("\nGo %s, Caddy %s and Redis 7.0, or later, or Valkey", needs[1], needs[2])
	must(t, "the README", want("naming the versions of go.mod", strings.Contains(readme, sentence), true))
}

// TestReadmeComparesInShort: the whole comparison is docs/comparison.md, whose cells are too long for
// the width of a code host. Here each limiter has a row, and each of six rows there a column.
func TestReadmeComparesInShort(t *testing.T) {
	text := read(t, "README.md")
	full := read(t, "docs/comparison.md")
	limiters, _, _ := strings.Cut(full[strings.Index(full, "\n| |"):], "\n|--")
	_, section, _ := strings.Cut(text, "\n## Why this one\n")
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
			if name := strings.TrimSpace(cell); len(rows) == 0 && i > 0 && !strings.Contains(full, "\n| "+name+" |") {
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
			text := read(t, file)
			inline := regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]+))?\)`).FindAllStringSubmatch(text, -1)
			definitions := regexp.MustCompile(`(?m)^\[[^\]]+\]: ([^#\s]*)(?:#(\S+))?$`).FindAllStringSubmatch(text, -1)
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

// TestRunbookLinksResolve checks that alerts link to sections that exist.
func TestRunbookLinksResolve(t *testing.T) {
	text := read(t, "contrib/alerts.yml")
	rules := strings.Count(text, "- alert: ")
	links := regexp.MustCompile(`runbook_url: https://github.com/shardlimit/caddy-shardlimit/blob/main/(docs/[\w-]+\.md)#([\w-]+)\n`).FindAllStringSubmatch(text, -1)
	if len(links) != rules || rules == 0 || strings.Count(text, "summary: ") != rules {
		t.Errorf("%d rules, %d links, %d summaries", rules, len(links), strings.Count(text, "summary: "))
	}
	for _, link := range links {
		if !hasSection(t, link[1], link[2]) {
			t.Errorf("%s has no section %s", link[1], link[2])
		}
	}
}

// hasSection reports whether a document has a heading with that anchor on GitHub.
func hasSection(t *testing.T, file, anchor string) bool {
	t.Helper()
	text := read(t, file)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		plain := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		if strings.ReplaceAll(plain, " ", "-") == anchor {
			return true
		}
	}
	return false
}

const evidence = "docs/evidence.md"

// operatorsDocuments are the documents of those who run the limiter.
func operatorsDocuments(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(append([]string{"README.md"}, documents(t, "docs/*.md")...), func(file string) bool {
		return file == "docs/design.md" || file == "docs/weight.md" || file == evidence
	})
}

func documents(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	must(t, "find documents", err)
	return files
}

// checkSection returns the section on check in the operators' documents.
func checkSection(t *testing.T) string {
	t.Helper()
	text := read(t, "docs/operating.md")
	_, section, _ := strings.Cut(text, "\n### Check\n")
	section, _, _ = strings.Cut(section, "\n## ")
	return section
}

// TestDocumentedCheckIsReal compares the documented report with one that a check printed.
func TestDocumentedCheckIsReal(t *testing.T) {
	golden := read(t, "e2e/testdata/check.json")
	_, example, _ := strings.Cut(checkSection(t), "\n```json\n")
	example, _, _ = strings.Cut(example, "\n```")
	example = strings.NewReplacer("10.0.0.1:6379", "PRIMARY", "10.0.0.2:6379", "REPLICA", "10.0.0.3:6379", "DOWN", "7.0.15", "7.0.N").Replace(example)
	measured := regexp.MustCompile(`_seconds": [N0-9.]+`)
	read := func(text string) (report any) {
		must(t, "read the report", json.Unmarshal([]byte(measured.ReplaceAllString(text, `_seconds": 0`)), &report))
		return report
	}
	if got, want := read(example), read(golden); !reflect.DeepEqual(got, want) {
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
	for _, pattern := range []string{"store/*.go", "internal/memory/*.go", "internal/redis/*.go", "internal/redis/*/*.go", "internal/admin/*.go"} {
		for _, file := range documents(t, pattern) {
			text := read(t, file)
			if !strings.HasSuffix(file, "_test.go") {
				want = append(want, codes(`(?m)(?:^\tcode[A-Z]\w* += |\bCode: )"(\w+)"`, text)...)
			}
		}
	}
	_, table, _ := strings.Cut(checkSection(t), "\n| Codes |")
	table, _, _ = strings.Cut(table, "\n\n")
	got := codes("`(\\w+)`", table)
	slices.Sort(got)
	got = slices.Compact(got)
	slices.Sort(want)
	want = slices.Compact(want)
	if !slices.Equal(got, want) || len(want) < 20 {
		t.Errorf("documented are %v, want %v", got, want)
	}
}

// The most words of the operators' documents together, of README.md, and of the evidence.
const (
	mostWords         = 18_600
	mostReadmeWords   = 600
	mostEvidenceWords = 2_500
)

// TestEvidenceNamesItsSources requires that the commands of the evidence are targets of make,
// that the page has one picture, and that its commits are named where it says what was measured.
func TestEvidenceNamesItsSources(t *testing.T) {
	page := read(t, evidence)
	text := page
	if words := len(strings.Fields(text)); words > mostEvidenceWords {
		t.Errorf("%s has %d words, at most %d should be", evidence, words, mostEvidenceWords)
	}
	if n := strings.Count(text, "!["); n != 1 {
		t.Errorf("%s has %d pictures", evidence, n)
	}
	makefile := read(t, "Makefile")
	_, sources, _ := strings.Cut(text, "\n| figures | command |")
	sources, _, _ = strings.Cut(sources, "\n\n")
	commands := regexp.MustCompile("`make ([a-z-]+)`").FindAllStringSubmatch(text, -1)
	for _, m := range commands {
		if !strings.Contains(makefile, "\n"+m[1]+": ") {
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
		text := read(t, file)
		words := 0
		for _, field := range strings.Fields(fenced.ReplaceAllString(text, "")) {
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
	text := read(t, "docs/design.md")
	if words := len(strings.Fields(text)); words > mostDesignWords {
		t.Errorf("docs/design.md has %d words, at most %d should be", words, mostDesignWords)
	}
	paragraphs := regexp.MustCompile(`\n\s*\n|\n\s*(?:[-*] |\||\d+\. )`).Split(text, -1)
	for _, paragraph := range paragraphs {
		if words := len(strings.Fields(paragraph)); words > mostParagraphWords {
			t.Errorf("docs/design.md has a paragraph of %d words, at most %d should be: %s", words, mostParagraphWords, paragraph)
		}
	}
	if len(paragraphs) < 100 {
		t.Errorf("found %d paragraphs in docs/design.md", len(paragraphs))
	}
	// The table of promises names them.
	for _, name := range testName.FindAllString(text, -1) {
		t.Errorf("docs/design.md names %s", name)
	}
}
