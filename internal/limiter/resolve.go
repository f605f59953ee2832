package limiter

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// collect resolves what the request asks of the zones that match it, as a new
// evaluation of t, or of a new tracker if t is nil or, in an error route, settled. It
// leaves out zones that do not limit the request, and buckets in which another
// handler counts it already. It returns no evaluation if nothing is left.
func (l *Limiter) collect(t *tracker, w http.ResponseWriter, r *http.Request, repl *caddy.Replacer) (*tracker, *evaluation, error) {
	var e *evaluation
	for _, z := range l.Zones {
		if len(z.Matchers) > 0 {
			matches, err := z.Matchers.AnyMatchWithError(r)
			if err != nil {
				return t, nil, err
			}
			if !matches {
				continue
			}
		}
		req, err := z.request(r, repl, l)
		if err != nil {
			return t, nil, err
		}
		bound, block := z.override(&req, l)
		if req.Events == unlimited && block == nil {
			continue
		}
		if t != nil && t.counts(bound, &req) {
			continue
		}
		if e == nil {
			if t == nil || t.settled {
				t = newTracker(w, t, len(l.Zones))
			}
			e = t.newEvaluation(l, repl)
		}
		e.add(bound, req, block)
	}
	if e != nil {
		t.enroll(e, r)
	}
	return t, e, nil
}

// request returns what r asks of the zone. If its Events are unlimited the zone
// does not count r; if they are 0 no store is asked.
func (z *Zone) request(r *http.Request, repl *caddy.Replacer, l *Limiter) (store.Request, error) {
	events, burst := z.eventsFor(repl, l)
	// A client without a limit may be blocked, so it is named like others.
	key, err := z.clientKey(r, repl, l, events != unlimited)
	if err != nil {
		return store.Request{}, err
	}
	if events == unlimited {
		return store.Request{Limit: &z.limit, ClientKey: key, Events: unlimited}, nil
	}
	req := store.Request{Limit: &z.limit, ClientKey: key, Events: events, Burst: burst, Batch: z.Batch, Penalty: z.Penalty}
	switch {
	case z.isLease:
		// A lease does not settle the cost.
		req.Cost = z.finalCost(repl, l, nil)
	default:
		req.Cost = z.firstCost(repl)
	}
	if z.needsID {
		req.ID = newID()
	}
	if len(z.Reserves) == 0 {
		return req, nil
	}
	percent, err := z.reservedFrom(r)
	req.Reserved = Share(req.Capacity(), percent)
	return req, err
}

// reservedFrom returns how many percent r must not use: what is kept for more
// important requests.
func (z *Zone) reservedFrom(r *http.Request) (percent int64, err error) {
	for _, s := range z.Reserves {
		matches, err := s.Matchers.AnyMatchWithError(r)
		if err != nil {
			return percent, err
		}
		if matches {
			break
		}
		percent += s.Percent
	}
	return percent, nil
}

// Share returns a percentage of n, rounded up.
func Share(n, percent int64) int64 {
	return n/100*percent + (n%100*percent+99)/100
}

// newID returns an ID that no other request has.
func newID() string {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 8), rand.Uint64())
	return base64.RawURLEncoding.EncodeToString(b)
}

// override applies what operators have changed for the client of req: it adds what was
// granted, and returns the block, if there is one, and the zone in the store in which the
// client is counted. A client without a limit may be blocked as well.
func (z *Zone) override(req *store.Request, l *Limiter) (bound *boundZone, block *store.Override) {
	bound = z.storeOf(req.ClientKey, l.Rollout)
	if has := z.bound[ownStore].handle.HasOverrides() || l.Rollout != nil && z.bound[rolloutStore].handle.HasOverrides(); !has {
		return bound, nil
	}
	now := l.Now()
	block, grant := bound.handle.OverridesOf(z.Name, req.ClientKey, now)
	if grant != nil && req.Events != unlimited {
		if z.Algorithm.HasBurst() && req.Events > 0 {
			// The rate stays, at which all of them have to come back within a century.
			req.Burst = min(cmp.Or(req.Burst, req.Events)+grant.Events, store.MaxEvents, mostBurst(req.Events, z.Window))
		} else {
			req.Events = min(req.Events+grant.Events, algorithm.Of(z.Algorithm).MostEvents)
		}
	}
	if block == nil && l.Rollout != nil {
		// A rollout that moves the client ends no block.
		other := &z.bound[ownStore+rolloutStore-bound.in]
		block, _ = other.handle.OverridesOf(z.Name, req.ClientKey, now)
	}
	return bound, block
}

// storeOf returns the zone in the store in which the client is counted.
func (z *Zone) storeOf(clientKey string, rollout *Rollout) *boundZone {
	if rollout.moves(clientKey) {
		return &z.bound[rolloutStore]
	}
	return &z.bound[ownStore]
}

// Rollout is the share of the clients that is counted in another store.
type Rollout struct {
	Store *stores.Handle
	// Percent is from 0 to 100.
	Percent float64
	// moved is how many cohorts are in the other store.
	moved uint64
}

// moves reports whether the client is counted in the other store.
func (o *Rollout) moves(clientKey string) bool {
	return o != nil && cohortOf(rolloutSalt, clientKey) < o.moved
}

// newTracker returns a tracker of responses to w, with room for an evaluation in so
// many zones. If settled is not nil, it was the request's tracker before. It is not
// pooled: handlers may use it as a writer, and access logs read it, after this
// handler has returned.
func newTracker(w http.ResponseWriter, settled *tracker, zones int) (t *tracker) {
	if zones == 1 {
		in := new(struct {
			tracker
			roomForOne
		})
		t = &in.tracker
		room := &in.roomForOne
		t.first.use(room.zones[:], room.reqs[:], room.states[:])
	} else {
		in := new(struct {
			tracker
			roomForTwo
		})
		t = &in.tracker
		room := &in.roomForTwo
		t.first.use(room.zones[:], room.reqs[:], room.states[:])
	}
	t.ResponseWriter, t.own = w, t.room[:0]
	if settled != nil {
		t.first.ensureRare().earlier = settled.all()
	}
	return t
}

// roomForOne is room for the slices of an evaluation in one zone, as most are, and
// roomForTwo for two. They are allocated with the tracker.
type roomForOne struct {
	zones  [1]inZone
	reqs   [1]store.Request
	states [1]store.State
}

type roomForTwo struct {
	zones  [2]inZone
	reqs   [2]store.Request
	states [2]store.State
}

// use makes the slices use some room.
func (e *evaluation) use(zones []inZone, reqs []store.Request, states []store.State) {
	e.zones, e.reqs, e.states = zones[:0], reqs[:0], states[:0]
}

// newEvaluation returns an evaluation that is not enrolled yet.
func (t *tracker) newEvaluation(l *Limiter, repl *caddy.Replacer) *evaluation {
	e := &t.first
	if len(t.own) > 0 {
		in := new(struct {
			evaluation
			roomForTwo
		})
		e = &in.evaluation
		room := &in.roomForTwo
		e.use(room.zones[:], room.reqs[:], room.states[:])
	}
	e.limiter, e.repl = l, repl
	return e
}

// add adds a zone, with the block of its client, or nil.
func (e *evaluation) add(z *boundZone, req store.Request, block *store.Override) {
	added := inZone{boundZone: z}
	if !z.enforces(req.ClientKey) {
		added.role = observes
	}
	e.zones = append(e.zones, added)
	e.reqs = append(e.reqs, req)
	if block != nil {
		e.setBlock(len(e.zones)-1, block)
	}
}

// enforces reports whether the zone refuses this client, and does not only observe
// it.
func (z *Zone) enforces(clientKey string) bool {
	return z.enforced == cohorts || cohortOf(enforceSalt, clientKey) < z.enforced
}

// The salts make the orders in which clients are moved and limits are enforced
// independent of each other, and of which shard owns a client. Other salts would
// choose other clients.
const (
	rolloutSalt = 0x726f6c6c6f7574
	enforceSalt = 0x656e666f726365
)

// cohorts is how many cohorts there are: as many as a float64 can count.
const cohorts = 1 << 53

// cohortOf returns a client's cohort, the same in every process. Each salt makes
// another order of the clients.
func cohortOf(salt uint64, clientKey string) uint64 {
	var d xxhash.Digest
	d.ResetWithSeed(salt)
	_, _ = d.WriteString(clientKey)
	return d.Sum64() % cohorts
}

// cohortsIn returns how many cohorts a share of the clients is.
func cohortsIn(percent float64) uint64 { return uint64(math.Round(percent / 100 * cohorts)) }

// enroll adds e to t, and makes t the request's tracker.
func (t *tracker) enroll(e *evaluation, r *http.Request) {
	if len(t.own) == 0 {
		t.request = r
		caddyhttp.SetVar(r.Context(), trackerVar, t)
		t.logAccess(r)
	}
	t.own = append(t.own, e)
	for i := range e.zones {
		z := &e.zones[i]
		if !z.SettleAtEnd {
			continue
		}
		if t.response == nil {
			t.response = &response{began: e.limiter.Now(), isHead: r.Method == http.MethodHead}
		}
		t.response.watch(z.Zone)
	}
}

// logAccess adds the decision to the request's entry in the access log, if there is
// one.
func (t *tracker) logAccess(r *http.Request) {
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil || server.Logs == nil {
		return
	}
	if fields, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		fields.Set(zap.Object("rate_limit", t))
	}
}

// counts reports whether the request is counted in that bucket already, or in one that
// clients share instead.
func (t *tracker) counts(z *boundZone, req *store.Request) bool {
	for _, e := range t.all() {
		for i := range e.zones {
			other := e.zones[i].boundZone
			if other.Name == z.Name && other.handle.Name == z.handle.Name && e.resolvedKey(i) == req.ClientKey {
				return true
			}
		}
	}
	return false
}
