package limiter

import (
	"net/http"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// ZoneCounts counts the events of a zone since the process began, in all its stores together.
type ZoneCounts struct {
	Decisions [telemetry.Outcomes]int64
	// Waited counts the requests that were held until they fit or were refused.
	Waited int64
	// Stores are the names of the stores in which the zone counts.
	Stores []string
}

// CountsOfZones returns the counts of the zones of configs that run, by their names.
func CountsOfZones() map[string]ZoneCounts {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	all := make(map[string]ZoneCounts, len(zoneStates.used))
	for id, state := range zoneStates.used {
		if len(state.accepted) == 0 {
			continue
		}
		c, isKnown := all[id.Zone]
		if !isKnown {
			for o := telemetry.Allowed; o < telemetry.Outcomes; o++ {
				c.Decisions[o] = state.counts.Decisions[o].Value()
			}
			c.Waited = state.counts.Waited.Value()
		}
		c.Stores = append(c.Stores, id.Store)
		all[id.Zone] = c
	}
	return all
}

// expectSeries has those series of the zone exported, while they are 0, that its options can bring
// about in a store. What operators or rare faults bring about is exported once it has happened.
func (z *Zone) expectSeries(onError string, isInMemory bool) {
	c := z.Counts
	expect := func(canCount bool, counters ...*telemetry.Counter) {
		for _, counter := range counters {
			if canCount {
				counter.Expect()
			}
		}
	}
	expect(true, &c.Requests, &c.Declined, &c.Decisions[telemetry.Allowed], &c.Decisions[telemetry.Refused])
	expect(z.Enforce != nil, &c.Decisions[telemetry.WouldRefuse])
	// The limit lets clients pass for whom it is not enforced.
	allows := onError == stores.OnErrorAllow || onError == stores.OnErrorDeny && z.Enforce != nil
	expect(!isInMemory && allows, &c.Decisions[telemetry.ErrorAllowed])
	expect(!isInMemory && onError == stores.OnErrorDeny, &c.Decisions[telemetry.ErrorRefused])
	expect(isInMemory, &c.Evicted)
	expect(!z.isLease, &c.Charged)
	expect(!z.isLease && !z.Free.IsEmpty() && z.Free != UsuallyFree, &c.Free)
	expect(z.mayGiveBack, &c.Refunded)
	expect(!z.Forgives.IsEmpty(), &c.Forgiven)
	expect(z.Warn > 0, &c.Near)
	expect(z.MaxWait > 0, &c.Waited)
	for option, quantity := range [...]Quantity{telemetry.OptionEvents: z.Events, telemetry.OptionBurst: z.Burst, telemetry.OptionCost: z.Cost} {
		causes := &c.Unreadable[option]
		expect(quantity.isDynamic(), &causes[telemetry.NotFound], &causes[telemetry.OutOfRange])
	}
	causes := &c.Unreadable[telemetry.OptionCost]
	expect(len(z.paths) > 0, &causes[telemetry.NotJSON], &causes[telemetry.Encoding])
	expect(len(z.paths) > 0 || z.readsSize, &causes[telemetry.BrokenOff])
}

// UsuallyFree are the statuses that cost nothing unless options say otherwise.
var UsuallyFree = func() (s StatusSet) {
	s.Add(http.StatusNotModified)
	return s
}()
