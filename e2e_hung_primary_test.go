package shardlimit_test

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// undelivered is what the metric of charges that failed says of a shard.
func (c *caddyProcess) undelivered(shard, outcome string) int64 {
	c.t.Helper()
	text := c.metric(fmt.Sprintf(`caddy_rate_limit_undelivered_charges_total{outcome=%q,shard=%q,store="default"}`, outcome, shard))
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	must(c.t, "metric", err)
	return n
}

// askAll makes the same number of requests for each client while the primary
// hangs, and returns the time that the middle one took.
func askAll(t *testing.T, c *caddyProcess, clients []string, each int) time.Duration {
	t.Helper()
	var took []time.Duration
	for range each {
		for _, key := range clients {
			a := c.ask("/", "X-Key: "+key)
			must(t, key, want("status", a.status, http.StatusOK))
			must(t, key, want("being checked", a.isLimited(), true))
			took = append(took, a.received.Sub(a.sent))
		}
	}
	slices.Sort(took)
	return took[len(took)/2]
}

func TestHungPrimaryDelaysNoResponse(t *testing.T) {
	const each, bound = 10, 250 * time.Millisecond
	for _, pipelining := range []string{"pipelining on", "pipelining off"} {
		for _, resumes := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, resumes %v", pipelining, resumes), func(t *testing.T) {
				servers := startShards(t, 1, 1)
				timeout := "charge_timeout 30s"
				if !resumes {
					timeout = "charge_timeout 2s"
				}
				// A check on the replica may take half of its time.
				c := startCaddy(t, apiSite(servers.store(pipelining, timeout, "check_timeout 20s"), 1000, "1h"))
				clients := []string{"alice", "bob", "carol"}
				wanted := map[string]int64{}
				for _, key := range clients {
					must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, 1))
					wanted[key] = 1
				}
				servers.awaitCounts(t, "api", wanted)
				servers.awaitReplicas(t)

				primary := servers[0].Primary
				must(t, "hang", primary.Pause())
				median := askAll(t, c, clients, each)
				must(t, "response", want(fmt.Sprintf("median of %v being above %v", median, bound), median > bound, false))
				charges := int64(each * len(clients))
				failed := func() int64 { return c.undelivered("a", "lost") + c.undelivered("a", "uncertain") }

				if resumes {
					must(t, "resume", primary.Resume())
					for _, key := range clients {
						wanted[key] += each
					}
					servers.awaitCounts(t, "api", wanted)
					must(t, "metric", want("charges that failed", failed(), 0))
					return
				}
				eventually(t, "all charges are given up", func() error { return want("number of them", failed(), charges) })
				uncertain := c.undelivered("a", "uncertain")
				must(t, "resume", primary.Resume())
				// What was on its way to Redis may count, but never twice, and
				// what is lost never counts.
				c.stop()
				counted := int64(0)
				for _, n := range servers.counts(t, "api") {
					counted += n - 1
				}
				if counted > uncertain {
					t.Errorf("%d charges counted, but only %d of %d are uncertain", counted, uncertain, charges)
				}
				must(t, "log", want("charges that failed being told", strings.Contains(c.logs.String(), `"msg":"charges failed"`), true))
				t.Logf("%d of %d charges were uncertain, %d of these counted", uncertain, charges, counted)
			})
		}
	}
}
