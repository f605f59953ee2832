package ledger

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// steady is a client that comes ten times a second.
type steady struct {
	*testing.T
	sim    *simulation
	ledger *Ledger
	req    store.Request
}

func newSteady(t *testing.T, limit store.Limit, events int64) *steady {
	limit.Zone, limit.Window = "zone", time.Minute
	s := newSimulation(1)
	return &steady{t, s, New(NewBooks(nil), s, Options{}), store.Request{Limit: &limit, ClientKey: "client", Events: events, Cost: 1}}
}

// come makes n requests, which are charged, and returns how many checks they
// cost.
func (c *steady) come(n int) (checks int) {
	before := c.sim.checks
	for range n {
		st := admit(c.ledger, c.req)
		if st.Err == nil && st.Allowed {
			c.ledger.Settle([]store.Request{c.req}, nil)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return c.sim.checks - before
}

func (c *steady) want(what string, got, least, most int) {
	c.Helper()
	if got < least || got > most {
		c.Errorf("%s, %s: %d checks, want %d to %d", c.req.Limit.Algorithm, what, got, least, most)
	}
}

// TestOwnBucketIsNotAskedAbout: once nobody else has charged a bucket for as long
// as the primary's word is trusted, requests that leave half of it are admitted
// without a check. Anything that speaks against it makes the store be asked.
func TestOwnBucketIsNotAskedAbout(t *testing.T) {
	for _, kind := range kinds {
		synctest.Test(t, func(t *testing.T) {
			c := newSteady(t, kind, 1000)
			c.want("at first", c.come(15), 10, 15)
			if !algorithm.Copies(kind.Algorithm) {
				c.want("where nothing is known of single events", c.come(20), 20, 20)
				c.ledger.Leave()
				return
			}
			c.want("alone", c.come(20), 0, 1)

			c.sim.others(algorithm.Charge, c.req)
			c.want("after another process has charged", c.come(10), 8, 10)
			c.want("alone again", c.come(20), 0, 5)

			time.Sleep(2 * DefaultTrust)
			c.want("once trust has run out", c.come(1), 1, 1)
			c.want("which one question renews", c.come(10), 0, 0)

			c.sim.setDown(true, false)
			c.want("in an outage", c.come(20), 18, 20)
			c.sim.setDown(false, false)
			c.come(30)
			c.want("after an outage", c.come(20), 0, 0)

			c.ledger.Refund(t.Context(), []store.Request{c.req})
			c.want("after a refund", c.come(5), 1, 5)
			c.ledger.Leave()
		})
	}
}

// TestOwnBucketIsAskedAboutNearTheLimit, and admits exactly that.
func TestOwnBucketIsAskedAboutNearTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSteady(t, store.Limit{Algorithm: store.FixedWindow}, 100)
		c.want("at first", c.come(15), 10, 15)
		c.want("with more than half left", c.come(30), 0, 2)
		c.come(10)
		c.want("with less than half left", c.come(30), 30, 30)
		c.come(30)
		if used := c.sim.used(c.req); used != 100 {
			t.Errorf("%d are used, want 100", used)
		}
		c.ledger.Leave()
	})
}

// TestOthersAreSeenWithinTrust: a process that had a bucket to itself knows what
// others spend as soon as its own next charge is answered.
func TestOthersAreSeenWithinTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSteady(t, store.Limit{Algorithm: store.FixedWindow}, 1000)
		c.come(30)
		for range 970 {
			c.sim.others(algorithm.Charge, c.req)
		}
		// One passes on what was true a moment ago; its charge tells the rest.
		c.come(5)
		if used := c.sim.used(c.req); used != 1001 {
			t.Errorf("%d of 1000 are used, want one more than that", used)
		}
		c.ledger.Leave()
	})
}
