package shardlimit

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/memorystore"
	"github.com/shardlimit/caddy-shardlimit/redisstore"
)

// generated compares the text between a beginning and an end in a file with what is
// generated, and writes it with -update.
func generated(t *testing.T, file, begin, end, want string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	got, after, ok2 := strings.Cut(rest, end)
	switch {
	case !ok || !ok2:
		t.Errorf("%s has no text between %q and %q", file, begin, end)
	case got == want:
	case *Update:
		if err := os.WriteFile(file, []byte(before+begin+want+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("%s has\n%s\nbut the options are\n%s\nwrite them with go test -run TestOptions . -update", file, got, want)
	}
}

// allOptions are the options of all blocks; rows that have a block come with those in it.
func allOptions() []option.Row {
	return slices.Concat(new(Handler).options(nil), memorystore.Rows(), redisstore.Rows())
}

// TestOptionsAreDocumented checks the tables of options in docs/configuration.md.
func TestOptionsAreDocumented(t *testing.T) {
	const file, head = "docs/configuration.md", "| option | meaning | default |\n"
	var sections []string
	for _, row := range option.Flatten(allOptions()) {
		// Some rows share the documentation of another one, or are no option.
		if row.Section == "" && row.Doc != "" {
			t.Errorf("%s is in no section", row.Name)
		} else if row.Section != "" && !slices.Contains(sections, row.Section) {
			sections = append(sections, row.Section)
		}
	}
	tables := 0
	for _, section := range sections {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		tables = strings.Count(string(text), head)
		// The table is the first in its section, and ends at an empty line.
		_, rest, ok := strings.Cut(string(text), "\n### "+section+"\n")
		intro, _, _ := strings.Cut(rest, head)
		if !ok || strings.Contains(intro, "\n#") {
			t.Errorf("%s has no section %q with a table of options", file, section)
			continue
		}
		want := strings.TrimSuffix(option.Reference(allOptions(), section), "\n")
		generated(t, file, "\n### "+section+"\n"+intro, "\n\n", want)
	}
	if tables != len(sections) {
		t.Errorf("%s has %d tables of options, but the options are in %d sections", file, tables, len(sections))
	}
}

// TestOptionsInTheGrammar checks the grammar in the documentation and in comments.
func TestOptionsInTheGrammar(t *testing.T) {
	directive := slices.Concat(
		[]string{"rate_limit [<matcher>] <key> <events> <window> [<name>]", ""},
		block("rate_limit [<matcher>]", option.Grammar(new(Handler).options(nil))))
	memory, redis := option.Grammar(memorystore.Rows()), option.Grammar(redisstore.Rows())
	const docs = "docs/configuration.md"
	generated(t, docs, "\n## Zones\n\n```\n", "\n```", strings.Join(directive, "\n"))
	generated(t, docs, "\n## Stores\n\n```\n", "\n```", strings.Join(block("", block("rate_limit", slices.Concat(
		block("store [<name>] memory", memory), block("store [<name>] redis", redis)))), "\n"))
	for _, comment := range []struct {
		file, begin, end string
		lines            []string
	}{
		{"caddyfile.go", "// parseDirective parses the rate_limit directive:\n//\n", "\n//\n// It only translates.", directive},
		{"memorystore/store.go", "// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:\n//\n", "\nfunc ", block("memory", memory)},
		{"redisstore/caddyfile.go", "// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:\n//\n", "\nfunc ", block("redis", redis)},
	} {
		text := strings.Join(indent(comment.lines, "//\t"), "\n")
		generated(t, comment.file, comment.begin, comment.end, strings.ReplaceAll(text, "//\t\n", "//\n"))
	}
}

// block is a block of a Caddyfile.
func block(name string, lines []string) []string {
	return slices.Concat([]string{strings.TrimSpace(name + " {")}, indent(lines, "\t"), []string{"}"})
}

// TestOptionsAreNoOtherNames checks that no option is among the names that are none.
func TestOptionsAreNoOtherNames(t *testing.T) {
	for _, row := range slices.Concat(option.Flatten(allOptions()), new(Handler).pluginOptions()) {
		if instead := option.Instead(row.Name); instead != "" {
			t.Errorf("%s is an option, but the compatibility table says %s", row.Name, instead)
		}
	}
	if option.Instead("dry_run") == "" {
		t.Error("nothing is known to write in place of dry_run")
	}
}

func indent(lines []string, by string) (indented []string) {
	for _, line := range lines {
		indented = append(indented, by+line)
	}
	return indented
}

// TestDefinitionHasAllFields checks that zones that differ in one field differ in their
// definitions, but for fields that may differ.
func TestDefinitionHasAllFields(t *testing.T) {
	mayDiffer := []string{"Name", "MatcherSetsRaw", "Status", "Enforce"}
	// Fields that count beside others only.
	beside := map[string]Zone{
		"EventsFallback": {Events: "{x}"}, "BurstFallback": {Burst: "{x}"}, "MaxWaitQueue": {MaxWait: 1},
		"TimeZone": {Calendar: "week"}, "WeekStarts": {Calendar: "week"}, "Align": {Window: 1},
	}
	values := map[string]string{"Charge": `"before"`, "WeekStarts": `"sunday"`, "Reserves": `[{"percent": 5}]`}
	for i := range reflect.TypeFor[Zone]().NumField() {
		field := reflect.TypeFor[Zone]().Field(i)
		if !field.IsExported() {
			continue
		}
		z := beside[field.Name]
		before := z.definition()
		value, ok := values[field.Name]
		if !ok {
			value = map[reflect.Type]string{
				reflect.TypeFor[string](): `"other"`, reflect.TypeFor[Amount](): `7`, reflect.TypeFor[Batch](): `7`, reflect.TypeFor[Texts](): `["x"]`,
				reflect.TypeFor[StatusList](): `[201]`, reflect.TypeFor[int](): `7`, reflect.TypeFor[int64](): `7`, reflect.TypeFor[*int64](): `7`,
				reflect.TypeFor[bool](): `true`, reflect.TypeFor[caddy.Duration](): `"7s"`, reflect.TypeFor[*float64](): `7`,
				reflect.TypeFor[caddyhttp.RawMatcherSets](): `[{"method": ["GET"]}]`,
			}[field.Type]
		}
		if err := json.Unmarshal([]byte(value), reflect.ValueOf(&z).Elem().Field(i).Addr().Interface()); err != nil {
			t.Fatalf("%s is set to %s: %v", field.Name, value, err)
		}
		if may := slices.Contains(mayDiffer, field.Name); (z.definition() == before) != may {
			t.Errorf("%s may differ: %v; it is defined as %q, and without it as %q", field.Name, may, z.definition(), before)
		}
	}
}

func TestDefinition(t *testing.T) {
	const second, minute = caddy.Duration(time.Second), caddy.Duration(time.Minute)
	match := caddyhttp.RawMatcherSets{caddy.ModuleMap{"method": []byte(`["GET"]`)}}
	for want, zones := range map[string][]Zone{
		"key k, events 10, window 1m0s": {
			{Key: Texts{"k"}, Events: "10", Window: minute},
			{Key: Texts{"k"}, Events: "0010", Window: minute, Algorithm: "fixed_window", Charge: "after", Cost: "01"},
			{Key: Texts{"k"}, Events: "10", Window: minute, CountStatusNot: StatusList{"304"}, MaxWaitQueue: limiter.DefaultMaxWaitQueue, Batch: "off"},
			{Key: Texts{"k"}, Events: "10", Window: minute, Name: "n", MatcherSetsRaw: match},
		},
		`key a "b c", events {x} 5, window 1s, algorithm sliding_window`: {
			{Key: Texts{"a", "b c"}, Events: "{x}", EventsFallback: 5, Window: second, Algorithm: "sliding_window"},
		},
		"key k, events 10, window 1s aligned, cost {x}, charge before, count_status not 304 5xx": {
			{Key: Texts{"k"}, Events: "10", Window: second, Align: true, Cost: "{x}", Charge: "before", CountStatusNot: StatusList{"5xx", "304", "5xx"}},
		},
		"key k, events 10, window day": {
			{Key: Texts{"k"}, Events: "10", Calendar: "day"},
			{Key: Texts{"k"}, Events: "10", Calendar: "day", TimeZone: "UTC"},
		},
		"key k, events 10, window week in Asia/Tokyo": {
			{Key: Texts{"k"}, Events: "10", Calendar: "week", TimeZone: "Asia/Tokyo", WeekStarts: "monday"},
		},
		"key k, events 10, window week from sunday": {
			{Key: Texts{"k"}, Events: "10", Calendar: "week", WeekStarts: "sunday"},
		},
		"key k, events 10, window 1s, charge before, batch 5": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "5"},
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "05"},
		},
		"key k, events 10, window 1s, charge before, batch auto": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto"},
		},
		"key k, events 10, window 1s, cost 0, count_status all": {
			{Key: Texts{"k"}, Events: "10", Window: second, Cost: "0", CountStatus: StatusList{"all"}},
		},
		"key k, events 10, window 1s, algorithm gcra": {
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra"},
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra", Burst: "10"},
		},
		"key k, events 10, window 1s, algorithm gcra, burst 11": {
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra", Burst: "11"},
		},
		"key k, events {x} 10, window 1s, algorithm gcra, burst 10": {
			{Key: Texts{"k"}, Events: "{x}", EventsFallback: 10, Window: second, Algorithm: "gcra", Burst: "10"},
		},
		"key k, events 10, algorithm concurrency": {
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency"},
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency", Charge: "before", Window: caddy.Duration(defaultLease)},
		},
		"key k, events 10, window 1s, algorithm concurrency": {
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency", Window: second},
		},
		"key k, events 10, window 1s, count_status 401 403, max_wait 1s 5, penalty 1m0s": {
			{Key: Texts{"k"}, Events: "10", Window: second, CountStatus: StatusList{"403", "401"}, MaxWait: second, MaxWaitQueue: 5, Penalty: minute},
		},
		"key k, events 10, window 1s, reserve 10, reserve 5": {
			{Key: Texts{"k"}, Events: "10", Window: second, Reserves: []*Reserve{{Percent: 10}, {Percent: 5}}},
			{Key: Texts{"k"}, Events: "10", Window: second, Reserves: []*Reserve{{Percent: 10, MatcherSetsRaw: match}, {Percent: 5}}},
		},
		"key k, events 10, window 1s, ipv4_prefix 24, ipv6_prefix 64, on_error deny": {
			{Key: Texts{"k"}, Events: "10", Window: second, IPv4Prefix: 24, IPv6Prefix: 64, OnError: "deny"},
		},
	} {
		for i := range zones {
			if got := zones[i].definition(); got != want {
				t.Errorf("definition is\n%s, want\n%s", got, want)
			}
		}
	}
}

func TestNearest(t *testing.T) {
	zone := option.Names(new(Zone).options(httpcaddyfile.Helper{}))
	redis := option.Names(redisstore.Rows())
	for _, test := range []struct {
		word  string
		known []string
		want  string
	}{
		// Slips.
		{"evnets", zone, "events"},
		{"event", zone, "events"},
		{"windw", zone, "window"},
		{"windows", zone, "window"},
		{"ley", zone, "key"},
		{"kye", zone, "key"},
		{"costs", zone, "cost"},
		{"max_wiat", zone, "max_wait"},
		{"max_wait_que", zone, "max_wait"},
		{"ipv5_prefix", zone, "ipv4_prefix"},
		{"check_timout", redis, "check_timeout"},
		{"pasword", redis, "password"},
		// Other forms.
		{"countStatus", zone, "count_status"},
		{"count-status", zone, "count_status"},
		{"EVENTS", zone, "events"},
		// Beginnings, and what has more at its end.
		{"algo", zone, "algorithm"},
		{"ipv6", zone, "ipv6_prefix"},
		{"on", zone, "on_error"},
		{"window_size", zone, "window"},
		{"max", zone, "max_wait"},
		{"ipv", zone, ""},
		// Parts.
		{"max_events", zone, "events"},
		{"redis_password", redis, "password"},
		// Other words.
		{"limit", zone, ""},
		{"rate", zone, ""},
		{"", zone, ""},
		{"k", zone, ""},
		{"x", nil, ""},
	} {
		if got := option.Nearest(test.word, test.known); got != test.want {
			t.Errorf("nearest to %q is %q, want %q", test.word, got, test.want)
		}
	}
}

// TestNearestIsItself checks that a known word is the nearest to itself.
func TestNearestIsItself(t *testing.T) {
	blocks := [][]option.Row{new(Handler).options(nil), new(Zone).options(httpcaddyfile.Helper{}), redisstore.Rows()}
	for _, row := range redisstore.Rows() {
		blocks = append(blocks, row.Block)
	}
	for _, block := range blocks {
		known := option.Names(block)
		for _, word := range known {
			if got := option.Nearest(word, known); got != word {
				t.Errorf("nearest to %s is %s", word, got)
			}
		}
	}
}

// notByRow are the fields that no row of the options sets, or sets as a whole. Their comments stand by themselves.
var notByRow = []string{
	"Rollout.store", "Rollout.percent", "Zone.name", "Reserve.percent", "Reserve.match",
	"Shard.name", "Sentinel.master", "Sentinel.addrs", "PasswordCommand.command",
}

// TestOptionsInComments compares the comments of fields, which Caddy's documentation shows, with the rows.
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
	// Backward, so that the offsets of earlier fields stay valid.
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
