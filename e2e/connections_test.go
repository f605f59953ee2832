package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestKeySecretHidesClients checks that no key in Redis reveals a client or the secret.
func TestKeySecretHidesClients(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	c := caddytest.Start(t, apiSite(servers.Store("key_secret correct-horse"), 3, "1h"))
	clients := []string{"alice", "bob", "carol", "dave", "erin", "frank", strings.Repeat("long", 50), "käthe"}
	for round := range int64(2) {
		for i, key := range clients {
			must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, round+1))
			servers.AwaitSum(t, "rl:3:api:", round*int64(len(clients))+int64(i+1))
		}
		servers.AwaitReplicas(t)
	}
	must(t, "client without a key", c.Ask("/").Is(http.StatusOK, 1))
	servers.AwaitSum(t, "rl:3:api:", int64(2*len(clients)+1))
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
	servers.AwaitSum(t, "rl:3:api:", int64(2*len(clients)+2))
}

func TestReadFromPrimaryAsksNoReplica(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	replica := servers[0].Replicas[0]
	c := caddytest.Start(t, apiSite(servers.Store("read_from primary"), 50, "1h"))
	// With replication paused, only the primary has the counts.
	must(t, "pause replication", replica.PauseReplication())
	for used := int64(1); used <= 20; used++ {
		must(t, "request", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used))
		servers.AwaitCount(t, "api", "alice", used)
	}
	stats, err := replica.Info("commandstats")
	must(t, "ask the replica", err)
	for command := range stats {
		// HGET reads blocks and grants, of a replica too where the primary is slow.
		if strings.Contains(command, "eval") || strings.Contains(command, "hmget") {
			t.Errorf("the replica was asked: %s %s", command, stats[command])
		}
	}
}

func TestDatabaseAndUser(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	primary := servers[0].Primary
	for _, node := range append(servers.Replicas(), primary) {
		// TestDocumentedACLRulesAreMinimal checks the rights that a user needs.
		must(t, "add user", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">s3cret", "~rl:*", "+@all").Err())
	}
	for db, options := range map[int][]string{
		3: {"db 3"},
		2: {"db 2", "username limiter", "password s3cret"},
		4: {"db 4", "username limiter", "password s3cret", "pipelining off"},
		5: {"db 5", "username {$LIMITER:limiter}", "password {env.SHARDLIMIT_TEST_PASSWORD}"},
	} {
		t.Run(strings.Join(options, ", "), func(t *testing.T) {
			client := goredis.NewClient(&goredis.Options{Addr: primary.Addr(), DB: db})
			defer client.Close()
			var env []string // which would cost a process that no other test can have
			if strings.Contains(fmt.Sprint(options), "{env.") {
				env = []string{"SHARDLIMIT_TEST_PASSWORD=s3cret"}
			}
			c := caddytest.Start(t, apiSite(servers.Store(options...), 3, "1h"), env...)
			countsIn(t, c, client, func() { servers.AwaitReplicas(t) })
		})
	}
}

// TestURL reaches a store of one shard, and a shard with a replica, by URLs of the environment.
func TestURL(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 1)
	primary, replica := servers[0].Primary, servers[0].Replicas[0]
	for _, node := range []*redistest.Server{primary, replica} {
		must(t, "add user", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">p@ss/w:rd", "~rl:*", "+@all").Err())
	}
	for db, options := range map[int]string{
		6: "url {env.SHARDLIMIT_TEST_URL}",
		7: fmt.Sprintf("shard a {\nurl {env.SHARDLIMIT_TEST_URL}\nreplica %s\n}", replica.Addr()),
	} {
		t.Run(fmt.Sprint(db), func(t *testing.T) {
			url := fmt.Sprintf("SHARDLIMIT_TEST_URL=redis://limiter:p%%40ss%%2Fw%%3Ard@%s/%d", primary.Addr(), db)
			client := goredis.NewClient(&goredis.Options{Addr: primary.Addr(), DB: db})
			defer client.Close()
			c := caddytest.Start(t, apiSite(caddytest.RedisStore(options), 3, "1h"), url)
			countsIn(t, c, client, func() { servers.AwaitReplicas(t) })
			for _, text := range []string{"p@ss", "p%40ss"} {
				must(t, "log", want("having the password", strings.Contains(c.Logs.String(), text), false))
			}
		})
	}
}

func TestPassword(t *testing.T) {
	t.Parallel()
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

// countsIn uses up a limit of 3 and waits for each count in the database of client.
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

func inAnHour() time.Time { return time.Now().Add(time.Hour) }

func anHourAgo() time.Time { return time.Now().Add(-time.Hour) }

func issueServer(t *testing.T, ca *redistest.Authority, hosts ...string) *redistest.Certificate {
	t.Helper()
	certificate, err := ca.IssueServer(inAnHour(), hosts...)
	must(t, "issue a server's certificate", err)
	return certificate
}

func issueClient(t *testing.T, ca *redistest.Authority) *redistest.Certificate {
	t.Helper()
	certificate, err := ca.IssueClient("limiter", inAnHour())
	must(t, "issue a client's certificate", err)
	return certificate
}

// tlsBlock returns the option tls with additional lines.
func tlsBlock(ca *redistest.Authority, client *redistest.Certificate, more ...string) string {
	lines := append([]string{"ca " + ca.File(), "cert " + client.CertFile() + " " + client.KeyFile()}, more...)
	return "tls {\n" + strings.Join(lines, "\n") + "\n}"
}

// cut closes all connections to servers except the test's own.
func cut(t *testing.T, servers ...*redistest.Server) {
	t.Helper()
	for _, server := range servers {
		must(t, "end connections", server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err())
	}
}

// strangers counts clients that have sent one request: a client that came before may be admitted
// without a call.
var strangers atomic.Int64

// awaitStatus sends requests of new clients until an answer has this status, and limit headers if
// it is 200.
func awaitStatus(c *caddytest.Caddy, status int) {
	c.T.Helper()
	eventually(c.T, fmt.Sprintf("the status is %d", status), func() error {
		a := c.Ask("/", fmt.Sprintf("X-Key: stranger-%d", strangers.Add(1)))
		return errors.Join(want("status", a.Status, status), want("having limit headers", a.IsLimited(), status == http.StatusOK))
	})
}

// awaitLeftOut sends requests of new clients until Caddy leaves a server out because of an error
// with these words, and on_error deny applies. Before each request it closes the connections to servers: also
// those that were being made when it became impossible to make others.
func awaitLeftOut(c *caddytest.Caddy, words string, servers ...*redistest.Server) {
	c.T.Helper()
	i := 0
	eventually(c.T, "a server is left out because "+words, func() error {
		cut(c.T, servers...)
		i++
		a := c.Ask("/", fmt.Sprintf("X-Key: %s-%d", words, i))
		lines := storeLines(c)
		for _, line := range lines {
			if line.Level == "warn" && line.Msg == "server is left out" && strings.Contains(line.Error, words) {
				return want("status", a.Status, http.StatusServiceUnavailable)
			}
		}
		return fmt.Errorf("the log says %+v", lines)
	})
}

// TestTLSShardsOfEveryKind uses servers and sentinels that require a client certificate.
func TestTLSShardsOfEveryKind(t *testing.T) {
	t.Parallel()
	ca := redistest.StartAuthority(t)
	// Sentinels report IP addresses, which need server_name unless certificates list them. The cluster reports names.
	static, watched, sentinels, cluster := startKinds(t, map[string]redistest.Option{
		"static":  redistest.TLS(issueServer(t, ca, "localhost")),
		"watched": redistest.TLS(issueServer(t, ca, "redis.internal")),
		"cluster": redistest.TLS(issueServer(t, ca, "localhost")),
	}, redistest.SentinelOptions{})
	named := func(s *redistest.Server) string { return strings.Replace(s.Addr(), "127.0.0.1", "localhost", 1) }
	for _, node := range cluster.Nodes {
		must(t, "name the node", node.Client().ConfigSet(t.Context(), "cluster-announce-hostname", "localhost").Err())
		must(t, "announce the name", node.Client().ConfigSet(t.Context(), "cluster-preferred-endpoint-type", "hostname").Err())
	}
	client := issueClient(t, ca)
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardWith("static", "primary "+named(static.Primary)),
		caddytest.ShardWith("watched", sentinelLine(sentinels), tlsBlock(ca, client, "server_name redis.internal")),
		caddytest.ShardWith("cluster", "cluster "+named(cluster.Nodes[0])),
		tlsBlock(ca, client), "check_timeout 1m",
	), 3, "1h"))
	const clients = 30
	for i := range clients {
		key := fmt.Sprintf("client-%d", i)
		must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 1))
	}
	eventually(t, "all clients are counted", func() error {
		of := []int{
			len(countsOn(t, "api", static.Primary)), len(countsOn(t, "api", watched.Primary)), len(countsOn(t, "api", cluster.Nodes...)),
		}
		if of[0] < 3 || of[1] < 3 || of[2] < 3 {
			return fmt.Errorf("clients are %v", of)
		}
		return want("clients", of[0]+of[1]+of[2], clients)
	})
	mustBeQuiet(c)
}

// TestClientCertificateIsReplacedInPlace also checks that a broken certificate is not used.
func TestClientCertificateIsReplacedInPlace(t *testing.T) {
	t.Parallel()
	const password = "marker-of-a-secret"
	ca := redistest.StartAuthority(t)
	client := issueClient(t, ca)
	shard := redistest.StartShard(t, 1, redistest.TLS(issueServer(t, ca)), redistest.Args("--requirepass", password))
	servers := []*redistest.Server{shard.Primary, shard.Replicas[0]}
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardOf("a", shard), "password {file."+writeFile(t, password)+"}", "pool_size 1", "on_error deny", tlsBlock(ca, client),
	), 1_000_000, "1h"))
	awaitStatus(c, http.StatusOK)

	must(t, "spoil the certificate", os.WriteFile(client.CertFile(), []byte("garbage"), 0o600))
	cut(t, servers...)
	awaitStatus(c, http.StatusOK)
	awaitLine(c, "warn", "certificates cannot be read, those before stay in use: correct the files", client.CertFile())

	// Servers refuse an expired certificate, which shows which one Caddy presents. They do so after
	// the handshake, and the first call may see no more than a closed connection.
	must(t, "replace the certificate", client.Renew(anHourAgo()))
	cut(t, servers...)
	awaitLeftOut(c, "")
	awaitLine(c, "info", "certificates can be read again", "")
	must(t, "log", want("lines about unreadable files", countLines(c, "certificates cannot be read"), 1))
	must(t, "log", want("lines about readable files", countLines(c, "certificates can be read again"), 1))
	must(t, "replace the certificate", client.Renew(inAnHour()))
	awaitStatus(c, http.StatusOK)
	mustHide(c, password)
}

// authorities returns the certificates of authorities, as a file has them.
func authorities(t *testing.T, all ...*redistest.Authority) string {
	t.Helper()
	var text []byte
	for _, a := range all {
		own, err := os.ReadFile(a.File())
		must(t, "read the certificate", err)
		text = append(text, own...)
	}
	return string(text)
}

// TestServerCertificates checks that on_error applies to untrusted certificates, and that the log
// says why.
func TestServerCertificates(t *testing.T) {
	t.Parallel()
	const password = "marker-of-a-secret"
	ca, other := redistest.StartAuthority(t), redistest.StartAuthority(t)
	client, certificate := issueClient(t, ca), issueServer(t, ca)
	shard := redistest.StartShard(t, 0, redistest.TLS(certificate), redistest.Args("--requirepass", password))
	site := func(onError, tls string) string {
		return apiSite(caddytest.RedisStore(caddytest.ShardOf("a", shard), "password "+password, "pool_size 1", "on_error "+onError, tls), 1_000_000, "1h")
	}
	trusted := writeFile(t, authorities(t, other))
	c := caddytest.Start(t, site("deny", strings.Replace(tlsBlock(ca, client), ca.File(), trusted, 1)))
	awaitLeftOut(c, "certificate signed by unknown authority")
	must(t, "replace the authorities", os.WriteFile(trusted, []byte(authorities(t, other, ca)), 0o600))
	awaitStatus(c, http.StatusOK)
	c.MustLoad(site("deny", tlsBlock(ca, client, "server_name redis.internal")))
	awaitLeftOut(c, "certificate is valid for localhost, not redis.internal")
	c.MustLoad(site("deny", "tls {\ninsecure_skip_verify\ncert "+client.CertFile()+" "+client.KeyFile()+"\n}"))
	awaitStatus(c, http.StatusOK)
	c.MustLoad(site("deny", tlsBlock(ca, client)))
	awaitStatus(c, http.StatusOK)

	must(t, "replace the certificate", certificate.Renew(anHourAgo()))
	must(t, "reload the certificate", shard.Primary.ReloadCertificate(t.Context()))
	cut(t, shard.Primary)
	awaitLeftOut(c, "certificate has expired")
	c.MustLoad(site("allow", tlsBlock(ca, client)))
	a := c.Ask("/", "X-Key: alice")
	must(t, "with on_error allow", errors.Join(want("status", a.Status, http.StatusOK), want("having limit headers", a.IsLimited(), false)))
	must(t, "replace the certificate", certificate.Renew(inAnHour()))
	must(t, "reload the certificate", shard.Primary.ReloadCertificate(t.Context()))
	awaitStatus(c, http.StatusOK)
	if text := c.Logs.String(); strings.Contains(text, password) {
		t.Error("the password is in the log")
	}
}

// documentedRules returns the ACL rules in docs/servers.md that begin with first.
func documentedRules(t *testing.T, user, first string) []string {
	t.Helper()
	text, err := os.ReadFile("../docs/servers.md")
	must(t, "read the documentation", err)
	found := regexp.MustCompile(`(?m)^ACL SETUSER ` + user + ` (` + regexp.QuoteMeta(first) + `.*)$`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("docs/servers.md has no rule of %s that begins with %s", user, first)
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

func asUser(name string) wire.Credentials {
	return func(context.Context) (string, string, error) { return name, "secret", nil }
}

// opensWindows opens windows of unknown clients until some are opened without a script.
func opensWindows(t *testing.T, s *redis.Store, shard *redis.Shard) {
	t.Helper()
	n, plain := 0, 0
	eventually(t, "windows open without scripts", func() error {
		n++
		if shard.Servers()[0].Checks.Opens() {
			plain++
		}
		limit := &store.Limit{Zone: "acl", Algorithm: store.FixedWindow, Window: 24 * time.Hour}
		// A take is a script, which tells the time.
		for i, run := range []func(context.Context, []*store.Ask){s.Take, s.Check} {
			must(t, "open a window", store.Answers(t.Context(), run, []store.Request{
				{Limit: limit, ClientKey: fmt.Sprintf("unknown-%d-%d", n, i), Events: 2, Cost: 1},
			})[0].Err)
		}
		return want("checks that open one", min(plain, 5), 5)
	})
}

// usesEverything runs every command of a store on buckets of every algorithm. It calls moved in
// between.
func usesEverything(t *testing.T, opts redis.ShardOptions, moved func()) {
	t.Helper()
	opts.DialTimeout = caddytest.WaitLimit
	shard := redis.NewShard(opts)
	t.Cleanup(func() { shard.Close(context.Background()) })
	shard.Listen(func(e wire.Event) {
		// A timeout on a busy machine is no missing right.
		if e.Err != nil && !isTimeout(e.Err.Error()) {
			t.Errorf("%s: %v", e.Addr, e.Err)
		}
	})
	with := func(secret string) *redis.Store {
		return redis.New(redis.Options{
			Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: caddytest.WaitLimit, ChargeTimeout: caddytest.WaitLimit, KeySecret: []byte(secret),
		})
	}
	s, fresh := with(""), with("so that it has read no overrides yet")
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
	opensWindows(t, s, shard)
	// Windows of the first round end before the second, on a slow machine sooner. Those of the second
	// last, so that logs grow beyond their limit.
	const short = 300 * time.Millisecond
	for _, window := range []time.Duration{short, time.Hour} {
		var reqs []store.Request
		for algorithm := range store.Algorithms {
			limit := &store.Limit{Zone: "acl", Algorithm: algorithm, Window: window}
			reqs = append(reqs, store.Request{Limit: limit, ClientKey: "k", Events: 2, Cost: 2})
		}
		named := func(id string) []store.Request {
			for i := range reqs {
				reqs[i].ID = fmt.Sprintf("%011s", id)
			}
			return reqs
		}
		run("check", store.Answers(t.Context(), s.Check, named("a")))
		for n := range 7 {
			for i, st := range run("take", store.Answers(t.Context(), s.Take, named("a"))) {
				reqs[i].Receipt = st.Receipt
			}
			run("check", store.Answers(t.Context(), s.Check, reqs))
			run("peek", store.Answers(t.Context(), s.Peek, reqs))
			run("refund", store.Answers(t.Context(), s.Refund, reqs))
			// These exceed the limit.
			run("charge", store.Answers(t.Context(), s.Charge, named(fmt.Sprint(n))))
			moved()
		}
		until := time.Now().Add(window).UnixMicro()
		for i := range reqs {
			reqs[i].Until = until
		}
		run("penalize", store.Answers(t.Context(), s.Penalize, []store.Request{reqs[0], reqs[1], reqs[3]}))
		for _, r := range reqs {
			eventually(t, "all servers answer an inspection", func() (err error) {
				for _, found := range s.Inspect(t.Context(), r).Copies {
					err = errors.Join(err, found.State.Err)
				}
				return err
			})
			eventually(t, "the bucket is reset in time", func() error { return s.Reset(t.Context(), r) })
		}
		part := s.Weights().Text()
		mine := store.Presence{ID: "a", At: []string{"a"}, Beat: 1, Digests: map[store.Part]string{store.PartShards: store.DigestOf(part)}}
		_, err := s.Announce(t.Context(), mine, func(store.Part) []byte { return part }, nil)
		must(t, "announce", err)
		details, err := s.Details(t.Context(), "a", mine.Digests[store.PartShards])
		must(t, "details", errors.Join(err, want("details", string(details.Text()), string(part))))
		s.Withdraw(t.Context(), mine)
		for _, key := range []string{"k", "l"} {
			o := store.Override{Kind: store.OverrideBlock, Zone: "acl", ClientKey: key, Until: time.Now().Add(time.Hour).UnixMicro()}
			must(t, "block", s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Expected: store.AnyVersion}})[0].Err)
		}
		for _, s := range []*redis.Store{s, fresh} {
			_, err := s.Overrides(t.Context())
			must(t, "list", err)
		}
		for _, key := range []string{"k", "l"} {
			o := store.Override{Kind: store.OverrideBlock, Zone: "acl", ClientKey: key}
			outcome := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}})[0]
			must(t, "unblock", errors.Join(outcome.Err, want("a block being removed", outcome.Before != nil, true)))
		}
		time.Sleep(short) // until the windows of the first round are over
	}
}

// requests returns one request with this ID for each algorithm that counts.
func requests(clientKey string, id int) []store.Request {
	var reqs []store.Request
	for _, name := range counting {
		a, _ := store.ParseAlgorithm(name)
		limit := &store.Limit{Zone: "lost", Algorithm: a, Window: 10000 * time.Hour}
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: clientKey, Events: 10, Cost: 1, ID: fmt.Sprintf("%011d", id)})
	}
	return reqs
}

// losesServer makes a shard leave its replica out, and find it again.
func losesServer(t *testing.T, shard *redistest.Shard) {
	t.Helper()
	replica := shard.Replicas[0]
	connected := redis.NewShard(redis.ShardOptions{
		Primary: shard.Primary.Addr(), Replicas: []string{replica.Addr()}, PoolSize: 1, Credentials: asUser("limiter"),
	})
	t.Cleanup(func() { connected.Close(context.Background()) })
	events := make(chan wire.EventKind, 100)
	connected.Listen(func(e wire.Event) { events <- e.Kind })
	s := redis.New(redis.Options{Members: []redis.Member{{Name: "a", Shard: connected}}, CheckTimeout: 2 * time.Second})
	await := func(wanted wire.EventKind) {
		t.Helper()
		eventually(t, "the replica is left out, or is back", func() error {
			store.Answers(t.Context(), s.Check, requests("k", 0)[:1])
			select {
			case kind := <-events:
				return want("event", kind, wanted)
			default:
				return errors.New("no event has arrived")
			}
		})
	}
	await(wire.Met)
	await(wire.Met)
	must(t, "hang", replica.Pause())
	await(wire.ServerDown)
	must(t, "resume", replica.Resume())
	await(wire.ServerUp)
}

// wandering moves a slot from node to node, a step at each call, so that clients get an ASK and
// then a MOVED.
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

// ranCommands returns the commands that servers have run, and those that they have refused.
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

// TestDocumentedACLRulesAreMinimal checks that the documented rules suffice, and that each is
// needed.
func TestDocumentedACLRulesAreMinimal(t *testing.T) {
	t.Parallel()
	rules := documentedRules(t, "limiter", "on >secret ~rl:* ")
	databaseRules := documentedRules(t, "limiter", "+select")
	clusterRules := documentedRules(t, "limiter", "+cluster|shards ")
	resettingRules := slices.Concat(documentedRules(t, "limiter", "+del"), documentedRules(t, "limiter", "+hscan "))
	sentinelRules := documentedRules(t, "watcher", "on >secret ")
	shard, watched, sentinels, cluster := startKinds(t, nil, redistest.SentinelOptions{})
	data := []*redistest.Server{shard.Primary, shard.Replicas[0], watched.Primary, watched.Replicas[0]}
	rules = slices.Concat(rules, databaseRules, resettingRules)
	clusterRules = append(clusterRules, resettingRules...)
	setUser(t, "limiter", rules, data...)
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
		"servers": {rules, data}, "cluster": {clusterRules, cluster.Nodes},
		// Sentinels keep no statistics.
		"sentinels": {nil, sentinels.Nodes},
	} {
		ran, refused := ranCommands(t, test.servers...)
		if refused != nil {
			t.Errorf("%s: refused: %v", name, refused)
		}
		for _, rule := range test.rules {
			if command, ok := strings.CutPrefix(rule, "+"); ok && !slices.Contains(ran, command) {
				t.Errorf("%s: a rule allows %s, which no test ran; the commands run are %v", name, command, ran)
			}
		}
	}
}

// TestPasswordIsRotated changes the password on the servers and in its file: counting continues
// without a reload, and on_error applies while the file is missing.
func TestPasswordIsRotated(t *testing.T) {
	t.Parallel()
	const first, second = "marker-of-a-secret-1", "marker-of-a-secret-2"
	servers := caddytest.StartShards(t, 1, 1)
	nodes := append(servers.Replicas(), servers[0].Primary)
	setUser := func(password string) {
		t.Helper()
		for _, node := range nodes {
			must(t, "set user", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "reset", "on", ">"+password, "~rl:*", "+@all").Err())
		}
	}
	file := writeFile(t, first+"\n")
	write := func(password string) {
		t.Helper()
		must(t, "write the password", os.WriteFile(file, []byte(password+"\n"), 0o600))
	}
	setUser(first)
	c := caddytest.Start(t, apiSite(servers.Store("username limiter", "password {file."+file+"}", "pool_size 1", "on_error deny"), 1_000_000, "1h"))
	awaitStatus(c, http.StatusOK)

	setUser(second)
	write(second)
	cut(t, nodes...)
	awaitStatus(c, http.StatusOK)
	used := int64(0)
	for range 5 {
		used++
		must(t, "with the new password", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used))
		servers.AwaitCount(t, "api", "alice", used)
	}

	must(t, "remove the password", os.Remove(file))
	awaitLeftOut(c, "password: placeholder {file."+file+"} is empty", nodes...)
	write(second)
	awaitStatus(c, http.StatusOK)

	// The log reports a password that is rotated on one side only.
	setUser(first)
	awaitLeftOut(c, "WRONGPASS", nodes...)
	write(first)
	awaitStatus(c, http.StatusOK)
	mustHide(c, first, second)
	must(t, "log", want("having the file's name", strings.Contains(c.Logs.String(), file), true))
}

// TestPasswordCommand has tokens made by a command: a new one counts before the old one ends,
// connections made with the old one are replaced, and no token is shown.
func TestPasswordCommand(t *testing.T) {
	t.Parallel() // it spends its time waiting
	const first, second = "marker-of-a-secret-1", "marker-of-a-secret-2"
	servers := caddytest.StartShards(t, 1, 1)
	nodes := append(servers.Replicas(), servers[0].Primary)
	// connections returns the greatest id of the limiter's connections, and how many there are up to
	// an id.
	connections := func(node *redistest.Server, upTo int64) (greatest, n int64) {
		list, err := node.Client().Do(t.Context(), "CLIENT", "LIST").Text()
		must(t, "list connections", err)
		for line := range strings.Lines(list) {
			if !strings.Contains(line, " user=limiter ") {
				continue
			}
			var id int64
			_, err := fmt.Sscanf(line, "id=%d ", &id)
			must(t, line, err)
			if greatest = max(greatest, id); id <= upTo {
				n++
			}
		}
		return greatest, n
	}
	file := writeFile(t, first+"\n")
	for _, node := range nodes {
		must(t, "set user", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">"+first, ">"+second, "~rl:*", "+@all").Err())
	}
	c := caddytest.Start(t, apiSite(servers.Store("username limiter", "password_command cat "+file+" {\nlifetime 10s\n}", "on_error deny"), 1_000_000, "1h"))
	used := int64(0)
	counts := func() {
		used++
		must(t, "a request", c.Ask("/", "X-Key: alice").Is(http.StatusOK, used))
		servers.AwaitCount(t, "api", "alice", used)
	}
	counts()
	must(t, "write the token", os.WriteFile(file, []byte(second+"\n"), 0o600))
	last := map[*redistest.Server]int64{}
	for _, node := range nodes {
		last[node], _ = connections(node, 0)
	}
	eventually(t, "all connections are others", func() error {
		counts()
		var errs []error
		for _, node := range nodes {
			_, n := connections(node, last[node])
			errs = append(errs, want("connections from before at "+node.Addr(), n, 0))
		}
		return errors.Join(errs...)
	})
	for _, node := range nodes {
		must(t, "remove the first token", node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "<"+first).Err())
	}
	counts()
	// Nothing is left of the second one.
	must(t, "remove the file", os.Remove(file))
	awaitLeftOut(c, "password_command cat: exit status 1: it wrote ", nodes...)
	mustHide(c, first, second)
}

// TestURLWithTLS reaches a shard by a rediss:// URL: with the authorities of the system, and with
// those of tls beside it.
func TestURLWithTLS(t *testing.T) {
	t.Parallel()
	const password = "marker-of-a-secret"
	ca := redistest.StartAuthority(t)
	shard := redistest.StartShard(t, 0, redistest.TLS(issueServer(t, ca)), redistest.Args("--requirepass", password))
	site := func(more ...string) string {
		lines := append([]string{"url rediss://:" + password + "@" + shard.Primary.Addr(), "on_error deny"}, more...)
		return apiSite(caddytest.RedisStore(lines...), 1_000_000, "1h")
	}
	c := caddytest.Start(t, site())
	awaitLeftOut(c, "certificate signed by unknown authority")
	c.MustLoad(site(tlsBlock(ca, issueClient(t, ca))))
	awaitStatus(c, http.StatusOK)
	must(t, "log", want("having the password", strings.Contains(c.Logs.String(), password), false))
}
