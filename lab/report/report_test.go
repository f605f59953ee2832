package report

import (
	"os"
	"path/filepath"
	"testing"
)

// TestRewriteKeepsWhatIsWrittenByHand requires that only what follows the mark
// is replaced, and that a document without one is left alone.
func TestRewriteKeepsWhatIsWrittenByHand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "document")
	mark := Mark("it")
	for _, c := range []struct{ old, want string }{
		{"by hand\n" + mark + "old\n", "by hand\n" + mark + "\nnew\n"},
		{"by hand\n", ""},
	} {
		if err := os.WriteFile(file, []byte(c.old), 0o600); err != nil {
			t.Fatal(err)
		}
		err := Rewrite(file, "it", "new\n")
		got, readErr := os.ReadFile(file)
		if readErr != nil {
			t.Fatal(readErr)
		}
		if want := c.want; want != "" && string(got) != want || want == "" && (err == nil || string(got) != c.old) {
			t.Errorf("rewriting %q: %q, %v", c.old, got, err)
		}
	}
}
