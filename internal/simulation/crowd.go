package simulation

import (
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// rival are other clients whose buckets share a part of a registry with one that is simulated: a full registry makes
// room in the part where it needs some. They come in turn.
type rival struct {
	keys [3]string
	came int
	// crowdedOut is when they have last crowded the bucket out.
	crowdedOut int64
}

// next is a request of the rival whose turn it is.
func (v *rival) next() *store.Request {
	v.came++
	return strangerRequest(v.keys[v.came%len(v.keys)])
}

var strangerLimit = store.Limit{Zone: "strangers", Algorithm: store.FixedWindow, Window: strangerTime}

// strangerTime is for how long what is known of a rival counts.
const strangerTime = time.Millisecond

func strangerRequest(key string) *store.Request {
	return &store.Request{Limit: &strangerLimit, ClientKey: key, Events: 1}
}

// findRivals finds rivals of each bucket that is simulated. It reports whether no two of these share a part of the
// registry, of which each has its own random number.
func (p *process) findRivals() bool {
	l := ledger.New(p.registry, &remote{process: p}, ledger.Options{})
	defer l.Leave()
	owners := ledger.NewOwners(l)
	// A bucket of which nothing is known goes once another one comes into its part.
	touch := func(c *client) { owners.Settle([]*store.Request{new(c.some())}, []int64{0}) }
	isKnown := func(c *client) bool { return owners.Recall(new(c.some())) }
	p.rivals = map[string]*rival{}
	for _, c := range p.clients {
		touch(c)
	}
	for _, c := range p.clients {
		if !isKnown(c) {
			return false
		}
	}
	strangers := 0
	for _, c := range p.clients {
		v := new(rival)
		for i := range v.keys {
			for touch(c); isKnown(c); strangers++ {
				v.keys[i] = strconv.Itoa(strangers)
				l.Settle([]*store.Request{strangerRequest(v.keys[i])}, []int64{0})
			}
		}
		some := c.some()
		p.rivals[keyOf(&some)] = v
	}
	return true
}

// crowdOut makes others crowd a bucket out of a process, unless it is in use. If it has what only the process knows,
// and something of less worth is beside it, that has to go first.
func (s *Run) crowdOut(rng *stream, then func()) {
	// The rivals of now are worth nothing to the next ones.
	defer s.after(2*strangerTime, then)
	p, c := s.caddys[rng.IntN(len(s.caddys))], s.clients[rng.IntN(len(s.clients))]
	r := c.some()
	rivals := p.rivals[keyOf(&r)]
	if isBeside, isAlone := rng.chance(0.5), rng.chance(0.5); isBeside && s.needs(p, c) {
		// Only charges that wait are worth more than what a process has decided alone.
		isAlone = isAlone && p.view.Account(&r).Unsent > 0
		for _, l := range []*ledger.Ledger{p.view.Ledger, p.full, p.full} {
			rival := rivals.next()
			if rival.Until = p.time().Add(strangerTime).UnixMicro(); isAlone {
				l.AdmitAlone(rival)
			} else {
				l.PenalizeAlone(rival)
			}
		}
		if p.view.Account(&r) == nil {
			s.fail("%s forgot what only it knew of %s, and not what was worth less, alone %v", p.name, c.key, isAlone)
		}
		return
	}
	isKnown := func() bool { return p.view.Recall(new(r)) }
	for n := 2 * len(rivals.keys); n > 0 && isKnown(); n-- {
		p.full.Settle([]*store.Request{rivals.next()}, []int64{0})
	}
	if isKnown() {
		return
	}
	s.note("%s forgets %s", p.name, c.key)
	if rivals.crowdedOut = s.now(); s.faults {
		c.forget(p)
	}
}

// penaltyTime is for how long a penalty certainly counts as on its way.
const penaltyTime = 1900 * time.Millisecond

// needs reports whether a process knows something of a bucket that is nowhere else: charges, or counts or a penalty
// on its way.
func (s *Run) needs(p *process, c *client) bool {
	r := c.some()
	a := p.view.Account(&r)
	since := max(c.reset, s.now()-penaltyTime.Microseconds(), p.rivals[keyOf(&r)].crowdedOut+1)
	isPenalized := c.penalizedBy == p && c.penalized >= since
	return a != nil && (a.Unsent > 0 || a.IsAlone || isPenalized)
}

// forget forgets what a process has admitted, because it has itself.
func (c *client) forget(p *process) {
	c.admitted = slices.DeleteFunc(c.admitted, func(a admission) bool { return a.by == p })
}
