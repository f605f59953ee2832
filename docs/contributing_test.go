package docs

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestTableOfPlacesNamesFiles checks that the files exist that CONTRIBUTING.md names for something
// new.
func TestTableOfPlacesNamesFiles(t *testing.T) {
	text := read(t, "CONTRIBUTING.md")
	_, rest, _ := strings.Cut(text, "\n| a new | goes into |\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	files := 0
	for row := range strings.Lines(table) {
		_, places, _ := strings.Cut(strings.TrimPrefix(row, "|"), "|")
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(places, -1) {
			files++
			if _, err := os.Stat(m[1]); err != nil {
				t.Errorf("the table of CONTRIBUTING.md: %v", err)
			}
		}
	}
	if files < 60 {
		t.Errorf("found %d files in the table of CONTRIBUTING.md", files)
	}
}
