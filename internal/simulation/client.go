package simulation

import (
	"fmt"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// zone is a limit for each client.
type zone struct {
	limit store.Limit
	// events and burst hold for most requests. If differ is set, some have a lower limit.
	events, burst, cost int64
	batched, differ     bool
	batch               int64
	// penalty is how long those are refused that were refused once, or 0.
	penalty time.Duration
}

func (z *zone) String() string {
	return fmt.Sprintf("%s, align %v, window %v, events %d, burst %d, cost %d, batched %v, differ %v, penalty %v",
		z.limit.Algorithm, z.limit.Align, z.limit.Window, z.events, z.burst, z.cost, z.batched, z.differ, z.penalty)
}

func (z *zone) capacity() int64 {
	if z.burst > 0 {
		return z.burst
	}
	return z.events
}

// kinds are the limits whose charges or takes the core decides about.
func kinds() (all []store.Limit) {
	for a := range store.Algorithms {
		if t := algorithm.Of(a); !t.Lease {
			all = append(all, store.Limit{Algorithm: a})
			if t.Windowed() {
				all = append(all, store.Limit{Algorithm: a}, store.Limit{Algorithm: a, Align: true})
			}
		}
	}
	return all
}

// newZone returns a zone. A second one has windows of about the same length.
func (s *Run) newZone(name string) *zone {
	rng := s.rng
	z := &zone{limit: oneOf(rng, kinds()...)}
	z.limit.Zone, z.limit.Window = name, oneOf(rng, 2*time.Second, 10*time.Second, time.Minute, 10*time.Minute, time.Hour)
	if len(s.zones) > 0 {
		z.limit.Window = s.zones[0].limit.Window * oneOf[time.Duration](rng, 1, 2) / oneOf[time.Duration](rng, 1, 2)
	}
	z.events, z.cost = oneOf[int64](rng, 1, 2, 5, 5, 20, 20, 100), oneOf[int64](rng, 1, 1, 1, 2, 3)
	if s.sequential {
		// Many requests give back what they took when there is no more.
		z.events = min(z.events, 5)
	}
	if z.limit.Algorithm.HasBurst() && rng.chance(0.5) {
		z.burst = oneOf[int64](rng, 1, 3, 10)
	}
	z.batched = s.takes && algorithm.Of(z.limit.Algorithm).Unbatched == "" && rng.chance(0.5)
	z.batch = oneOf(rng, max(z.events/4, 1), max(z.events/4, z.cost+1), max(z.events/2, z.cost+1), store.BatchAuto)
	z.differ = rng.chance(0.3)
	if algorithm.Of(z.limit.Algorithm).Copies() && rng.chance(0.2) {
		z.penalty = z.limit.Window / oneOf[time.Duration](rng, 1, 5)
	}
	return z
}

// client is the true state of a client in a zone.
type client struct {
	*zone
	key string
	// rng decides the client's actions, and made is how many requests it has made, counted by the first in beside.
	rng  *stream
	made int
	// beside are the same client in all zones, in the order in which they are asked.
	beside []*client
	// penalizedUntil is until when penalizedBy has penalized the client, by the primary's clock, at the
	// instant penalized.
	penalizedUntil, penalized int64
	penalizedBy               *process
	// served is the cost of requests that were served and are charged, counted what the
	// primary has counted; uncertain what was reported to have an unknown outcome, and lost
	// to be given up.
	served, counted, uncertain, lost int64
	// kept is what requests that were not served may have taken and not given back.
	kept int64
	// admitted are the requests that were admitted by what a store, or a Caddy alone, has
	// counted.
	admitted []admission
	// unlanded is the cost that was admitted and is neither in the primary nor free.
	unlanded int64
	// truth is what was spent or about to be, at each of its changes of late.
	truth []moment
	// spent is the primary's count at the last note. over is when the count last fell, and the count before that.
	spent int64
	over  moment
	// heldSince is since when what is held is all that is in the way of the client's requests, or 0.
	heldSince int64
	// missing are costs that the primary may never have heard of.
	missing []admission
	// resets are the resets of recent windows, each with the time of the first answer that had it. reset is until when an
	// operator's reset of the client may not have been seen.
	resets map[int64]int64
	reset  int64
}

type admission struct {
	at, cost, reset, events int64
	by                      *process
	// byAnotherClock is set if the process had not heard the primary's clock yet.
	byAnotherClock bool
}

// client returns the client of a bucket.
func (s *Run) client(key string) *client {
	for _, c := range s.clients {
		if c.limit.Zone+"/"+c.key == key {
			return c
		}
	}
	return nil
}

// request is one of a client to the zone.
func (s *Run) request(c *client) store.Request {
	r := c.some()
	r.Cost, r.ID = c.cost, strconv.Itoa(c.beside[0].made)
	if c.differ && c.rng.chance(0.5) {
		r.Events = max(r.Events/2, 1)
	}
	if c.batched {
		r.Batch = c.batch
	}
	return r
}

// some is a request of the client that costs nothing.
func (c *client) some() store.Request {
	return store.Request{Limit: &c.limit, ClientKey: c.key, Events: c.events, Burst: c.burst}
}
