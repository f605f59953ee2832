package docs

import (
	"path/filepath"
	"strings"
	"testing"
)

// mostRootTests bounds the test files of the root: a test of what is shipped stands beside it.
const mostRootTests = 12

func TestRootHasFewTestFiles(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil || len(files) == 0 || len(files) > mostRootTests {
		t.Errorf("%d test files, error %v; want at most %d", len(files), err, mostRootTests)
	}
}

// TestSleepsHaveReasons: a test waits for a condition or moves a clock. One that sleeps says why beside the sleep,
// unless its file moves clocks.
func TestSleepsHaveReasons(t *testing.T) {
	seen := 0
	visitTestFiles(t, func(file, text string) {
		if strings.Contains(text, `"testing/synctest"`) {
			return
		}
		before := ""
		for n, line := range strings.Split(text, "\n") {
			code, comment, _ := strings.Cut(line, "//")
			if strings.Contains(code, "time.Sleep"+"(") {
				if seen++; comment == "" && !strings.HasPrefix(strings.TrimSpace(before), "//") {
					t.Errorf("%s:%d: write the reason of the sleep beside it, or wait for a condition", file, n+1)
				}
			}
			before = line
		}
	})
	if seen == 0 {
		t.Error("there are no sleeps")
	}
}
