package report

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// TestWriteFillsTheTemplate requires every section once, and no place without one.
func TestWriteFillsTheTemplate(t *testing.T) {
	for _, c := range []struct{ template, want string }{
		{"before\n{{tables}}\nafter\n", "before\nnew\nafter\n"},
		{"before\n", ""},
		{"{{tables}} {{tables}}", ""},
		{"{{tables}} {{result}}", ""},
	} {
		dir := filepath.Join(t.TempDir(), "a", "b")
		err := Write(dir, "document", c.template, map[string]string{Tables: "new\n"}, map[string]fmt.Stringer{"picture": new(Table)})
		text, _ := os.ReadFile(filepath.Join(dir, "document"))
		_, pictured := os.Stat(filepath.Join(dir, "picture"))
		if written := err == nil && pictured == nil; string(text) != c.want || written != (c.want != "") {
			t.Errorf("%q: %q, %v, %v", c.template, text, err, pictured)
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

// TestRankKeepsTheConfidence computes the confidence from all outcomes of the coins.
func TestRankKeepsTheConfidence(t *testing.T) {
	confidenceOf := func(n, k int) float64 {
		inside := 0
		for outcome := range 1 << n {
			heads := bits.OnesCount(uint(outcome))
			if heads >= k && n-heads >= k {
				inside++
			}
		}
		return float64(inside) / float64(int(1)<<n)
	}
	for n, want := range []int{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3} {
		k := Rank(n)
		if k != want {
			t.Errorf("of %d values the rank is %d, want %d", n, k, want)
		}
		if k > 0 && confidenceOf(n, k) < 0.99 {
			t.Errorf("of %d values rank %d has a confidence of %v", n, k, confidenceOf(n, k))
		}
		if n > 1 && confidenceOf(n, k+1) >= 0.99 {
			t.Errorf("of %d values rank %d would do", n, k+1)
		}
	}
}

func TestInterval(t *testing.T) {
	rounds := []float64{12, 1, 11, 2, 10, 3, 9, 4, 8, 5, 7, 6}
	if low, high, ok := Interval(rounds); low != 2 || high != 11 || !ok {
		t.Errorf("%v to %v, %t", low, high, ok)
	}
	if rounds[0] != 12 {
		t.Errorf("the rounds are sorted: %v", rounds)
	}
	if _, _, ok := Interval(rounds[:7]); ok {
		t.Error("seven rounds have an interval")
	}
}

func TestAddRounds(t *testing.T) {
	for most, want := range map[int]string{
		0: "", 1: "0ab", 6: "0ab1ab2ab3ab4ab5ab", 7: "0ab1ab2ab3ab4ab5ab6b", 30: "0ab1ab2ab3ab4ab5ab6b7b8b9b10b11b",
	} {
		left, got := []string{"ab", "b", ""}, ""
		err := AddRounds(most, func() []string {
			those := strings.Split(left[0], "")
			left = left[1:]
			return those
		}, func(round int, those []string) error {
			got += strconv.Itoa(round) + strings.Join(those, "")
			return nil
		})
		if got != want || err != nil {
			t.Errorf("at most %d: %q, %v, want %q", most, got, err, want)
		}
	}
	failed := errors.New("failed")
	all := func() []int { return []int{1} }
	if err := AddRounds(2, all, func(int, []int) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("error %v, want %v", err, failed)
	}
}

// TestVerdictNeedsTheWholeInterval: the median alone decides nothing.
func TestVerdictNeedsTheWholeInterval(t *testing.T) {
	rounds := []float64{1, 2, 3, 4, 5, 6, 7, 8, 8.5, 8.6, 8.7, 9} // 2 to 8.7
	for _, c := range []struct {
		atLeast bool
		bound   float64
		rounds  []float64
		want    Verdict
	}{
		{false, 8.7, rounds, Reached},
		{false, 8.6, rounds, Undecided},
		{false, 2, rounds, Undecided},
		{false, 1.9, rounds, Missed},
		{true, 2, rounds, Reached},
		{true, 2.1, rounds, Undecided},
		{true, 8.7, rounds, Undecided},
		{true, 8.8, rounds, Missed},
		{false, 100, rounds[:7], Undecided},
		{false, 100, nil, Undecided},
		// In nine rounds one that stands out leaves it open; in fifteen two do not.
		{false, 5, []float64{4, 4, 4, 4, 4, 4, 4, 4, 99}, Undecided},
		{false, 5, []float64{4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 99, 99}, Reached},
	} {
		g := Goal{AtLeast: c.atLeast, Bound: c.bound, Rounds: c.rounds}
		if got := g.Verdict(); got != c.want {
			t.Errorf("at least %t, bound %v, rounds %v: %q, want %q", c.atLeast, c.bound, c.rounds, got, c.want)
		}
	}
}

func TestRatiosAreOfTheSameRound(t *testing.T) {
	same := func(f float64) float64 { return f }
	for _, more := range [][2][]float64{{{6, 8}, {2, 4, 5}}, {{6, 8, 9}, {2, 4}}} {
		if got, want := RatiosBy(more[0], more[1], same), []float64{3, 2}; !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

func TestTable(t *testing.T) {
	eight := []float64{1, 1.01, 1.02, 1.05, 1.051, 1.1, 1.15, 1.2}
	for _, test := range []struct {
		goal Goal
		want string
	}{
		{Goal{What: "memory", Bound: 1.2, Rounds: eight}, "| memory | ≤ 1.20 | 1.05 (1.00 to 1.20) | 8 | 1.00 to 1.20 | yes |"},
		{Goal{What: "memory", Bound: 1.19, Rounds: eight}, "| memory | ≤ 1.19 | 1.05 (1.00 to 1.20) | 8 | 1.00 to 1.20 | not decided |"},
		{Goal{What: "memory", Bound: 0.99, Rounds: eight}, "| memory | ≤ 0.99 | 1.05 (1.00 to 1.20) | 8 | 1.00 to 1.20 | **no** |"},
		{Goal{What: "memory", Bound: 1.1999, Rounds: eight}, "| memory | ≤ 1.20 | 1.05 (1.00 to 1.20) | 8 | 1.00 to 1.2000 | not decided |"},
		{Goal{What: "memory", Bound: 1.0001, Rounds: eight}, "| memory | ≤ 1.00 | 1.05 (1.00 to 1.20) | 8 | 1.0000 to 1.20 | not decided |"},
		{Goal{What: "take", AtLeast: true, Bound: 1.8, Rounds: eight[:1]}, "| take | ≥ 1.80 | 1.00 | 1 |  | not decided |"},
		{
			Goal{What: "redis", Bound: 9, Rounds: []float64{0.0004, 12.34, 12.34, 12.34, 12.34, 12.34, 12.34, 1234}},
			"| redis | ≤ 9.00 | 12.3 (0.00040 to 1234) | 8 | 0.00040 to 1234 | not decided |",
		},
	} {
		if lines := strings.Split(Goals([]Goal{test.goal}), "\n"); lines[2] != test.want {
			t.Errorf("%q, want %q", lines[2], test.want)
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

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 1234.5: "1234", 2: "2.00", 1.004: "1.00", 0.5: "0.5", 0.0123: "0.012", 0.000998: "0.001", 0.00012: "0.00012", 0.000046: "0.000046",
	} {
		if got := Number(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}

func TestThousands(t *testing.T) {
	for f, want := range map[float64]string{0: "0", math.SmallestNonzeroFloat64: "0", 7.4: "7", 12.9: "13", 999.4: "999", 1234: "1,230", 75_781: "75,800", 1e6: "1,000,000"} {
		if got := Rounded(f); got != want {
			t.Errorf("%v is %q, want %q", f, got, want)
		}
	}
}

// TestCommit checks what is said of a repository's commit and changes, and of nothing where
// there is no repository of the folder's own.
func TestCommit(t *testing.T) {
	dir := t.TempDir()
	// What is around the folder, and how its user has set up git, is left out.
	for name, value := range map[string]string{"GIT_CEILING_DIRECTORIES": filepath.Dir(dir), "GIT_CONFIG_GLOBAL": os.DevNull, "GIT_CONFIG_NOSYSTEM": "1"} {
		t.Setenv(name, value)
	}
	require := func(what, expression, folder string) {
		t.Helper()
		if got := commit(t.Context(), folder); !regexp.MustCompile("^" + expression + "$").MatchString(got) {
			t.Errorf("%s: %q, want %s", what, got, expression)
		}
	}
	git := func(args ...string) {
		t.Helper()
		who := []string{"-C", dir, "-c", "user.name=name", "-c", "user.email=mail@example.com"}
		if out, err := exec.CommandContext(t.Context(), "git", append(who, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	require("no repository", "", dir)
	git("init", "--quiet")
	require("no commit", "", dir)
	git("commit", "--quiet", "--allow-empty", "--message", "first")
	require("a commit", "[0-9a-f]{7,}", dir)
	git("tag", "v1.2.3")
	require("a tag", `v1\.2\.3`, dir)
	inner := filepath.Join(dir, "inner")
	if err := os.Mkdir(inner, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(inner, "new"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	require("a new file", `v1\.2\.3 and changes`, dir)
	require("a folder in a repository", "", inner)
}
