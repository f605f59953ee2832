package bench

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/lab/bench/endtoend"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

func TestReadOwnAllocations(t *testing.T) {
	const told = `goos: linux
BenchmarkHandler/own_allocations-2         	       1	    135515 ns/op	      1223 own-B/op	         5.517 own-allocs/op	    4152 B/op	      35 allocs/op
BenchmarkHandler/own_allocations-2         	       1	    206231 ns/op	      1224.5 own-B/op	         5.524 own-allocs/op
PASS
`
	if own, err := readOwnAllocations([]byte(told)); err != nil ||
		!slices.Equal(own.allocations, []float64{5.517, 5.524}) || !slices.Equal(own.bytes, []float64{1223, 1224.5}) {
		t.Errorf("%v, error %v", own, err)
	}
	if own, err := readOwnAllocations([]byte("PASS\n")); err != nil || len(own.allocations) > 0 {
		t.Errorf("of nothing: %v, error %v", own, err)
	}
	if own, err := readOwnAllocations([]byte("BenchmarkHandler/own_allocations-2 1 2 own-B/op 1.2.3 own-allocs/op\n")); err == nil {
		t.Errorf("%v without an error", own)
	}
}

// TestResultCountsTheVerdicts: what was not measured is not decided either.
func TestResultCountsTheVerdicts(t *testing.T) {
	m := &measured{rounds: 9, more: 24, endToEnd: new(endtoend.Result), libraries: new(libraries.Result)}
	m.own.allocations, m.own.bytes = slices.Repeat([]float64{4}, 9), slices.Repeat([]float64{650}, 9)
	want := fmt.Sprintf("**Result.** 1 of %d goals were reached, and 1 missed; the rounds do not decide %d. ", len(m.goals()), len(m.goals())-2)
	if got := m.result(); !strings.HasPrefix(got, want) {
		t.Errorf("%q, want %q first", got, want)
	}
	if text, want := m.howDecided(), "of 9 rounds it leaves out 0 at either end, of 33 rounds 8;"; !strings.Contains(text, want) {
		t.Errorf("%q lacks %q", text, want)
	}
}

func TestThousands(t *testing.T) {
	for f, want := range map[float64]string{0: "0", math.SmallestNonzeroFloat64: "0", 7.4: "7", 12.9: "13", 999.4: "999", 1234: "1,230", 75_781: "75,800", 1e6: "1,000,000"} {
		if got := report.Rounded(f); got != want {
			t.Errorf("%v is %q, want %q", f, got, want)
		}
	}
}

func TestProcessors(t *testing.T) {
	for micros, want := range map[float64]int{0: 0, 0.1: 1, 0.5: 1, 56: 112, 56.1: 113} {
		if got := processors(micros); got != want {
			t.Errorf("%v µs need %d, want %d", micros, got, want)
		}
	}
}

// TestCommit tells of a repository's commit and changes, and of nothing where
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
