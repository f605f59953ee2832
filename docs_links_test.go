package shardlimit_test

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestLinksToSectionsLead: links between documents lead to files that exist,
// and to headings where they name one.
func TestLinksToSectionsLead(t *testing.T) {
	links := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "examples/*.md"} {
		files, err := filepath.Glob(pattern)
		must(t, "find documents", err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			must(t, "read", err)
			for _, m := range regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]+))?\)`).FindAllStringSubmatch(string(text), -1) {
				if strings.HasPrefix(m[1], "http") {
					continue
				}
				target := file
				if m[1] != "" {
					target = path.Join(path.Dir(file), m[1])
				}
				links++
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s: %v", file, err)
				} else if m[2] != "" && !hasSection(t, target, m[2]) {
					t.Errorf("%s: %s has no section %s", file, target, m[2])
				}
			}
		}
	}
	if links < 20 {
		t.Errorf("found %d links", links)
	}
}

// hasSection tells whether a document has a heading of which GitHub makes that
// anchor.
func hasSection(t *testing.T, file, anchor string) bool {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, "read", err)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		plain := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		if strings.ReplaceAll(plain, " ", "-") == anchor {
			return true
		}
	}
	return false
}
