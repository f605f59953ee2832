package identity

import (
	"strings"
	"testing"
)

// TestDigestIsNoClientKey sends the digest of a long client key as a client key.
func TestDigestIsNoClientKey(t *testing.T) {
	for _, n := range []int{maxKey + 1, 100, 10_000} {
		long := New(0, strings.Repeat("k", n))
		if forged := New(0, long.Key); forged == long {
			t.Errorf("client key of %d bytes shares its bucket with its digest", n)
		}
		if len(long.Key) <= maxKey {
			t.Errorf("digest of %d bytes could be a client key", len(long.Key))
		}
	}
}
