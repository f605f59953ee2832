package shardlimit

import (
	"math"

	"github.com/cespare/xxhash/v2"
)

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

// boundOf is up to where a share of the clients reaches in such an order.
func boundOf(percent float64) uint64 { return uint64(math.Round(percent / 100 * places)) }

// isPercent tells whether f is from 0 to 100, which NaN is not.
func isPercent(f float64) bool { return f >= 0 && f <= 100 }
