package limiter

import (
	"math"

	"github.com/cespare/xxhash/v2"
)

// cohorts is how many places an order of clients has: as many as a float64 can
// tell apart.
const cohorts = 1 << 53

// cohortOf is a client's place in an order of all clients, the same in every
// process. Each salt makes another order.
func cohortOf(salt uint64, clientKey string) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(salt)
	_, _ = d.WriteString(clientKey)
	return d.Sum64() % cohorts
}

// boundOf is up to where a share of the clients reaches in such an order.
func boundOf(percent float64) uint64 { return uint64(math.Round(percent / 100 * cohorts)) }

// rolloutSalt makes the order in which clients are moved independent of which
// shard owns them. If it changed, other clients would be moved.
const rolloutSalt = 0x726f6c6c6f7574

// rolloutCohort is the client's place in the order in which clients are moved.
func rolloutCohort(clientKey string) uint64 { return cohortOf(rolloutSalt, clientKey) }
