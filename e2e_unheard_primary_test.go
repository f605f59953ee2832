package shardlimit_test

import (
	"errors"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestReplicasStandInForACaddyThatIsNew: one that starts while the primary is away,
// and one that gets other connections by a reload, refuse who is over the limit by
// what the replica has.
func TestReplicasStandInForACaddyThatIsNew(t *testing.T) {
	t.Parallel()
	const events = 3
	servers := caddytest.StartShards(t, 1, 1)
	site := func(option string) string { return apiSite(servers.Store("on_error deny", option), events, "1h") }
	reloaded := caddytest.Start(t, site("pool_size 4"))
	useUpAPI := func(key string) {
		t.Helper()
		for used := range int64(events) {
			must(t, key, reloaded.Ask("/", "X-Key: "+key).Is(http.StatusOK, used+1))
			servers.AwaitCount(t, "api", key, used+1)
		}
	}
	useUpAPI("alice")
	useUpAPI("bob")
	servers.AwaitReplicas(t)
	must(t, "kill the primary", servers[0].Primary.Kill())

	started := caddytest.Start(t, site("pool_size 4"))
	reloaded.MustLoad(site("pool_size 5"))
	for name, c := range map[string]*caddytest.Caddy{"started": started, "reloaded": reloaded} {
		for _, key := range []string{"alice", "bob", "alice"} {
			must(t, name, c.Ask("/", "X-Key: "+key).Is(http.StatusTooManyRequests, events))
		}
		// Nobody can open a window.
		a := c.Ask("/", "X-Key: carol")
		must(t, name, errors.Join(want("status", a.Status, http.StatusServiceUnavailable), want("having limit headers", a.IsLimited(), false)))
	}

	must(t, "restart the primary", servers[0].Primary.Restart())
	eventually(t, "the primary decides again", func() error {
		return started.Ask("/", "X-Key: carol").Is(http.StatusOK, 1)
	})
}
