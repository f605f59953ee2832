package limiter

import "github.com/shardlimit/caddy-shardlimit/internal/telemetry"

// ZoneCounts counts the events of a zone since the process began, in all its stores together.
type ZoneCounts struct {
	Decisions [telemetry.Outcomes]int64
	// Waited counts the requests that were held until they fit or were refused.
	Waited int64
	// Stores are the names of the stores in which the zone counts.
	Stores []string
}

// CountsOfZones returns the counts of the zones that are in use, by their names.
func CountsOfZones() map[string]ZoneCounts {
	all := map[string]ZoneCounts{}
	zoneStates.Lock()
	defer zoneStates.Unlock()
	for id, state := range zoneStates.used {
		c, isKnown := all[id.Zone]
		if !isKnown {
			for o := telemetry.Allowed; o < telemetry.Outcomes; o++ {
				c.Decisions[o] = telemetry.ValueOf(state.counts.Decisions[o])
			}
			c.Waited = telemetry.ValueOf(state.counts.Waited)
		}
		c.Stores = append(c.Stores, id.Store)
		all[id.Zone] = c
	}
	return all
}
