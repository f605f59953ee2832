package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestRolloutHoldsRequests: a request that waits in one store holds nothing in the
// other.
func TestRolloutHoldsRequests(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // it spends its time waiting
			whileFull(t, 4*time.Second, func(full time.Duration) bool {
				servers := caddytest.StartShards(t, 2, 0)
				zones := "rollout other 50\n" + zoneWith("slow", "algorithm gcra", "events 20", "window 1s", "burst 1", "max_wait 10m", "charge "+mode) +
					zoneWith("second", byGroup, "charge before")
				c := startWith(t, twoStores(servers), zones, "respond ok")
				must(t, "first request", want("status", c.Probe("/", "X-Key: alice", "X-Group: group").Status, http.StatusOK))
				eventually(t, "it is charged", func() error {
					return want("there being a bucket", servers.Content(t, "slow", "alice").Spent != "", true)
				})
				at := holderOf(t, servers, "slow", "alice")
				slow, second := servers[at:at+1], servers[1-at:2-at]
				group := ""
				for i := 0; group == "" || second.Content(t, "second", group).Used == 0; i++ {
					group = fmt.Sprint("group-", i)
					must(t, group, want("status", c.Probe("/", "X-Key: bob", "X-Group: "+group).Status, http.StatusOK))
					servers.AwaitUsed(t, "second", group, 1)
				}

				free := keepFull(t, slow, 20, full)
				var held []caddytest.Running
				for i := range 3 {
					r, inTime := waitInLineUntil(t.Context(), t, c, free, fmt.Sprint("request ", i), "X-Group: "+group)
					if !inTime {
						return false
					}
					held = append(held, r)
				}
				// Who waits got back what he took, if he was that far.
				second.AwaitUsed(t, "second", group, 1)
				for _, r := range held {
					a := r.Ends(t)
					must(t, "held request", errors.Join(want("status", a.Status, http.StatusOK), want("being answered before it fits", a.Received.Before(free), false)))
				}
				second.AwaitUsed(t, "second", group, 4)
				c.Stop()
				must(t, "at the end", want("what is used of the second zone", second.Content(t, "second", group).Used, 4))
				return true
			})
		})
	}
}

// TestRolloutPenalizes: in the store of the zone that refuses, and nobody in the
// other one.
func TestRolloutPenalizes(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 0)
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			for _, s := range servers {
				must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
			}
			c := startWith(t, twoStores(servers), "rollout other 50\n"+zoneWith("first", "charge before", "penalty 1h")+
				zoneWith("second", byGroup, "events 2", "charge before", "penalty 20000h"), "respond ok")
			key := keyApart(t, servers, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			must(t, "request that fits", c.Probe("/", "X-Key: "+key, "X-Group: "+group).Shows(http.StatusOK, 2, 2))
			a := c.Probe("/", "X-Key: "+key, "X-Group: "+group)
			must(t, "refusal", errors.Join(a.Refuses("second"), want("Retry-After being that of the penalty", a.RetryAfter > 10000*3600, true)))
			eventually(t, "the penalty is stored", func() error {
				return want("its end being the reset", ceilSeconds(second.Content(t, "second", group).Penalty), a.Reset)
			})
			c.Stop()
			must(t, "at the end", errors.Join(want("the penalty of the first zone", first.Content(t, "first", key).Penalty, 0),
				want("what is used of the first zone", first.Content(t, "first", key).Used, 2)))
		})
	}
}

// TestRolloutTakesBatches: from both stores, and gives back to both what nobody
// used.
func TestRolloutTakesBatches(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 0)
	for place, at := range places {
		t.Run(place, func(t *testing.T) {
			for _, s := range servers {
				must(t, "flush", s.Primary.Client().FlushAll(t.Context()).Err())
			}
			c := startWith(t, twoStores(servers), "rollout other 50\n"+zoneWith("first")+zoneWith("second", byGroup)+
				zoneWith("batch.first", "events 1000", "charge before", "batch 50")+
				zoneWith("batch.second", byGroup, "events 1000", "charge before", "batch 50"), "respond ok")
			key := keyApart(t, servers, c, "X-Group", at)
			group := "group-" + key
			first, second := servers[at:at+1], servers[1-at:2-at]
			asked := int64(1)
			eventually(t, "batches are taken", func() error {
				c.Probe("/", "X-Key: "+key, "X-Group: "+group)
				asked++
				return errors.Join(want("the first store having more than was asked for", first.Content(t, "batch.first", key).Used > asked, true),
					want("the second store having more than was asked for", second.Content(t, "batch.second", group).Used > asked, true))
			})
			must(t, "next request", c.Probe("/", "X-Key: "+key, "X-Group: "+group).Shows(http.StatusOK, 100, asked+1))
			asked++
			c.Stop()
			must(t, "at the end", errors.Join(want("what is used of the first zone", first.Content(t, "batch.first", key).Used, asked),
				want("what is used of the second zone", second.Content(t, "batch.second", group).Used, asked)))
		})
	}
}

// TestRolloutOfTwoHandlers: a bucket is charged once, in whichever handlers its
// zone is, and a client that one of them moves has two.
func TestRolloutOfTwoHandlers(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 0)
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
			c := caddytest.Start(t, twoHandlersSite(twoStores(servers), test.outer+"\n"+zoneText("api", 3), test.inner+"\n"+zoneText("api", 3)))
			for used := range int64(3) {
				must(t, "request that fits", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used+1))
			}
			must(t, "request too many", c.Ask("/", "X-Key: alice").Is(http.StatusTooManyRequests, 3))
			c.Stop()
			must(t, "counts", errors.Join(want("of the default store", servers[:1].Counts(t, "api")["alice"], test.own),
				want("of the other store", servers[1:].Counts(t, "api")["alice"], test.other)))
		})
	}
}
