package cli

import (
	"os/exec"
	"testing"
)

// TestQuotedTexts are one word of a shell, which is the text.
func TestQuotedTexts(t *testing.T) {
	for text, want := range map[string]string{
		"{header.X-Key}": "{header.X-Key}", "k1": "k1", "a...b": "a...b",
		"{1..3}": "'{1..3}'", "x{a..c}y": "'x{a..c}y'", "{a,b}": "'{a,b}'", "it's": `'it'\''s'`, "": "''",
	} {
		if got := quoted(text); got != want {
			t.Errorf("%s is quoted as %s, want %s", text, got, want)
		}
		if out, err := exec.Command("bash", "-c", "printf '<%s>' "+quoted(text)).Output(); err != nil || string(out) != "<"+text+">" {
			t.Errorf("a shell makes %s of %s, %v", out, text, err)
		}
	}
}
