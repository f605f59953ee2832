package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// awaitOwner returns the place of the shard that has counted so much of a client,
// once one has.
func awaitOwner(t *testing.T, servers caddytest.Shards, client string, count int64) (owner int) {
	t.Helper()
	eventually(t, client+" is charged", func() error {
		for owner = range servers {
			if servers[owner:owner+1].Counts(t, "api")[client] == count {
				return nil
			}
		}
		return errors.New("no shard has counted it")
	})
	return owner
}

// TestReloadBringsNothingAgain while the shards stay the same. Once they were
// others in between, what was spent there meanwhile is brought, although a request
// of the first config runs on.
func TestReloadBringsNothingAgain(t *testing.T) {
	const clients = 60
	servers := caddytest.StartShards(t, 3, 0)
	backend := caddytest.StartSlowBackend(t)
	config := func(n int, options ...string) string {
		return limitedSite(servers[:n].Store(options...), 10, "1h",
			"handle /slow {\nreverse_proxy "+backend.Server.Listener.Addr().String()+"\n}\nrespond ok")
	}
	c := caddytest.Start(t, config(2))
	// askAll returns which clients are counted by the last shard.
	askAll := func(used int64) (moved int64) {
		t.Helper()
		for n := range clients {
			client := fmt.Sprint("client-", n)
			must(t, client, c.Ask("/", "X-Key: "+client).Is(http.StatusOK, used))
			if awaitOwner(t, servers, client, used) == 2 {
				moved++
			}
		}
		return moved
	}
	dumped := func() (n int64) {
		t.Helper()
		for _, server := range servers[:2] {
			calls, err := server.Primary.Calls()
			must(t, "ask for statistics", err)
			n += calls["dump"]
		}
		return n
	}
	askAll(1)
	c.MustLoad(config(3, "previous_shards a b"))
	moved := askAll(2)
	if moved == 0 {
		t.Error("no client has moved")
	}
	must(t, "after the resharding", want("buckets looked for", dumped(), moved))
	c.MustLoad(config(3, "previous_shards a b", "ledger_trust 2s"))
	askAll(3)
	must(t, "after a reload", want("buckets looked for", dumped(), moved))

	// The new owner knows this client, and the former one does not. Then it spends
	// at the former one.
	late, owner := "", 0
	for n := 0; owner != 2; n++ {
		late = fmt.Sprint("late-", n)
		must(t, "by the new shards", c.Ask("/", "X-Key: "+late).Is(http.StatusOK, 1))
		owner = awaitOwner(t, servers, late, 1)
	}
	running := backend.Start(t, c, "/slow", "X-Key: runner")
	c.MustLoad(config(2))
	must(t, "flush", servers[2].Primary.Client().FlushAll(t.Context()).Err())
	for range 4 {
		must(t, "by the old shards", want("status", c.Ask("/", "X-Key: "+late).Status, http.StatusOK))
	}
	servers[:2].AwaitCount(t, "api", late, 4)
	c.MustLoad(config(3, "previous_shards a b"))
	must(t, "by the new shards again", want("status", c.Ask("/", "X-Key: "+late).Status, http.StatusOK))
	servers[2:].AwaitCount(t, "api", late, 5)
	must(t, "running request", want("status", backend.Finish(t, running)[0].Status, http.StatusOK))
}
