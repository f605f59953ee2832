package endtoend

import (
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// site is one of the Caddyfile that is asked, a case.
type site struct {
	name string
	text string
	// status is that of nearly all responses.
	status int
	// floor is the name of the case to compare with, if any, and limit how many
	// times as much CPU the case may cost, if that is a goal.
	floor string
	limit float64
	// keys is how many distinct clients there are.
	keys int64
	// store is where it counts, or whose servers idle meanwhile.
	store *redisStore
	// limits are those in which clients have buckets before they come.
	limits []*store.Limit
	// isAlone is set if it is in a Caddy that has no other.
	isAlone bool

	addr  string
	caddy *caddyproc.Process
	// sent is how many requests it has had, so that their clients go on where
	// they were.
	sent int64
}

// called is the one of some sites that has a name.
func called(sites []*site, name string) *site {
	return sites[slices.IndexFunc(sites, func(c *site) bool { return c.name == name })]
}

// Cases whose cost is asked for: the Redis store with clients of whom much is
// known and with more that come seldom, with other ways to charge, and refusals.
const (
	ChargeAfter  = "redis store"
	ManyClients  = "redis store, 50,000 clients"
	ChargeBefore = "redis store, charge before"
	BatchAuto    = "redis store, batch auto"
	Refused      = "redis store, refused"
)

// The names of other cases that are referred to.
const (
	floor        = "respond, five headers"
	memoryStore  = "memory store"
	refusedFloor = "error 429, six headers"
	refusedHot   = "redis store, one refused key"
)

// The bounds for the CPU of Caddy, relative to the floor.
const (
	memoryBound      = 1.06
	chargeAfterBound = 1.35
	batchBound       = 1.10
	refusedHotBound  = 1.05
)

// clients is how many distinct ones the cases have, unless they say otherwise.
const clients = 500

const fiveHeaders = `
	header X-RateLimit-Limit 50000000
	header X-RateLimit-Remaining 49999999
	header X-RateLimit-Used 1
	header X-RateLimit-Reset 1800000000
	header X-RateLimit-Resource default
`

// baseCases count in the default store, except for one: who takes batches calls
// Redis every second from then on, which would be seen in all others.
func baseCases(base, batched *redisStore) []*site {
	cases := []*site{
		{name: "respond", status: 200, text: "respond ok"},
		{name: floor, status: 200, text: fiveHeaders + "respond ok"},
		{
			name: memoryStore, status: 200, floor: floor, limit: memoryBound, text: `
	rate_limit {
		store memory
		zone memory {
			key {header.X-Key}
			events 50000000
			window 1h
		}
	}
	respond ok`,
		},
		{
			name: ChargeAfter, status: 200, floor: floor, limit: chargeAfterBound, text: `
	rate_limit {header.X-Key} 50000000 1h
	respond ok`,
		},
		{
			// Each comes once in several seconds, so that little is known of it.
			name: ManyClients, status: 200, floor: floor, keys: 50_000,
			limits: []*store.Limit{{Zone: "many", Algorithm: store.FixedWindow, Window: time.Hour}}, text: `
	rate_limit {header.X-Key} 50000000 1h many
	respond ok`,
		},
		{
			name: "redis store, one hot key", status: 200, floor: floor, text: `
	rate_limit static 50000000 1h hot
	respond ok`,
		},
		{
			name: ChargeBefore, status: 200, floor: floor, text: `
	rate_limit {
		zone before {
			key {header.X-Key}
			events 50000000
			window 1h
			charge before
		}
	}
	respond ok`,
		},
		{
			name: "redis store, charge before, one hot key", status: 200, floor: floor, text: `
	rate_limit {
		zone before_hot {
			key static
			events 50000000
			window 1h
			charge before
		}
	}
	respond ok`,
		},
		{
			name: BatchAuto, status: 200, floor: floor, limit: batchBound, store: batched, text: `
	rate_limit {
		store batched
		zone batch {
			key static
			events 1000000
			window 1m
			charge before
			batch auto
		}
	}
	respond ok`,
		},
		{name: refusedFloor, status: 429, text: fiveHeaders + "header Retry-After 3600\nerror 429"},
		{
			name: "memory store, refused", status: 429, floor: refusedFloor, text: `
	rate_limit {
		store memory
		zone refused {
			key {header.X-Key}
			events 1
			window 1h
		}
	}
	respond ok`,
		},
		{
			name: Refused, status: 429, floor: refusedFloor, text: `
	rate_limit {header.X-Key} 1 1h refused
	respond ok`,
		},
		{
			name: refusedHot, status: 429, floor: refusedFloor, limit: refusedHotBound, text: `
	rate_limit static 1 1h attacked
	respond ok`,
		},
	}
	for _, c := range cases {
		if c.store == nil {
			c.store = base
		}
		if c.keys == 0 {
			c.keys = clients
		}
	}
	return cases
}
