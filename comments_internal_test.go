package shardlimit

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/memorystore"
	"github.com/shardlimit/caddy-shardlimit/redisstore"
)

// notByRow are the fields that no row of the options sets, or sets as a whole. Their comments stand by themselves.
var notByRow = []string{
	"Rollout.store", "Rollout.percent", "Zone.name", "Reserve.percent", "Reserve.match",
	"Shard.name", "Sentinel.master", "Sentinel.addrs", "PasswordCommand.command",
}

// TestOptionsInComments: Caddy's documentation shows the comments of fields, so they are what the rows say.
func TestOptionsInComments(t *testing.T) {
	redis := redisstore.Rows()
	blockOf := func(name string) []option.Row {
		rows := option.Flatten(redis)
		return rows[slices.IndexFunc(rows, func(row option.Row) bool { return row.Name == name })].Block
	}
	var byHand []string
	for _, s := range []struct {
		file, name string
		rows       []option.Row
	}{
		{"handler.go", "Limits", new(Handler).options(nil)},
		{"handler.go", "Rollout", nil},
		{"zone.go", "Zone", new(Zone).options(httpcaddyfile.Helper{})},
		{"zone.go", "Reserve", nil},
		{"memorystore/store.go", "Store", memorystore.Rows()},
		{"redisstore/store.go", "Store", redis},
		{"redisstore/shard.go", "Shard", blockOf("shard")},
		{"redisstore/shard.go", "Sentinel", nil},
		{"redisstore/connection.go", "Connection", redis},
		{"redisstore/connection.go", "TLS", blockOf("tls")},
		{"redisstore/connection.go", "PasswordCommand", blockOf("password_command")},
	} {
		byHand = append(byHand, checkComments(t, s.file, s.name, s.rows)...)
	}
	if !slices.Equal(byHand, notByRow) {
		t.Errorf("no row says what these fields mean: %v, want %v", byHand, notByRow)
	}
}

// checkComments compares the comments of a struct's fields with the rows, and writes them with -update. It returns
// the fields of which the rows say nothing.
func checkComments(t *testing.T, file, name string, rows []option.Row) (byHand []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	files := token.NewFileSet()
	parsed, err := parser.ParseFile(files, file, text, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var fields []*ast.Field
	ast.Inspect(parsed, func(n ast.Node) bool {
		if declared, ok := n.(*ast.TypeSpec); ok && declared.Name.Name == name {
			fields = declared.Type.(*ast.StructType).Fields.List
		}
		return true
	})
	if fields == nil {
		t.Fatalf("%s has no struct %s", file, name)
	}
	written := string(text)
	// From the last one on, so that the places of those before stay.
	for _, field := range slices.Backward(fields) {
		if field.Tag == nil {
			continue
		}
		json, _, _ := strings.Cut(reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("json"), ",")
		want := option.Comment(rows, json)
		if want == "" {
			byHand = append([]string{name + "." + json}, byHand...)
			continue
		}
		if field.Doc == nil {
			t.Errorf("%s: %s.%s has no comment", file, name, json)
			continue
		}
		begin, end := files.Position(field.Doc.Pos()).Offset, files.Position(field.Doc.End()).Offset
		if got := strings.Join(strings.Fields(field.Doc.Text()), " "); got == strings.Join(strings.Fields(want), " ") {
			continue
		} else if !*Update {
			t.Errorf("%s: the comment of %s.%s is\n%s\nbut its option says\n%s\nwrite it with go test -run TestOptions . -update", file, name, json, got, want)
		}
		written = written[:begin] + commentOf(want) + written[end:]
	}
	if *Update && written != string(text) {
		if err := os.WriteFile(file, []byte(written), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return byHand
}

// commentOf returns the comment of a field, in lines of up to 80 columns.
func commentOf(text string) string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+len(word) >= 76 {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return "// " + strings.Join(append(lines, line), "\n\t// ")
}

// TestOptionsShareWords: outcomes and reasons are listed as their tables have them.
func TestOptionsShareWords(t *testing.T) {
	outcomes, reasons := telemetry.Listed(telemetry.OutcomeWords()), telemetry.Listed(limiter.ReasonWords())
	for _, words := range [][]telemetry.Word{telemetry.OutcomeWords(), limiter.ReasonWords()} {
		if slices.ContainsFunc(words, func(w telemetry.Word) bool { return w.Name == "" }) {
			t.Errorf("a word is missing in %v", words)
		}
	}
	names := slices.Clone(telemetry.OutcomeWords())
	for i := range names {
		names[i].Meaning = ""
	}
	const operating = "docs/operating.md"
	generated(t, "handler.go", "// `{http.rate_limit.outcome}` | ", "\n", outcomes)
	generated(t, "handler.go", "// `{http.rate_limit.reason}` | Why it was not allowed: ", "\n", reasons)
	generated(t, operating, "\n- `{http.rate_limit.outcome}`: ", "\n", outcomes)
	generated(t, operating, "\n- `{http.rate_limit.reason}`: why not: ", "\n", reasons)
	generated(t, operating, "\n`outcome` is ", "; `kind` is", telemetry.Listed(names))
}
