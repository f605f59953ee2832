package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// documentedRules are the ACL rules that docs/redis.md names, by their first
// words.
func documentedRules(t *testing.T, user, first string) []string {
	t.Helper()
	text, err := os.ReadFile("docs/redis.md")
	must(t, "read the documentation", err)
	found := regexp.MustCompile(`(?m)^ACL SETUSER ` + user + ` (` + regexp.QuoteMeta(first) + `.*)$`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("docs/redis.md has no rule of %s that begins with %s", user, first)
	}
	return strings.Fields(strings.TrimPrefix(string(found[1]), "on >secret "))
}

// setUser gives servers a user with nothing but these rules.
func setUser(t *testing.T, name string, rules []string, servers ...*redistest.Server) {
	t.Helper()
	for _, server := range servers {
		args := []any{"ACL", "SETUSER", name, "reset", "on", ">secret"}
		for _, rule := range rules {
			args = append(args, rule)
		}
		must(t, "set user", server.Client().Do(t.Context(), args...).Err())
	}
}

func asUser(name string) redis.Credentials {
	return func(context.Context) (string, string, error) { return name, "secret", nil }
}

// usesEverything makes a store do all that it can with buckets of every
// algorithm, so that it runs every command that it ever runs. moved is called in
// between.
func usesEverything(t *testing.T, opts redis.ShardOptions, moved func()) {
	t.Helper()
	opts.DialTimeout = caddytest.WaitLimit
	shard := redis.NewShard(opts)
	t.Cleanup(func() { shard.Close(context.Background()) })
	shard.Listen(func(e redis.Event) {
		// A busy machine may take longer than is waited for; that is no right that
		// is missing.
		if e.Err != nil && !strings.Contains(e.Err.Error(), "i/o timeout") {
			t.Errorf("%s: %v", e.Addr, e.Err)
		}
	})
	s := redis.New(redis.Options{
		Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: caddytest.WaitLimit, ChargeTimeout: caddytest.WaitLimit,
	})
	ctx, cancel := context.WithTimeout(t.Context(), caddytest.WaitLimit)
	defer cancel()
	s.Warm(ctx)
	run := func(what string, states []store.State) []store.State {
		t.Helper()
		for _, st := range states {
			must(t, what, st.Err)
		}
		return states
	}
	const window = 300 * time.Millisecond
	for range 2 {
		var reqs []store.Request
		for _, algorithm := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA, store.Concurrency} {
			limit := &store.Limit{Zone: "acl", Algorithm: algorithm, Window: window}
			reqs = append(reqs, store.Request{Limit: limit, ClientKey: "k", Events: 2, Cost: 1})
		}
		named := func(id string) []store.Request {
			for i := range reqs {
				reqs[i].ID = fmt.Sprintf("%011s", id)
			}
			return reqs
		}
		run("check", s.Check(t.Context(), named("a")))
		for n := range 7 {
			for i, st := range run("take", s.Take(t.Context(), named("a"))) {
				reqs[i].Receipt = st.Receipt
			}
			run("check", s.Check(t.Context(), reqs))
			run("peek", s.Peek(t.Context(), reqs))
			run("refund", s.Refund(t.Context(), reqs))
			// More than fits.
			run("charge", s.Charge(t.Context(), named(fmt.Sprint(n))))
			moved()
		}
		until := time.Now().Add(window).UnixMicro()
		for i := range reqs {
			reqs[i].Until = until
		}
		run("penalize", s.Penalize(t.Context(), []store.Request{reqs[0], reqs[1], reqs[3]}))
		for _, r := range reqs {
			for _, found := range s.Inspect(t.Context(), r).Copies {
				must(t, "inspect", found.State.Err)
			}
			must(t, "reset", s.Reset(t.Context(), r))
		}
		// The next round finds buckets whose windows are over.
		time.Sleep(window)
	}
}

// losesServer makes a shard leave its replica out, and find it again.
func losesServer(t *testing.T, shard *redistest.Shard) {
	t.Helper()
	replica := shard.Replicas[0]
	connected := redis.NewShard(redis.ShardOptions{
		Primary: shard.Primary.Addr(), Replicas: []string{replica.Addr()}, PoolSize: 1, Credentials: asUser("limiter"),
	})
	t.Cleanup(func() { connected.Close(context.Background()) })
	events := make(chan redis.EventKind, 100)
	connected.Listen(func(e redis.Event) { events <- e.Kind })
	s := redis.New(redis.Options{Members: []redis.Member{{Name: "a", Shard: connected}}, CheckTimeout: 100 * time.Millisecond})
	await := func(wanted redis.EventKind) {
		t.Helper()
		eventually(t, "the replica is left out, or is back", func() error {
			s.Check(t.Context(), requests("k", 0)[:1])
			select {
			case kind := <-events:
				return want("event", kind, wanted)
			default:
				return errors.New("nothing has happened")
			}
		})
	}
	await(redis.Met)
	await(redis.Met)
	must(t, "hang", replica.Pause())
	await(redis.ServerDown)
	must(t, "resume", replica.Resume())
	await(redis.ServerUp)
}

// inherits brings buckets from one server to another.
func inherits(t *testing.T, from, to *redistest.Server) {
	t.Helper()
	member := func(name string, server *redistest.Server) redis.Member {
		shard := redis.NewShard(redis.ShardOptions{Primary: server.Addr(), DB: 1, DialTimeout: caddytest.WaitLimit, Credentials: asUser("mover")})
		t.Cleanup(func() { shard.Close(context.Background()) })
		return redis.Member{Name: name, Shard: shard}
	}
	before, after := []redis.Member{member("before", from)}, []redis.Member{member("after", to)}
	reqs := requests("moved", 0)
	for i, st := range redis.New(redis.Options{Members: before, ChargeTimeout: caddytest.WaitLimit}).Charge(t.Context(), reqs) {
		must(t, "charge, "+counting[i], st.Err)
	}
	for i, st := range redis.New(redis.Options{Members: after, Former: before, CheckTimeout: caddytest.WaitLimit}).Check(t.Context(), reqs) {
		must(t, "check, "+counting[i], errors.Join(st.Err, want("used", st.Used, 1)))
	}
}

// wandering moves a slot from node to node, a step at each call, so that clients
// meet an ASK and then a MOVED.
func wandering(t *testing.T, cluster *redistest.Cluster, slot int) (step func()) {
	var migration *redistest.Migration
	calls := 0
	return func() {
		t.Helper()
		switch calls++; calls % 7 {
		case 1:
			from, err := cluster.Owner(t.Context(), slot)
			must(t, "find the owner", err)
			to := cluster.Nodes[0]
			if to == from {
				to = cluster.Nodes[1]
			}
			migration, err = cluster.BeginMigration(t.Context(), slot, from, to)
			must(t, "begin the migration", err)
			for n := 1; n > 0; {
				n, err = migration.MoveKeys(t.Context(), 100)
				must(t, "move keys", err)
			}
		case 3:
			must(t, "finish the migration", migration.Finish(t.Context()))
			must(t, "settle", cluster.WaitUntilOK(t.Context()))
		}
	}
}

// ranCommands are those that servers have run, and what they have refused.
func ranCommands(t *testing.T, servers ...*redistest.Server) (ran []string, refused error) {
	t.Helper()
	seen := map[string]bool{}
	for _, server := range servers {
		stats, err := server.Info("commandstats")
		must(t, "ask for statistics", err)
		for name := range stats {
			seen[strings.TrimPrefix(name, "cmdstat_")] = true
		}
		log, err := server.Client().Do(t.Context(), "ACL", "LOG").Slice()
		must(t, "ask for refusals", err)
		for _, entry := range log {
			refused = errors.Join(refused, fmt.Errorf("%s: %v", server.Addr(), entry))
		}
	}
	return slices.Sorted(maps.Keys(seen)), refused
}

// TestDocumentedACLRulesAreTheLeast that suffice.
func TestDocumentedACLRulesAreTheLeast(t *testing.T) {
	t.Parallel()
	rules := documentedRules(t, "limiter", "on >secret ~rl:* ")
	databaseRules := documentedRules(t, "limiter", "+select")
	clusterRules := documentedRules(t, "limiter", "+cluster|shards ")
	movingRules := documentedRules(t, "limiter", "+dump ")
	resettingRules := documentedRules(t, "limiter", "+del")
	sentinelRules := documentedRules(t, "watcher", "on >secret ")
	var shard, watched *redistest.Shard
	var sentinels *redistest.Sentinels
	var cluster *redistest.Cluster
	caddytest.Together(t, 3, func(i int) (err error) {
		switch i {
		case 0:
			shard, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShard(1))
		case 1:
			watched, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShard(0))
			if err == nil {
				sentinels, err = started(t, (*redistest.Sentinels).Stop)(redistest.LaunchSentinels(
					masterName, watched.Primary, 1, redistest.SentinelOptions{}))
			}
		case 2:
			cluster, err = started(t, (*redistest.Cluster).Stop)(redistest.LaunchCluster(2, 0))
		}
		return err
	})
	data := []*redistest.Server{shard.Primary, shard.Replicas[0], watched.Primary}
	rules = slices.Concat(rules, databaseRules, resettingRules)
	clusterRules = append(clusterRules, resettingRules...)
	setUser(t, "limiter", rules, data...)
	setUser(t, "mover", append(slices.Clone(rules), movingRules...), data...)
	setUser(t, "limiter", append(documentedRules(t, "limiter", "on >secret ~rl:* "), clusterRules...), cluster.Nodes...)
	setUser(t, "watcher", sentinelRules, sentinels.Nodes...)

	t.Run("", func(t *testing.T) {
		for name, use := range map[string]func(t *testing.T){
			"given": func(t *testing.T) {
				usesEverything(t, redis.ShardOptions{
					Primary: shard.Primary.Addr(), Replicas: []string{shard.Replicas[0].Addr()}, DB: 1, Credentials: asUser("limiter"),
				}, func() {
					must(t, "replicate", shard.WaitReplicated(t.Context()))
					must(t, "flush scripts", shard.Primary.Client().ScriptFlush(t.Context()).Err())
				})
				losesServer(t, shard)
				inherits(t, shard.Primary, watched.Primary)
			},
			"sentinel": func(t *testing.T) {
				usesEverything(t, redis.ShardOptions{
					Sentinel:    &redis.SentinelOptions{Master: masterName, Addrs: sentinels.Addrs(), Credentials: asUser("watcher")},
					Credentials: asUser("limiter"),
				}, func() {})
			},
			"cluster": func(t *testing.T) {
				usesEverything(t, redis.ShardOptions{Cluster: cluster.Addrs(), Credentials: asUser("limiter")}, wandering(t, cluster, redistest.Keyslot("{k}")))
			},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				use(t)
			})
		}
	})

	for name, test := range map[string]struct {
		rules   []string
		servers []*redistest.Server
	}{
		"servers": {append(slices.Clone(rules), movingRules...), data}, "cluster": {clusterRules, cluster.Nodes},
		// Sentinels keep no statistics.
		"sentinels": {nil, sentinels.Nodes},
	} {
		ran, refused := ranCommands(t, test.servers...)
		if refused != nil {
			t.Errorf("%s: refused: %v", name, refused)
		}
		for _, rule := range test.rules {
			if command, ok := strings.CutPrefix(rule, "+"); ok && !slices.Contains(ran, command) {
				t.Errorf("%s: the rule allows %s, which was not run; there ran %v", name, command, ran)
			}
		}
	}
}
