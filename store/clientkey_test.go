package store

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func shortened(text string) string { return string(Shortened([]byte(text))) }

// TestShortened keys have one length, and no two texts have the same.
func TestShortened(t *testing.T) {
	seen := map[string]string{}
	for n := range 4 * MaxClientKey {
		for _, tail := range []string{"", "x", "\x00"} {
			text := strings.Repeat("k", n) + tail
			key := shortened(text)
			if len(text) <= MaxClientKey && key != text {
				t.Errorf("a text of %d bytes became %q", len(text), key)
			}
			if len(text) > MaxClientKey && (len(key) != MaxClientKey || !strings.HasPrefix(key, text[:shortHead]+shortMark) || !IsShortened(key)) {
				t.Errorf("a text of %d bytes became %q, want %d bytes that begin like it", len(text), key, MaxClientKey)
			}
			if other, ok := seen[key]; ok && other != text {
				t.Errorf("%q and %q share the key %q", other, text, key)
			}
			seen[key] = text
		}
	}
}

// TestShortenedKeyIsNoText sends the shortened key of another client, and that of the imitation.
func TestShortenedKeyIsNoText(t *testing.T) {
	victim := shortened(strings.Repeat("k", 100))
	seen := map[string]bool{}
	for key := victim; len(seen) < 10; key = shortened(key) {
		if seen[key] || len(key) != MaxClientKey {
			t.Fatalf("%q is the key of another client, or has not %d bytes", key, MaxClientKey)
		}
		seen[key] = true
	}
}

// TestShortenedKeysAreText if the beginning of the text is.
func TestShortenedKeysAreText(t *testing.T) {
	for shift := range 5 {
		for _, letter := range []string{"é", "漢", "🙂"} {
			if key := shortened(strings.Repeat("x", shift) + strings.Repeat(letter, 100)); len(key) != MaxClientKey || !utf8.ValidString(key) || !IsShortened(key) {
				t.Errorf("the shortened key is %q of %d bytes, want %d of text", key, len(key), MaxClientKey)
			}
		}
	}
	// Bytes that are no text are cut anywhere.
	if key := shortened(strings.Repeat("\x80", 1000)); len(key) != MaxClientKey || !IsShortened(key) {
		t.Errorf("the shortened key is %q of %d bytes, want %d", key, len(key), MaxClientKey)
	}
}

// TestIsShortened takes the form alone: 32 digits of base64url behind three dots.
func TestIsShortened(t *testing.T) {
	head := strings.Repeat("k", shortHead)
	for key, want := range map[string]bool{
		head + shortMark + strings.Repeat("-", 32):        true,
		head + shortMark + strings.Repeat("_9zZ", 8):      true,
		head + shortMark + strings.Repeat("/", 32):        false,
		head + shortMark + strings.Repeat("A", 31) + "\n": false,
		head + shortMark + strings.Repeat("A", 31):        false,
		head + "..k" + strings.Repeat("A", 32):            false,
		strings.Repeat("k", MaxClientKey):                 false,
		strings.Repeat(".", MaxClientKey):                 false,
		"":                                                false,
	} {
		if got := IsShortened(key); got != want {
			t.Errorf("%q: %t, want %t", key, got, want)
		}
	}
}
