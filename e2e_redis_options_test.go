package shardlimit_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestKeySecretHidesClients looks for clients everywhere in Redis.
func TestKeySecretHidesClients(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 1)
	c := caddytest.Start(t, apiSite(servers.Store("key_secret correct-horse"), 3, "1h"))
	clients := []string{"alice", "bob", "carol", "dave", "erin", "frank", strings.Repeat("long", 50), "käthe"}
	for round := range int64(2) {
		for i, key := range clients {
			must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, round+1))
			servers.AwaitSum(t, "rl:1:api:", round*int64(len(clients))+int64(i+1))
		}
		servers.AwaitReplicas(t)
	}
	must(t, "client without a key", c.Ask("/").Is(http.StatusOK, 1))
	servers.AwaitSum(t, "rl:1:api:", int64(2*len(clients)+1))
	for _, shard := range servers {
		for key := range caddytest.ReadBuckets(t, shard.Primary.Client()) {
			for _, secret := range append(clients, "127.0.0.1", "correct-horse") {
				if strings.Contains(key, secret) {
					t.Errorf("key %q contains %q", key, secret)
				}
			}
		}
	}
	// Another secret means other buckets.
	c.MustLoad(apiSite(servers.Store("key_secret battery-staple"), 3, "1h"))
	must(t, "alice under another secret", c.Ask("/", "X-Key: alice").Is(http.StatusOK, 1))
	servers.AwaitSum(t, "rl:1:api:", int64(2*len(clients)+2))
}

func TestReadFromPrimaryAsksNoReplica(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	replica := servers[0].Replicas[0]
	c := caddytest.Start(t, apiSite(servers.Store("read_from primary"), 50, "1h"))
	// With a replica that has stopped to follow, only the primary knows.
	must(t, "pause replication", replica.PauseReplication())
	for used := int64(1); used <= 20; used++ {
		must(t, "request", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used))
		servers.AwaitCount(t, "api", "alice", used)
	}
	stats, err := replica.Info("commandstats")
	must(t, "ask the replica", err)
	for command := range stats {
		if strings.Contains(command, "eval") || strings.Contains(command, "hget") || strings.Contains(command, "hmget") {
			t.Errorf("the replica was asked: %s %s", command, stats[command])
		}
	}
}

func TestLocalClockDecides(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	caddys := caddytest.StartMany(t, 2, apiSite(servers.Store("clock local"), 5, "1h"))
	before := time.Now()
	first := caddys[0].Ask("/", "X-Key: alice")
	after := time.Now()
	must(t, "first request", first.Is(http.StatusOK, 1))
	servers.AwaitCount(t, "api", "alice", 1)
	reset := servers.Buckets(t, "api")["alice"].Reset
	if reset < before.Add(time.Hour).UnixMicro() || reset > after.Add(time.Hour).UnixMicro() {
		t.Errorf("reset is %v, want an hour after %v", time.UnixMicro(reset), before)
	}
	servers.AwaitReplicas(t)
	for used := int64(2); used <= 5; used++ {
		a := caddys[used%2].Ask("/", "X-Key: alice")
		must(t, "request", errors.Join(a.Is(http.StatusOK, used), want("reset", a.Reset, first.Reset)))
		servers.AwaitCount(t, "api", "alice", used)
		servers.AwaitReplicas(t)
	}
	must(t, "request too many", caddys[0].Ask("/", "X-Key: alice").Is(http.StatusTooManyRequests, 5))
	// All processes of a test share one clock: whose was asked shows here.
	stats, err := servers[0].Primary.Info("commandstats")
	must(t, "ask the primary", err)
	must(t, "calls of TIME", want("their statistics", stats["cmdstat_time"], ""))
}

func TestDatabaseAndUser(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	primary := servers[0].Primary
	for _, node := range append(servers.Replicas(), primary) {
		// The least that a user needs is a test of the store's.
		must(t, "add user", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">s3cret", "~rl:*", "+@all").Err())
	}
	for db, options := range map[int][]string{
		3: {"db 3"},
		2: {"db 2", "username limiter", "password s3cret"},
		4: {"db 4", "username limiter", "password s3cret", "pipelining off"},
		5: {"db 5", "username {$LIMITER:limiter}", "password {env.SHARDLIMIT_TEST_PASSWORD}"},
	} {
		t.Run(strings.Join(options, ", "), func(t *testing.T) {
			t.Setenv("SHARDLIMIT_TEST_PASSWORD", "s3cret")
			client := goredis.NewClient(&goredis.Options{Addr: primary.Addr(), DB: db})
			defer client.Close()
			c := caddytest.Start(t, apiSite(servers.Store(options...), 3, "1h"))
			countsIn(t, c, client, func() { servers.AwaitReplicas(t) })
		})
	}
}

func TestPassword(t *testing.T) {
	const password = "hunter2"
	servers := caddytest.StartShards(t, 1, 0)
	primary := servers[0].Primary
	must(t, "set password", primary.Client().ConfigSet(t.Context(), "requirepass", password).Err())
	client := goredis.NewClient(&goredis.Options{Addr: primary.Addr(), Password: password})
	defer client.Close()

	c := caddytest.Start(t, apiSite(servers.Store("on_error deny", "password wrong"), 3, "1h"))
	a := c.Ask("/", "X-Key: alice")
	must(t, "with the wrong password", want("status", a.Status, http.StatusServiceUnavailable))
	c.MustLoad(apiSite(servers.Store("on_error deny", "password "+password), 3, "1h"))
	countsIn(t, c, client, func() {})
	if strings.Contains(c.Logs.String(), password) {
		t.Error("the password is in the log")
	}
}

// countsIn uses up a limit of 3 and sees the counts arrive where client looks.
func countsIn(t *testing.T, c *caddytest.Caddy, client *goredis.Client, charged func()) {
	t.Helper()
	for used := int64(1); used <= 3; used++ {
		must(t, "request", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used))
		eventually(t, "the request is charged", func() error {
			sum := int64(0)
			for _, b := range caddytest.ReadBuckets(t, client) {
				sum += b.Count
			}
			return want("count", sum, used)
		})
		charged()
	}
	must(t, "request too many", c.Ask("/", "X-Key: alice").Is(http.StatusTooManyRequests, 3))
}
