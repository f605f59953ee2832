package shardlimit_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
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
