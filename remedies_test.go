package shardlimit_test

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

var (
	// removed matches errors whose remedy is to remove a line.
	removed = regexp.MustCompile(`[:;,] (?:or )?remove (?:it|one|batch|rollout)\b`)
	// example matches a value that an error gives as an example.
	example = regexp.MustCompile(`(?:such as|as in|write) (.+?)(?:,? at Caddyfile|, \S+ \S| with a line|\)? \(|: )`)
	// filled replaces what an example leaves to the reader.
	filled     = strings.NewReplacer("<duration>", "1m", "<window>", "1m", "<n>", "10", "<events>", "10", "<key>", "static", "<name>", "other", "<host:port>", "localhost:6379", "{ ", "{\n", "; ", "\n", " }", "\n}", "…", "")
	lineNumber = regexp.MustCompile(`Caddyfile:(\d+)|in line (\d+)`)
)

// byHand are rows whose remedy takes more than a line.
var byHand []string

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
				tries = append(append(tries, without(lines, n-1)), withValue(lines, n-1, "")...)
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
		if isRemoval && !slices.Contains(byHand, row.Name) {
			t.Errorf("the remedy of %s does not work:\n%s", row.Expected, strings.Join(failures, "\n"))
		}
		if os.Getenv("SHOWX") != "" {
			t.Logf("XX %s\n   %s", row.Expected, strings.Join(failures, "\n   "))
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
