package simulation

import (
	"cmp"
	"errors"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// ran notes what the primary has executed.
func (s *Run) ran(op algorithm.Operation, r *store.Request, st *store.State) {
	s.note("primary ran %v of %d for %s: %+v", op, r.Cost, r.ClientKey, *st)
	c := s.client(keyOf(r))
	switch op {
	case opCharge:
		c.counted += r.Cost
		s.land(c, r.Cost)
	case opTake:
		if st.Allowed {
			c.counted += r.Cost
		}
		s.land(c, 0)
	case opRefund:
		c.counted -= r.Cost
		// Until now it counted.
		c.truth = append(c.truth, moment{s.now(), st.Used + r.Cost + c.unlanded})
		s.land(c, 0)
	}
	if held := s.held(c); !held.InFlight {
		c.heldSince = 0
	} else if c.heldSince == 0 {
		c.heldSince = s.now()
	}
}

// held is what the primary would say of what is held to a request of a client.
func (s *Run) held(c *client) store.State {
	r := c.some()
	r.Cost, r.Hold = c.cost, store.HearsHeld
	return s.net.servers.look(r, s.net.clock(), false)
}

// doubted notes a take of unknown outcome. If it is served alone and was not executed, the store hears of it late, or
// never.
func (s *Run) doubted(r *store.Request, late *store.Late) {
	c, cost := s.client(keyOf(r)), r.Cost
	c.uncertain += cost
	c.missing = append(c.missing, admission{at: s.now(), cost: cost})
	late.Then(func(err error) {
		if err == nil {
			c.kept += cost
		}
		if err == nil || errors.Is(err, store.ErrNotExecuted) {
			c.uncertain -= cost
		}
	})
}

// everStarted are all processes, also those that have ended.
func (s *Run) everStarted() []*process { return slices.Concat(s.caddys, s.former) }

// noteLost notes the charges that processes have given up. Their zone is not known, so they count in each.
func (s *Run) noteLost() {
	for _, p := range s.everStarted() {
		p.givenLock.Lock()
		given := p.given
		p.given = nil
		p.givenLock.Unlock()
		// A registry gives its parts up in a random order.
		slices.SortFunc(given, func(a, b undelivered) int { return cmp.Compare(a.shard, b.shard) })
		for _, g := range given {
			s.note("given up for the %s: %d, %v", g.shard, g.requests, g.err)
			if !errors.Is(g.err, store.ErrUncertain) {
				p.lost += g.requests
			}
			for _, c := range s.clients {
				if shardPrefix+c.key == g.shard {
					s.lose(c, g.requests*c.cost, g.err)
				}
			}
		}
	}
}

func (s *Run) lose(c *client, cost int64, err error) {
	c.missing = append(c.missing, admission{at: s.now(), cost: cost})
	if errors.Is(err, store.ErrUncertain) {
		c.uncertain += cost
	} else {
		c.lost += cost
	}
}
