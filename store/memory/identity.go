package memory

import "crypto/sha256"

// maxKey is the length up to which client keys are kept as they are.
const maxKey = 64

// identity tells buckets apart.
type identity struct {
	// limit is the limit's number.
	limit uint32
	// key stands for the client key.
	key string
}

// newIdentity keeps a client key, or a digest of one that is long: clients can
// choose keys as long as a header may be, and a bound on the number of buckets
// has to be a bound on memory.
func newIdentity(limit uint32, clientKey string) identity {
	if len(clientKey) <= maxKey {
		return identity{limit: limit, key: clientKey}
	}
	// What is kept of the key makes the result longer than any key that is
	// kept as it is, so none can be made up to equal it.
	digest := sha256.Sum256([]byte(clientKey))
	return identity{limit: limit, key: clientKey[:maxKey] + string(digest[:])}
}
