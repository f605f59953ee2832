package admin

import (
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/history"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Reading returns what has happened so far in the zones that are in use, and in their stores.
func Reading() history.Reading {
	zones := limiter.CountsOfZones()
	now := history.Reading{Zones: make(map[string]history.Totals, len(zones)), Stores: map[string]history.Calls{}}
	counts, seconds := telemetry.Default.CallsOf(algorithm.Check.String(), algorithm.Take.String())
	for name, n := range counts {
		now.Stores[name] = history.Calls{Count: n, Seconds: seconds[name]}
	}
	for name, c := range zones {
		now.Zones[name] = history.Totals{
			Allowed: c.Decisions[telemetry.Allowed], WouldRefuse: c.Decisions[telemetry.WouldRefuse], Unchecked: c.Decisions[telemetry.ErrorAllowed],
			Refused: c.Decisions[telemetry.Refused] + c.Decisions[telemetry.ErrorRefused] + c.Decisions[telemetry.Blocked],
			Waited:  c.Waited, Stores: c.Stores,
		}
	}
	return now
}

// historyOf answers GET /rate_limit/history with what has happened in zones: in those of the config and
// all others of which something is kept, or in those of them that are named. It is an error if none is.
func historyOf(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "zone...", "range")
	if err != nil {
		return nil, err
	}
	of := history.Ranges[0]
	if name := query.Get("range"); name != "" {
		var names []string
		for _, other := range history.Ranges {
			names = append(names, other.Name)
		}
		i := slices.Index(names, name)
		if i < 0 {
			return nil, apiErrorf(http.StatusBadRequest, "range is %q: write one of %s", name, strings.Join(names, ", "))
		}
		of = history.Ranges[i]
	}
	inConfig := zonesInStores(running)
	names := append(sortedKeys(inConfig), history.Default.Zones()...)
	if named := query["zone"]; query.Has("zone") {
		names = slices.DeleteFunc(names, func(name string) bool { return !slices.Contains(named, name) })
		if len(names) == 0 {
			return nil, unknownZone(named[0], inConfig)
		}
	}
	slices.Sort(names)
	now := time.Now()
	answer := adminapi.History{Range: of.Name, Step: int64(of.Step.Seconds()), Zones: []adminapi.ZoneHistory{}}
	// Zones of one answer have the same steps, also if a sample comes between them.
	partial := history.Default.Partial(of, now)
	answer.Partial = int64(partial.Seconds())
	for _, name := range slices.Compact(names) {
		start, steps := history.Default.Steps(name, of, now, partial)
		answer.Start = start.Unix()
		answer.Zones = append(answer.Zones, zoneHistory(name, steps))
	}
	return answer, nil
}

func zoneHistory(name string, steps []*history.Step) adminapi.ZoneHistory {
	z := adminapi.ZoneHistory{Zone: name}
	for _, s := range steps {
		add := func(series *adminapi.Series, of func(*history.Step) uint32) {
			n := math.NaN()
			if s != nil {
				n = float64(of(s))
			}
			*series = append(*series, n)
		}
		add(&z.Allowed, func(s *history.Step) uint32 { return s.Allowed })
		add(&z.WouldRefuse, func(s *history.Step) uint32 { return s.WouldRefuse })
		add(&z.Refused, func(s *history.Step) uint32 { return s.Refused })
		add(&z.Unchecked, func(s *history.Step) uint32 { return s.Unchecked })
		add(&z.Waited, func(s *history.Step) uint32 { return s.Waited })
		add(&z.StoreCalls, func(s *history.Step) uint32 { return s.Calls })
		latency := math.NaN()
		if s != nil && s.Calls > 0 {
			latency = math.Round(float64(s.CallSeconds)/float64(s.Calls)*1e6) / 1e6
		}
		z.StoreLatency = append(z.StoreLatency, latency)
	}
	return z
}
