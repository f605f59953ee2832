// Package docs tests the documents and the files that no program compiles: links, promises, rules of
// contributing, workflows, dashboards and alerts. It links no Caddy; tests that adapt or load a config are in
// examples and e2e.
package docs

import (
	"fmt"
	"os"
	"testing"
)

// TestMain runs the tests at the root of the repository, so that they name files as the documents do.
func TestMain(m *testing.M) {
	if err := os.Chdir(".."); err != nil {
		panic(err)
	}
	m.Run()
}

// must ends the test unless err is nil.
func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// want returns an error unless got is want.
func want[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, want %v", what, got, want)
	}
	return nil
}

// read returns the text of a file.
func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read", err)
	return string(text)
}
