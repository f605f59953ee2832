package limiter

import (
	"cmp"
	"math"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// collect resolves what the request asks of the zones that match it, as a new
// evaluation of t, or of a new tracker if t is nil or, in an error route, settled. It
// leaves out zones that do not limit the request, buckets in which another
// handler counts it already, and zones of addresses if Caddy includes what it asks for. It returns no
// evaluation if nothing is left.
func (l *Limiter) collect(t *tracker, w http.ResponseWriter, r *http.Request) (*tracker, *evaluation, error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if t == nil || len(t.own) == 0 {
		repl.Map(placeholders(r))
	}
	var e *evaluation
	chosen, isOfCaddy := choice{limiter: l}, isInclude(r)
	for _, z := range l.Zones {
		if isOfCaddy && z.countsAddress(r, repl) {
			continue
		}
		asked, isAsked, err := z.meet(r, repl, &chosen)
		for more := asked.more; ; more = more[1:] {
			switch {
			case err != nil:
				return t, nil, err
			case isAsked && (t == nil || !t.counts(asked.zone, &asked.req)):
				if l.simulation == nil {
					asked.zone.sampled(asked.req.ClientKey, r)
				}
				if e == nil {
					if t == nil || t.settled {
						t = newTracker(w, t, len(l.Zones))
					}
					e = t.newEvaluation(l, repl)
				}
				e.add(&asked)
			}
			if len(more) == 0 {
				break
			}
			asked = resolved{zone: asked.zone, rule: asked.rule, isOneOf: true}
			events, burst := z.limitBy(asked.rule, repl, l)
			isAsked, err = asked.resolve(more[0], r, repl, l, events, burst)
		}
	}
	if e != nil {
		t.enroll(e, r)
	}
	return t, e, nil
}

// isInclude reports whether r is a request of Caddy to itself, by httpInclude of templates, with the headers of
// its visitor but not the address. No client can send one: the server gives each the local address.
func isInclude(r *http.Request) bool {
	return r.RemoteAddr == "127.0.0.1:10000" && r.Context().Value(http.LocalAddrContextKey) == nil
}

// choice is in which store a request counts, made once a zone matches.
type choice struct {
	limiter *Limiter
	in      int
	isMade  bool
}

// make makes the choice, by the client of a zone.
func (c *choice) make(by *Zone, r *http.Request, repl *caddy.Replacer) {
	if c.isMade = true; c.limiter.Rollout == nil {
		return
	}
	if key, _, _, _ := by.keyOf(r, repl); c.limiter.Rollout.moves(key, by.rule(c.limiter)) {
		c.in = rolloutStore
	}
}

// Moves reports whether a rollout moves requests by the client of the zone: the handler's first one, or any zone of a
// service.
func (l *Limiter) Moves(by *Zone) bool {
	return l.Rollout != nil && (l.IsService || l.Zones[0] == by)
}

// meet resolves what r asks of the zone if r matches, and reports whether the zone limits r, or blocks its client.
func (z *Zone) meet(r *http.Request, repl *caddy.Replacer, in *choice) (asked resolved, isAsked bool, err error) {
	if len(z.Matchers) > 0 {
		if matches, err := z.Matchers.AnyMatchWithError(r); err != nil || !matches {
			return asked, false, err
		}
	}
	if !in.isMade {
		in.make(in.limiter.Zones[0], r, repl)
	}
	l := in.limiter
	asked = resolved{zone: &z.bound[in.in], rule: z.rule(l)}
	events, burst := z.limitBy(asked.rule, repl, l)
	// A client without a limit may be blocked, so it is named like others.
	key, more, err := z.clientKeys(r, repl, l, events != unlimited)
	if err != nil {
		return asked, false, err
	}
	asked.more, asked.isOneOf = more, len(more) > 0
	isAsked, err = asked.resolve(key, r, repl, l, events, burst)
	return asked, isAsked, err
}

// resolved is what a request asks of a zone about a client.
type resolved struct {
	// zone is in the store in which the request is counted.
	zone *boundZone
	req  store.Request
	// block is that of the client, or nil; rule is what operators have changed of the zone, or nil.
	block, rule *store.Override
	// more are the keys of the other clients that the zone counts the request for.
	more []string
	// isOneOf is set if there are others.
	isOneOf bool
}

// resolve sets what r asks for a client: by the limit of the zone, and what operators have changed for the
// client. It reports whether the zone limits r, or blocks the client. If the events are 0 no store is asked.
func (a *resolved) resolve(key string, r *http.Request, repl *caddy.Replacer, l *Limiter, events, burst int64) (isAsked bool, err error) {
	z, req := a.zone, &a.req
	of := z.overridesOf(key, l)
	a.block, *req = of.Block, store.Request{Limit: &z.limit, ClientKey: key}
	if err = z.setLimit(req, r, events, burst, of); req.Events == unlimited {
		return a.block != nil, nil
	}
	req.Batch, req.Penalty = z.Batch, z.Penalty
	switch {
	case z.isLease:
		// A lease does not settle the cost.
		req.Cost = z.finalCost(repl, l, nil)
	default:
		req.Cost = z.firstCost(repl)
	}
	if z.needsID {
		req.ID = identity.NewRequestID()
	}
	req.Hold = z.newHold(nil)
	return err == nil, err
}

// setLimit makes req ask for the limit that holds: that of the client in place of that of the zone, without
// what r must not use, and with what was granted. If a matcher fails, that is the error, and nothing is kept.
func (z *Zone) setLimit(req *store.Request, r *http.Request, events, burst int64, of stores.ClientOverrides) (err error) {
	if of.Limit != nil {
		events, burst = z.limitIn(of.Limit)
	}
	req.Events, req.Burst, req.Reserved = events, burst, 0
	if events == unlimited {
		return nil
	}
	if len(z.Reserves) > 0 {
		var percent int64
		if percent, err = z.reservedFrom(r); err == nil {
			req.Reserved = Share(req.Capacity(), percent)
		}
	}
	z.grant(req, of.Grant)
	return err
}

// LimitNow makes r, which is about a bucket in a store, ask for what holds for the client now, by a rule of
// the zone or nil. Where that depends on the request, or there is no limit, r stays as it is. It reports
// whether there is one.
func (z *Zone) LimitNow(r *store.Request, in *stores.Handle, rule *store.Override, l *Limiter) bool {
	of := z.boundIn(in).overridesOf(r.ClientKey, l)
	last := *r
	switch {
	case of.Limit != nil:
		r.Events, r.Burst = z.limitIn(of.Limit)
	case rule != nil && rule.Events != 0:
		r.Events, r.Burst = z.limitIn(rule)
	case z.Events.isDynamic() || z.Burst.isDynamic():
		return r.Events > 0
	default:
		r.Events, r.Burst = z.Events.Number, z.Burst.Number
	}
	if r.Events == unlimited {
		*r = last
		return false
	}
	if z.grant(r, of.Grant); r.Events == 0 {
		// What was spent drains by the limit that it was spent under, of which nothing may be used.
		r.Events, r.Burst = cmp.Or(last.Events, algorithm.Of(z.Algorithm).MostEvents), last.Burst
		r.Reserved = r.Capacity()
	}
	return true
}

// boundIn returns the zone in one of its stores.
func (z *Zone) boundIn(in *stores.Handle) *boundZone {
	if other := &z.bound[rolloutStore]; other.handle == in {
		return other
	}
	return &z.bound[ownStore]
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

// rule returns what operators have changed of the zone, or nil. It is kept in the handler's own store.
func (z *Zone) rule(l *Limiter) *store.Override {
	return z.bound[ownStore].handle.ZoneOverride(z.Name, l.Now)
}

// limitBy returns how many events the zone admits for the request, or unlimited, and how many at once:
// by a rule, if that says so, or the config.
func (z *Zone) limitBy(rule *store.Override, repl *caddy.Replacer, l *Limiter) (events, burst int64) {
	if rule != nil && rule.Events != 0 {
		return z.limitIn(rule)
	}
	return z.eventsFor(repl, l)
}

// limitIn returns the limit that an override gives, as far as the algorithm allows it. An override
// without a burst leaves that of the config, or its fallback.
func (z *Zone) limitIn(o *store.Override) (events, burst int64) {
	if o.Events == store.Unlimited {
		return unlimited, 0
	}
	limit := *o
	if limit.Burst = cmp.Or(o.Burst, z.Burst.Number); !z.Algorithm.HasBurst() {
		limit.Burst = 0
	}
	return z.Bounded(&limit)
}

// overridesOf returns what operators have changed for a client. A rollout that moves the client ends
// no block and no limit.
func (z *boundZone) overridesOf(clientKey string, l *Limiter) stores.ClientOverrides {
	of := z.handle.OverridesOf(z.Name, clientKey, l.Now)
	if l.Rollout == nil {
		return of
	}
	other := z.bound[ownStore+rolloutStore-z.in].handle.OverridesOf(z.Name, clientKey, l.Now)
	of.Block, of.Limit = cmp.Or(of.Block, other.Block), cmp.Or(of.Limit, other.Limit)
	return of
}

// grant adds the events that were granted, if any were, to the limit of req.
func (z *Zone) grant(req *store.Request, grant *store.Override) {
	switch {
	case grant == nil:
	case z.Algorithm.HasBurst() && req.Events > 0:
		// The rate stays, at which all of them have to come back within a century.
		req.Burst = min(cmp.Or(req.Burst, req.Events)+grant.Events, store.MaxEvents, algorithm.MostBurst(req.Events, z.Window))
	default:
		req.Events = min(req.Events+grant.Events, algorithm.Of(z.Algorithm).MostEvents)
	}
}

// Rollout is the share of the clients that is counted in another store.
type Rollout struct {
	Store *stores.Handle
	// Percent is from 0 to 100.
	Percent float64
	// moved is how many cohorts are in the other store.
	moved uint64
}

// moves reports whether the client is counted in the other store, by a rule of the zone or the config.
func (o *Rollout) moves(clientKey string, rule *store.Override) bool {
	moved := o.moved
	if rule != nil && rule.Rollout != nil {
		moved = cohortsIn(*rule.Rollout)
	}
	return cohortOf(rolloutSalt, clientKey) < moved
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
		t.first.use(in.inZones[:], in.roomForOne.zones[:], in.asks[:], in.posts[:])
	} else {
		in := new(struct {
			tracker
			roomForTwo
		})
		t = &in.tracker
		t.first.use(in.inZones[:], in.roomForTwo.zones[:], in.asks[:], in.posts[:])
	}
	t.ResponseWriter, t.own = w, t.room[:0]
	if settled != nil {
		t.first.ensureRare().earlier = settled.all()
	}
	return t
}

// roomForOne is room for an evaluation in one zone, as most are, and roomForTwo for two. They are
// allocated with the tracker.
type roomForOne struct {
	inZones [1]inZone
	zones   [1]*inZone
	asks    [1]*store.Ask
	posts   [1]*store.Request
}

type roomForTwo struct {
	inZones [2]inZone
	zones   [2]*inZone
	asks    [2]*store.Ask
	posts   [2]*store.Request
}

// use makes the evaluation use some room.
func (e *evaluation) use(room []inZone, zones []*inZone, asks []*store.Ask, posts []*store.Request) {
	for i := range room {
		zones[i] = &room[i]
	}
	e.zones, e.asks, e.posts = zones[:0], asks[:0], posts[:0]
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
		e.use(in.inZones[:], in.roomForTwo.zones[:], in.roomForTwo.asks[:], in.roomForTwo.posts[:])
	}
	e.limiter, e.repl = l, repl
	return e
}

// add adds a zone.
func (e *evaluation) add(asked *resolved) *inZone {
	var z *inZone
	if n := len(e.zones); n < cap(e.zones) {
		z = e.zones[:n+1][n]
	}
	if z == nil {
		z = new(inZone)
	}
	*z = inZone{boundZone: asked.zone, of: e, ask: store.Ask{Request: asked.req}, isOneOf: asked.isOneOf}
	if !asked.zone.enforces(asked.req.ClientKey, asked.rule) {
		z.role = observes
	}
	if asked.block != nil {
		z.setBlock(asked.block)
	}
	e.zones, e.asks = append(e.zones, z), append(e.asks, &z.ask)
	return z
}

// enforces reports whether the zone refuses this client, and does not only observe
// it, by a rule or the config.
func (z *Zone) enforces(clientKey string, rule *store.Override) bool {
	enforced := z.enforced
	if rule != nil && rule.Enforce != nil {
		enforced = cohortsIn(*rule.Enforce)
	}
	return enforced == cohorts || cohortOf(enforceSalt, clientKey) < enforced
}

// observesAll reports whether the zone refuses no client, by a rule or the config.
func (z *Zone) observesAll(rule *store.Override) bool {
	if rule != nil && rule.Enforce != nil {
		return *rule.Enforce == 0
	}
	return z.enforced == 0
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
	for _, z := range e.zones {
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
		for _, other := range e.zones {
			if other.Name == z.Name && other.handle.Name == z.handle.Name && other.resolvedKey() == req.ClientKey {
				return true
			}
		}
	}
	return false
}
