package shardlimit

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Update is the flag with which tests write what they compare.
var Update = flag.Bool("update", false, "write what is generated into testdata, docs and comments")

// Table is a file of rows in testdata: a line with == and the name of a base, which
// the rows below it have; a line with -- and a row's name, lines of a Caddyfile, and
// => with what is expected, up to an empty line. Other lines are comments.
type Table struct {
	Rows []Row
	// comments are the lines before each row, and those at the end.
	comments []string
}

// Row is one Caddyfile of a table.
type Row struct{ Name, Base, Text, Expected string }

// Glob returns the files of a pattern, of which there must be some.
func Glob(t testing.TB, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("find %s: %v, %d files", pattern, err, len(files))
	}
	return files
}

// ReadTable reads a table.
func ReadTable(t testing.TB, file string) Table {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var table Table
	var comment strings.Builder
	var base string
	for lines := strings.SplitAfter(string(text), "\n"); len(lines) > 0; {
		name, ok := strings.CutPrefix(lines[0], "-- ")
		if !ok {
			if name, ok := strings.CutPrefix(lines[0], "== "); ok {
				base = strings.TrimSpace(name)
			}
			comment.WriteString(lines[0])
			lines = lines[1:]
			continue
		}
		r := Row{Name: strings.TrimSpace(name), Base: base}
		if slices.ContainsFunc(table.Rows, func(other Row) bool { return other.Name == r.Name }) {
			t.Fatalf("%s has two rows %s", file, r.Name)
		}
		r.Text, lines = cutLines(lines[1:], func(line string) bool { return strings.HasPrefix(line, "=> ") })
		r.Expected, lines = cutLines(lines, func(line string) bool { return strings.TrimSpace(line) == "" })
		if r.Expected, ok = strings.CutPrefix(r.Expected, "=> "); !ok {
			t.Fatalf("%s: row %s has no line with =>", file, r.Name)
		}
		table.Rows, table.comments = append(table.Rows, r), append(table.comments, comment.String())
		comment.Reset()
	}
	table.comments = append(table.comments, comment.String())
	return table
}

// cutLines returns the lines up to an end, as one text, and the others.
func cutLines(lines []string, isEnd func(line string) bool) (text string, rest []string) {
	end := slices.IndexFunc(lines, isEnd)
	if end < 0 {
		end = len(lines)
	}
	return strings.TrimSuffix(strings.Join(lines[:end], ""), "\n"), lines[end:]
}

// Write replaces the file of a table.
func (t Table) Write(file string) error {
	var b bytes.Buffer
	for i, r := range t.Rows {
		fmt.Fprintf(&b, "%s-- %s\n", t.comments[i], r.Name)
		if r.Text != "" {
			fmt.Fprintln(&b, r.Text)
		}
		fmt.Fprintf(&b, "=> %s\n", r.Expected)
	}
	b.WriteString(t.comments[len(t.Rows)])
	return os.WriteFile(file, b.Bytes(), 0o600)
}

// Base is a Caddyfile with lines of dots, which rows replace, and, if it has rows of
// options, the JSON that it adapts to, with a member of dots in the object to which
// the rows add.
type Base struct{ caddyfile, config string }

// dots mark the places of a base, and separate the parts of a row for each of them.
const dots = "..."

// ReadBases reads the bases of the tables, by name.
func ReadBases(t testing.TB) map[string]Base {
	bases := map[string]Base{}
	for _, r := range ReadTable(t, "testdata/bases.txt").Rows {
		bases[r.Name] = Base{r.Text, r.Expected}
	}
	return bases
}

// Fill returns the Caddyfile of a row.
func (b Base) Fill(t testing.TB, row Row) string {
	t.Helper()
	var filled []string
	parts := splitAt(row.Text, dots)
	for line := range strings.SplitSeq(b.caddyfile, "\n") {
		indent, ok := strings.CutSuffix(line, dots)
		if !ok {
			filled = append(filled, line)
			continue
		}
		if len(parts) == 0 {
			t.Fatal("the base has more lines of dots than the row has parts")
		}
		for _, line := range parts[0] {
			if line != "" {
				line = indent + line
			}
			filled = append(filled, line)
		}
		parts = parts[1:]
	}
	if len(parts) != 0 {
		t.Fatal("the row has more parts than its base has lines of dots")
	}
	return strings.Join(filled, "\n") + "\n"
}

// splitAt returns the lines between those that are the separator.
func splitAt(text, separator string) (parts [][]string) {
	parts = make([][]string, 1)
	if text == "" {
		return parts
	}
	for line := range strings.SplitSeq(text, "\n") {
		if line == separator {
			parts = append(parts, nil)
		} else {
			parts[len(parts)-1] = append(parts[len(parts)-1], line)
		}
	}
	return parts
}

// cut returns the object of the base's JSON to which rows add, and what is before
// and after it.
func (b Base) cut(t testing.TB) (before string, object map[string]json.RawMessage, after string) {
	t.Helper()
	start := strings.Index(b.config, `{"...":{}`)
	if start < 0 {
		t.Fatal("the base has no JSON with dots; write a golden of the whole Caddyfile")
	}
	d := json.NewDecoder(strings.NewReader(b.config[start:]))
	if err := d.Decode(&object); err != nil {
		t.Fatalf("read the base's JSON: %v", err)
	}
	delete(object, dots)
	return b.config[:start], object, b.config[start+int(d.InputOffset()):]
}

// Add returns the JSON of the base with the members that a row adds.
func (b Base) Add(t testing.TB, row Row) string {
	t.Helper()
	before, object, after := b.cut(t)
	if err := json.Unmarshal([]byte(row.Expected), &object); err != nil {
		t.Fatalf("read the row's JSON: %v", err)
	}
	return indented(t, before+marshal(t, object)+after)
}

// Added returns the members that a config adds to the JSON of the base.
func (b Base) Added(t testing.TB, config []byte) string {
	t.Helper()
	var compact bytes.Buffer
	if err := json.Compact(&compact, config); err != nil {
		t.Fatalf("read the config: %v", err)
	}
	before, object, after := b.cut(t)
	text, ok := strings.CutPrefix(compact.String(), before)
	text, ok2 := strings.CutSuffix(text, after)
	var members map[string]json.RawMessage
	if !ok || !ok2 || json.Unmarshal([]byte(text), &members) != nil {
		t.Fatalf("differs from its base in more than one object; write a golden of the whole Caddyfile, which adapts to\n%s", config)
	}
	for name, value := range object {
		if got, ok := members[name]; !ok {
			t.Fatalf("has no %s, unlike its base; take another, or write a golden of the whole Caddyfile, which adapts to\n%s", name, config)
		} else if string(got) == string(value) {
			delete(members, name)
		}
	}
	added := marshal(t, members)
	if len(added) > 140 {
		added = indented(t, added)
	}
	return added
}

func marshal(t testing.TB, members map[string]json.RawMessage) string {
	t.Helper()
	text, err := json.Marshal(members)
	if err != nil {
		t.Fatalf("write JSON: %v", err)
	}
	return string(text)
}

func indented(t testing.TB, text string) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Indent(&b, []byte(text), "", "\t"); err != nil {
		t.Fatalf("indent JSON: %v", err)
	}
	return b.String()
}
