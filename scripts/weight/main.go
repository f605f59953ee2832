// Weight writes docs/weight.md, which says how large the project is: lines by package, options, exported
// names, words of documents, the CPU time of make test, and the functions that name most mechanisms.
//
//	go run ./scripts/weight                       # writes the file
//	go run ./scripts/weight -cpu bin/cpu-seconds  # with the CPU time that .ci/run has left there
//	go run ./scripts/weight -check                # fails if it would change, but for the CPU time
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
)

const document = "docs/weight.md"

func main() {
	check := flag.Bool("check", false, "compare instead of writing")
	measured := flag.String("cpu", "", "`file` with the CPU seconds; without one they stay as they are")
	flag.Parse()
	if err := run(*check, *measured); err != nil {
		fmt.Fprintln(os.Stderr, "weight:", err)
		os.Exit(1)
	}
}

func run(check bool, measured string) error {
	project, err := read(".")
	if err != nil {
		return err
	}
	old, err := os.ReadFile(document)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	cpu := cpuOf(string(old))
	if measured != "" {
		text, err := os.ReadFile(measured)
		if err != nil {
			return err
		}
		cpu = strings.TrimSpace(string(text))
	}
	if !check {
		return os.WriteFile(document, []byte(render(project, cpu)), 0o644)
	}
	if render(project, "") != withoutCPU(string(old)) {
		return fmt.Errorf("%s is out of date: run make weight, and commit it", document)
	}
	return nil
}

// cpuLine is the line of the document with the CPU time.
var cpuLine = regexp.MustCompile(`(?m)^(\| CPU seconds of .make test. \| )([0-9.]*)( \|)$`)

// cpuOf returns the CPU seconds in a document, or "" if there are none.
func cpuOf(document string) string {
	if found := cpuLine.FindStringSubmatch(document); found != nil {
		return found[2]
	}
	return ""
}

// withoutCPU returns a document without its CPU seconds.
func withoutCPU(document string) string { return cpuLine.ReplaceAllString(document, "$1$3") }

// render returns the document.
func render(p *project, cpu string) string {
	var to strings.Builder
	to.WriteString(head)
	table := func(heading string, rows [][]string) {
		for i, row := range append([][]string{strings.Split(heading, "|")}, rows...) {
			fmt.Fprintf(&to, "| %s |\n", strings.Join(row, " | "))
			if i == 0 {
				to.WriteString("|---" + strings.Repeat("|---", len(row)-1) + "|\n")
			}
		}
	}
	table("what|number", [][]string{
		{"lines of the product", count(p.lines[product])},
		{"lines of tests", count(p.lines[tests])},
		{"lines of what tests use", count(p.lines[support])},
		{"lines of the laboratory, tests included", count(p.lines[laboratory])},
		{"lines of the page, and of Lua", count(p.lines[other])},
		{"options", count(p.options)},
		{"exported names outside `internal/`", count(p.exported)},
		{"methods of exported types there", count(p.methods)},
		{"functions of the product", count(len(p.functions))},
		{fmt.Sprintf("functions that name %d mechanisms or more", many), count(p.naming(many))},
		{"words of documents", count(p.words)},
		{"CPU seconds of `make test`", cpu},
	})
	to.WriteString("\n## Lines of the product by package\n\n")
	table("package|lines", p.packages())
	to.WriteString("\n## Functions that name most mechanisms\n\n")
	fmt.Fprintf(&to, "Of %d mechanisms, whose words stand in `scripts/weight/mechanisms.go`.\n\n", len(mechanisms))
	table("function|names|mechanisms", p.worst(10))
	return to.String()
}

const head = `# Weight

The size of the project: code to read, tests to run, mechanisms to keep in mind. ` + "`make weight`" + ` writes this page, and CI fails if a change leaves it out of date, so each change shows here what it adds and removes. No number is a limit, except that CI holds the CPU time of ` + "`make test`" + ` to the budget in ` + "`.ci/run`" + `. Lines are all lines of Go files, generated ones not counted. Exported names are those at the top level of packages.

`

// count writes a number with commas between its thousands.
func count(n int) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
