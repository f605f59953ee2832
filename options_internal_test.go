package shardlimit

import (
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
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

// blocksOf returns the options of a block, and those of the blocks in it.
func blocksOf(rows []option.Row) (blocks [][]option.Row) {
	blocks = append(blocks, rows)
	for _, row := range rows {
		if row.Block != nil {
			blocks = append(blocks, blocksOf(row.Block)...)
		}
	}
	return blocks
}

// TestOptionsAreDocumented checks the tables of options in docs/configuration.md.
func TestOptionsAreDocumented(t *testing.T) {
	for _, rows := range [][]option.Row{new(Handler).options(nil), memorystore.Rows(), redisstore.Rows()} {
		documented(t, rows)
	}
}

// documented checks the tables with these options, and those of their blocks.
func documented(t *testing.T, rows []option.Row) {
	t.Helper()
	var sections []string
	for _, row := range slices.Concat(blocksOf(rows)...) {
		if row.Section != "" && !slices.Contains(sections, row.Section) {
			sections = append(sections, row.Section)
		}
	}
	for _, section := range sections {
		// The table is the first in its section, and ends at an empty line.
		const head = "| option | meaning | default |\n"
		text, err := os.ReadFile("docs/configuration.md")
		if err != nil {
			t.Fatal(err)
		}
		_, rest, ok := strings.Cut(string(text), "\n### "+section+"\n")
		intro, _, _ := strings.Cut(rest, head)
		if !ok || strings.Contains(intro, "\n#") {
			t.Errorf("docs/configuration.md has no section %q with a table of options", section)
			continue
		}
		generated(t, "docs/configuration.md", "\n### "+section+"\n"+intro, "\n\n", strings.TrimSuffix(option.Reference(rows, section), "\n"))
	}
}

// TestOptionsInTheGrammar checks the grammar of the directive in its two places.
func TestOptionsInTheGrammar(t *testing.T) {
	lines := append([]string{"rate_limit [<matcher>] <key> <events> <window> [<name>]", "", "rate_limit [<matcher>] {"},
		append(indent(option.Grammar(new(Handler).options(nil)), "\t"), "}")...)
	generated(t, "docs/configuration.md", "\n## Zones\n\n```\n", "\n```", strings.Join(lines, "\n"))
	comment := strings.ReplaceAll(strings.Join(indent(lines, "//\t"), "\n"), "//\t\n", "//\n")
	generated(t, "caddyfile.go", "// parseDirective parses the rate_limit directive:\n//\n", "\n//\n// It only translates.", comment)
}

// TestOptionsInTheGrammarOfStores checks the grammar of the stores in its places.
func TestOptionsInTheGrammarOfStores(t *testing.T) {
	var stores []string
	for _, store := range []struct {
		name, file string
		rows       []option.Row
	}{{"memory", "memorystore/store.go", memorystore.Rows()}, {"redis", "redisstore/caddyfile.go", redisstore.Rows()}} {
		lines := slices.Concat([]string{store.name + " {"}, indent(option.Grammar(store.rows), "\t"), []string{"}"})
		generated(t, store.file, "// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:\n//\n", "\nfunc ", strings.Join(indent(lines, "//\t"), "\n"))
		lines[0] = "store [<name>] " + lines[0]
		stores = append(stores, indent(lines, "\t\t")...)
	}
	generated(t, "docs/configuration.md", "\n## Stores\n\n```\n{\n\trate_limit {\n", "\n\t}\n}\n```", strings.Join(stores, "\n"))
}

// TestOptionsAreNoOtherNames checks that no option is among the names that are none.
func TestOptionsAreNoOtherNames(t *testing.T) {
	blocks := slices.Concat(blocksOf(new(Handler).options(nil)), blocksOf(memorystore.Rows()), blocksOf(redisstore.Rows()))
	for _, row := range slices.Concat(append(blocks, new(Handler).pluginOptions())...) {
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
	mayDiffer := []string{"Name", "MatcherSetsRaw", "Enforce"}
	// Fields that count beside others only.
	beside := map[string]Zone{
		"EventsFallback": {Events: "{x}"}, "BurstFallback": {Burst: "{x}"}, "MaxWaitQueue": {MaxWait: 1},
		"TimeZone": {Calendar: "week"}, "WeekStarts": {Calendar: "week"}, "Align": {Window: 1},
	}
	values := map[string]string{"Charge": `"before"`, "WeekStarts": `"sunday"`, "Reserves": `[{"percent": 5}]`}
	for i := range reflect.TypeFor[Zone]().NumField() {
		field := reflect.TypeFor[Zone]().Field(i)
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
