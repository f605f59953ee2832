package admin

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
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
	for _, use := range running.Stores() {
		s.Stores = append(s.Stores, statusOfStore(use))
	}
	return s, nil
}

func statusOfZone(l *limiter.Limiter, z *limiter.Zone) zoneStatus {
	s := zoneStatus{
		Name: z.Name, Store: l.Store.Name, Algorithm: z.Algorithm, Key: z.Key,
		Events: z.Events.String(), Burst: z.Burst, Window: z.Window.Seconds(),
		Charge: limiter.ChargeAfter, Enforce: 100, Decisions: map[string]int64{},
	}
	if l.Rollout != nil {
		s.Rollout = &rolloutStatus{l.Rollout.Store.Name, l.Rollout.Percent}
	}
	if z.ChargeBefore {
		s.Charge = limiter.ChargeBefore
	}
	if z.Enforce != nil {
		s.Enforce = *z.Enforce
	}
	for o := telemetry.Allowed; o < telemetry.Outcomes; o++ {
		s.Decisions[o.String()] = telemetry.ValueOf(z.Counts.Decisions[o])
	}
	return s
}

func statusOfStore(use *stores.Handle) storeStatus {
	s := storeStatus{Name: use.Name}
	if m, ok := use.Module.(caddy.Module); ok {
		s.Module = m.CaddyModule().ID
	}
	open := use.EnterOpen()
	if open == nil {
		return s
	}
	defer use.Leave()
	if b, ok := open.Base.(interface{ Len() int }); ok {
		n := b.Len()
		s.Buckets = &n
	}
	if sharded, ok := open.Base.(store.Sharded); ok {
		for _, shard := range sharded.Shards() {
			s.Shards = append(s.Shards, statusOfShard(&shard))
		}
	}
	f := open.Accounts.Figures()
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

// zoneTop is what the admin API tells of the clients that a zone refused.
type zoneTop struct {
	Zone string `json:"zone"`
	// Since is how many seconds the counts cover.
	Since   float64                 `json:"since"`
	Refused []limiter.RefusedClient `json:"refused"`
}

// allTops are those of all zones, in alphabetical order.
type allTops struct {
	Zones []zoneTop `json:"zones"`
}

const (
	defaultTop = 20
	mostTop    = 100
)

// adminTop answers GET /rate_limit/top: the clients that were refused most in
// the last minutes.
func adminTop(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "zone", "n")
	if err != nil {
		return nil, err
	}
	n := defaultTop
	if text := query.Get("n"); text != "" {
		if n, err = strconv.Atoi(text); err != nil || n < 1 || n > mostTop {
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("n is %q: it must be a number from 1 to %d", text, mostTop))
		}
	}
	now := time.Now()
	storeNames := storesOfZones(running)
	if zone := query.Get("zone"); zone != "" {
		names, ok := storeNames[zone]
		if !ok {
			return nil, unknownZone(zone, storeNames)
		}
		return topOf(zone, names, n, now), nil
	}
	all := allTops{Zones: []zoneTop{}}
	for _, zone := range sortedKeys(storeNames) {
		all.Zones = append(all.Zones, topOf(zone, storeNames[zone], n, now))
	}
	return all, nil
}

// topOf is about a zone in all stores in which it counts.
func topOf(zone string, storeNames []string, n int, now time.Time) zoneTop {
	top := zoneTop{Zone: zone, Refused: []limiter.RefusedClient{}}
	refused, since := limiter.RefusedMost(zone, storeNames, n, now)
	top.Since, top.Refused = since.Seconds(), append(top.Refused, refused...)
	return top
}

// storesOfZones returns the names of the stores in which each zone counts.
func storesOfZones(running runningConfig) map[string][]string {
	storeNames := map[string][]string{}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, use := range l.Stores() {
				if !slices.Contains(storeNames[z.Name], use.Name) {
					storeNames[z.Name] = append(storeNames[z.Name], use.Name)
				}
			}
		}
	}
	return storeNames
}

func unknownZone(zone string, storeNames map[string][]string) error {
	return apiError(http.StatusNotFound, fmt.Errorf("zone %q is unknown; there is %s", zone, strings.Join(sortedKeys(storeNames), ", ")))
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}

// queryOf returns the parameters of a request, of which there must be no others
// than those that are known, each at most once.
func queryOf(r *http.Request, known ...string) (url.Values, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("query: %w", err))
	}
	for name, values := range query {
		switch {
		case !slices.Contains(known, name):
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("parameter %q is unknown; there is %s", name, strings.Join(known, ", ")))
		case len(values) > 1:
			return nil, apiError(http.StatusBadRequest, errors.New("parameter "+name+" is given twice"))
		}
	}
	return query, nil
}
