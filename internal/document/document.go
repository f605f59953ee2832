// Package document puts what was measured into the documents.
package document

import (
	"fmt"
	"os"
	"strings"
)

// Mark is the line below which make target writes.
func Mark(target string) string {
	return "<!-- what follows is written by make " + target + " -->\n"
}

// Rewrite replaces what follows the mark of a make target in a file.
func Rewrite(file, target, text string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document: %w", err)
	}
	mark := Mark(target)
	head, _, found := strings.Cut(string(old), mark)
	if !found {
		return fmt.Errorf("%s has no line %q", file, mark)
	}
	if err := os.WriteFile(file, []byte(head+mark+"\n"+text), 0o644); err != nil {
		return fmt.Errorf("write the document: %w", err)
	}
	return nil
}
