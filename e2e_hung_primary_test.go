package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// undelivered is what the metric of charges that failed says of a shard.
func undelivered(c *caddytest.Caddy, shard, outcome string) int64 {
	c.T.Helper()
	text := c.Metric(fmt.Sprintf(`caddy_rate_limit_undelivered_total{operation="charge",outcome=%q,shard=%q,store="default"}`, outcome, shard))
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	must(c.T, "metric", err)
	return n
}

// askAll makes the same number of requests for each client while the primary
// hangs. A response that waits for the primary fails the test: check_timeout is
// longer than the test's own client waits.
func askAll(t *testing.T, c *caddytest.Caddy, clients []string, each int) {
	t.Helper()
	for range each {
		for _, key := range clients {
			a := c.Ask("/", "X-Key: "+key)
			must(t, key, errors.Join(want("status", a.Status, http.StatusOK), want("being checked", a.IsLimited(), true)))
		}
	}
}

func TestHungPrimaryDelaysNoResponse(t *testing.T) {
	const each = 10
	for _, test := range []struct {
		pipelining, timeout string
		hangs               time.Duration // 0: until charges are given up
	}{
		{"on", "1h", time.Nanosecond},
		{"off", "1h", time.Nanosecond},
		// Longer than a client of Redis commonly waits for a reply.
		{"on", "1h", 6 * time.Second},
		{"on", "1s", 0},
		{"off", "1s", 0},
	} {
		t.Run(fmt.Sprintf("pipelining %s, charge_timeout %s, hangs %v", test.pipelining, test.timeout, test.hangs), func(t *testing.T) {
			// They spend their time waiting.
			t.Parallel()
			servers := caddytest.StartShards(t, 1, 1)
			// A check on the replica may take half of its time.
			store := servers.Store("pipelining "+test.pipelining, "charge_timeout "+test.timeout, "check_timeout 1h")
			c := caddytest.Start(t, apiSite(store, 1000, "1h"))
			clients := []string{"alice", "bob", "carol"}
			wanted := map[string]int64{}
			for _, key := range clients {
				must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 1))
				wanted[key] = 1
			}
			servers.AwaitCounts(t, "api", wanted)
			servers.AwaitReplicas(t)

			primary := servers[0].Primary
			must(t, "hang", primary.Pause())
			askAll(t, c, clients, each)
			charges := int64(each * len(clients))
			failed := func() int64 {
				return undelivered(c, "a", "lost") + undelivered(c, "a", "expired") + undelivered(c, "a", "uncertain")
			}

			if test.hangs > 0 {
				time.Sleep(test.hangs)
				must(t, "resume", primary.Resume())
				for _, key := range clients {
					wanted[key] += each
				}
				servers.AwaitCounts(t, "api", wanted)
				must(t, "metric", want("number of charges that failed", failed(), 0))
				return
			}
			eventually(t, "charges are given up", func() error {
				return want("their outcome being unknown", undelivered(c, "a", "uncertain") > 0, true)
			})
			// The others wait in the ledger, for longer than charge_timeout and
			// the reply to what may be sent by then.
			time.Sleep(4 * time.Second)
			must(t, "waiting charges", errors.Join(want("some being left", failed() < charges, true),
				want("number of those that surely did not run and are given up", undelivered(c, "a", "lost")+undelivered(c, "a", "expired"), 0)))
			must(t, "resume", primary.Resume())
			// All count that surely did not run before. What was on its way to
			// Redis may count, but never twice.
			var uncertain, counted int64
			eventually(t, "the waiting charges are delivered", func() error {
				uncertain, counted = undelivered(c, "a", "uncertain"), 0
				for _, n := range servers.Counts(t, "api") {
					counted += n - 1
				}
				return want(fmt.Sprintf("%d being at least %d, less %d that are uncertain", counted, charges, uncertain), counted >= charges-uncertain, true)
			})
			c.Stop()
			for _, key := range clients {
				n := servers.Counts(t, "api")[key] - 1
				must(t, key, want(fmt.Sprintf("%d requests counting more than once", n), n > each, false))
			}
			logs := c.Logs.String()
			must(t, "log", errors.Join(want("telling of failed charges", strings.Contains(logs, `"msg":"charges or refunds failed"`), true),
				want("telling of charges that are lost", strings.Contains(logs, `"msg":"charges were lost at exit"`), false)))
			t.Logf("%d of %d charges were uncertain, %d charges counted", uncertain, charges, counted)
		})
	}
}
