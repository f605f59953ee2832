package scaling

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDocumentIsWhatTheProgramWrites requires that docs/capacity.md follows from the
// figures of docs/evidence.md.
func TestDocumentIsWhatTheProgramWrites(t *testing.T) {
	dir := t.TempDir()
	copied := filepath.Join(dir, "capacity.md")
	want := read(t, "../../docs/capacity.md")
	if err := os.WriteFile(copied, []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Run(t.Context(), []string{"-figures", "../../docs/evidence.md", "-capacity", copied, "-out", dir}); err != nil {
		t.Fatal(err)
	}
	if read(t, copied) != want {
		t.Error("docs/capacity.md is not what follows from docs/evidence.md; to write it: make scaling")
	}
	tables := read(t, filepath.Join(dir, "scaling.md"))
	for _, row := range []string{"| a take, in the primary | ", "| `charge before` | ", "\n| 64 | "} {
		if !strings.Contains(tables, row) {
			t.Errorf("no row %q in\n%s", row, tables)
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
	m := measured{"document", "It takes 161 bytes.\n\n| a | b | c | b |\n|---|---|---|---|\n| x | 1 | 2 | 3 |\n| w | y | 4.5 | 6 |\n\n| d | b |\n|---|---|\n| x | 7 |\n| y | 8.5 (-2 to 9.25) |\n| z | 8.5 (about) |\n"}
	for _, c := range []struct {
		table, column, row string
		want               float64
	}{{"a", "b", "x", 1}, {"a", "c", "w", 4.5}, {"d", "b", "x", 7}, {"d", "b", "y", 8.5}} {
		if got, err := m.figure(c.table, c.column, c.row); err != nil || got != c.want {
			t.Errorf("%+v: %v, %v", c, got, err)
		}
	}
	if _, err := m.figure("a", "b", "z"); err == nil {
		t.Error("a row that is not there was found")
	}
	if _, err := m.figure("a", "b", "w"); err == nil {
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

// TestHardwareIsEnough requires that what is said to be needed is, and that less is not.
func TestHardwareIsEnough(t *testing.T) {
	for micros, want := range map[float64]float64{0.1: 1, 0.5: 1, 56: 112, 56.1: 113} {
		if got := needed(1e6, micros); got != want {
			t.Errorf("%v µs need %v, want %v", micros, got, want)
		}
	}
	for _, micros := range []float64{0.7, 2.7, 8.1, 15.2} {
		n := needed(exampleRate, micros)
		if load := exampleRate * micros / 1e6; load > busy*n || load <= busy*(n-1) {
			t.Errorf("%v processors for a load of %v", n, load)
		}
	}
}
