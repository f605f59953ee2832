package store

import (
	"crypto/sha256"
	"encoding/base64"
	"unicode/utf8"
)

// MaxClientKey is the most bytes that a client key has. Everything that is known of a client
// is kept under its key, and clients choose what it is made of: [Shortened] makes a client key
// of that.
const MaxClientKey = 64

// A shortened client key has MaxClientKey bytes: a beginning, at least shortMark, and
// a digest of the whole. These numbers decide which bucket, shard and cohort a
// client belongs to: they are the same in all processes and must not change.
const (
	shortMark = "..."
	// shortDigest is how many bytes of the SHA-256 are kept: with 192 bits no client
	// can find two texts that share a client key.
	shortDigest = 24
	// digestAt is where the digest begins, in base64url.
	digestAt  = MaxClientKey - shortDigest*8/6
	shortHead = digestAt - len(shortMark)
)

// Shortened returns the client key that stands for a text of any length: the text itself
// or, if it is too long, its beginning and a digest, which may overwrite the text. A text
// that looks like a shortened key is shortened too, so no client can send the key of another.
func Shortened(text []byte) []byte {
	if len(text) <= MaxClientKey && !IsShortened(text) {
		return text
	}
	digest := sha256.Sum256(text)
	head := shortHead
	for head > shortHead-utf8.UTFMax && !utf8.RuneStart(text[head]) {
		// The API and the logs show text: do not cut inside a rune.
		head--
	}
	text = append(text[:head], shortMark...)
	for len(text) < digestAt {
		text = append(text, '.')
	}
	return base64.RawURLEncoding.AppendEncode(text, digest[:shortDigest])
}

// IsShortened reports whether a client key has the form of a shortened one.
func IsShortened[Key string | []byte](key Key) bool {
	if len(key) != MaxClientKey || string(key[shortHead:digestAt]) != shortMark {
		return false
	}
	for _, c := range []byte(key[digestAt:]) {
		isDigit := c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c == '-' || c == '_'
		if !isDigit {
			return false
		}
	}
	return true
}
