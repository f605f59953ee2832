package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// limitIs waits until a response shows a client that limit.
func limitIs(t *testing.T, c *caddytest.Caddy, client string, limit int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s has the limit %d", client, limit), func() error {
		return caddytest.Want("limit", c.Probe("/", "X-Key: "+client).Limit, limit)
	})
}

// TestRulesReachEveryCaddy: what is set of a client and of the zone holds in all Caddys, after reloads and
// restarts, while shards are added and removed, and while one is away.
func TestRulesReachEveryCaddy(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 3, 1)
	zone := zoneWith("api", "events 1000000")
	site := func(shards ...string) string {
		return zonesSite(caddytest.RedisStore(shards...), zone, "respond ok")
	}
	a, b := caddytest.ShardOf("a", servers[0]), caddytest.ShardOf("b", servers[1])
	two := site(a, b)
	caddys := caddytest.StartMany(t, 2, two)
	must := func(text string, code int) {
		t.Helper()
		must(t, text, want("exit code", code, 0))
	}
	out, errOut, code := command(t, "set", "api", "--events", "7000", "--for", "30d", "alice", "--address", caddys[0].Admin)
	must(out+errOut, code)
	out, errOut, code = command(t, "set", "api", "--events", "9000", "--address", caddys[1].Admin)
	must(out+errOut, code)
	holds := func(what string, caddys ...*caddytest.Caddy) {
		t.Helper()
		t.Log(what)
		for _, c := range caddys {
			limitIs(t, c, "alice", 7000)
			limitIs(t, c, "bob", 9000)
		}
	}
	holds("two Caddys", caddys...)
	for _, c := range caddys {
		c.MustLoad(two + "\n# again")
	}
	holds("after a reload", caddys...)
	caddys[0].Stop()
	caddys[0] = caddytest.Start(t, two)
	holds("after a restart", caddys...)
	caddys[0].MustLoad(site(a, b, caddytest.ShardOf("c", servers[2], "weight 1 was 0")))
	holds("one has another shard", caddys...)
	caddys[0].MustLoad(site(caddytest.ShardOf("a", servers[0], "weight 0 was 1"), b, caddytest.ShardOf("c", servers[2])))
	holds("one gives a shard up", caddys[0])
	// What a Caddy remembers says nothing about the servers that will be asked.
	eventually(t, "the shards that stay have the rules", func() error {
		for _, server := range servers[1:] {
			for _, rule := range rulesOn(t, servers[0]) {
				if kept := rulesOn(t, server); !slices.Contains(kept, rule) {
					return fmt.Errorf("one has %q, and not %q", kept, rule)
				}
			}
		}
		return nil
	})
	caddys[0].MustLoad(site(b, caddytest.ShardOf("c", servers[2])))
	holds("without that shard", caddys[0])
	for _, server := range servers[1:] {
		must("", btoi(server.Primary.Pause() != nil))
	}
	holds("while shards are away", caddys[0])
	for _, server := range servers[1:] {
		must("", btoi(server.Primary.Resume() != nil))
	}
	caddys[0].AwaitServers()
	eventually(t, "the limit is ended", func() error {
		out, errOut, code := command(t, "unset", "api", "alice", "--address", caddys[0].Admin)
		return errors.Join(caddytest.Want(out+errOut, code, 0))
	})
	limitIs(t, caddys[0], "alice", 9000)
}

// rulesOn returns the names under which a shard's primary keeps what operators have set.
func rulesOn(t *testing.T, shard *redistest.Shard) (names []string) {
	t.Helper()
	client := shard.Primary.Client()
	keys, err := client.Keys(t.Context(), "*:#overrides2").Result()
	must(t, "find the rules", err)
	for _, key := range keys {
		found, err := client.HKeys(t.Context(), key).Result()
		must(t, "read the rules", err)
		// Fields of the store's own have no colon.
		names = append(names, slices.DeleteFunc(found, func(name string) bool { return !strings.Contains(name, ":") })...)
	}
	return names
}

func btoi(is bool) int {
	if is {
		return 1
	}
	return 0
}

// TestWritersOfRules at the same time: each change is made after what it has read, or told.
func TestWritersOfRules(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	caddys := caddytest.StartMany(t, 2, zonesSite(servers.Store(), zoneWith("api", "events 1000000"), "respond ok"))
	const writers = 20
	var made, told int64
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			code, text := caddys[i%2].AdminCall(http.MethodPost, fmt.Sprint("/rate_limit/zones/api?events=", i+1, "&by=writer-", i), "", "")
			mu.Lock()
			defer mu.Unlock()
			switch {
			case code == http.StatusOK:
				made++
			case code == http.StatusConflict && strings.Contains(text, "changed it meanwhile"):
				told++
			default:
				t.Errorf("writer %d: status %d, %s", i, code, text)
			}
		})
	}
	all.Wait()
	var audit adminapi.Audit
	caddys[0].AdminJSON(http.MethodGet, "/rate_limit/audit?zone=api", "", &audit)
	must(t, "the audit", errors.Join(want("changes", int64(len(audit.Changes)), made), want("having one", made > 0, true), want("answers", made+told, writers)))
	for i, c := range audit.Changes {
		if i+1 < len(audit.Changes) && (c.Before == nil || c.Before.Events != audit.Changes[i+1].After.Events) {
			t.Errorf("change %d was of %+v, which is not what the one before has made", i, c.Before)
		}
	}
	limitIs(t, caddys[1], "alice", audit.Changes[0].After.Events)
	// A version that is not the last one is refused, whatever is changed.
	version := audit.Changes[0].After.Version
	for _, c := range []struct {
		query string
		want  int
	}{{"events=5&version=another", http.StatusConflict}, {"events=5&version=" + version, http.StatusOK}, {"events=6&version=" + version, http.StatusConflict}} {
		code, text := caddys[0].AdminCall(http.MethodPost, "/rate_limit/zones/api?"+c.query, "", "")
		must(t, c.query+": "+text, want("status", code, c.want))
	}
}

// TestRuleCommands set, list, export, import and end rules on the command line.
func TestRuleCommands(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("", zoneWith("api", "events 10", "key {header.X-Key}")+zoneWith("slow", "events 3", "algorithm gcra"), "respond ok"))
	file, elsewhere := filepath.Join(t.TempDir(), "rules.json"), filepath.Join(t.TempDir(), "elsewhere.json")
	must(t, "a file of another Caddy", os.WriteFile(elsewhere, []byte(`{"overrides":[{"kind":"zone","zone":"gone","events":5},{"kind":"zone","zone":"api","events":5,"until":5},{"kind":"zone","zone":"api","events":7}]}`), 0o600))
	for _, step := range []struct {
		args   []string
		prints string
		code   int
	}{
		{[]string{"set", "api"}, "nothing is set", 1},
		{[]string{"set", "api", "--events", "0"}, `events="0"`, 1},
		{[]string{"set", "api", "--enforce", "101"}, `enforce="101"`, 1},
		{[]string{"set", "api", "--rollout", "5"}, "names the other store", 1},
		{[]string{"set", "api", "--events", "5", "--burst", "2"}, "which has no burst", 1},
		{[]string{"set", "api", "--events", "5", "--for", "never"}, `for="never"`, 1},
		{[]string{"set", "absent", "--events", "5"}, "unknown", 3},
		{[]string{"set", "api", "--enforce", "5", "alice"}, "is of a zone", 1},
		{[]string{"set", "api", "--events", "50", "--for", "30d", "--reason", "partner", "alice"}, "limit of events 50, ends in 720h0m0s (partner): {header.X-Key} alice in zone api", 0},
		{[]string{"set", "api", "--enforce", "-0"}, "enforce 0%: zone api", 0},
		{[]string{"set", "api", "--enforce", "25"}, "enforce 25%: zone api", 0},
		{[]string{"set", "api", "--events", "20", "--for", "1h"}, "name enforce too, or unset it first", 1},
		{[]string{"unset", "api", "--rollout"}, "zone api has nothing set of rollout in store default", 3},
		{[]string{"set", "api", "--events", "20"}, "events 20, enforce 25%: zone api", 0},
		{[]string{"set", "slow", "--events", "30", "--burst", "4"}, "events 30, burst 4: zone slow", 0},
		{[]string{"status"}, "20 (set; config 10)", 0},
		{[]string{"rules"}, "events 20, enforce 25%", 0},
		{[]string{"rules", "--kind", "limit"}, "events 50", 0},
		{[]string{"find", "alice"}, "limit of events 50", 0},
		{[]string{"find", "alice"}, "in zone slow", 0},
		{[]string{"get", "api", "alice"}, "limit of events 50", 0},
		{[]string{"audit", "api"}, "events 20, enforce 25%", 0},
		{[]string{"rules", "--dry-run"}, "are for --import", 1},
		{[]string{"rules", "--export", "--import", file}, "leave out", 1},
		{[]string{"rules", "--kind", "blocks"}, "there is zone, limit, block, grant", 1},
		{[]string{"rules", "absent"}, "there is api, slow", 3},
		{[]string{"audit", "absent"}, "there is api, slow", 3},
		{[]string{"audit", "-n", "-1"}, "must be from 0 on", 1},
		{[]string{"rules", "--export"}, `"events": 50`, 0},
		{[]string{"unset", "api", "--enforce"}, "events 20: zone api", 0},
		{[]string{"unset", "api", "alice"}, "no limit any more: {header.X-Key} alice", 0},
		{[]string{"unset", "api", "alice"}, "has no limit of this client", 3},
		{[]string{"set", "api", "--events", "unlimited", "bob"}, "limit of events unlimited", 0},
		{[]string{"rules", "--import", file, "--dry-run", "--prune"}, "- limit api {header.X-Key} bob: events unlimited\n", 0},
		{[]string{"rules", "--kind", "limit"}, "bob", 0},
		{[]string{"rules", "--import", file, "--prune"}, "+ zone api: events 20, enforce 25%\n3 changed, 1 as they are\n", 0},
		{[]string{"rules", "--import", file, "--prune"}, "0 changed, 3 as they are\n", 0},
		{[]string{"unset", "slow"}, "as in the config: zone slow", 0},
		{[]string{"unset", "slow"}, "nothing of zone slow is set", 3},
		{[]string{"block", "--all-zones", "eve", "1h"}, "{header.X-Key} eve in zone slow", 0},
		{[]string{"unblock", "--all-zones", "eve"}, "no block any more: {header.X-Key} eve in zone api", 0},
		{[]string{"unblock", "--all-zones", "eve"}, "has no block in any zone", 3},
		{[]string{"block", "api", "eve", "1h"}, "block, ends in", 0},
		{[]string{"unblock", "--all-zones", "eve"}, "no block any more: {header.X-Key} eve in zone api", 0},
		{[]string{"set", "slow", "--events", "30", "--burst", "4"}, "events 30, burst 4: zone slow", 0},
		{[]string{"set", "slow", "--events", "40"}, "events 40, burst 4: zone slow", 0},
		{[]string{"unset", "slow", "--burst"}, "events 40: zone slow", 0},
		{[]string{"set", "slow", "--events", "5", "--burst", "2", "alice"}, "limit of events 5, burst 2:", 0},
		{[]string{"set", "slow", "--events", "6", "alice"}, "limit of events 6, burst 2:", 0},
		{[]string{"unset", "slow", "--burst", "alice"}, "limit of events 6:", 0},
		{[]string{"unset", "slow", "--enforce", "alice"}, "of a client, only --burst", 1},
		{[]string{"rules", "--import", elsewhere}, "skipped: zone gone: events 5: the config has no zone \"gone\"\n1 changed, 0 as they are, 1 ended, 1 skipped\n", 1},
		{[]string{"grant", "api", "eve", "5"}, "grant of 5", 0},
		{[]string{"ungrant", "api", "eve"}, "no grant any more", 0},
		{[]string{"grant", "slow", "eve", "5"}, "grant of 5", 0},
		{[]string{"ungrant", "--all-zones", "eve"}, "no grant any more: {header.X-Key} eve in zone slow", 0},
		{[]string{"ungrant", "--all-zones", "eve"}, "has no grant in any zone", 3},
		{[]string{"near"}, "ZONE", 0},
	} {
		out, errOut, code := command(t, append(step.args, "--address", c.Admin)...)
		must(t, fmt.Sprint(step.args, ": ", out, errOut), errors.Join(want("exit code", code, step.code), want("printing "+step.prints, strings.Contains(out+errOut, step.prints), true)))
		if len(step.args) > 1 && step.args[1] == "--export" {
			must(t, "export", os.WriteFile(file, []byte(out), 0o600))
		}
	}
}

// TestCaddysThatDisagree about the names of shards or a zone find each other; those that agree do not.
func TestCaddysThatDisagree(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	site := func(prefix, a, b string, events int) string {
		shards := []string{caddytest.ShardOf(a, servers[0]), caddytest.ShardOf(b, servers[1]), "key_prefix " + prefix}
		return zonesSite(caddytest.RedisStore(shards...), zoneWith("api", fmt.Sprint("events ", events)), "respond ok")
	}
	problems := func(c *caddytest.Caddy) string {
		status, _ := adminStatus(c)
		return fmt.Sprint(status.Problems)
	}
	for name, c := range map[string]struct{ other, problem, remedy string }{
		"swapped":   {site("swapped", "b", "a", 5), "calls shard b by the name a, calls shard a by the name b, so 100 % of the clients are counted on different servers", "give all Caddys the same shards, by the same names and weights"},
		"otherwise": {site("otherwise", "a", "b", 6), "zone api is defined otherwise for the Caddy on ", "load the same definition, or give one zone another name"},
		"fewer":     {zonesSite(caddytest.RedisStore(caddytest.ShardOf("a", servers[0]), "key_prefix fewer"), zoneWith("api", "events 5"), "respond ok"), "of the clients are counted on different servers", "give all Caddys the same shards"},
		"agreed":    {site("agreed", "a", "b", 5), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			one, other := caddytest.Start(t, site(name, "a", "b", 5)), caddytest.Start(t, c.other)
			if c.problem == "" {
				// The one that disagrees below is found by then.
				third := caddytest.Start(t, site(name, "a", "b", 7))
				eventually(t, "a third one disagrees", func() error {
					return want("being found", strings.Contains(problems(third), "zone api is defined otherwise"), true)
				})
				third.Stop()
			}
			for _, caddy := range []*caddytest.Caddy{one, other} {
				eventually(t, "they are found", func() error {
					text := problems(caddy)
					if c.problem == "" {
						return want(text+" being empty in the end", strings.Contains(text, "the Caddy on"), false)
					}
					return want(text+" being found", strings.Contains(text, c.problem) && strings.Contains(text, c.remedy), true)
				})
			}
			other.MustLoad(site(name, "a", "b", 5))
			for _, caddy := range []*caddytest.Caddy{one, other} {
				eventually(t, "the remedy works", func() error {
					return want(problems(caddy)+" having another Caddy", strings.Contains(problems(caddy), "the Caddy on"), false)
				})
			}
		})
	}
}
