package docs

import (
	"io/fs"
	"os"
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
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (path == "bin" || path == "dist" || path == ".git") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || strings.Contains(string(text), `"testing/synctest"`) {
			return err
		}
		before := ""
		for n, line := range strings.Split(string(text), "\n") {
			code, comment, _ := strings.Cut(line, "//")
			if strings.Contains(code, "time.Sleep"+"(") {
				if seen++; comment == "" && !strings.HasPrefix(strings.TrimSpace(before), "//") {
					t.Errorf("%s:%d: write the reason of the sleep beside it, or wait for a condition", path, n+1)
				}
			}
			before = line
		}
		return nil
	})
	if err != nil || seen == 0 {
		t.Errorf("%d sleeps, error %v", seen, err)
	}
}
