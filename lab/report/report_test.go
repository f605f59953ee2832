package report

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestRewriteKeepsWhatIsWrittenByHand requires that only what is between the marks is
// replaced, and that a document without them is left alone.
func TestRewriteKeepsWhatIsWrittenByHand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "document")
	mark, end := Mark("it", Tables), EndMark("it")
	for _, c := range []struct{ old, want string }{
		{"by hand\n" + mark + "old\n" + end + "by hand too\n", "by hand\n" + mark + "\nnew\n\n" + end + "by hand too\n"},
		{"by hand\n" + mark + "old\n", ""},
		{"by hand\n", ""},
	} {
		if err := os.WriteFile(file, []byte(c.old), 0o600); err != nil {
			t.Fatal(err)
		}
		err := Rewrite(file, "it", map[string]string{Tables: "new\n"})
		got, readErr := os.ReadFile(file)
		if readErr != nil {
			t.Fatal(readErr)
		}
		if want := c.want; want != "" && string(got) != want || want == "" && (err == nil || string(got) != c.old) {
			t.Errorf("rewriting %q: %q, %v", c.old, got, err)
		}
	}
}

// TestDocumentsHaveTheMarks requires that each program finds its places in its document.
func TestDocumentsHaveTheMarks(t *testing.T) {
	for target, document := range map[string]string{
		"algorithms": "algorithms.md", "bench": "benchmarks.md", "calls": "calls.md", "faults": "faults.md", "guarantees": "guarantees.md",
	} {
		text, err := os.ReadFile(filepath.Join("../../docs/evidence", document))
		if err != nil {
			t.Fatal(err)
		}
		for _, section := range []string{Result, Tables} {
			if mark := Mark(target, section); strings.Count(string(text), mark) != 1 {
				t.Errorf("%s has not one line %q", document, mark)
			}
		}
	}
}

func TestOf(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   Spread
	}{
		{nil, Spread{}},
		{[]float64{3}, Spread{3, 3, 3}},
		{[]float64{3, 1, 2}, Spread{2, 1, 3}},
		{[]float64{4, 1, 2, 8}, Spread{3, 1, 8}},
		{[]float64{3, 1, 2, 5, 4}, Spread{3, 1, 5}},
	} {
		if got := SpreadOf(c.values); got != c.want {
			t.Errorf("%v: %v, want %v", c.values, got, c.want)
		}
	}
}

func TestOfKeepsTheOrderOfRounds(t *testing.T) {
	values := []float64{3, 1, 2}
	if SpreadOf(values); !slices.Equal(values, []float64{3, 1, 2}) {
		t.Errorf("the rounds are %v", values)
	}
}

func TestText(t *testing.T) {
	for _, c := range []struct {
		spread       Spread
		format, want string
	}{
		{Spread{1.234, 1, 2}, "%.2f", "1.23 (1.00 to 2.00)"},
		{Spread{1.234, 1.23, 1.24}, "%.2f", "1.23 (1.23 to 1.24)"},
		{Spread{1.234, 1.23, 1.24}, "%.1f", "1.2"},
		{Spread{0, -1, 1}, "%.0f", "0 (-1 to 1)"},
		{Spread{}, "%.0f", "0"},
	} {
		if got := c.spread.Text(c.format); got != c.want {
			t.Errorf("%v as %s is %q, want %q", c.spread, c.format, got, c.want)
		}
	}
}

func TestAs(t *testing.T) {
	percent := func(f float64) string { return strconv.Itoa(int(100*f)) + " %" }
	if got, want := (Spread{0.5, 0.25, 0.75}).As(percent), "50 % (25 % to 75 %)"; got != want {
		t.Errorf("the text is %q, want %q", got, want)
	}
}

func TestTable(t *testing.T) {
	for _, test := range []struct {
		goal Goal
		want string
	}{
		{Goal{What: "memory", Bound: 1.06, Spread: Spread{Median: 1.05, Least: 1, Most: 1.2}}, "| memory | ≤ 1.06 | 1.05 (1.00 to 1.20) | yes |"},
		{Goal{What: "memory", Bound: 1.06, Spread: Spread{Median: 1.061, Least: 1, Most: 1.2}}, "| memory | ≤ 1.06 | 1.06 (1.00 to 1.20) | **no** |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Spread: Spread{Median: 1.8, Least: 1.5, Most: 2}}, "| take | ≥ 1.80 | 1.80 (1.50 to 2.00) | yes |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Spread: Spread{Median: 1.5, Least: 1.5, Most: 2}}, "| take | ≥ 1.80 | 1.50 (1.50 to 2.00) | **no** |"},
		{Goal{What: "redis", Bound: 9, Unit: " µs", Spread: Spread{Median: 12.34, Least: 0.0004, Most: 1234}}, "| redis | ≤ 9.00 µs | 12.3 (0.00040 to 1234) µs | **no** |"},
		{Goal{What: "calls", Bound: 2, Spread: Spread{Median: 1.001, Least: 1, Most: 1.004}}, "| calls | ≤ 2.00 | 1.00 | yes |"},
	} {
		if lines := strings.Split(Goals([]Goal{test.goal}), "\n"); lines[2] != test.want {
			t.Errorf("%q, want %q", lines[2], test.want)
		}
	}
}

func TestWrkVersion(t *testing.T) {
	for told, want := range map[string]string{
		"wrk debian/4.1.0-3+b2 [epoll] Copyright (C) 2012 Will Glozer\nUsage: wrk <options> <url>\n": "wrk 4.1.0-3+b2",
		"wrk 4.2.0 [epoll] Copyright (C) 2012 Will Glozer\n":                                         "wrk 4.2.0",
		"":                     "no wrk",
		"sh: not found: wrk\n": "no wrk",
	} {
		if got := wrkVersion(told); got != want {
			t.Errorf("%q is %q, want %q", told, got, want)
		}
	}
}

func TestStolenSince(t *testing.T) {
	before := parseTimes("cpu  100 0 50 800 0 0 0 50 10 0\ncpu0 1 2 3\n")
	after := parseTimes("cpu  150 0 100 850 0 0 0 100 20 0\ncpu0 1 2 3\n")
	if got := after.StolenSince(before); got != 0.25 {
		t.Errorf("%v, want a quarter", got)
	}
	for _, stat := range []string{"", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "cpu 1 2 3 4 5 6 7 x 9"} {
		if got := parseTimes(stat); got != (Times{}) {
			t.Errorf("%q: %+v", stat, got)
		}
		if got := parseTimes(stat).StolenSince(after); got != 0 {
			t.Errorf("%q: %v", stat, got)
		}
	}
	if ReadTimes().StolenSince(Times{}) < 0 {
		t.Error("less than nothing was stolen")
	}
}
