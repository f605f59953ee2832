package operate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// primaryIn, replicaIn and clusterIn match addresses in remedies.
var (
	primaryIn = regexp.MustCompile(`primary (\S+)`)
	replicaIn = regexp.MustCompile(`replica (?:of )?(127\S+)`)
	clusterIn = regexp.MustCompile(`cluster (\S+)`)
)

func addressIn(pattern *regexp.Regexp, f *store.Finding) string {
	m := append(pattern.FindStringSubmatch(f.Remedy), pattern.FindStringSubmatch(f.Problem)...)
	if len(m) < 2 {
		return ""
	}
	return m[1]
}

// TestRemediesOfFindings applies the remedy of each finding, after which the diagnosis has that finding no more, and no
// error. An entry that begins with a command is executed as it stands.
func TestRemediesOfFindings(t *testing.T) {
	t.Parallel()
	sh, pair := redistest.StartShard(t, 1, lasting), redistest.StartShard(t, 1, lasting)
	primary, replica := sh.Primary.Addr(), sh.Replicas[0].Addr()
	lone := func(addr string) wire.Options { return wire.Options{Primary: addr} }
	sentinels := redistest.StartSentinels(t, masterName, sh.Primary, 1, redistest.SentinelOptions{DownAfter: time.Hour})
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	cluster := redistest.StartCluster(t, 1, 0, lasting, redistest.NodeTimeout(redistest.WaitTimeout)).Addrs()[0]
	byName := func(name, addr string) wire.Options {
		return wire.Options{Sentinel: &wire.SentinelOptions{Master: name, Addrs: []string{addr}}}
	}
	do := func(server *redistest.Server, words ...string) {
		t.Helper()
		all := make([]any, len(words))
		for i, word := range words {
			all[i] = word
		}
		must(t, server.Client().Do(t.Context(), all...).Err())
	}
	// execute executes a remedy that is a command.
	execute := func(server *redistest.Server, f *store.Finding) {
		t.Helper()
		do(server, strings.Fields(strings.ReplaceAll(f.Remedy, "<user>", "limiter"))...)
	}
	limited := func(server *redistest.Server, rules ...string) wire.Options {
		do(server, append([]string{"ACL", "SETUSER", "limiter", "reset", "on", ">secret", "~rl:*", "+@all"}, rules...)...)
		return wire.Options{Primary: server.Addr(), Credentials: login("limiter", "secret")}
	}
	follow := func(server *redistest.Server, addr string) {
		host, port, _ := strings.Cut(addr, ":")
		do(server, "REPLICAOF", host, port)
	}
	start := func(args ...string) *redistest.Server {
		return redistest.Start(t, lasting, redistest.Args(args...))
	}
	ca, stranger := redistest.StartAuthority(t), redistest.StartAuthority(t)
	certificate, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	identity, err := ca.IssueClient("limiter", time.Now().Add(time.Hour))
	must(t, err)
	secure := redistest.Start(t, lasting, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no")).Addr()
	mutual := redistest.Start(t, lasting, redistest.TLS(certificate)).Addr()
	trusting := func(a *redistest.Authority) func(*tls.Config) { return func(c *tls.Config) { c.RootCAs = a.Pool() } }
	withTLS := func(addr string, config *tls.Config) wire.Options { return wire.Options{Primary: addr, TLS: config} }

	rebound := func(o *wire.Options, f *store.Finding) {
		*o = wire.Options{Primary: addressIn(primaryIn, f)}
		if addr := addressIn(replicaIn, f); strings.Contains(f.Remedy, "replica") {
			o.Replicas = []string{addr}
		}
	}
	full, lonely, evicting := start("--maxmemory", "1", "--maxmemory-policy", "noeviction"), start("--min-replicas-to-write", "1"), start("--maxmemory-policy", "allkeys-lru")
	forgetful, unasked, rightless, keyless, baseless := redistest.Start(t, redistest.Args("--save", "")), redistest.Start(t, redistest.Args("--save", "3600 1")), start(), start(), start()
	closed, crowded, down, lacking := start("--requirepass", "secret"), start("--maxclients", "1"), start(), start("--rename-command", "HINCRBY", "")
	secureCrowded := redistest.Start(t, lasting, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no", "--maxclients", "1"))
	must(t, crowded.Client().Ping(t.Context()).Err())
	must(t, secureCrowded.Client().Ping(t.Context()).Err())
	must(t, down.Kill())
	slow := redistest.StartProxy(t, primary)
	must(t, slow.Delay(30*time.Millisecond))
	hidden := redistest.StartFilter(t, primary, redistest.Refusing("-ERR unknown command 'time'", "time")).Addr()
	refusing := startRefusal(t)
	foreigner, stray := redistest.StartShard(t, 1, lasting), start()
	writable, stale, detached := redistest.StartShard(t, 1, lasting), redistest.StartShard(t, 1, lasting), redistest.StartShard(t, 1, lasting)
	do(writable.Replicas[0], "CONFIG", "SET", "replica-read-only", "no")
	do(stale.Replicas[0], "CONFIG", "SET", "replica-serve-stale-data", "no")
	must(t, detached.Replicas[0].PauseReplication())
	late := redistest.StartShard(t, 1, lasting)
	busy, _ := startBusy(t)
	nameless := startRenamed(t, sh.Primary, func(int64) string { return "" })
	hung, hungNode := start(), redistest.StartCluster(t, 1, 0, lasting, redistest.NodeTimeout(redistest.WaitTimeout)).Nodes[0]
	for _, server := range []*redistest.Server{hung, hungNode} {
		must(t, server.Pause())
	}
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	old, err := ca.IssueServer(time.Now().Add(time.Hour))
	must(t, err)
	expired := redistest.Start(t, lasting, redistest.TLS(old), redistest.Args("--tls-auth-clients", "no"))
	must(t, old.Renew(time.Now().Add(-time.Hour)))
	must(t, expired.ReloadCertificate(t.Context()))

	shardOf := func(s *redistest.Shard) wire.Options {
		return wire.Options{Primary: s.Primary.Addr(), Replicas: []string{s.Replicas[0].Addr()}}
	}
	for name, c := range map[string]struct {
		wire.Options
		code   string
		remedy string
		apply  func(o *wire.Options, f *store.Finding)
	}{
		"a server as a sentinel":  {byName("m", pair.Primary.Addr()), codeRole, "write primary", rebound},
		"a replica as a sentinel": {byName("m", replica), codeRole, "and replica", rebound},
		"a node as a sentinel":    {byName("m", cluster), codeRole, "write cluster", func(o *wire.Options, f *store.Finding) { *o = wire.Options{Cluster: []string{addressIn(clusterIn, f)}} }},
		"another name": {byName("nobody", sentinels.Addrs()[0]), codeUnfound, "SENTINEL MASTERS", func(o *wire.Options, _ *store.Finding) {
			text, err := sentinels.Nodes[0].Client().Do(t.Context(), "SENTINEL", "MASTERS").Result()
			must(t, err)
			o.Sentinel.Master = regexp.MustCompile(`name:? ?(\w+)`).FindStringSubmatch(fmt.Sprint(text))[1]
		}},
		"a server as a node":    {wire.Options{Cluster: []string{pair.Primary.Addr()}}, codeRole, "write primary", rebound},
		"a replica as a node":   {wire.Options{Cluster: []string{replica}}, codeRole, "and replica", rebound},
		"a sentinel as a node":  {wire.Options{Cluster: sentinels.Addrs()}, codeRole, "write sentinel", func(o *wire.Options, f *store.Finding) { *o = byName(masterName, f.Address) }},
		"a sentinel as primary": {lone(sentinels.Addrs()[0]), codeRole, "write sentinel", func(o *wire.Options, f *store.Finding) { *o = byName(masterName, f.Address) }},
		"a node as primary":     {lone(cluster), codeRole, "write cluster", func(o *wire.Options, f *store.Finding) { *o = wire.Options{Cluster: []string{f.Address}} }},
		"swapped": {wire.Options{Primary: replica, Replicas: []string{primary}}, codeRole, "exchange the two", func(o *wire.Options, f *store.Finding) {
			o.Primary, o.Replicas = f.Address, []string{o.Primary}
		}},
		"a replica as primary": {lone(replica), codeRole, "give that one as the primary", func(o *wire.Options, f *store.Finding) {
			o.Primary, o.Replicas = addressIn(replicaIn, f), []string{o.Primary}
		}},
		"a primary as its own replica": {wire.Options{Primary: primary, Replicas: []string{strings.Replace(primary, "127.0.0.1", "localhost", 1)}}, codeRole, "remove it", func(o *wire.Options, _ *store.Finding) { o.Replicas = nil }},
		"a primary as a replica":       {wire.Options{Primary: primary, Replicas: []string{stray.Addr()}}, codeRole, "REPLICAOF", func(o *wire.Options, _ *store.Finding) { follow(stray, o.Primary) }},
		"a replica of another":         {wire.Options{Primary: primary, Replicas: []string{foreigner.Replicas[0].Addr()}}, codeForeign, "REPLICAOF", func(o *wire.Options, _ *store.Finding) { follow(foreigner.Replicas[0], o.Primary) }},
		"a writable replica":           {shardOf(writable), codeWritable, "CONFIG SET", func(_ *wire.Options, f *store.Finding) { execute(writable.Replicas[0], f) }},
		"a replica that would refuse":  {shardOf(stale), codeStale, "CONFIG SET", func(_ *wire.Options, f *store.Finding) { execute(stale.Replicas[0], f) }},
		"a detached replica":           {shardOf(detached), codeDetached, "masterauth, the network", func(*wire.Options, *store.Finding) { must(t, detached.Replicas[0].ResumeReplication()) }},
		"a late replica":               {shardOf(late), codeLag, "to follow its primary", func(*wire.Options, *store.Finding) { must(t, late.Replicas[0].DelayReplication(0)) }},
		"no replica":                   {lone(pair.Primary.Addr()), codeNoReplica, "add a replica", func(o *wire.Options, _ *store.Finding) { o.Replicas = []string{pair.Replicas[0].Addr()} }},
		"a policy that evicts":         {lone(evicting.Addr()), codeEviction, "noeviction", func(*wire.Options, *store.Finding) { do(evicting, "CONFIG", "SET", "maxmemory-policy", "noeviction") }},
		"no persistence":               {lone(forgetful.Addr()), codePersistence, "set appendonly yes", func(*wire.Options, *store.Finding) { do(forgetful, "CONFIG", "SET", "appendonly", "yes") }},
		"unknown persistence": {limited(unasked, "-config|get"), codePersistence, "ACL SETUSER <user> +config|get", func(_ *wire.Options, f *store.Finding) {
			_, f.Remedy, _ = strings.Cut(f.Remedy, ", or ")
			execute(unasked, f)
		}},
		"rights":                      {limited(rightless, "-hincrby", "-zadd"), codeRights, "ACL SETUSER", func(_ *wire.Options, f *store.Finding) { execute(rightless, f) }},
		"keys":                        {limited(keyless, "resetkeys", "~other:*"), codeKeys, "ACL SETUSER", func(_ *wire.Options, f *store.Finding) { execute(keyless, f) }},
		"a right to databases":        {func() wire.Options { o := limited(baseless, "-select"); o.DB = 1; return o }(), codeRights, "ACL SETUSER", func(_ *wire.Options, f *store.Finding) { execute(baseless, f) }},
		"a database too high":         {wire.Options{Primary: primary, DB: 16}, codeDatabase, "correct db", func(o *wire.Options, _ *store.Finding) { o.DB = 15 }},
		"a database in a cluster":     {wire.Options{Cluster: []string{cluster}, DB: 1}, codeDatabase, "leave db out", func(o *wire.Options, _ *store.Finding) { o.DB = 0 }},
		"no password":                 {lone(closed.Addr()), codeLogin, "check username and password", func(o *wire.Options, _ *store.Finding) { o.Credentials = login("", "secret") }},
		"a failing password":          {wire.Options{Primary: closed.Addr(), Credentials: failingLogin}, codeLogin, "correct username, password, password_command", func(o *wire.Options, _ *store.Finding) { o.Credentials = login("", "secret") }},
		"a failing sentinel_password": {wire.Options{Sentinel: &wire.SentinelOptions{Master: masterName, Addrs: sentinels.Addrs(), Credentials: failingLogin}}, codeLogin, "correct sentinel_username", func(o *wire.Options, _ *store.Finding) { o.Sentinel.Credentials = nil }},
		"too many connections":        {lone(crowded.Addr()), codeUnreachable, "raise maxclients", func(*wire.Options, *store.Finding) { do(crowded, "CONFIG", "SET", "maxclients", "100") }},
		"too many TLS connections": {withTLS(secureCrowded.Addr(), &tls.Config{RootCAs: ca.Pool()}), codeTLS, "its maxclients", func(*wire.Options, *store.Finding) {
			do(secureCrowded, "CONFIG", "SET", "maxclients", "100")
		}},
		"full memory":                   {lone(full.Addr()), codeWrites, "maxmemory", func(*wire.Options, *store.Finding) { do(full, "CONFIG", "SET", "maxmemory", "100mb") }},
		"too few replicas":              {lone(lonely.Addr()), codeWrites, "correct what the reply says", func(*wire.Options, *store.Finding) { do(lonely, "CONFIG", "SET", "min-replicas-to-write", "0") }},
		"a renamed command":             {lone(lacking.Addr()), codeCommands, "undo a rename-command", func(o *wire.Options, _ *store.Finding) { o.Primary = start().Addr() }},
		"a hidden command":              {lone(hidden), codeCommands, "in place of a proxy's", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }},
		"a proxy that executes nothing": {lone(refusing), codeNotReady, "the address of a Redis server", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }},
		"a busy server":                 {lone(busy.Addr()), codeNotReady, "SCRIPT KILL", func(*wire.Options, *store.Finding) { do(busy, "SCRIPT", "KILL") }},
		"a server that is down":         {lone(down.Addr()), codeUnreachable, "see that it runs", func(*wire.Options, *store.Finding) { must(t, down.Restart()) }},
		"a host without an address":     {lone("redis.invalid:6379"), codeUnreachable, "correct the name of the host", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }},
		"a slow server":                 {wire.Options{Primary: slow.Addr(), DialTimeout: 2 * time.Second}, codeSlow, "raise check_timeout above", nil},
		"an unknown authority":          {withTLS(secure, &tls.Config{}), codeTLS, "ca <file>", func(o *wire.Options, _ *store.Finding) { o.TLS = &tls.Config{RootCAs: ca.Pool()} }},
		"an authority beside others":    {wire.Options{Primary: secure, TLS: &tls.Config{}, AddCertificates: trusting(stranger)}, codeTLS, "to the file of ca", func(o *wire.Options, _ *store.Finding) { o.AddCertificates = trusting(ca) }},
		"another host's certificate": {withTLS(secure, &tls.Config{RootCAs: ca.Pool(), ServerName: "redis.internal"}), codeTLS, "set server_name", func(o *wire.Options, _ *store.Finding) {
			o.TLS = &tls.Config{RootCAs: ca.Pool(), ServerName: "localhost"}
		}},
		"a missing client certificate": {withTLS(mutual, &tls.Config{RootCAs: ca.Pool()}), codeTLS, "cert <file> <key>", func(o *wire.Options, _ *store.Finding) {
			pair, err := tls.LoadX509KeyPair(identity.CertFile(), identity.KeyFile())
			must(t, err)
			o.TLS = &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}}
		}},
		"an unverified certificate": {withTLS(secure, &tls.Config{InsecureSkipVerify: true}), codeUnverified, "remove insecure_skip_verify", func(o *wire.Options, _ *store.Finding) { o.TLS = &tls.Config{RootCAs: ca.Pool()} }},
		"TLS that is not spoken":    {wire.Options{Primary: primary, TLS: &tls.Config{RootCAs: ca.Pool()}, DialTimeout: 100 * time.Millisecond}, codeUnreachable, "may speak no TLS", func(o *wire.Options, _ *store.Finding) { o.TLS, o.DialTimeout = nil, 0 }},
		"TLS at a port without it":  {withTLS(web.Listener.Addr().String(), &tls.Config{RootCAs: ca.Pool()}), codeTLS, "remove tls, or give the port with TLS", func(o *wire.Options, _ *store.Finding) { o.Primary = secure }},
		"a web server":              {lone(web.Listener.Addr().String()), codeUnreachable, "give the address of a Redis server", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }},
		"a server that hangs":       {wire.Options{Primary: hung.Addr(), DialTimeout: 300 * time.Millisecond}, codeUnreachable, "not overloaded", func(*wire.Options, *store.Finding) { must(t, hung.Resume()) }},
		"a node that hangs":         {wire.Options{Cluster: []string{hungNode.Addr()}, DialTimeout: 300 * time.Millisecond}, codeUnfound, "to answer, and more with a longer check_timeout", func(*wire.Options, *store.Finding) { must(t, hungNode.Resume()) }},
		"a server without a name":   {lone(nameless), codeVague, "in place of a proxy's", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }},
		"an expired certificate": {withTLS(expired.Addr(), &tls.Config{RootCAs: ca.Pool()}), codeTLS, "renew the server's certificate", func(*wire.Options, *store.Finding) {
			must(t, old.Renew(time.Now().Add(time.Hour)))
			must(t, expired.ReloadCertificate(t.Context()))
		}},
		"TLS that is not configured": {lone(secure), codeUnreachable, "option tls", func(o *wire.Options, _ *store.Finding) { o.TLS = &tls.Config{RootCAs: ca.Pool()} }},
	} {
		t.Run(name, func(t *testing.T) {
			opts, within := c.Options, redistest.WaitTimeout
			if c.code == codeLag {
				must(t, late.Replicas[0].DelayReplication(time.Hour))
				must(t, late.Primary.Client().Set(t.Context(), "k", "v", 0).Err())
				opts.MaxReplicaLag = 200 * time.Millisecond
			}
			lookTimeout := redistest.WaitTimeout
			if c.DialTimeout > 0 {
				lookTimeout = 8 * time.Second
			}
			if c.code == codeSlow {
				within = 10 * time.Millisecond
			}
			look := func() []store.Finding {
				// A search is repeated for half of the time.
				ctx, cancel := context.WithTimeout(t.Context(), lookTimeout)
				defer cancel()
				return newOperator(t, opts, func(o *Operator) { o.asker.ReadPrimary, o.asker.CheckTimeout = c.code != codeNoReplica, within }).Diagnose(ctx).Findings
			}
			findings := look()
			i := slices.IndexFunc(findings, func(f store.Finding) bool { return f.Code == c.code && strings.Contains(f.Remedy, c.remedy) })
			if i < 0 {
				t.Fatalf("no finding %s with the remedy %q: %+v", c.code, c.remedy, findings)
			}
			if c.apply != nil {
				c.apply(&opts, &findings[i])
			} else {
				var above time.Duration
				above, err := time.ParseDuration(strings.Trim(strings.Fields(findings[i].Remedy)[3], ","))
				must(t, err)
				within = above + 20*time.Millisecond
			}
			eventually(t, name+": the remedy works", func() error {
				for _, f := range look() {
					if f.Code == c.code || f.Severity == store.SeverityError {
						return fmt.Errorf("with %+v there is %+v", opts, f)
					}
				}
				return nil
			})
		})
	}
}

// TestRemediesOfSlots: a node that died comes back, or others get its slots.
func TestRemediesOfSlots(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3, 0, lasting)
	dead := cluster.Nodes[2]
	opts := wire.Options{Cluster: cluster.Addrs()[:2]}
	await := func(isWhole bool) (remedy string) {
		t.Helper()
		eventually(t, fmt.Sprint("the cluster has all slots: ", isWhole), func() error {
			remedy = ""
			for _, f := range diagnosed(t, opts, nil).Findings {
				if f.Code == codeSlots || f.Code == codeUnfound {
					remedy = f.Remedy
				}
			}
			if (remedy == "") != isWhole || remedy != "" && !strings.Contains(remedy, dead.Addr()) {
				return fmt.Errorf("the remedy is %q", remedy)
			}
			return nil
		})
		return remedy
	}
	must(t, dead.Kill())
	await(false)
	must(t, dead.Restart())
	await(true)
	must(t, dead.Kill())
	fixByCommand(t, await(false), cluster.Addrs()[0])
	await(true)
}

// TestRemedyOfSlotsThatNobodyHas gives them to a node.
func TestRemedyOfSlotsThatNobodyHas(t *testing.T) {
	t.Parallel()
	node := redistest.StartCluster(t, 1, 0, lasting, redistest.NodeTimeout(redistest.WaitTimeout)).Nodes[0]
	must(t, node.Client().ClusterDelSlots(t.Context(), 5, 6).Err())
	opts := wire.Options{Cluster: []string{node.Addr()}}
	d := diagnosed(t, opts, nil)
	i := slices.IndexFunc(d.Findings, func(f store.Finding) bool { return f.Code == codeSlots })
	if i < 0 {
		t.Fatalf("the findings are %+v", d.Findings)
	}
	fixByCommand(t, d.Findings[i].Remedy, node.Addr())
	diagnosedAs(t, opts, nil, "warning no_replica "+node.Addr())
}

// TestRemedyOfAMovedNode: other nodes hear its new address from it, but it names the old one for itself.
func TestRemedyOfAMovedNode(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 0, lasting, redistest.NodeTimeout(redistest.WaitTimeout), redistest.Args("--cluster-announce-ip", "", "--bind", "127.0.0.1", "127.0.0.2"))
	moved, other := cluster.Nodes[0], cluster.Nodes[1]
	_, port, _ := strings.Cut(moved.Addr(), ":")
	bus := regexp.MustCompile(":" + port + `@(\d+)`).FindStringSubmatch(moved.Client().ClusterNodes(t.Context()).Val())[1]
	set := func(name, value string) {
		t.Helper()
		must(t, moved.Client().ConfigSet(t.Context(), name, value).Err())
	}
	await := func(where string) {
		t.Helper()
		eventually(t, "the node is looked for at "+where, func() error {
			for _, f := range diagnosed(t, wire.Options{Cluster: []string{"127.0.0.2:" + port}}, nil).Findings {
				if f.Severity != store.SeverityError {
					continue
				}
				if f.Address == where+":"+port && f.Code == codeUnreachable && strings.Contains(f.Remedy, "cluster-announce-ip, or without that setting run CLUSTER MEET") {
					return nil
				}
				return fmt.Errorf("found %+v", f)
			}
			if where != "127.0.0.2" {
				return errors.New("it is found")
			}
			return nil
		})
	}
	set("bind", "127.0.0.2")
	set("bind-source-addr", "127.0.0.2")
	must(t, other.Restart())
	await("127.0.0.1")
	must(t, other.Client().Do(t.Context(), "CLUSTER", "MEET", "127.0.0.2", port, bus).Err())
	await("127.0.0.2")
	set("cluster-announce-ip", "127.0.0.9")
	await("127.0.0.9")
	set("cluster-announce-ip", "127.0.0.2")
	await("127.0.0.2")
}

// fixByCommand executes the command in a remedy, which needs the address of a node, and asks.
func fixByCommand(t *testing.T, remedy, addr string) {
	t.Helper()
	command := regexp.MustCompile(`redis-cli (.*)\)`).FindStringSubmatch(remedy)[1]
	ctx, cancel := context.WithTimeout(t.Context(), redistest.WaitTimeout)
	defer cancel()
	fix := exec.CommandContext(ctx, "redis-cli", strings.Fields(strings.Replace(command, "fix", "fix "+addr, 1))...)
	fix.Stdin = strings.NewReader("yes\n")
	if out, err := fix.CombinedOutput(); err != nil {
		t.Logf("%v: %s", err, out)
	}
}
