package admin

import (
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// status answers GET /rate_limit/ with the zones and the state of the stores. It
// calls no server.
func status(running runningConfig, r *http.Request) (any, error) {
	if _, err := queryOf(r); err != nil {
		return nil, err
	}
	s := adminapi.Status{
		Instances: []adminapi.Instance{instance()}, Problems: running.Watch().Problems(), Zones: []adminapi.Zone{}, Stores: []adminapi.Store{},
	}
	seen := map[limiter.ZoneID]bool{}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			id := limiter.ZoneID{Store: l.Store.Name, Zone: z.Name}
			if !seen[id] {
				seen[id] = true
				s.Zones = append(s.Zones, statusOfZone(l, z))
			}
		}
	}
	for _, handle := range running.Stores() {
		s.Stores = append(s.Stores, statusOfStore(handle))
	}
	return s, nil
}

// burstOf returns the zone's burst, or "" if it is that of its events.
func burstOf(z *limiter.Zone) string {
	if z.Burst == (limiter.Quantity{}) {
		return ""
	}
	return z.Burst.String()
}

func statusOfZone(l *limiter.Limiter, z *limiter.Zone) adminapi.Zone {
	s := adminapi.Zone{
		Name: z.Name, Store: l.Store.Name, Algorithm: z.Algorithm.String(), Key: z.Key,
		Events: z.Events.String(), Burst: burstOf(z), Window: z.Window.Seconds(),
		Charge: limiter.ChargeAfter, Enforce: 100, Definition: z.DefinitionDigest(), Decisions: map[string]int64{},
	}
	for _, handle := range l.Stores() {
		s.LastRefused = max(s.LastRefused, limiter.LastRefusalOfAny(limiter.ZoneID{Store: handle.Name, Zone: z.Name}))
	}
	if z.Calendar.Unit != "" {
		s.Calendar, s.Window = z.Calendar.String(), z.Calendar.Unit.Length().Seconds()
	}
	if l.Rollout != nil {
		s.Rollout = &adminapi.Rollout{Store: l.Rollout.Store.Name, Percent: l.Rollout.Percent}
		if !l.Moves(z) {
			s.Rollout.By = l.Zones[0].Name
		}
	}
	if z.ChargeBefore {
		s.Charge = limiter.ChargeBefore
	}
	if z.Enforce != nil {
		s.Enforce = *z.Enforce
	}
	if rule := l.Store.ZoneOverride(z.Name, time.Now); rule != nil {
		shown := obeyed(z, l.Store.Name, rule, adminapi.Client{})
		s.Rule = &shown
	}
	for o := telemetry.Allowed; o < telemetry.Outcomes; o++ {
		s.Decisions[o.String()] = z.Counts.Decisions[o].Value()
	}
	return s
}

func statusOfStore(handle *stores.Handle) adminapi.Store {
	s := adminapi.Store{Name: handle.Name, Module: moduleOf(handle)}
	open := handle.EnterOpen()
	if open == nil {
		return s
	}
	defer handle.Leave()
	s.Shared = open.IsRemote
	if open.Operable != nil {
		if n := open.Operable.Len(); n >= 0 {
			s.Buckets = &n
		}
		for _, shard := range open.Operable.Shards() {
			answer := adminapi.Shard{Name: shard.Name, Kind: shard.Kind, Retired: shard.Retired, Found: shard.Found, Servers: []adminapi.Server{}}
			servers := slices.Concat(shard.Servers, shard.Sources)
			for i := range servers {
				answer.Servers = append(answer.Servers, statusOfServer(&servers[i]))
			}
			s.Shards = append(s.Shards, answer)
		}
	}
	f := open.Accounts.Figures()
	s.Ledger = &adminapi.Ledger{
		Buckets: f.Buckets, InFlight: f.InFlight, Unsent: f.Unsent, Uncertain: f.Uncertain,
		LocalRefusals: f.LocalRefusals, UnaskedAdmissions: f.UnaskedAdmissions,
		Batches: adminapi.Batches{Fetched: f.Fetches, Tokens: f.TokensFetched, Returned: f.TokensReturned, Expired: f.TokensExpired},
	}
	return s
}

// moduleOf returns the ID of the store's module.
func moduleOf(handle *stores.Handle) string {
	if m, ok := handle.Module.(caddy.Module); ok {
		return string(m.CaddyModule().ID)
	}
	return ""
}

func statusOfServer(server *store.ServerFigures) adminapi.Server {
	s := adminapi.Server{
		Address: server.Address, Role: server.Role, State: server.State,
		Breakers: map[string]string{}, Latency: map[string]float64{}, Pools: map[string]adminapi.Pool{},
	}
	if server.LagKnown {
		lag := seconds(server.Lag)
		s.Lag = &lag
	}
	for i := range server.Lanes {
		lane := &server.Lanes[i]
		s.Breakers[lane.Purpose] = lane.Breaker
		if lane.Latency > 0 {
			s.Latency[lane.Purpose] = seconds(lane.Latency)
		}
		s.Pools[lane.Purpose] = adminapi.Pool(lane.Pool)
		s.Queued += lane.Queued
	}
	return s
}

// seconds returns d in seconds, to the microsecond.
func seconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1e6 }
