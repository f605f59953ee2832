package cli

import (
	"os/exec"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// TestClientTexts are arguments that no command takes for options.
func TestClientTexts(t *testing.T) {
	for want, c := range map[string]adminapi.Client{
		"{header.X-Key} k1":                {Template: "{header.X-Key}", Values: []string{"k1"}},
		"-- {header.X-Key} '--address=x'":  {Template: "{header.X-Key}", Values: []string{"--address=x"}},
		"-- '{a}|{b}' '-x y' z":            {Template: "{a}|{b}", Values: []string{"-x y", "z"}},
		"-Ab:x (a key of no text)":         {ClientKey: "-Ab:x", Note: "a key of no text"},
		"base64:_w (a key that is binary)": {ClientKey: "base64:_w", Note: "a key that is binary"},
	} {
		if got := clientText(&c); got != want {
			t.Errorf("%+v is shown as %s, want %s", c, got, want)
		}
	}
}

// TestQuotedTexts are one word of a shell, which is the text.
func TestQuotedTexts(t *testing.T) {
	for text, want := range map[string]string{
		"{header.X-Key}": "{header.X-Key}", "k1": "k1", "a...b": "a...b",
		"{1..3}": "'{1..3}'", "x{a..c}y": "'x{a..c}y'", "a..b{c}": "a..b{c}", "{a,b}": "'{a,b}'", "it's": `'it'\''s'`, "": "''",
	} {
		if got := quoted(text); got != want {
			t.Errorf("%s is quoted as %s, want %s", text, got, want)
		}
		if out, err := exec.Command("bash", "-c", "printf '<%s>' "+quoted(text)).Output(); err != nil || string(out) != "<"+text+">" {
			t.Errorf("a shell makes %s of %s, %v", out, text, err)
		}
	}
	// What cannot be printed opens no quotes.
	for text, want := range map[string]string{"x';echo more;'\t": `x';echo more;'\t`, "\\';echo more #\u200b": `\\';echo more #\u200b`} {
		if out, err := exec.Command("bash", "-c", "printf '<%s>' "+shown(quoted(text))).Output(); err != nil || string(out) != "<"+want+">" {
			t.Errorf("a shell makes %s of %q, %v", out, text, err)
		}
	}
}
