// Package identity tells buckets apart in this process's memory, in little of
// it.
package identity

import (
	"crypto/sha256"
	"hash/maphash"
)

// maxKey is the length up to which client keys are kept as they are.
const maxKey = 64

// ID is a bucket's identity.
type ID struct {
	// Limit is the limit's number.
	Limit uint32
	// Key stands for the client key.
	Key string
}

// New keeps a client key, or a digest of one that is long: clients can
// choose keys as long as a header may be, and a bound on the number of buckets
// has to be a bound on memory.
func New(limit uint32, clientKey string) ID {
	if len(clientKey) <= maxKey {
		return ID{Limit: limit, Key: clientKey}
	}
	// What is kept of the key makes the result longer than any key that is
	// kept as it is, so none can be made up to equal it.
	digest := sha256.Sum256([]byte(clientKey))
	return ID{Limit: limit, Key: clientKey[:maxKey] + string(digest[:])}
}

// Hash is spread over the upper bits.
func (id ID) Hash(seed maphash.Seed) uint64 {
	// The limit takes part so that one client key in many zones, such as the
	// empty one of zones that count everybody together, is not one place. The
	// multiplier is 2^64 divided by the golden ratio, which spreads numbers
	// that follow each other over the upper bits.
	return maphash.String(seed, id.Key) + uint64(id.Limit)*0x9e3779b97f4a7c15
}
