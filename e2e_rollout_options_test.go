package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"
)

// TestRolloutHoldsRequests: a request that waits in one store holds nothing in the
// other.
func TestRolloutHoldsRequests(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 4*time.Second, func(full time.Duration) bool {
				servers := startShards(t, 2, 0)
				zones := "rollout other 50\n" + zoneWith("slow", "algorithm gcra", "events 20", "window 1s", "burst 1", "max_wait 10m", "charge "+mode) +
					zoneWith("second", byGroup, "charge before")
				c := startWith(t, twoStores(servers), zones, "respond ok")
				must(t, "first request", want("status", c.probe("/", "X-Key: alice", "X-Group: group").status, http.StatusOK))
				eventually(t, "it is charged", func() error {
					return want("there being a bucket", servers.content(t, "slow", "alice").spent != "", true)
				})
				at := servers.holder(t, "slow", "alice")
				slow, second := servers[at:at+1], servers[1-at:2-at]
				group := ""
				for i := 0; group == "" || second.content(t, "second", group).used == 0; i++ {
					group = fmt.Sprint("group-", i)
					must(t, group, want("status", c.probe("/", "X-Key: bob", "X-Group: "+group).status, http.StatusOK))
					servers.awaitUsed(t, "second", group, 1)
				}

				free := slow.keepFull(t, 20, full)
				var held []running
				for i := range 3 {
					r, inTime := c.lineUntil(t.Context(), t, free, fmt.Sprint("request ", i), "X-Group: "+group)
					if !inTime {
						return false
					}
					held = append(held, r)
				}
				// Who waits got back what he took, if he was that far.
				second.awaitUsed(t, "second", group, 1)
				for _, r := range held {
					a := r.ends(t)
					must(t, "held request", errors.Join(want("status", a.status, http.StatusOK), want("being answered before it fits", a.received.Before(free), false)))
				}
				second.awaitUsed(t, "second", group, 4)
				c.stop()
				must(t, "at the end", want("what is used of the second zone", second.content(t, "second", group).used, 4))
				return true
			})
		})
	}
}

// TestRolloutPenalizes: in the store of the zone that refuses, and nobody in the
// other one.
func TestRolloutPenalizes(t *testing.T) {
	servers := startShards(t, 2, 0)
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			for _, s := range servers {
				must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
			}
			c := startWith(t, twoStores(servers), "rollout other 50\n"+zoneWith("first", "charge before", "penalty 1h")+
				zoneWith("second", byGroup, "events 2", "charge before", "penalty 20000h"), "respond ok")
			key := servers.apart(t, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			must(t, "request that fits", c.probe("/", "X-Key: "+key, "X-Group: "+group).shows(http.StatusOK, 2, 2))
			a := c.probe("/", "X-Key: "+key, "X-Group: "+group)
			must(t, "refusal", errors.Join(a.refuses("second"), want("Retry-After being that of the penalty", a.retryAfter > 10000*3600, true)))
			eventually(t, "the penalty is stored", func() error {
				return want("its end being the reset", ceilSeconds(second.content(t, "second", group).penalty), a.reset)
			})
			c.stop()
			must(t, "at the end", errors.Join(want("the penalty of the first zone", first.content(t, "first", key).penalty, 0),
				want("what is used of the first zone", first.content(t, "first", key).used, 2)))
		})
	}
}

// TestRolloutTakesBatches: from both stores, and gives back to both what nobody
// used.
func TestRolloutTakesBatches(t *testing.T) {
	servers := startShards(t, 2, 0)
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			for _, s := range servers {
				must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
			}
			c := startWith(t, twoStores(servers), "rollout other 50\n"+zoneWith("first")+zoneWith("second", byGroup)+
				zoneWith("batch.first", "events 1000", "charge before", "batch 50")+
				zoneWith("batch.second", byGroup, "events 1000", "charge before", "batch 50"), "respond ok")
			key := servers.apart(t, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			asked := int64(1)
			eventually(t, "batches are taken", func() error {
				c.probe("/", "X-Key: "+key, "X-Group: "+group)
				asked++
				return errors.Join(want("the first store having more than was asked for", first.content(t, "batch.first", key).used > asked, true),
					want("the second store having more than was asked for", second.content(t, "batch.second", group).used > asked, true))
			})
			must(t, "next request", c.probe("/", "X-Key: "+key, "X-Group: "+group).shows(http.StatusOK, 100, asked+1))
			asked++
			c.stop()
			must(t, "at the end", errors.Join(want("what is used of the first zone", first.content(t, "batch.first", key).used, asked),
				want("what is used of the second zone", second.content(t, "batch.second", group).used, asked)))
		})
	}
}

// TestRolloutOfTwoHandlers: a bucket is charged once, in whichever handlers its
// zone is, and a client that one of them moves has two.
func TestRolloutOfTwoHandlers(t *testing.T) {
	servers := startShards(t, 2, 0)
	for name, test := range map[string]struct {
		outer, inner string
		own, other   int64
	}{
		"the same":             {"rollout other 100", "rollout other 100", 0, 3},
		"by one":               {"rollout other 100", "rollout other 0", 3, 3},
		"to the store of one":  {"rollout other 100", "store other", 0, 3},
		"crosswise, everybody": {"rollout other 100", "store other\nrollout default 100", 3, 3},
	} {
		t.Run(name, func(t *testing.T) {
			for _, s := range servers {
				must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
			}
			c := startCaddy(t, twoHandlersSite(twoStores(servers), test.outer+"\n"+zoneText("api", 3), test.inner+"\n"+zoneText("api", 3)))
			for used := range int64(3) {
				must(t, "request that fits", c.ask("/", "X-Key: alice").is(http.StatusOK, used+1))
			}
			must(t, "request too many", c.ask("/", "X-Key: alice").is(http.StatusTooManyRequests, 3))
			c.stop()
			must(t, "counts", errors.Join(want("of the default store", servers[:1].counts(t, "api")["alice"], test.own),
				want("of the other store", servers[1:].counts(t, "api")["alice"], test.other)))
		})
	}
}
