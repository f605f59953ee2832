package limiter

import (
	"github.com/shardlimit/caddy-shardlimit/internal/history"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Reading returns what has happened so far in the zones that are in use, and in their stores.
func Reading() history.Reading {
	now := history.Reading{Zones: map[string]history.Totals{}, Stores: map[string]history.Calls{}}
	counts, seconds := telemetry.Default.CallsOf(algorithm.Check.String(), algorithm.Take.String())
	for name, n := range counts {
		now.Stores[name] = history.Calls{Count: n, Seconds: seconds[name]}
	}
	zoneStates.Lock()
	defer zoneStates.Unlock()
	for id, state := range zoneStates.used {
		totals, isKnown := now.Zones[id.Zone]
		if !isKnown {
			of := func(o telemetry.Outcome) int64 { return telemetry.ValueOf(state.counts.Decisions[o]) }
			totals = history.Totals{
				Allowed: of(telemetry.Allowed), WouldRefuse: of(telemetry.WouldRefuse), Unchecked: of(telemetry.ErrorAllowed),
				Refused: of(telemetry.Refused) + of(telemetry.ErrorRefused) + of(telemetry.Blocked),
				Waited:  telemetry.ValueOf(state.counts.Waited),
			}
		}
		totals.Stores = append(totals.Stores, id.Store)
		now.Zones[id.Zone] = totals
	}
	return now
}
