package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/document"
)

// endMark is the line after each section that is written.
const endMark = "<!-- end of what make scaling writes -->\n"

// rewrite replaces the sections of a file, each between its mark and the next
// end.
func rewrite(file string, sections map[string]string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document: %w", err)
	}
	text := string(old)
	for name, section := range sections {
		mark := document.Mark("scaling, " + name)
		head, rest, started := strings.Cut(text, mark)
		_, tail, ended := strings.Cut(rest, endMark)
		if !started || !ended {
			return fmt.Errorf("%s lacks the line %q, or %q after it", file, mark, endMark)
		}
		text = head + mark + "\n" + section + "\n" + endMark + tail
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write the document: %w", err)
	}
	return nil
}
