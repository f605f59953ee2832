package operate

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// lasting makes a server keep its data, so that a sound one yields no finding.
var lasting = redistest.Args("--appendonly", "yes", "--appendfsync", "no")

// diagnosed diagnoses a store on one shard.
func diagnosed(t *testing.T, opts wire.Options, change func(*Operator)) store.Diagnosis {
	t.Helper()
	return newOperator(t, opts, change).Diagnose(t.Context())
}

// diagnosedAs repeats the diagnosis until it has these findings: on a machine that stands still,
// sound servers may be late.
func diagnosedAs(t *testing.T, opts wire.Options, change func(*Operator), want ...string) (d store.Diagnosis) {
	t.Helper()
	slices.Sort(want)
	eventually(t, "the diagnosis has the findings", func() error {
		if d = diagnosed(t, opts, change); !slices.Equal(summary(d), want) {
			return fmt.Errorf("the findings are\n%s\nwant\n%s", strings.Join(summary(d), "\n"), strings.Join(want, "\n"))
		}
		return nil
	})
	return d
}

// summary has the severity, the code and the address of each finding, in order.
func summary(d store.Diagnosis) (all []string) {
	for _, f := range d.Findings {
		all = append(all, strings.TrimSpace(fmt.Sprintf("%s %s %s", f.Severity, f.Code, f.Address)))
	}
	slices.Sort(all)
	return all
}

// finds requires these findings, and no others, each with a problem and a remedy.
func finds(t *testing.T, what string, d store.Diagnosis, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := summary(d); !slices.Equal(got, want) {
		t.Errorf("%s: the findings are\n%s\nwant\n%s\n%+v", what, strings.Join(got, "\n"), strings.Join(want, "\n"), d.Findings)
	}
	for _, f := range d.Findings {
		if f.Problem == "" || f.Remedy == "" || f.Shard == "" {
			t.Errorf("%s: a finding lacks something: %+v", what, f)
		}
	}
}

// mentions requires a finding of a kind with words in its problem or remedy.
func mentions(t *testing.T, d store.Diagnosis, code string, words ...string) {
	t.Helper()
	for _, f := range d.Findings {
		has := f.Code == code
		for _, word := range words {
			has = has && strings.Contains(f.Problem+"\n"+f.Remedy, word)
		}
		if has {
			return
		}
	}
	t.Errorf("no finding %s mentions %q: %+v", code, words, d.Findings)
}

var isVersion = regexp.MustCompile(`^(Valkey )?\d+\.\d+\.\d+$`)

func TestDiagnosisOfASoundShard(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1, lasting)
	d := diagnosed(t, wire.Options{Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}, DB: 3}, func(o *Operator) {
		o.previous = []Member{{Name: "a", Shard: o.members[0].Shard}}
	})
	finds(t, "a sound shard", d)
	if len(d.Shards) != 1 || len(d.Shards[0].Servers) != 2 {
		t.Fatalf("the shards are %+v", d.Shards)
	}
	if shard := d.Shards[0]; shard.Name != "a" || shard.Kind != "static" || shard.Retired {
		t.Errorf("the shard is %+v", shard)
	}
	for i, role := range []store.Role{store.RolePrimary, store.RoleReplica} {
		v := d.Shards[0].Servers[i]
		if v.Role != role || !v.Reachable || !isVersion.MatchString(v.Version) || v.RoundTrip <= 0 || v.EvictionPolicy != "noeviction" ||
			v.Persistence != persistenceLog || v.MissingRights == nil || len(v.MissingRights) > 0 || v.ClockSkew == nil || (v.Lag != nil) != (role == store.RoleReplica) {
			t.Errorf("the %s is %+v", role, v)
		}
	}
}

// TestDiagnosisChangesNothing: probes leave neither keys nor scripts behind, in any server.
func TestDiagnosisChangesNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	key := ask.Keys{Prefix: "rl"}.Key(hourly, "k")
	must(t, server.Client().HSet(t.Context(), key, "c", 1).Err())
	diagnosed(t, wire.Options{Primary: server.Addr()}, func(o *Operator) { o.previous = o.members })
	keys := server.Client().Keys(t.Context(), "*").Val()
	info, err := server.Info("memory")
	must(t, err)
	if !slices.Equal(keys, []string{key}) || info["number_of_cached_scripts"] != "0" {
		t.Errorf("the server has keys %q and %s scripts", keys, info["number_of_cached_scripts"])
	}
	if n := server.Client().HLen(t.Context(), key).Val(); n != 1 {
		t.Errorf("the bucket has %d fields", n)
	}
}

func TestDiagnosisFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	sh, other := redistest.StartShard(t, 1, lasting), redistest.StartShard(t, 1, lasting)
	primary, replica, foreigner := sh.Primary.Addr(), sh.Replicas[0].Addr(), other.Replicas[0].Addr()
	down := redistest.Start(t)
	must(t, down.Kill())
	evicting := redistest.Start(t, lasting, redistest.Args("--maxmemory-policy", "allkeys-lru")).Addr()
	forgetful := redistest.Start(t, redistest.Args("--save", "")).Addr()
	saving := redistest.Start(t, redistest.Args("--save", "3600 1")).Addr()
	full := redistest.Start(t, lasting, redistest.Args("--maxmemory", "1", "--maxmemory-policy", "noeviction")).Addr()
	lonely := redistest.Start(t, lasting, redistest.Args("--min-replicas-to-write", "1")).Addr()
	watcher := redistest.StartSentinels(t, masterName, redistest.Start(t, lasting), 1, redistest.SentinelOptions{}).Nodes[0].Addr()
	closed := redistest.Start(t, lasting, redistest.Args("--requirepass", "secret")).Addr()
	crowded := redistest.Start(t, lasting, redistest.Args("--maxclients", "1"))
	must(t, crowded.Client().Ping(t.Context()).Err())
	lacking := redistest.Start(t, lasting, redistest.Args("--rename-command", "HINCRBY", "")).Addr()
	timeless := redistest.Start(t, lasting, redistest.Args("--rename-command", "TIME", "")).Addr()
	hidden := redistest.StartFilter(t, primary, redistest.Refusing("-ERR unknown command 'time'", "time")).Addr()
	nameless, renamed := startRenamed(t, sh.Primary, func(int64) string { return "" }), startRenamed(t, sh.Primary, func(n int64) string { return fmt.Sprintf("run_id:%d\r\n", n) })
	slow := redistest.StartProxy(t, sh.Primary.Addr())
	must(t, slow.Delay(30*time.Millisecond))
	ca, stranger := redistest.StartAuthority(t), redistest.StartAuthority(t)
	certificate, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	secure := redistest.Start(t, lasting, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no")).Addr()
	mutual := redistest.Start(t, lasting, redistest.TLS(certificate)).Addr()
	lone := func(addr string) wire.Options { return wire.Options{Primary: addr} }
	// They answer calls, and not as Redis does.
	garbled := redistest.Start(t, lasting, redistest.Args("--rename-command", "TIME", "", "--rename-command", "ROLE", "TIME")).Addr()
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	elsewhere := web.Listener.Addr().String()
	busy, release := startBusy(t)
	defer release()
	proxy := startRefusal(t)
	secretive := func(opts wire.Options) wire.Options {
		opts.Credentials = login("", "marker")
		return opts
	}
	withTLS := func(addr string, config *tls.Config) wire.Options { return wire.Options{Primary: addr, TLS: config} }
	for name, c := range map[string]struct {
		wire.Options
		change func(*Operator)
		want   []string
		code   string
		words  []string
	}{
		"a server that is down": {
			wire.Options{Primary: down.Addr(), Replicas: []string{replica}}, nil,
			[]string{"error unreachable " + down.Addr()}, codeUnreachable, []string{"refused", "see that it runs"},
		},
		"a replica that is down": {
			wire.Options{Primary: primary, Replicas: []string{replica, down.Addr()}}, nil,
			[]string{"error unreachable " + down.Addr()}, codeUnreachable, []string{"refused"},
		},
		"a host without an address": {lone("redis.invalid:6379"), nil, []string{"error unreachable redis.invalid:6379", "warning no_replica redis.invalid:6379"}, codeUnreachable, []string{"name of the host"}},
		"a policy that evicts":      {lone(evicting), nil, []string{"warning eviction " + evicting, "warning no_replica " + evicting}, codeEviction, []string{"allkeys-lru", "noeviction"}},
		"no persistence":            {lone(forgetful), nil, []string{"warning persistence " + forgetful, "warning no_replica " + forgetful}, codePersistence, []string{"appendonly"}},
		"snapshots":                 {lone(saving), nil, []string{"warning no_replica " + saving}, codeNoReplica, nil},
		"no replica that is needed": {lone(primary), func(o *Operator) { o.asker.ReadPrimary = true }, nil, "", nil},
		"full memory":               {lone(full), nil, []string{"error writes_refused " + full, "warning no_replica " + full}, codeWrites, []string{"OOM", "maxmemory"}},
		"too few replicas":          {lone(lonely), nil, []string{"error writes_refused " + lonely, "warning no_replica " + lonely}, codeWrites, []string{"NOREPLICAS"}},
		"too many connections":      {lone(crowded.Addr()), nil, []string{"error unreachable " + crowded.Addr(), "warning no_replica " + crowded.Addr()}, codeUnreachable, []string{"maxclients"}},
		"a command that is renamed": {lone(lacking), nil, []string{"error commands " + lacking, "warning no_replica " + lacking}, codeCommands, []string{"hincrby", "rename-command"}},
		"TIME that scripts lack":    {lone(timeless), nil, []string{"error commands " + timeless, "warning no_replica " + timeless}, codeCommands, []string{"have the commands time", "rename-command"}},
		"TIME that a proxy hides":   {lone(hidden), nil, []string{"warning commands " + hidden, "warning no_replica " + hidden}, codeCommands, []string{"hides the commands time"}},
		"a run ID that is hidden":   {lone(nameless), func(o *Operator) { o.asker.ReadPrimary = true }, []string{"note unidentified " + nameless}, codeVague, []string{"missing or differ"}},
		"a run ID that changes":     {lone(renamed), func(o *Operator) { o.asker.ReadPrimary = true }, []string{"note unidentified " + renamed}, codeVague, []string{"in place of a proxy's"}},
		"a sentinel as a primary":   {lone(watcher), nil, []string{"error role " + watcher, "warning no_replica " + watcher}, codeRole, []string{"is a sentinel", "in place of primary and replica"}},
		"a sentinel as a replica":   {wire.Options{Primary: primary, Replicas: []string{watcher}}, nil, []string{"error role " + watcher}, codeRole, []string{"is a sentinel"}},
		"a primary as a replica": {
			wire.Options{Primary: primary, Replicas: []string{other.Primary.Addr()}}, nil,
			[]string{"error role " + other.Primary.Addr()}, codeRole, []string{"given as a replica and is a primary", "REPLICAOF"},
		},
		"a replica as a primary": {lone(replica), nil, []string{"error role " + replica, "warning no_replica " + replica}, codeRole, []string{"is a replica of 127.0.0.1:", "sentinel"}},
		"a replica of another primary": {
			wire.Options{Primary: primary, Replicas: []string{foreigner}}, nil,
			[]string{"error replica_foreign " + foreigner}, codeForeign, []string{"another primary"},
		},
		"no password":      {lone(closed), nil, []string{"error login " + closed, "warning no_replica " + closed}, codeLogin, []string{"NOAUTH", "password"}},
		"a wrong password": {wire.Options{Primary: closed, Credentials: login("", "marker")}, nil, []string{"error login " + closed, "warning no_replica " + closed}, codeLogin, []string{"WRONGPASS", "password"}},
		"a password without TLS": {
			secretive(lone("redis.invalid:6379")), func(o *Operator) { o.asker.ReadPrimary = true },
			[]string{"error unreachable redis.invalid:6379", "warning no_tls"}, codePlain, []string{"redis.invalid:6379", "option tls"},
		},
		"a password for sentinels without TLS": {
			wire.Options{Sentinel: &wire.SentinelOptions{Master: "m", Addrs: []string{"redis.invalid:26379"}, Credentials: login("", "marker")}}, nil,
			[]string{"error unreachable redis.invalid:26379", "error not_found", "warning no_tls"}, codePlain, []string{"redis.invalid:26379"},
		},
		"no password, and no TLS": {
			wire.Options{Sentinel: &wire.SentinelOptions{Master: "m", Addrs: []string{"redis.invalid:26379"}}, Credentials: login("", "marker")}, nil,
			[]string{"error unreachable redis.invalid:26379", "error not_found"}, "", nil,
		},
		"certificates that are not verified": {
			withTLS(secure, &tls.Config{InsecureSkipVerify: true}), func(o *Operator) { o.asker.ReadPrimary = true },
			[]string{"warning tls_unverified"}, codeUnverified, []string{"insecure_skip_verify"},
		},
		"a clock that makes no sense": {lone(garbled), func(o *Operator) { o.asker.ReadPrimary = true }, []string{"error unreachable " + garbled}, codeUnreachable, []string{"it does not answer as Redis does: ", "address of a Redis"}},
		"a web server":                {lone(elsewhere), func(o *Operator) { o.asker.ReadPrimary = true }, []string{"error unreachable " + elsewhere}, codeUnreachable, []string{"it does not answer as Redis does: "}},
		"a server that runs another client's script": {
			lone(busy.Addr()), func(o *Operator) { o.asker.ReadPrimary = true },
			[]string{"error not_ready " + busy.Addr(), "error rights " + busy.Addr()}, codeNotReady, []string{"INFO with BUSY", "SCRIPT KILL"},
		},
		"a proxy that executes nothing": {
			lone(proxy), func(o *Operator) { o.asker.ReadPrimary = true },
			[]string{"error not_ready " + proxy, "error rights " + proxy}, codeNotReady, []string{"INFO with ERR unsupported command", "a Redis server"},
		},
		"a proxy that executes nothing, and no database": {
			wire.Options{Primary: proxy, DB: 1}, func(o *Operator) { o.asker.ReadPrimary = true },
			[]string{"error not_ready " + proxy, "error rights " + proxy}, codeRights, []string{"unknown whether its user may run evalsha, ", "pexpireat: it answers ERR unsupported"},
		},
		"a failing password": {wire.Options{Primary: closed, Credentials: failingLogin}, nil, []string{"error login"}, codeLogin, []string{"it is not there"}},
		"a database too high": {
			wire.Options{Primary: primary, Replicas: []string{replica}, DB: 16}, nil,
			[]string{"error database " + primary, "error database " + replica}, codeDatabase, []string{"database 16", "out of range"},
		},
		"an unknown authority": {withTLS(secure, &tls.Config{RootCAs: stranger.Pool()}), nil, []string{"error tls " + secure, "warning no_replica " + secure}, codeTLS, []string{"unknown authority", "the file of ca"}},
		"another host's certificate": {
			withTLS(secure, &tls.Config{RootCAs: ca.Pool(), ServerName: "redis.internal"}), nil,
			[]string{"error tls " + secure, "warning no_replica " + secure}, codeTLS, []string{"redis.internal", "server_name"},
		},
		"TLS that a server does not speak": {
			wire.Options{Primary: primary, TLS: &tls.Config{RootCAs: ca.Pool()}, DialTimeout: 100 * time.Millisecond}, func(o *Operator) { o.asker.ReadPrimary = true },
			[]string{"error unreachable " + primary}, codeUnreachable, []string{"may speak no TLS"},
		},
		"TLS that is not configured": {lone(secure), func(o *Operator) { o.asker.ReadPrimary = true }, []string{"error unreachable " + secure}, codeUnreachable, []string{"option tls"}},
		"no client certificate":      {withTLS(mutual, &tls.Config{RootCAs: ca.Pool()}), func(o *Operator) { o.asker.ReadPrimary = true }, []string{"error tls " + mutual}, codeTLS, []string{"client certificate"}},
		"a slow server": {
			lone(slow.Addr()), func(o *Operator) { o.asker.CheckTimeout, o.asker.ReadPrimary = 10*time.Millisecond, true },
			[]string{"error slow " + slow.Addr()}, codeSlow, []string{"checks have 10ms", "check_timeout"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := diagnosedAs(t, c.Options, c.change, c.want...)
			if c.code != "" {
				mentions(t, d, c.code, c.words...)
			}
			if strings.Contains(fmt.Sprintf("%+v", d), "marker") {
				t.Errorf("the diagnosis has the password: %+v", d)
			}
			if slices.Contains(c.want, "error not_ready "+c.Primary) && d.Shards[0].Servers[0].MissingRights != nil {
				t.Errorf("the missing rights are known: %+v", d.Shards[0].Servers)
			}
		})
	}
}

// startRenamed starts a proxy that has another line in place of the server's run ID, given how often INFO was asked for.
func startRenamed(t *testing.T, server *redistest.Server, line func(n int64) string) string {
	t.Helper()
	text, err := server.Client().Info(t.Context(), "everything").Result()
	must(t, err)
	text = regexp.MustCompile("server_time_usec:.*\r\n").ReplaceAllString(text, "")
	var asked atomic.Int64
	return redistest.StartFilter(t, server.Addr(), func(command []string) string {
		if !strings.EqualFold(command[0], "info") {
			return ""
		}
		text := regexp.MustCompile("run_id:.*\r\n").ReplaceAllString(text, line(asked.Add(1)))
		return fmt.Sprintf("$%d\r\n%s", len(text), text)
	}).Addr()
}

// TestDiagnosisOfAServerTooSlowForASecondCall of a check.
func TestDiagnosisOfAServerTooSlowForASecondCall(t *testing.T) {
	t.Parallel()
	slow := redistest.StartProxy(t, redistest.Start(t, lasting).Addr())
	must(t, slow.Delay(time.Second))
	d := diagnosedAs(t, wire.Options{Primary: slow.Addr()}, func(o *Operator) { o.asker.CheckTimeout, o.asker.ReadPrimary = 1900*time.Millisecond, true }, "warning slow "+slow.Addr())
	mentions(t, d, codeSlow, "has half", "check_timeout above")
}

// startRefusal starts what answers each command with the same error, as proxies may.
func startRefusal(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var running sync.WaitGroup
	running.Go(func() {
		for client, err := listener.Accept(); err == nil; client, err = listener.Accept() {
			running.Go(func() {
				defer client.Close()
				for lines := bufio.NewScanner(client); lines.Scan(); {
					// A command begins with the number of its words.
					if strings.HasPrefix(lines.Text(), "*") {
						_, _ = io.WriteString(client, "-ERR unsupported command\r\n")
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		running.Wait()
	})
	return listener.Addr().String()
}

func failingLogin(context.Context) (string, string, error) {
	return "", "", errors.New("it is not there")
}

// TestDiagnosisOfACertificateThatExpired needs a server that was started before.
func TestDiagnosisOfACertificateThatExpired(t *testing.T) {
	t.Parallel()
	ca := redistest.StartAuthority(t)
	certificate, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	server := redistest.Start(t, lasting, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no"))
	must(t, certificate.Renew(time.Now().Add(-time.Hour)))
	must(t, server.ReloadCertificate(t.Context()))
	d := diagnosed(t, wire.Options{Primary: server.Addr(), TLS: &tls.Config{RootCAs: ca.Pool()}}, func(o *Operator) { o.asker.ReadPrimary = true })
	finds(t, "an expired certificate", d, "error tls "+server.Addr())
	mentions(t, d, codeTLS, "expired", "renew")
}

// TestDiagnosisNamesEachMissingRight takes the rights from a user one by one.
func TestDiagnosisNamesEachMissingRight(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	addr := server.Addr()
	cluster := redistest.StartCluster(t, 1, 0, lasting, redistest.NodeTimeout(redistest.WaitTimeout))
	set := func(server *redistest.Server, rules ...any) {
		t.Helper()
		must(t, server.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, rules...)...).Err())
	}
	for _, server := range []*redistest.Server{server, cluster.Nodes[0]} {
		set(server, "reset", "on", ">secret", "~rl:*", "+@all")
	}
	opts := wire.Options{Primary: addr, DB: 1, Credentials: login("limiter", "secret")}
	clusterOpts := wire.Options{Cluster: cluster.Addrs(), Credentials: login("limiter", "secret")}
	examine := func(opts wire.Options) store.Diagnosis {
		t.Helper()
		return diagnosed(t, opts, func(o *Operator) { o.asker.ReadPrimary = true })
	}
	finds(t, "a user with all rights", examine(opts))
	must(t, server.Client().ConfigSet(t.Context(), "appendonly", "no").Err())
	set(server, "-config|get")
	d := examine(opts)
	finds(t, "a user who may not ask for settings", d, "note persistence "+addr)
	mentions(t, d, codePersistence, "unknown", "+config|get")
	must(t, server.Client().ConfigSet(t.Context(), "appendonly", "yes").Err())
	finds(t, "a user who need not ask for settings", examine(opts))
	optional := slices.AppendSeq(namesOf(slices.Concat(resetRights, overrideRights)), maps.Keys(lesserCommands))
	for _, command := range namesOf(slices.Concat(basicRights, databaseRights, resetRights, overrideRights)) {
		set(server, "-"+command)
		d := examine(opts)
		set(server, "+"+command)
		severity := "error"
		if slices.Contains(optional, command) {
			severity = "warning"
		}
		finds(t, command, d, severity+" rights "+addr)
		mentions(t, d, codeRights, "may not run "+command+":", "+"+command)
		if got := d.Shards[0].Servers[0].MissingRights; !slices.Equal(got, []string{command}) {
			t.Errorf("without %s the missing rights are %q", command, got)
		}
	}
	for _, command := range namesOf(clusterRights) {
		set(cluster.Nodes[0], "-"+command)
		d := examine(clusterOpts)
		set(cluster.Nodes[0], "+"+command)
		mentions(t, d, codeRights, "may not run "+command+":", "+"+command)
	}
	set(server, "resetkeys", "~other:*")
	d = examine(opts)
	finds(t, "a user without the keys", d, "error keys "+addr)
	mentions(t, d, codeKeys, "begin with rl:", "~rl:*")
	// Probes that are refused are in the server's own log, as docs/operating.md says.
	if log := server.Client().Do(t.Context(), "ACL", "LOG").Val().([]any); len(log) == 0 {
		t.Error("ACL LOG has no refused probe")
	}
}

// TestDiagnosisOfAReplicaWithFewRights: it needs those of a primary only when it is one.
func TestDiagnosisOfAReplicaWithFewRights(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1, lasting)
	replica := sh.Replicas[0]
	set := func(server *redistest.Server, rules ...any) {
		t.Helper()
		must(t, server.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, rules...)...).Err())
	}
	for _, server := range []*redistest.Server{sh.Primary, replica} {
		set(server, "reset", "on", ">secret", "~rl:*", "+@all")
	}
	for _, command := range primaryCommands {
		set(replica, "-"+command)
	}
	opts := wire.Options{Primary: sh.Primary.Addr(), Replicas: []string{replica.Addr()}, Credentials: login("limiter", "secret")}
	d := diagnosed(t, opts, nil)
	finds(t, "a replica that may only read", d, "warning rights "+replica.Addr())
	mentions(t, d, codeRights, "hincrby", "becomes the primary", "+hincrby")
	if got := d.Shards[0].Servers[1].MissingRights; !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(primaryCommands))) {
		t.Errorf("the missing rights are %q", got)
	}
	set(replica, "-hmget")
	d = diagnosed(t, opts, nil)
	finds(t, "a replica that may not read either", d, "warning rights "+replica.Addr(), "error rights "+replica.Addr())
	mentions(t, d, codeRights, "may not run hmget: checks")

	// With these few rights it answers checks while the primary is away.
	set(replica, "+hmget")
	s := newOperator(t, opts, nil)
	var reqs []store.Request
	for a := range store.Algorithms {
		limit := &store.Limit{Zone: "z", Algorithm: a, Window: 10_000 * time.Hour}
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: "k", Events: 10, Cost: 1})
	}
	for _, st := range run(t, s, algorithm.Charge, reqs) {
		must(t, st.Err)
	}
	must(t, replica.WaitInSync(t.Context()))
	must(t, sh.Primary.Kill())
	// The estimate of the primary's clock may be behind the charges, so that gcra counts one more.
	eventually(t, "the replica answers", func() (err error) {
		for i, st := range run(t, s, algorithm.Check, reqs) {
			if st.Err != nil || st.Used != 1 {
				err = errors.Join(err, fmt.Errorf("%v: %+v", reqs[i].Limit.Algorithm, st))
			}
		}
		return err
	})
}

// namesOf returns the commands of rights.
func namesOf(rights []right) (names []string) {
	for _, r := range rights {
		names = append(names, r.command)
	}
	return names
}

// TestDocumentedRightsAreThoseThatAreProbed: both are the same list.
func TestDocumentedRightsAreThoseThatAreProbed(t *testing.T) {
	text, err := os.ReadFile("../../../docs/servers.md")
	must(t, err)
	var documented [][]string
	for _, rule := range regexp.MustCompile(`(?m)^ACL SETUSER \w+ (.*)$`).FindAllSubmatch(text, -1) {
		var commands []string
		for _, word := range strings.Fields(string(rule[1])) {
			if command, ok := strings.CutPrefix(word, "+"); ok {
				commands = append(commands, command)
			}
		}
		documented = append(documented, commands)
	}
	probed := [][]string{
		namesOf(basicRights), namesOf(databaseRights), namesOf(clusterRights), namesOf(resetRights), namesOf(overrideRights), sentinelRights,
	}
	if fmt.Sprint(documented) != fmt.Sprint(probed) {
		t.Errorf("docs/servers.md has %q, and what is probed is %q", documented, probed)
	}
}

// TestDiagnosisOfReplicasThatAreBehind, one of which has lost its primary.
func TestDiagnosisOfReplicasThatAreBehind(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 3, lasting)
	sound, late, lost := sh.Replicas[0], sh.Replicas[1], sh.Replicas[2]
	must(t, late.DelayReplication(time.Hour))
	must(t, lost.PauseReplication())
	must(t, sh.Primary.Client().Set(t.Context(), "k", "v", 0).Err())
	must(t, sound.WaitInSync(t.Context()))
	d := diagnosedAs(t, wire.Options{
		Primary: sh.Primary.Addr(), Replicas: []string{sound.Addr(), late.Addr(), lost.Addr()}, MaxReplicaLag: 200 * time.Millisecond,
	}, nil, "warning replica_lags "+late.Addr(), "warning replica_detached "+lost.Addr())
	servers := d.Shards[0].Servers
	if v := servers[1]; v.Lag == nil || *v.Lag > 0.2 {
		t.Errorf("the sound replica is %+v", v)
	}
	if v := servers[2]; v.Lag == nil || *v.Lag < 0.2 {
		t.Errorf("the late replica is %+v", v)
	}
	if v := servers[3]; v.Lag != nil {
		t.Errorf("the lost replica is %+v", v)
	}
}

// TestDiagnosisOfAReplicaBesideAHungOne: the time that the other takes is none of its lag.
func TestDiagnosisOfAReplicaBesideAHungOne(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 2, lasting)
	sound, hung := sh.Replicas[0], sh.Replicas[1]
	must(t, hung.Pause())
	t.Cleanup(func() { must(t, hung.Resume()) })
	// The primary always has something new.
	ctx, cancel := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	writer.Go(func() {
		// More often than the diagnosis compares offsets, and not so often that it takes a processor.
		for ctx.Err() == nil {
			sh.Primary.Client().Incr(ctx, "k")
			time.Sleep(lagPeriod / 10) // see above
		}
	})
	const lagLimit = 4 * time.Second
	d := diagnosedAs(t, wire.Options{
		Primary: sh.Primary.Addr(), Replicas: []string{sound.Addr(), hung.Addr()}, DialTimeout: lagLimit, MaxReplicaLag: lagLimit,
	}, func(o *Operator) { o.asker.CheckTimeout = infoTimeout }, "error unreachable "+hung.Addr())
	cancel()
	writer.Wait()
	finds(t, "a replica beside one that hangs", d, "error unreachable "+hung.Addr())
	if v := d.Shards[0].Servers[1]; v.Lag == nil || *v.Lag >= lagLimit.Seconds() {
		t.Errorf("the sound replica is %+v", v)
	}
}

// TestDiagnosisThatEndsBeforeAReplicaCatchesUp does not know its lag.
func TestDiagnosisThatEndsBeforeAReplicaCatchesUp(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1, lasting)
	must(t, sh.Replicas[0].DelayReplication(time.Hour))
	must(t, sh.Primary.Client().Set(t.Context(), "k", "v", 0).Err())
	s := newOperator(t, wire.Options{Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}, MaxReplicaLag: time.Hour}, nil)
	eventually(t, "the diagnosis gets as far as the lag", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		d := s.Diagnose(ctx)
		if got := summary(d); len(got) > 0 || d.Shards[0].Servers[1].Lag != nil {
			return fmt.Errorf("the findings are %q, and the replica is %+v", got, d.Shards[0].Servers[1])
		}
		return nil
	})
}

// TestDiagnosisOfClocks compares a server's clock with an injected one of this machine.
func TestDiagnosisOfClocks(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	for lead, want := range map[time.Duration][]string{
		0:                nil,
		-5 * time.Minute: {"warning clock " + server.Addr()},
		5 * time.Minute:  {"warning clock " + server.Addr()},
	} {
		d := diagnosed(t, wire.Options{Primary: server.Addr()}, func(o *Operator) {
			o.asker.ReadPrimary = true
			o.now = func() time.Time { return time.Now().Add(lead) }
		})
		finds(t, fmt.Sprint("a lead of ", lead), d, want...)
		if v := d.Shards[0].Servers[0]; v.ClockSkew == nil || math.Abs(*v.ClockSkew+lead.Seconds()) > v.RoundTrip+1 {
			t.Errorf("a lead of %v shows as %+v", lead, v)
		}
		if want != nil {
			mentions(t, d, codeClock, "differs from this machine's by", "NTP")
		}
	}
}

// TestDiagnosisShowsRetiredShards, which still have to be reached.
func TestDiagnosisShowsRetiredShards(t *testing.T) {
	t.Parallel()
	server, down := redistest.Start(t, lasting), redistest.Start(t)
	must(t, down.Kill())
	members := []Member{
		{Name: "a", Shard: newShard(t, wire.Options{Primary: server.Addr()})}, {Name: "b", Shard: newShard(t, wire.Options{Primary: down.Addr()})},
	}
	d := diagnosed(t, wire.Options{Primary: server.Addr()}, func(o *Operator) {
		o.asker.ReadPrimary, o.members, o.previous = true, members[:1], members
	})
	finds(t, "a retired shard", d, "error unreachable "+down.Addr())
	if len(d.Shards) != 2 || d.Shards[0].Retired || !d.Shards[1].Retired {
		t.Errorf("the shards are %+v", d.Shards)
	}
}

// TestDiagnosisEndsInTime although a server does not answer and timeouts are long.
func TestDiagnosisEndsInTime(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	must(t, server.Pause())
	t.Cleanup(func() { must(t, server.Resume()) })
	s := newOperator(t, wire.Options{Primary: server.Addr()}, func(o *Operator) { o.asker.ReadPrimary = true })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	soon(t, "a diagnosis of 300ms", func() {
		d := s.Diagnose(ctx)
		finds(t, "a server that hangs", d, "error unreachable "+server.Addr())
		mentions(t, d, codeUnreachable, "check_timeout")
	})
}

func TestDiagnosisThroughSentinels(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1, lasting)
	primary, replica := sh.Primary.Addr(), sh.Replicas[0].Addr()
	// Nobody but the test decides who is down.
	sentinels := redistest.StartSentinels(t, masterName, sh.Primary, 3, redistest.SentinelOptions{DownAfter: time.Hour})
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	opts := sentinelOptions(sentinels)
	d := diagnosed(t, opts, nil)
	finds(t, "sound sentinels", d)
	var servers []string
	for _, v := range d.Shards[0].Servers {
		servers = append(servers, fmt.Sprintf("%s %s %v", v.Role, v.Address, v.Reachable))
	}
	want := []string{"primary " + primary + " true", "replica " + replica + " true"}
	for _, addr := range sentinels.Addrs() {
		want = append(want, "sentinel "+addr+" true")
	}
	slices.Sort(servers)
	if slices.Sort(want); !slices.Equal(servers, want) || d.Shards[0].Kind != "sentinel" {
		t.Errorf("the servers are %q, want %q", servers, want)
	}

	node := sentinels.Nodes[0]
	for _, command := range sentinelRights {
		must(t, node.Client().Do(t.Context(), "ACL", "SETUSER", "watcher", "reset", "on", ">secret", "+@all", "-"+command).Err())
		limited := opts
		limited.Sentinel = &wire.SentinelOptions{Master: masterName, Addrs: []string{node.Addr()}, Credentials: login("watcher", "secret")}
		d := diagnosed(t, limited, nil)
		finds(t, "a sentinel's user without "+command, d, "error rights "+node.Addr(), "error not_found")
		mentions(t, d, codeRights, command, "+sentinel|master +sentinel|replicas")
		limited.Sentinel.Credentials = login("watcher", "marker")
		d = diagnosed(t, limited, nil)
		finds(t, "a wrong password of a sentinel", d, "error login "+node.Addr(), "error not_found")
		mentions(t, d, codeLogin, "sentinel_password")
	}
	strange := opts
	strange.Sentinel = &wire.SentinelOptions{Master: "nobody", Addrs: sentinels.Addrs()[:1]}
	d = diagnosed(t, strange, nil)
	finds(t, "an unknown master", d, "error not_found "+node.Addr(), "error not_found")
	mentions(t, d, codeUnfound, "the name nobody")
	must(t, node.Kill())
	finds(t, "a sentinel that is down", diagnosed(t, opts, nil), "error unreachable "+node.Addr())
	other := sentinels.Nodes[1]
	must(t, other.Kill())
	d = diagnosed(t, opts, nil)
	finds(t, "two of three that are down", d, "error unreachable "+node.Addr(), "error unreachable "+other.Addr(), "error no_quorum")
	mentions(t, d, codeNoQuorum, "only 1 of the 3 given sentinels", other.Addr(), "restart")
}

// TestDiagnosisOfAnAddressOfSeveralServers names the remedy whichever it reaches first.
func TestDiagnosisOfAnAddressOfSeveralServers(t *testing.T) {
	t.Parallel()
	servers, dialled := []*redistest.Server{redistest.Start(t, lasting), redistest.Start(t, lasting)}, new(atomic.Int64)
	const addr = "127.0.0.1:1"
	for range 2 {
		d := diagnosed(t, wire.Options{Primary: addr, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, servers[dialled.Add(1)%2].Addr())
		}}, nil)
		finds(t, "an address of several servers", d, "error round_robin "+addr, "warning no_replica "+addr)
		mentions(t, d, codeTurns, "leads to the primary alone")
		dialled.Add(1)
	}
	finds(t, "the primary alone", diagnosed(t, wire.Options{Primary: servers[0].Addr()}, nil), "warning no_replica "+servers[0].Addr())
}

// TestDiagnosisOfSentinelsThatDisagree: two watch different servers under one name.
func TestDiagnosisOfSentinelsThatDisagree(t *testing.T) {
	t.Parallel()
	var addrs, primaries []string
	for range 2 {
		server := redistest.Start(t, lasting)
		sentinels := redistest.StartSentinels(t, masterName, server, 1, redistest.SentinelOptions{DownAfter: time.Hour})
		addrs, primaries = append(addrs, sentinels.Addrs()...), append(primaries, server.Addr())
	}
	d := diagnosed(t, wire.Options{Sentinel: &wire.SentinelOptions{Master: masterName, Addrs: addrs}}, nil)
	finds(t, "sentinels that disagree", d, "warning foreign_server "+addrs[1], "warning no_replica "+primaries[0])
	mentions(t, d, codeElsewhere, "it leads to "+primaries[1], "remove its address")
	finds(t, "one of them", diagnosed(t, wire.Options{Sentinel: &wire.SentinelOptions{Master: masterName, Addrs: addrs[:1]}}, nil), "warning no_replica "+primaries[0])
}

// TestDiagnosisOfAReplicaThatSentinelsTakeForDead, which the store leaves out.
func TestDiagnosisOfAReplicaThatSentinelsTakeForDead(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1, lasting)
	sentinels := redistest.StartSentinels(t, masterName, sh.Primary, 1, redistest.SentinelOptions{DownAfter: time.Second})
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	must(t, sh.Replicas[0].Kill())
	finder := wire.NewSentinel(&newShard(t, sentinelOptions(sentinels)).Options)
	t.Cleanup(finder.Close)
	eventually(t, "the sentinel takes the replica for dead", func() error {
		found, err := finder.Find(t.Context())
		if err == nil && len(found.Roles[0].Down) == 0 {
			err = fmt.Errorf("it takes it for %+v", found.Roles[0])
		}
		return err
	})
	finds(t, "a replica that the sentinel takes for dead", diagnosed(t, sentinelOptions(sentinels), nil), "error unreachable "+sh.Replicas[0].Addr())
}

func TestDiagnosisOfACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 1, lasting, redistest.NodeTimeout(redistest.WaitTimeout))
	opts := wire.Options{Cluster: cluster.Addrs()[:2]}
	d := diagnosed(t, opts, nil)
	finds(t, "a sound cluster", d)
	if n := len(d.Shards[0].Servers); n != len(cluster.Nodes) || d.Shards[0].Kind != "cluster" {
		t.Errorf("the cluster has %d nodes, want %d", n, len(cluster.Nodes))
	}
	// Each node is probed with a key of its own slots: one that takes no writes is found.
	for i, v := range d.Shards[0].Servers {
		if v.Role != store.RolePrimary {
			continue
		}
		node := cluster.Nodes[slices.IndexFunc(cluster.Nodes, func(s *redistest.Server) bool { return s.Addr() == v.Address })]
		must(t, node.Client().ConfigSet(t.Context(), "min-replicas-to-write", "5").Err())
		finds(t, fmt.Sprint("node ", i), diagnosed(t, opts, nil), "error writes_refused "+v.Address)
		must(t, node.Client().ConfigSet(t.Context(), "min-replicas-to-write", "0").Err())
	}
	elsewhere := redistest.Start(t, lasting)
	d = diagnosed(t, wire.Options{Cluster: []string{elsewhere.Addr()}}, nil)
	finds(t, "a server that is no cluster", d, "error not_found", "error role "+elsewhere.Addr())
	mentions(t, d, codeRole, "no node of a Redis Cluster", "give the node's address, or write primary "+elsewhere.Addr()+" in place of cluster")
	opts.Cluster = append(slices.Clone(opts.Cluster), elsewhere.Addr())
	must(t, elsewhere.Kill())
	finds(t, "a configured node that the cluster does not name", diagnosed(t, opts, nil), "error unreachable "+elsewhere.Addr())
}

// TestDiagnosisOfAClusterWithAHungNode asks the others as well.
func TestDiagnosisOfAClusterWithAHungNode(t *testing.T) {
	t.Parallel()
	cluster, hung := redistest.StartCluster(t, 1, 1, lasting, redistest.NodeTimeout(redistest.WaitTimeout)), redistest.Start(t, lasting)
	must(t, hung.Pause())
	t.Cleanup(func() { must(t, hung.Resume()) })
	opts := wire.Options{Cluster: append([]string{hung.Addr()}, cluster.Addrs()...), DialTimeout: 2 * time.Second}
	want := "error unreachable " + hung.Addr()
	finds(t, "a node that hangs", diagnosedAs(t, opts, func(o *Operator) { o.asker.CheckTimeout = 2 * time.Second }, want), want)
}

// TestDiagnosisOfAClusterWithoutIdentity names the remedy.
func TestDiagnosisOfAClusterWithoutIdentity(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 1, 0, lasting)
	var asked atomic.Int64
	var port string
	filter := redistest.StartFilter(t, cluster.Addrs()[0], func(command []string) string {
		switch strings.ToLower(strings.Join(command, " ")) {
		case "cluster shards":
			return "*0"
		case "cluster slots":
			id := fmt.Sprint("id", asked.Add(1))
			return fmt.Sprintf("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%s\r\n$%d\r\n%s", port, len(id), id)
		}
		return ""
	})
	_, port, _ = net.SplitHostPort(filter.Addr())
	d := diagnosed(t, wire.Options{Cluster: []string{filter.Addr()}}, nil)
	finds(t, "IDs that change", d, "note unidentified", "warning no_replica "+filter.Addr())
	mentions(t, d, codeVague, "IDs of its cluster's nodes", "in place of a proxy's")
}

// TestDiagnosisOfAClusterWithoutSomeSlots after a node without a replica has gone.
func TestDiagnosisOfAClusterWithoutSomeSlots(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3, 0, lasting)
	must(t, cluster.Nodes[2].Kill())
	dead := cluster.Nodes[2].Addr()
	// The nodes take some time to find it dead.
	want := []string{"error slots", "error unreachable " + dead, "warning no_replica " + cluster.Nodes[0].Addr(), "warning no_replica " + cluster.Nodes[1].Addr()}
	d := diagnosedAs(t, wire.Options{Cluster: cluster.Addrs()[:2]}, nil, want...)
	finds(t, "a node without a replica that has gone", d, want...)
	mentions(t, d, codeSlots, fmt.Sprintf("of its %d slots", wire.SlotCount), "\nrestart "+dead)
}

// TestProbedRepliesOfOtherVersions covers words that the tested version does not use.
func TestProbedRepliesOfOtherVersions(t *testing.T) {
	for text, want := range map[string]string{
		"NOPERM User monkey has no permissions to run the 'get' command":                  "missing",
		"NOPERM No permissions to access a key":                                           "key",
		"NOPERM this user has no permissions to access one of the keys used as arguments": "key",
		"ERR unknown command 'GET', with args beginning with: ":                           "unknown",
		"ERR unknown subcommand 'shards'. Try CLUSTER HELP.":                              "unknown",
		"MISCONF Redis is configured to save RDB snapshots":                               "refusal",
		"unknown command 'get'":                                                           "unknown",
		"BUSY Redis is busy running a script":                                             "unclear",
		"LOADING Redis is loading the dataset":                                            "unclear",
		"unsupported command":                                                             "unclear",
		"unsupported command 'GET'":                                                       "unknown",
		"MOVED 1 127.0.0.1:1":                                                             "",
		"ERR value is not an integer or out of range":                                     "",
	} {
		var p probed
		p.note("get", reply(text))
		got := ""
		switch {
		case len(p.missing) > 0:
			got = "missing"
		case p.isKeyDenied:
			got = "key"
		case len(p.unknown) > 0:
			got = "unknown"
		case len(p.refusals) > 0:
			got = "refusal"
		case len(p.unclear) > 0:
			got = "unclear"
		}
		if got != want {
			t.Errorf("%q means %q, want %q", text, got, want)
		}
	}
}

// TestNumbersThatAreNoneAreGarbled, as a server's clock could be.
func TestNumbersThatAreNoneAreGarbled(t *testing.T) {
	_, err := strconv.ParseInt("noon", 10, 64)
	if !isGarbled(err) || isGarbled(nil) || isGarbled(reply("ERR invalid ")) || isGarbled(io.EOF) {
		t.Error("answers that make no sense are not told from others")
	}
}

// TestUntestedVersionsAreNoted covers versions that no server of these tests has.
func TestUntestedVersionsAreNoted(t *testing.T) {
	for text, want := range map[string][]store.Severity{
		"redis_version:7.0.15\r\n":                         nil,
		"redis_version:7.2.4\r\n":                          nil,
		"redis_version:8.0.9\r\n":                          nil,
		"redis_version:8.1.0\r\n":                          {store.SeverityNote},
		"redis_version:10.0.0\r\n":                         {store.SeverityNote},
		"redis_version:7.2.4\r\nvalkey_version:7.2.9\r\n":  nil,
		"redis_version:7.2.4\r\nvalkey_version:9.1.9\r\n":  nil,
		"redis_version:7.2.4\r\nvalkey_version:9.2.0\r\n":  {store.SeverityNote},
		"redis_version:7.2.4\r\nvalkey_version:10.0.0\r\n": {store.SeverityNote},
		"redis_version:6.2.14\r\n":                         {store.SeverityError},
	} {
		s := newOperator(t, wire.Options{Primary: "localhost:1"}, nil)
		v := &serverDiagnoser{shardDiagnoser: &shardDiagnoser{operator: s, shard: s.members[0].Shard}, info: parseInfo(text + "aof_enabled:1\r\n")}
		v.judge(t.Context())
		var got []store.Severity
		for _, f := range v.findings {
			got = append(got, f.Severity)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q yields %q, want %q", text, got, want)
		}
	}
}
