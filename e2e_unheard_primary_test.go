package shardlimit_test

import (
	"errors"
	"net/http"
	"testing"
)

// TestReplicasStandInForACaddyThatIsNew: one that starts while the primary is away,
// and one that gets other connections by a reload, refuse who is over the limit by
// what the replica has.
func TestReplicasStandInForACaddyThatIsNew(t *testing.T) {
	t.Parallel()
	const events = 3
	servers := startShards(t, 1, 1)
	site := func(option string) string { return apiSite(servers.store("on_error deny", option), events, "1h") }
	reloaded := startCaddy(t, site("pool_size 4"))
	useUpAPI := func(key string) {
		t.Helper()
		for used := range int64(events) {
			must(t, key, reloaded.ask("/", "X-Key: "+key).is(http.StatusOK, used+1))
			servers.awaitCount(t, "api", key, used+1)
		}
	}
	useUpAPI("alice")
	useUpAPI("bob")
	servers.awaitReplicas(t)
	must(t, "kill the primary", servers[0].Primary.Kill())

	started := startCaddy(t, site("pool_size 4"))
	reloaded.mustLoad(site("pool_size 5"))
	for name, c := range map[string]*caddyProcess{"started": started, "reloaded": reloaded} {
		for _, key := range []string{"alice", "bob", "alice"} {
			must(t, name, c.ask("/", "X-Key: "+key).is(http.StatusTooManyRequests, events))
		}
		// Nobody can open a window.
		a := c.ask("/", "X-Key: carol")
		must(t, name, errors.Join(want("status", a.status, http.StatusServiceUnavailable), want("having limit headers", a.isLimited(), false)))
	}

	must(t, "restart the primary", servers[0].Primary.Restart())
	eventually(t, "the primary decides again", func() error {
		return started.ask("/", "X-Key: carol").is(http.StatusOK, 1)
	})
}
