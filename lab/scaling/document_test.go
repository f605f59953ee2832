package scaling

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestDocumentIsWhatTheProgramWrites runs the program on a copy: as a program, for
// with the race detector all that it simulates takes minutes.
func TestDocumentIsWhatTheProgramWrites(t *testing.T) {
	const docs = "../../docs"
	dir := t.TempDir()
	files := map[string]string{"scaling.md": filepath.Join(docs, "scaling.md")}
	for _, name := range []string{clientPicture, shardPicture} {
		files[name] = filepath.Join(docs, "img", name)
	}
	written := filepath.Join(dir, "scaling.md")
	if err := os.WriteFile(written, []byte(read(t, files["scaling.md"])), 0o600); err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), "go", "run", "..", "scaling", "-documents", docs, "-document", written, "-pictures", dir)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, file := range files {
		if read(t, filepath.Join(dir, name)) != read(t, file) {
			t.Errorf("%s is not what follows from the other documents; to write it: make scaling", file)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestRewriteKeepsWhatIsWrittenByHand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "document")
	before := "by hand\n<!-- what follows is written by make scaling, a -->\nold\n" + report.EndMark("scaling") + "by hand too\n"
	if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := report.RewriteSections(file, "scaling", map[string]string{"b": "new"}); err == nil || read(t, file) != before {
		t.Errorf("a section without a place: %v, %q", err, read(t, file))
	}
	if err := report.RewriteSections(file, "scaling", map[string]string{"a": "new\n"}); err != nil {
		t.Fatal(err)
	}
	if want := strings.Replace(before, "old\n", "\nnew\n\n", 1); read(t, file) != want {
		t.Errorf("%q, want %q", read(t, file), want)
	}
}

func TestFiguresAreRead(t *testing.T) {
	m := measured{"document", "It takes 161 bytes.\n\n| a | b | c | b |\n|---|---|---|---|\n| x | 1 | 2 | 3 |\n| x | y | 4.5 | 6 |\n\n| d | b |\n|---|---|\n| x | 7 |\n| y | 8.5 (-2 to 9.25) |\n| z | 8.5 (about) |\n"}
	for _, c := range []struct {
		table, column string
		row           []string
		want          float64
	}{{"a", "b", []string{"x"}, 1}, {"a", "c", []string{"x", "y"}, 4.5}, {"d", "b", []string{"x"}, 7}, {"d", "b", []string{"y"}, 8.5}} {
		if got, err := m.figure(c.table, c.column, c.row...); err != nil || got != c.want {
			t.Errorf("%+v: %v, %v", c, got, err)
		}
	}
	if _, err := m.figure("a", "b", "z"); err == nil {
		t.Error("a row that is not there was found")
	}
	if _, err := m.figure("a", "b", "x", "y"); err == nil {
		t.Error("a cell that is no number was read")
	}
	if _, err := m.figure("d", "b", "z"); err == nil {
		t.Error("a number with a remark was read as the median of rounds")
	}
	if got, err := m.stated(`takes (\d+) bytes`); err != nil || got != 161 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := m.stated(`gives (\d+) bytes`); err == nil {
		t.Error("what is not stated was found")
	}
}
