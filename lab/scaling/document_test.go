package scaling

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestDocumentIsWhatTheProgramWrites runs the program on a copy: as a program, for
// with the race detector all that it simulates takes minutes.
func TestDocumentIsWhatTheProgramWrites(t *testing.T) {
	const docs = "../../docs"
	dir := t.TempDir()
	for _, folder := range []string{"evidence", "img"} {
		if err := os.Mkdir(filepath.Join(dir, folder), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	written := []string{scalingDocument, capacityDocument, clientPicture, shardPicture}
	for _, name := range append([]string{benchmarksDocument, designDocument, callsDocument}, written...) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(read(t, filepath.Join(docs, name))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	command := exec.CommandContext(t.Context(), "go", "run", "..", "scaling", "-documents", dir)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, name := range written {
		if read(t, filepath.Join(dir, name)) != read(t, filepath.Join(docs, name)) {
			t.Errorf("docs/%s is not what follows from the other documents; to write it: make scaling", name)
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
