package shardlimit_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// TestKeySecretHidesClients looks for clients everywhere in Redis.
func TestKeySecretHidesClients(t *testing.T) {
	servers := startShards(t, 2, 1)
	c := startCaddy(t, apiSite(servers.store("key_secret correct-horse"), 3, "1h"))
	clients := []string{"alice", "bob", "carol", "dave", "erin", "frank", strings.Repeat("long", 50), "käthe"}
	for round := range int64(2) {
		for i, key := range clients {
			must(t, key, c.ask("/", "X-Key: "+key).is(http.StatusOK, round+1))
			servers.awaitSum(t, "rl:1:api:", round*int64(len(clients))+int64(i+1))
		}
		servers.awaitReplicas(t)
	}
	must(t, "client without a key", c.ask("/").is(http.StatusOK, 1))
	servers.awaitSum(t, "rl:1:api:", int64(2*len(clients)+1))
	for _, shard := range servers {
		for key := range readBuckets(t, shard.Primary.Client()) {
			for _, secret := range append(clients, "127.0.0.1", "correct-horse") {
				if strings.Contains(key, secret) {
					t.Errorf("key %q contains %q", key, secret)
				}
			}
		}
	}
	// Another secret means other buckets.
	c.mustLoad(apiSite(servers.store("key_secret battery-staple"), 3, "1h"))
	must(t, "alice under another secret", c.ask("/", "X-Key: alice").is(http.StatusOK, 1))
	servers.awaitSum(t, "rl:1:api:", int64(2*len(clients)+2))
}

func TestReadFromPrimaryAsksNoReplica(t *testing.T) {
	servers := startShards(t, 1, 1)
	replica := servers[0].Replicas[0]
	c := startCaddy(t, apiSite(servers.store("read_from primary"), 50, "1h"))
	// With a replica that has stopped to follow, only the primary knows.
	must(t, "pause replication", replica.PauseReplication())
	for used := int64(1); used <= 20; used++ {
		must(t, "request", c.ask("/", "X-Key: alice").is(http.StatusOK, used))
		servers.awaitCount(t, "api", "alice", used)
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
	servers := startShards(t, 1, 1)
	caddys := startCaddys(t, 2, apiSite(servers.store("clock local"), 5, "1h"))
	before := time.Now()
	first := caddys[0].ask("/", "X-Key: alice")
	after := time.Now()
	must(t, "first request", first.is(http.StatusOK, 1))
	servers.awaitCount(t, "api", "alice", 1)
	reset := servers.buckets(t, "api")["alice"].Reset
	if reset < before.Add(time.Hour).UnixMicro() || reset > after.Add(time.Hour).UnixMicro() {
		t.Errorf("reset is %v, want an hour after %v", time.UnixMicro(reset), before)
	}
	servers.awaitReplicas(t)
	for used := int64(2); used <= 5; used++ {
		a := caddys[used%2].ask("/", "X-Key: alice")
		must(t, "request", errors.Join(a.is(http.StatusOK, used), want("reset", a.reset, first.reset)))
		servers.awaitCount(t, "api", "alice", used)
		servers.awaitReplicas(t)
	}
	must(t, "request too many", caddys[0].ask("/", "X-Key: alice").is(http.StatusTooManyRequests, 5))
	// All processes of a test share one clock: whose was asked shows here.
	stats, err := servers[0].Primary.Info("commandstats")
	must(t, "ask the primary", err)
	must(t, "calls of TIME", want("their statistics", stats["cmdstat_time"], ""))
}

func TestDatabaseAndUser(t *testing.T) {
	servers := startShards(t, 1, 1)
	primary := servers[0].Primary
	for _, node := range append(servers.replicas(), primary) {
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
			c := startCaddy(t, apiSite(servers.store(options...), 3, "1h"))
			countsIn(t, c, client, func() { servers.awaitReplicas(t) })
		})
	}
}

func TestPassword(t *testing.T) {
	const password = "hunter2"
	servers := startShards(t, 1, 0)
	primary := servers[0].Primary
	must(t, "set password", primary.Client().ConfigSet(t.Context(), "requirepass", password).Err())
	client := goredis.NewClient(&goredis.Options{Addr: primary.Addr(), Password: password})
	defer client.Close()

	c := startCaddy(t, apiSite(servers.store("on_error deny", "password wrong"), 3, "1h"))
	a := c.ask("/", "X-Key: alice")
	must(t, "with the wrong password", want("status", a.status, http.StatusServiceUnavailable))
	c.mustLoad(apiSite(servers.store("on_error deny", "password "+password), 3, "1h"))
	countsIn(t, c, client, func() {})
	if strings.Contains(c.logs.String(), password) {
		t.Error("the password is in the log")
	}
}

// countsIn uses up a limit of 3 and sees the counts arrive where client looks.
func countsIn(t *testing.T, c *caddyProcess, client *goredis.Client, charged func()) {
	t.Helper()
	for used := int64(1); used <= 3; used++ {
		must(t, "request", c.ask("/", "X-Key: alice").is(http.StatusOK, used))
		eventually(t, "the request is charged", func() error {
			sum := int64(0)
			for _, b := range readBuckets(t, client) {
				sum += b.Count
			}
			return want("count", sum, used)
		})
		charged()
	}
	must(t, "request too many", c.ask("/", "X-Key: alice").is(http.StatusTooManyRequests, 3))
}
