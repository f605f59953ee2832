package docs

import (
	"flag"
	"go/build/constraint"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// testName matches the names of tests, benchmarks and fuzz targets.
var testName = regexp.MustCompile(`\b(?:Test|Benchmark|Fuzz)[A-Z]\w*`)

var update = flag.Bool("update", false, "write the commands into the table of promises")

// command is the target of make that runs a test.
type command string

const (
	makeTest  command = "test"
	makeCheck command = "check"
)

// commandOf returns which command runs the tests of a file, "" for none of the two. make check runs those of make
// test too.
func commandOf(t *testing.T, file, text string) command {
	t.Helper()
	runs := func(tags ...string) bool {
		line := regexp.MustCompile(`(?m)^//go:build .*$`).FindString(text)
		if line == "" {
			return true
		}
		expression, err := constraint.Parse(line)
		must(t, file, err)
		return expression.Eval(func(tag string) bool { return slices.Contains(tags, tag) })
	}
	isOtherModule := strings.HasPrefix(file, "lab/") || strings.HasPrefix(file, "contrib/")
	switch {
	case runs("linux", "unix") && !isOtherModule:
		return makeTest
	case runs("linux", "unix", "check"), runs("linux", "unix", "build"): // make check runs make contrib, whose tests have the tag build
		return makeCheck
	}
	return ""
}

// definedTests returns the commands that run each test, by its name, which several packages may have.
func definedTests(t *testing.T) map[string][]command {
	t.Helper()
	found := map[string][]command{}
	definition := regexp.MustCompile(`(?m)^func (` + testName.String() + `)\(`)
	visitTestFiles(t, func(file, text string) {
		run := commandOf(t, file, text)
		for _, m := range definition.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(found[m[1]], run) {
				found[m[1]] = append(found[m[1]], run)
			}
		}
	})
	return found
}

// visitTestFiles calls visit for each test file of this module, the laboratory's and contrib's.
func visitTestFiles(t *testing.T, visit func(file, text string)) {
	t.Helper()
	must(t, "find the tests", filepath.WalkDir(".", func(file string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(file, "_test.go") {
			visit(file, read(t, file))
		}
		return err
	}))
}

// TestNamedTestsExist checks that the tests exist that the documents name, in this module, the laboratory's or
// contrib's.
func TestNamedTestsExist(t *testing.T) {
	defined, names := definedTests(t), 0
	for _, pattern := range []string{"docs/*.md", "docs/evidence/*.md"} {
		for _, file := range documents(t, pattern) {
			for _, name := range testName.FindAllString(read(t, file), -1) {
				names++
				if len(defined[name]) == 0 {
					t.Errorf("%s names %s, which does not exist", file, name)
				}
			}
		}
	}
	if names < 200 {
		t.Errorf("found %d names of tests", names)
	}
}

const promises = "docs/evidence/promises.md"

// TestPromisesNameTheirTests checks that each row of the table of promises links a document, names a test, and
// says which commands run its tests: by their folders and build tags. With -update it writes those.
func TestPromisesNameTheirTests(t *testing.T) {
	const head = "\n| promise | document | `make` | tests |\n|---|---|---|---|\n"
	text := read(t, promises)
	before, rest, _ := strings.Cut(text, head)
	table, after, _ := strings.Cut(rest, "\n\n")
	defined, rows := definedTests(t), 0
	var updated []string
	for row := range strings.Lines(table) {
		rows++
		cells := strings.Split(strings.Trim(strings.TrimSpace(row), "| "), " | ")
		if len(cells) != 4 || !strings.Contains(cells[1], ".md") {
			t.Errorf("the table of promises has the row %s", row)
			continue
		}
		var runs []string
		for _, name := range testName.FindAllString(cells[3], -1) {
			if strings.HasPrefix(name, "Benchmark") {
				continue
			}
			run := defined[name]
			if len(run) != 1 || run[0] == "" {
				t.Errorf("%s runs by %q: name one that make test or make check runs, with a name of its own", name, run)
				continue
			}
			runs = append(runs, string(run[0]))
		}
		slices.Sort(runs)
		slices.Reverse(runs)
		cell := strings.Join(slices.Compact(runs), ", ")
		if cell == "" {
			t.Errorf("no test holds the promise %s", cells[0])
		} else if cells[2] != cell && !*update {
			t.Errorf("the tests of this row run by make %s; write it with go test ./docs -run TestPromises -update: %s", cell, row)
		}
		cells[2] = cell
		updated = append(updated, "| "+strings.Join(cells, " | ")+" |")
	}
	if rows < 90 {
		t.Errorf("found %d promises", rows)
	}
	if *update && !t.Failed() {
		table = strings.Join(updated, "\n")
		if after != "" {
			after = "\n\n" + after
		} else {
			after = "\n"
		}
		must(t, "write", os.WriteFile(promises, []byte(before+head+table+after), 0o644))
	}
}

// TestOperatorsDocumentsNameNoTests: the table of promises names them, for the documents of
// evidence too.
func TestOperatorsDocumentsNameNoTests(t *testing.T) {
	files := append(operatorsDocuments(t), "SECURITY.md", evidence)
	for _, file := range append(files, documents(t, "docs/evidence/*.md")...) {
		if file == promises || file == remedies {
			continue
		}
		text := read(t, file)
		for _, name := range testName.FindAllString(text, -1) {
			t.Errorf("%s names %s; name it in %s", file, name, promises)
		}
	}
}
