package shardlimit_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// goldenLine separates a golden's Caddyfile from the JSON that it adapts to.
const goldenLine = "\n----------\n"

// errorStart is how Caddy begins an error in a Caddyfile. Tables have dots instead.
const errorStart = "parsing caddyfile tokens for 'rate_limit': "

// TestCaddyfileGoldens compares whole Caddyfiles with the JSON that they adapt to.
func TestCaddyfileGoldens(t *testing.T) {
	for _, file := range shardlimit.Glob(t, "testdata/*.caddyfiletest") {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			must(t, "read the golden", err)
			caddyfile, expected, ok := strings.Cut(string(text), goldenLine)
			if !ok {
				t.Fatalf("%s has no line of dashes between the Caddyfile and what it adapts to", file)
			}
			got, err := adapt(caddyfile + "\n")
			must(t, "adapt", err)
			if *shardlimit.Update && string(got) != expected {
				must(t, "write the golden", os.WriteFile(file, []byte(caddyfile+goldenLine+string(got)), 0o600))
				expected = string(got)
			}
			checkConfig(t, got, expected)
		})
	}
}

// TestCaddyfileErrors checks that the Caddyfiles of the tables errors_*.txt do not adapt, and why.
func TestCaddyfileErrors(t *testing.T) {
	testTables(t, "testdata/errors_*.txt", func(t *testing.T, base shardlimit.Base, row *shardlimit.Row) {
		_, err := adapt(base.Fill(t, *row))
		if err == nil {
			t.Fatal("adapts; the tables options_*.txt have what does")
		}
		if !placed.MatchString(err.Error()) {
			t.Errorf("the error names no line: %v", err)
		}
		got := err.Error()
		if rest, ok := strings.CutPrefix(got, errorStart); ok {
			got = "... " + rest
		}
		if *shardlimit.Update {
			row.Expected = got
		}
		if got != row.Expected {
			t.Errorf("fails with\n%s\nwant\n%s", got, row.Expected)
		}
	})
}

// TestCaddyfileOptions checks what the lines of the tables options_*.txt add to the
// JSON of their base.
func TestCaddyfileOptions(t *testing.T) {
	testTables(t, "testdata/options_*.txt", func(t *testing.T, base shardlimit.Base, row *shardlimit.Row) {
		got, err := adapt(base.Fill(t, *row))
		must(t, "adapt", err)
		if *shardlimit.Update {
			row.Expected = base.Added(t, got)
		}
		checkConfig(t, got, base.Add(t, *row)+"\n")
	})
}

// testTables runs a test of each row of some tables, and with -update writes what the
// test changed.
func testTables(t *testing.T, pattern string, test func(*testing.T, shardlimit.Base, *shardlimit.Row)) {
	bases := shardlimit.ReadBases(t)
	for _, file := range shardlimit.Glob(t, pattern) {
		table := shardlimit.ReadTable(t, file)
		if len(table.Rows) == 0 {
			t.Errorf("%s has no rows", file)
		}
		for i := range table.Rows {
			row := &table.Rows[i]
			base, ok := bases[row.Base]
			if !ok {
				t.Fatalf("%s: row %s is below base %q, which bases.txt does not have", file, row.Name, row.Base)
			}
			t.Run(row.Name, func(t *testing.T) { test(t, base, row) })
		}
		if *shardlimit.Update {
			must(t, "write the table", table.Write(file))
		}
	}
}

// checkConfig checks the JSON that a Caddyfile adapts to, and that it loads.
func checkConfig(t *testing.T, got []byte, expected string) {
	t.Helper()
	if string(got) != expected {
		t.Errorf("adapts to\n%swant\n%s", got, expected)
	}
	if needsFile.Match(got) {
		return // It does not load without that file.
	}
	setPlaceholders(t, got)
	if err := caddytest.Validate(got); err != nil {
		t.Errorf("adapts, but does not load: %v", err)
	}
}

var (
	placed    = regexp.MustCompile(`Caddyfile:\d+`)
	envNames  = regexp.MustCompile(`\{env\.(\w+)\}`)
	needsFile = regexp.MustCompile(`\{file\.|"(ca|cert)":`)
)

// setPlaceholders sets a config's environment variables to distinct values, as addresses must be.
func setPlaceholders(t *testing.T, config []byte) {
	for i, match := range envNames.FindAllSubmatch(config, -1) {
		t.Setenv(string(match[1]), fmt.Sprintf("10.0.0.%d", i+1))
	}
}

var (
	// removed matches errors whose remedy is to remove a line.
	removed = regexp.MustCompile(`[:;,] (?:or )?remove (?:it|one|batch|rollout)\b`)
	// example matches a value that an error gives as an example.
	example = regexp.MustCompile(`(?:such as|as in|write) (.+?)(?:,? at Caddyfile|, \S+ \S| with a line|\)? \(|: )`)
	// filled replaces what an example leaves to the reader.
	filled     = strings.NewReplacer("<duration>", "1m", "<window>", "1m", "<n>", "10", "<events>", "10", "<key>", "static", "<name>", "other", "<host:port>", "localhost:6379", "{ ", "{\n", "; ", "\n", " }", "\n}", "…", "")
	lineNumber = regexp.MustCompile(`Caddyfile:(\d+)|in line (\d+)`)
)

// byHand are rows whose remedy takes more than the removal of what the error names.
var byHand = map[string]string{
	"shard_replica_before_primary":             "the other line of the two is the one to remove",
	"shard_sentinel_username_without_sentinel": "the next error is that of the password",
	"redis_sentinel_username_without_sentinel": "the next error is that of the password",
	"shard_url_and_username":                   "the next error is that of the password",
	"redis_url_empty":                          "a store without a url needs shards",
}

// TestRemediesOfErrors applies the remedies of the tables errors_*.txt: without the line that an error says to
// remove, or with the value that it gives as an example, a Caddyfile loads.
func TestRemediesOfErrors(t *testing.T) {
	applied := 0
	testTables(t, "testdata/errors_*.txt", func(t *testing.T, base shardlimit.Base, row *shardlimit.Row) {
		lines := strings.Split(base.Fill(t, *row), "\n")
		isRemoval := removed.MatchString(row.Expected)
		var tries []string
		for _, m := range lineNumber.FindAllStringSubmatch(row.Expected, -1) {
			n, _ := strconv.Atoi(m[1] + m[2])
			if isRemoval {
				tries = append(append(tries, without(lines, n-1)), withoutWords(lines, n-1, row.Expected)...)
			}
			for _, value := range example.FindAllStringSubmatch(row.Expected, -1) {
				for alternative := range strings.SplitSeq(value[1], " or ") {
					tries = append(tries, withValue(lines, n-1, filled.Replace(alternative))...)
				}
			}
		}
		if len(tries) == 0 {
			return
		}
		var failures []string
		for _, try := range tries {
			config, err := adapt(try)
			if err == nil && !needsFile.Match(config) {
				setPlaceholders(t, config)
				err = caddytest.Validate(config)
			}
			if err == nil {
				applied++
				return
			}
			failures = append(failures, err.Error())
		}
		if isRemoval && byHand[row.Name] == "" {
			t.Errorf("the remedy of %s does not work:\n%s", row.Expected, strings.Join(failures, "\n"))
		}
	})
	if applied < 180 {
		t.Errorf("%d remedies were applied", applied)
	}
}

// without returns a Caddyfile without a line, and the block that begins there.
func without(lines []string, n int) string {
	end := n + 1
	if strings.HasSuffix(lines[n], "{") {
		indent := lines[n][:len(lines[n])-len(strings.TrimLeft(lines[n], "\t"))]
		end += slices.Index(lines[n:], indent+"}")
	}
	return strings.Join(slices.Delete(slices.Clone(lines), n, end), "\n")
}

// withoutWords returns Caddyfiles without one of the words of a line that an error names, or all of them.
func withoutWords(lines []string, n int, problem string) (all []string) {
	words, named := strings.Fields(lines[n]), strings.FieldsFunc(problem, func(r rune) bool { return strings.ContainsRune(" ,:;()\"", r) })
	isNamed := func(word string) bool { return word == `""` || slices.Contains(named, strings.Trim(word, `"`)) }
	try := func(kept []string) {
		changed := slices.Clone(lines)
		changed[n] = strings.Join(kept, " ")
		all = append(all, strings.Join(changed, "\n"))
	}
	for i := 1; i < len(words); i++ {
		if isNamed(words[i]) {
			try(slices.Delete(slices.Clone(words), i, i+1))
		}
	}
	if len(words) > 0 {
		try(append(words[:1:1], slices.DeleteFunc(slices.Clone(words[1:]), isNamed)...))
	}
	return all
}

// withValue returns Caddyfiles with a value in place of the last words of a line, or of the whole line.
func withValue(lines []string, n int, value string) (all []string) {
	words := strings.Fields(lines[n])
	for keep := range words {
		changed := slices.Clone(lines)
		changed[n] = strings.Join(append(slices.Clone(words[:keep]), value), " ")
		all = append(all, strings.Join(changed, "\n"))
	}
	return append(all, strings.Join(slices.Insert(slices.Clone(lines), n+1, value), "\n"))
}
