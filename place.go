package shardlimit

import "github.com/cespare/xxhash/v2"

// places is how many places an order of clients has: as many as a float64 can
// tell apart.
const places = 1 << 53

// placeOf is a client's place in an order of all clients, the same in every
// process. Each salt makes another order.
func placeOf(salt uint64, clientKey string) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(salt)
	_, _ = d.WriteString(clientKey)
	return d.Sum64() % places
}
