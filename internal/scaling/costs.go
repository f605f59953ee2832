package main

// The tables and rows of docs/benchmarks.md that costs are taken from. The
// clients of rarely come every few seconds, so that each of their requests costs
// a check and a charge; those of own cost charges alone.
const (
	cases   = "case"
	floor   = "respond, five headers"
	rarely  = "redis store, 50,000 clients"
	own     = "redis store"
	taking  = "redis store, charge before"
	batched = "redis store, batch auto"
)

// costs are what a call, a request and a client cost, as measured.
type costs struct {
	// caddy is CPU time of Caddy for a whole request, limiter and all, and
	// limiter what of that is the limiter's, in microseconds.
	caddy, limiter float64
	// charge and take are CPU time of the primary for one, check that of a replica,
	// and replicated what it costs a replica to follow one.
	charge, take, check, replicated float64
	// ledgerBytes is the most that a Caddy remembers of a bucket, redisBytes the
	// most that one takes in each server, and memoryBytes that of the memory store.
	ledgerBytes, redisBytes, memoryBytes float64
}

// busy is which part of a processor's time may be used on average.
const busy = 0.5

func readCosts(benchmarks, design measured) (c costs, err error) {
	var base, follow float64
	for _, f := range []struct {
		v           *float64
		column, row string
	}{
		{&c.caddy, "Caddy µs", rarely}, {&base, "Caddy µs", floor},
		{&c.charge, "primary µs", rarely}, {&c.take, "primary µs", taking},
		{&follow, "replica µs", rarely}, {&c.replicated, "replica µs", own},
	} {
		if *f.v, err = benchmarks.figure(cases, f.column, f.row); err != nil {
			return c, err
		}
	}
	c.limiter, c.check = c.caddy-base, follow-c.replicated
	if c.memoryBytes, err = benchmarks.stated(`takes (\d+) bytes of Caddy's heap`); err != nil {
		return c, err
	}
	if c.redisBytes, err = benchmarks.stated(`\d+ to (\d+) bytes of .used_memory. in Redis`); err != nil {
		return c, err
	}
	c.ledgerBytes, err = design.stated(`less than (\d+) bytes each with a client key of 30`)
	return c, err
}

// primary is which part of a processor a shard's primary needs for the calls of a
// second. Opening a window and refunding are taken to be as dear as a charge.
func (c *costs) primary(load calls) float64 {
	m := &load.made
	return (c.charge*(m[open]+m[charge]+m[refund]) + c.take*m[take]) / float64(second)
}

// replicas is the same for all replicas together, if there are so many: each
// follows the primary, and checks are divided.
func (c *costs) replicas(load calls, replicas int) float64 {
	return (c.check*load.made[check] + float64(replicas)*c.replicated*load.primary()) / float64(second)
}
