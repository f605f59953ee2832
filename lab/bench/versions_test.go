package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

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
