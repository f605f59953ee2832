package limiter

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/body"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Zone is a named limit. New completes it.
type Zone struct {
	Name string
	// Definition is what zones of one name have to have in common, as a text: Caddys that share a store
	// compare it.
	Definition string
	Matchers   caddyhttp.MatcherSets
	// Key are the templates of the client key.
	Key []string
	// IPv4Prefix and IPv6Prefix are how many bits of an address identify a client;
	// 0 for all.
	IPv4Prefix, IPv6Prefix int

	Algorithm store.Algorithm
	Window    time.Duration
	Align     bool
	// Calendar, if it has a unit, replaces Window and Align.
	Calendar store.Calendar
	Events   Quantity
	// Burst is 0 for that of Events.
	Burst Quantity
	Cost  Quantity
	// ChargeBefore is set if the zone takes when a request arrives, as one with
	// concurrency always does.
	ChargeBefore bool
	// Batch is 0, [store.BatchAuto], or how many events are taken at once.
	Batch int64
	// Free are the statuses that cost nothing; Forgives are those that empty the bucket
	// as well.
	Free, Forgives StatusSet

	// Warn is the percentage of the limit from which a client is near it; 0 for none.
	Warn int64

	// SettleAtEnd is set if the final cost is known when the response has ended, and not
	// when it begins.
	SettleAtEnd bool
	// KnowsGRPC is set if Free or Forgives were made of statuses of gRPC: StatusGRPC.
	KnowsGRPC bool

	MaxWait      time.Duration
	MaxWaitQueue int
	Penalty      time.Duration
	// ObeyUpstream is set if a response that says when to come again, as package retryafter reads it, keeps
	// its client refused until then.
	ObeyUpstream bool
	// Reserves begin with the most important one.
	Reserves []Reserve
	// Status answers refused requests, and BlockStatus blocked clients; 0 means 429.
	Status, BlockStatus int
	// OnError is empty for the default of the store.
	OnError string
	// Enforce is the percentage of the clients for which the limit is enforced;
	// nil for all.
	Enforce *float64

	// Counts are set by New.
	Counts *telemetry.ZoneCounters

	templates []keyTemplate
	// sum is the cost, if that depends on the request, and paths are those in the JSON of
	// responses that it asks for.
	sum       Sum
	paths     []body.Path
	readsSize bool
	limit     store.Limit
	// probes is the limit of requests that find out whether an upstream is open.
	probes store.Limit
	// isLease: the zone counts requests while they run. needsID: it keeps events one by one. mayGiveBack: what a
	// request takes may come back.
	isLease, needsID, mayGiveBack bool
	// enforced is how many cohorts the limit is enforced for.
	enforced uint64
	refusal  error
	blocked  error
	bound    [maxStores]boundZone

	noKey, repeats, never, obeyed, overFree telemetry.LogThrottle
	// doubts are what is likely wrong with the key, by its texts, and unknown is a placeholder of it
	// that nothing defined for some request, or nil.
	doubts        []string
	unknown       atomic.Pointer[string]
	noCost        [telemetry.Causes]telemetry.LogThrottle
	events, burst quota
}

// When a zone charges.
const (
	ChargeAfter  = "after"
	ChargeBefore = "before"
)

// Reserve is a part of a zone's capacity that is kept for matching requests.
type Reserve struct {
	Percent  int64
	Matchers caddyhttp.MatcherSets
}

// prepare derives what requests need from the exported fields.
func (z *Zone) prepare() {
	z.templates = compileKey(z.Key)
	if z.Cost.isDynamic() {
		z.sum, _, _ = ParseSum(z.Cost.Text) // checked
		z.paths, z.readsSize = z.sum.paths(), slices.Contains(z.sum.placeholders(), responsePrefix+responseSize)
	}
	if z.Calendar.Unit != "" {
		z.Window, z.Align = z.Calendar.Window(), true
	}
	z.limit = store.Limit{Zone: z.Name, Algorithm: z.Algorithm, Window: z.Window, Align: z.Align, Calendar: z.Calendar}
	z.probes = probesOf(z.Name)
	if z.enforced = cohorts; z.Enforce != nil {
		z.enforced = cohortsIn(*z.Enforce)
	}
	traits := algorithm.Of(z.Algorithm)
	z.isLease, z.needsID = traits.Lease, traits.NeedsID
	z.ChargeBefore = z.ChargeBefore || z.isLease
	isFree := !z.Free.IsEmpty() || !z.Forgives.IsEmpty()
	z.mayGiveBack = z.ChargeBefore && !z.isLease && (isFree || z.Cost.isDynamic())
	z.refusal = fmt.Errorf("rate limit %s exceeded", z.Name)
	z.blocked = fmt.Errorf("the client is blocked in rate limit %s", z.Name)
	z.Status = cmp.Or(z.Status, http.StatusTooManyRequests)
	z.BlockStatus = cmp.Or(z.BlockStatus, http.StatusTooManyRequests)
}

// A handler counts in its own store and, with a rollout, in another one.
const (
	ownStore = iota
	rolloutStore
	maxStores
)

// boundZone is a zone in one of the stores in which its handler counts.
type boundZone struct {
	*Zone
	*zoneState
	// in is ownStore or rolloutStore.
	in      int
	handle  *stores.Handle
	onError string
}

// countIn makes the zone count in a store.
func (z *Zone) countIn(in int, handle *stores.Handle) {
	state := acquireState(handle, z.Name)
	z.Counts = state.counts
	handle.OnOverrides(state.room.wakeAll)
	handle.NoteZone(z.Name, z.DefinitionDigest())
	z.bound[in] = boundZone{z, state, in, handle, cmp.Or(z.OnError, handle.OnError)}
}

// DefinitionDigest identifies the definition to other Caddys.
func (z *Zone) DefinitionDigest() string {
	sum := sha256.Sum256([]byte(z.Definition))
	return hex.EncodeToString(sum[:6])
}

// ZoneID identifies a zone in a store.
type ZoneID struct{ Store, Zone string }

// zoneState is what a zone has in a store besides its buckets. Configs and requests
// that use the store share it, and it ends with the last of them.
type zoneState struct {
	counts  *telemetry.ZoneCounters
	refused *refusedClients
	sample  requestSample
	recent  recentClients
	running runningTakes
	room    *waitingRoom
	pace    pace
	aborted abortedRequests
	pause   pause
	users   int
	// accepted are the zones of the configs that use it and run, the latest last.
	accepted []*Zone
}

// zoneStates are the states in use. Unlike [caddy.UsagePool] they begin none while one
// of the same zone ends, whose metrics go.
var zoneStates = struct {
	sync.Mutex
	used map[ZoneID]*zoneState
}{used: map[ZoneID]*zoneState{}}

// acquireState returns the state of a zone in a store, and keeps it until the
// store is closed.
func acquireState(handle *stores.Handle, zone string) *zoneState {
	id := ZoneID{handle.Name, zone}
	handle.OnClose(func() { releaseState(id) })
	zoneStates.Lock()
	defer zoneStates.Unlock()
	state := zoneStates.used[id]
	if state == nil {
		state = &zoneState{
			counts:  telemetry.Default.Zone(zone),
			refused: newRefusedClients(time.Now()), room: newWaitingRoom(),
		}
		zoneStates.used[id] = state
	}
	state.users++
	return state
}

// run notes that the config of z runs, until its store is closed.
func (z *boundZone) run() {
	if !z.handle.EnterRunning() {
		// The config ended before it ran.
		return
	}
	defer z.handle.Leave()
	s := z.zoneState
	zoneStates.Lock()
	s.accepted = append(s.accepted, z.Zone)
	zoneStates.Unlock()
	// An expected series stays expected while any config has the zone, so only configs that run may add one.
	z.expectSeries(z.onError, z.handle.IsInMemory())
	z.handle.OnClose(func() {
		zoneStates.Lock()
		defer zoneStates.Unlock()
		s.accepted = slices.DeleteFunc(s.accepted, func(other *Zone) bool { return other == z.Zone })
	})
	s.room.wakeAll()
}

// latest returns the zone in the config that began to run last, if it has the same buckets, or
// else the zone itself.
func (z *boundZone) latest() *Zone {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	if n := len(z.accepted); n > 0 && z.accepted[n-1].limit == z.limit {
		return z.accepted[n-1]
	}
	return z.Zone
}

// findState returns the state of a zone in a store, or nil if it is not in use.
func findState(id ZoneID) *zoneState {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	return zoneStates.used[id]
}

// releaseState ends one use.
func releaseState(id ZoneID) {
	zoneStates.Lock()
	defer zoneStates.Unlock()
	state := zoneStates.used[id]
	if state.users--; state.users == 0 {
		delete(zoneStates.used, id)
		telemetry.Default.ForgetZone(id.Zone)
	}
}
