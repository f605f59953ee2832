package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/lab/bench/endtoend"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/service"
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
	m := &measured{rounds: 9, more: 24, endToEnd: new(endtoend.Result), libraries: new(libraries.Result), services: new(service.Result)}
	m.own.allocations, m.own.bytes = slices.Repeat([]float64{4}, 9), slices.Repeat([]float64{650}, 9)
	want := fmt.Sprintf("**Result.** 1 of %d goals were reached, and 1 missed; the rounds do not decide %d. ", len(m.goals()), len(m.goals())-2)
	if got := m.result(); !strings.HasPrefix(got, want) {
		t.Errorf("%q, want %q first", got, want)
	}
	if text, want := m.howDecided(), "Of 9 rounds that range leaves out 0 at either end, of 33 rounds 8;"; !strings.Contains(text, want) {
		t.Errorf("%q lacks %q", text, want)
	}
}

// TestRun takes the measurements of this package.
func TestRun(t *testing.T) {
	o, err := ownAllocations(t.Context(), 1)
	if err != nil || o.allocations[0] <= 0 || o.bytes[0] <= 0 {
		t.Errorf("own allocations are %v, error %v", o, err)
	}
	if all, err := versions(); err != nil || len(all) == 0 {
		t.Errorf("versions are %v, error %v", all, err)
	}
}

// TestPlacesAreFilled: each place of the document is that of a section. The packages that measure test the reverse.
func TestPlacesAreFilled(t *testing.T) {
	var code strings.Builder
	files, err := filepath.Glob("*/*.go")
	for _, file := range append(files, "bench.go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, failed := os.ReadFile(file)
		code.Write(text)
		err = errors.Join(err, failed)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, place := range regexp.MustCompile(`\{\{(.*?)\}\}`).FindAllStringSubmatch(template, -1) {
		if !strings.Contains(code.String(), strconv.Quote(place[1])) {
			t.Errorf("no section is %s", place[0])
		}
	}
}
