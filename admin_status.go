package shardlimit

import (
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// status is what the admin API tells of the running config.
type status struct {
	Zones  []zoneStatus  `json:"zones"`
	Stores []storeStatus `json:"stores"`
}

// zoneStatus is a zone in the store in which its handlers count.
type zoneStatus struct {
	Name      string           `json:"name"`
	Store     string           `json:"store"`
	Rollout   *rolloutStatus   `json:"rollout,omitempty"`
	Algorithm store.Algorithm  `json:"algorithm"`
	Key       []string         `json:"key"`
	Events    string           `json:"events"`
	Burst     int64            `json:"burst,omitempty"`
	Window    float64          `json:"window"` // seconds
	Charge    string           `json:"charge"`
	Enforce   float64          `json:"enforce"` // percent
	Decisions map[string]int64 `json:"decisions"`
}

type rolloutStatus struct {
	Store   string  `json:"store"`
	Percent float64 `json:"percent"`
}

type storeStatus struct {
	Name   string         `json:"name"`
	Module caddy.ModuleID `json:"module,omitempty"`
	// Buckets are those in memory.
	Buckets *int          `json:"buckets,omitempty"`
	Shards  []shardStatus `json:"shards,omitempty"`
	Ledger  *ledgerStatus `json:"ledger,omitempty"`
}

type shardStatus struct {
	Name    string         `json:"name"`
	Kind    string         `json:"kind"`
	Retired bool           `json:"retired"`
	Found   bool           `json:"found"`
	Servers []serverStatus `json:"servers"`
}

// serverStatus is about a server; the maps are by purpose.
type serverStatus struct {
	Address  string                `json:"address"`
	Role     store.Role            `json:"role"`
	State    store.ServerState     `json:"state"`
	Breakers map[string]string     `json:"breakers"`
	Lag      *float64              `json:"lag_seconds,omitempty"`
	Latency  map[string]float64    `json:"latency_seconds"`
	Pools    map[string]poolStatus `json:"pools"`
	Queued   int                   `json:"queued"`
}

type poolStatus struct {
	Connections int64 `json:"connections"`
	Idle        int64 `json:"idle"`
	Hits        int64 `json:"hits"`
	Misses      int64 `json:"misses"`
	Timeouts    int64 `json:"timeouts"`
	Stale       int64 `json:"stale"`
}

type ledgerStatus struct {
	Buckets           int64       `json:"buckets"`
	InFlight          int64       `json:"in_flight"`
	Unsent            int64       `json:"unsent"`
	Uncertain         int64       `json:"uncertain"`
	LocalRefusals     int64       `json:"local_refusals"`
	UnaskedAdmissions int64       `json:"unasked_admissions"`
	Batches           batchStatus `json:"batches"`
}

type batchStatus struct {
	Fetched  int64 `json:"fetched"`
	Tokens   int64 `json:"tokens"`
	Returned int64 `json:"returned"`
	Expired  int64 `json:"expired"`
}

// adminStatus answers GET /rate_limit/: the zones, and how the stores are. No
// server is asked for it.
func adminStatus(running runningConfig, r *http.Request) (any, error) {
	if _, err := queryOf(r); err != nil {
		return nil, err
	}
	s := status{Zones: []zoneStatus{}, Stores: []storeStatus{}}
	seen := map[zoneID]bool{}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			id := zoneID{l.Store.name, z.Name}
			if !seen[id] {
				seen[id] = true
				s.Zones = append(s.Zones, statusOfZone(l, z))
			}
		}
	}
	for _, use := range running.Stores() {
		s.Stores = append(s.Stores, statusOfStore(use))
	}
	return s, nil
}

func statusOfZone(l *Limiter, z *compiledZone) zoneStatus {
	s := zoneStatus{
		Name: z.Name, Store: l.Store.name, Algorithm: z.Algorithm, Key: z.Key,
		Events: z.Events.String(), Burst: z.Burst, Window: z.Window.Seconds(),
		Charge: chargeAfter, Enforce: 100, Decisions: map[string]int64{},
	}
	if l.Rollout != nil {
		s.Rollout = &rolloutStatus{l.Rollout.Store.name, l.Rollout.Percent}
	}
	if z.ChargeBefore {
		s.Charge = chargeBefore
	}
	if z.Enforce != nil {
		s.Enforce = *z.Enforce
	}
	for o := allowed; o < outcomes; o++ {
		s.Decisions[o.String()] = valueOf(z.counts.decisions[o])
	}
	return s
}

func statusOfStore(use *storeUse) storeStatus {
	s := storeStatus{Name: use.name}
	if m, ok := use.module.(caddy.Module); ok {
		s.Module = m.CaddyModule().ID
	}
	open := use.enterOpen()
	if open == nil {
		return s
	}
	defer use.leave()
	if b, ok := open.base.(interface{ Len() int }); ok {
		n := b.Len()
		s.Buckets = &n
	}
	if sharded, ok := open.base.(store.Sharded); ok {
		for _, shard := range sharded.Shards() {
			s.Shards = append(s.Shards, statusOfShard(&shard))
		}
	}
	f := open.accounts.Figures()
	s.Ledger = statusOfLedger(&f)
	return s
}

func statusOfLedger(f *ledger.Figures) *ledgerStatus {
	return &ledgerStatus{
		Buckets: f.Buckets, InFlight: f.InFlight, Unsent: f.Unsent, Uncertain: f.Uncertain,
		LocalRefusals: f.LocalRefusals, UnaskedAdmissions: f.UnaskedAdmissions,
		Batches: batchStatus{Fetched: f.Fetches, Tokens: f.TokensFetched, Returned: f.TokensReturned, Expired: f.TokensExpired},
	}
}

func statusOfShard(shard *store.Shard) shardStatus {
	s := shardStatus{Name: shard.Name, Kind: shard.Kind, Retired: shard.Retired, Found: shard.Found, Servers: []serverStatus{}}
	for i := range shard.Servers {
		s.Servers = append(s.Servers, statusOfServer(&shard.Servers[i]))
	}
	return s
}

func statusOfServer(server *store.Server) serverStatus {
	s := serverStatus{
		Address: server.Address, Role: server.Role, State: server.State,
		Breakers: map[string]string{}, Latency: map[string]float64{}, Pools: map[string]poolStatus{},
	}
	if server.LagKnown {
		lag := roundSeconds(server.Lag)
		s.Lag = &lag
	}
	for i := range server.Lanes {
		lane := &server.Lanes[i]
		s.Breakers[lane.Purpose] = lane.Breaker
		if lane.Latency > 0 {
			s.Latency[lane.Purpose] = roundSeconds(lane.Latency)
		}
		s.Pools[lane.Purpose] = poolStatus(lane.Pool)
		s.Queued += lane.Queued
	}
	return s
}

// roundSeconds is a duration in seconds, to the microsecond.
func roundSeconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1e6 }
