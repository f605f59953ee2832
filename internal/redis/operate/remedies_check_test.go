//go:build check

package operate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
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
	start := func(t *testing.T, args ...string) *redistest.Server {
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
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	shardOf := func(s *redistest.Shard) wire.Options {
		return wire.Options{Primary: s.Primary.Addr(), Replicas: []string{s.Replicas[0].Addr()}}
	}
	// remedied is a finding, and what ends it; nil if the finding says how long check_timeout has to be.
	type remedied struct {
		wire.Options
		code, remedy string
		apply        func(o *wire.Options, f *store.Finding)
	}
	for name, begin := range map[string]func(t *testing.T) remedied{
		"a primary in place of one that died": func(t *testing.T) remedied {
			dead, promoted := start(t), start(t)
			must(t, dead.Kill())
			return remedied{wire.Options{Primary: dead.Addr(), Replicas: []string{promoted.Addr()}}, codeRole, "give it as the primary", func(o *wire.Options, f *store.Finding) { *o = lone(f.Address) }}
		},
		"a server among sentinels": func(*testing.T) remedied {
			o := byName(masterName, sentinels.Addrs()[0])
			o.Sentinel.Addrs = append(o.Sentinel.Addrs, pair.Primary.Addr())
			return remedied{o, codeRole, "remove its address, or give the sentinel's in its place", func(o *wire.Options, _ *store.Finding) { *o = byName(masterName, sentinels.Addrs()[0]) }}
		},
		"a server among nodes": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: []string{cluster, pair.Primary.Addr()}}, codeRole, "remove its address, or give the node's in its place", func(o *wire.Options, _ *store.Finding) { o.Cluster = o.Cluster[:1] }}
		},
		"the port of a server in place of a sentinel's": func(*testing.T) remedied {
			return remedied{byName(masterName, primary), codeRole, "give the sentinel's address, or write", func(o *wire.Options, _ *store.Finding) { o.Sentinel.Addrs = sentinels.Addrs() }}
		},
		"the port of a server in place of a node's": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: []string{primary}}, codeRole, "give the node's address, or write", func(o *wire.Options, _ *store.Finding) { o.Cluster = []string{cluster} }}
		},
		"no sentinel": func(*testing.T) remedied {
			return remedied{byName(masterName, primary), codeUnfound, "correct what is wrong with the sentinels", func(o *wire.Options, _ *store.Finding) { o.Sentinel.Addrs = sentinels.Addrs() }}
		},
		"no node": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: []string{"127.0.0.1:1"}}, codeUnfound, "correct what is wrong with the nodes, or give others", func(o *wire.Options, _ *store.Finding) { o.Cluster = []string{cluster} }}
		},
		"a password in the clear": func(t *testing.T) remedied {
			user := limited(start(t))
			plain := wire.Options{Primary: "redis.example:6379", Credentials: user.Credentials, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, user.Primary)
			}}
			return remedied{plain, codePlain, "set up TLS there, and the option tls", func(o *wire.Options, _ *store.Finding) {
				server := redistest.Start(t, lasting, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no", "--requirepass", "secret"))
				*o = withTLS(server.Addr(), &tls.Config{RootCAs: ca.Pool()})
				o.Credentials = login("", "secret")
			}}
		},
		"a server as a sentinel": func(*testing.T) remedied {
			return remedied{byName("m", pair.Primary.Addr()), codeRole, "or write primary", rebound}
		},
		"a replica as a sentinel": func(*testing.T) remedied {
			return remedied{byName("m", replica), codeRole, "or write primary", rebound}
		},
		"a node as a sentinel": func(*testing.T) remedied {
			return remedied{byName("m", cluster), codeRole, "the sentinel's address, or write cluster", func(o *wire.Options, f *store.Finding) { *o = wire.Options{Cluster: []string{addressIn(clusterIn, f)}} }}
		},
		"another name": func(t *testing.T) remedied {
			return remedied{byName("nobody", sentinels.Addrs()[0]), codeUnfound, "SENTINEL MASTERS", func(o *wire.Options, _ *store.Finding) {
				text, err := sentinels.Nodes[0].Client().Do(t.Context(), "SENTINEL", "MASTERS").Result()
				must(t, err)
				o.Sentinel.Master = regexp.MustCompile(`name:? ?(\w+)`).FindStringSubmatch(fmt.Sprint(text))[1]
			}}
		},
		"a server as a node": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: []string{pair.Primary.Addr()}}, codeRole, "or write primary", rebound}
		},
		"a replica as a node": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: []string{replica}}, codeRole, "or write primary", rebound}
		},
		"a sentinel as a node": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: sentinels.Addrs()}, codeRole, "or write sentinel, the name of the master", func(o *wire.Options, f *store.Finding) { *o = byName(masterName, f.Address) }}
		},
		"a sentinel as primary": func(*testing.T) remedied {
			return remedied{lone(sentinels.Addrs()[0]), codeRole, "write sentinel", func(o *wire.Options, f *store.Finding) { *o = byName(masterName, f.Address) }}
		},
		"a node as primary": func(*testing.T) remedied {
			return remedied{lone(cluster), codeRole, "write cluster in place of primary and replica", func(o *wire.Options, f *store.Finding) { *o = wire.Options{Cluster: []string{f.Address}} }}
		},
		"swapped": func(*testing.T) remedied {
			return remedied{wire.Options{Primary: replica, Replicas: []string{primary}}, codeRole, "exchange the two", func(o *wire.Options, f *store.Finding) {
				o.Primary, o.Replicas = f.Address, []string{o.Primary}
			}}
		},
		"a replica as primary": func(*testing.T) remedied {
			return remedied{lone(replica), codeRole, "give that one as the primary", func(o *wire.Options, f *store.Finding) {
				o.Primary, o.Replicas = addressIn(replicaIn, f), []string{o.Primary}
			}}
		},
		"a primary as its own replica": func(*testing.T) remedied {
			return remedied{wire.Options{Primary: primary, Replicas: []string{strings.Replace(primary, "127.0.0.1", "localhost", 1)}}, codeRole, "remove it", func(o *wire.Options, _ *store.Finding) { o.Replicas = nil }}
		},
		"a primary as a replica": func(t *testing.T) remedied {
			stray := start(t)
			return remedied{wire.Options{Primary: primary, Replicas: []string{stray.Addr()}}, codeRole, "or remove it; REPLICAOF", func(o *wire.Options, _ *store.Finding) { o.Replicas = nil }}
		},
		"a replica of another": func(t *testing.T) remedied {
			foreigner := redistest.StartShard(t, 1, lasting)
			return remedied{wire.Options{Primary: primary, Replicas: []string{foreigner.Replicas[0].Addr()}}, codeForeign, "correct the address, or remove it", func(o *wire.Options, _ *store.Finding) { o.Replicas = []string{replica} }}
		},
		"a writable replica": func(t *testing.T) remedied {
			writable := redistest.StartShard(t, 1, lasting)
			do(writable.Replicas[0], "CONFIG", "SET", "replica-read-only", "no")
			return remedied{shardOf(writable), codeWritable, "set replica-read-only yes (CONFIG SET", func(*wire.Options, *store.Finding) {
				do(writable.Replicas[0], "CONFIG", "SET", "replica-read-only", "yes")
			}}
		},
		"a replica that would refuse": func(t *testing.T) remedied {
			stale := redistest.StartShard(t, 1, lasting)
			do(stale.Replicas[0], "CONFIG", "SET", "replica-serve-stale-data", "no")
			return remedied{shardOf(stale), codeStale, "set replica-serve-stale-data yes (CONFIG SET", func(*wire.Options, *store.Finding) {
				do(stale.Replicas[0], "CONFIG", "SET", "replica-serve-stale-data", "yes")
			}}
		},
		"a detached replica": func(t *testing.T) remedied {
			detached := redistest.StartShard(t, 1, lasting)
			must(t, detached.Replicas[0].PauseReplication())
			return remedied{shardOf(detached), codeDetached, "masterauth, the network", func(*wire.Options, *store.Finding) { must(t, detached.Replicas[0].ResumeReplication()) }}
		},
		"a late replica": func(t *testing.T) remedied {
			late := redistest.StartShard(t, 1, lasting)
			must(t, late.Replicas[0].DelayReplication(time.Hour))
			must(t, late.Primary.Client().Set(t.Context(), "k", "v", 0).Err())
			return remedied{shardOf(late), codeLag, "to follow its primary", func(*wire.Options, *store.Finding) { must(t, late.Replicas[0].DelayReplication(0)) }}
		},
		"no replica": func(*testing.T) remedied {
			return remedied{lone(pair.Primary.Addr()), codeNoReplica, "add a replica", func(o *wire.Options, _ *store.Finding) { o.Replicas = []string{pair.Replicas[0].Addr()} }}
		},
		"a policy that evicts": func(t *testing.T) remedied {
			evicting := start(t, "--maxmemory-policy", "allkeys-lru")
			return remedied{lone(evicting.Addr()), codeEviction, "set it to noeviction", func(*wire.Options, *store.Finding) { do(evicting, "CONFIG", "SET", "maxmemory-policy", "noeviction") }}
		},
		"no persistence": func(t *testing.T) remedied {
			forgetful := redistest.Start(t, redistest.Args("--save", ""))
			return remedied{lone(forgetful.Addr()), codePersistence, "set appendonly yes", func(*wire.Options, *store.Finding) { do(forgetful, "CONFIG", "SET", "appendonly", "yes") }}
		},
		"unknown persistence": func(t *testing.T) remedied {
			unasked := redistest.Start(t, redistest.Args("--save", "3600 1"))
			return remedied{limited(unasked, "-config|get"), codePersistence, "ACL SETUSER <user> +config|get", func(_ *wire.Options, f *store.Finding) {
				_, f.Remedy, _ = strings.Cut(f.Remedy, ", or ")
				execute(unasked, f)
			}}
		},
		"rights": func(t *testing.T) remedied {
			rightless := start(t)
			return remedied{limited(rightless, "-hincrby", "-zadd"), codeRights, "ACL SETUSER <user> +", func(_ *wire.Options, f *store.Finding) { execute(rightless, f) }}
		},
		"keys": func(t *testing.T) remedied {
			keyless := start(t)
			return remedied{limited(keyless, "resetkeys", "~other:*"), codeKeys, "ACL SETUSER <user> ~", func(_ *wire.Options, f *store.Finding) { execute(keyless, f) }}
		},
		"a right to databases": func(t *testing.T) remedied {
			baseless := start(t)
			return remedied{func() wire.Options { o := limited(baseless, "-select"); o.DB = 1; return o }(), codeRights, "ACL SETUSER <user> +select", func(_ *wire.Options, f *store.Finding) { execute(baseless, f) }}
		},
		"a database too high": func(*testing.T) remedied {
			return remedied{wire.Options{Primary: primary, DB: 16}, codeDatabase, "correct db, or raise databases", func(o *wire.Options, _ *store.Finding) { o.DB = 15 }}
		},
		"a database in a cluster": func(*testing.T) remedied {
			return remedied{wire.Options{Cluster: []string{cluster}, DB: 1}, codeDatabase, "leave db out: a cluster has database 0 only", func(o *wire.Options, _ *store.Finding) { o.DB = 0 }}
		},
		"no password": func(t *testing.T) remedied {
			closed := start(t, "--requirepass", "secret")
			return remedied{lone(closed.Addr()), codeLogin, "check username and password, and that the user is on", func(o *wire.Options, _ *store.Finding) { o.Credentials = login("", "secret") }}
		},
		"a failing password": func(t *testing.T) remedied {
			closed := start(t, "--requirepass", "secret")
			return remedied{wire.Options{Primary: closed.Addr(), Credentials: failingLogin}, codeLogin, "correct username, password, password_command", func(o *wire.Options, _ *store.Finding) { o.Credentials = login("", "secret") }}
		},
		"a failing sentinel_password": func(*testing.T) remedied {
			return remedied{wire.Options{Sentinel: &wire.SentinelOptions{Master: masterName, Addrs: sentinels.Addrs(), Credentials: failingLogin}}, codeLogin, "correct sentinel_username", func(o *wire.Options, _ *store.Finding) { o.Sentinel.Credentials = nil }}
		},
		"too many connections": func(t *testing.T) remedied {
			crowded := start(t, "--maxclients", "1")
			must(t, crowded.Client().Ping(t.Context()).Err())
			return remedied{lone(crowded.Addr()), codeUnreachable, "raise maxclients", func(*wire.Options, *store.Finding) { do(crowded, "CONFIG", "SET", "maxclients", "100") }}
		},
		"too many TLS connections": func(t *testing.T) remedied {
			crowded := redistest.Start(t, lasting, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no", "--maxclients", "1"))
			must(t, crowded.Client().Ping(t.Context()).Err())
			return remedied{withTLS(crowded.Addr(), &tls.Config{RootCAs: ca.Pool()}), codeTLS, "or have no connection left (its maxclients)", func(*wire.Options, *store.Finding) {
				do(crowded, "CONFIG", "SET", "maxclients", "100")
			}}
		},
		"full memory": func(t *testing.T) remedied {
			full := start(t, "--maxmemory", "1", "--maxmemory-policy", "noeviction")
			return remedied{lone(full.Addr()), codeWrites, "give it more memory (maxmemory)", func(*wire.Options, *store.Finding) { do(full, "CONFIG", "SET", "maxmemory", "100mb") }}
		},
		"too few replicas": func(t *testing.T) remedied {
			lonely := start(t, "--min-replicas-to-write", "1")
			return remedied{lone(lonely.Addr()), codeWrites, "correct what the reply says", func(*wire.Options, *store.Finding) { do(lonely, "CONFIG", "SET", "min-replicas-to-write", "0") }}
		},
		"a renamed command": func(t *testing.T) remedied {
			lacking := start(t, "--rename-command", "HINCRBY", "")
			return remedied{lone(lacking.Addr()), codeCommands, "undo a rename-command", func(o *wire.Options, _ *store.Finding) { o.Primary = start(t).Addr() }}
		},
		"a hidden command": func(t *testing.T) remedied {
			hidden := redistest.StartFilter(t, primary, redistest.Refusing("-ERR unknown command 'time'", "time")).Addr()
			return remedied{lone(hidden), codeCommands, "give the server's address in place of a proxy's", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }}
		},
		"a proxy that executes nothing": func(t *testing.T) remedied {
			refusing := startRefusal(t)
			return remedied{lone(refusing), codeNotReady, "the address of a Redis server", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }}
		},
		"a busy server": func(t *testing.T) remedied {
			busy, _ := startBusy(t)
			return remedied{lone(busy.Addr()), codeNotReady, "end the script that it runs (SCRIPT KILL)", func(*wire.Options, *store.Finding) { do(busy, "SCRIPT", "KILL") }}
		},
		"a server that is down": func(t *testing.T) remedied {
			down := start(t)
			must(t, down.Kill())
			return remedied{lone(down.Addr()), codeUnreachable, "see that it runs", func(*wire.Options, *store.Finding) { must(t, down.Restart()) }}
		},
		"a host without an address": func(*testing.T) remedied {
			return remedied{lone("redis.invalid:6379"), codeUnreachable, "correct the name of the host", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }}
		},
		"a slow server": func(t *testing.T) remedied {
			slow := redistest.StartProxy(t, primary)
			must(t, slow.Delay(30*time.Millisecond))
			return remedied{wire.Options{Primary: slow.Addr(), DialTimeout: redistest.WaitTimeout}, codeSlow, "raise check_timeout above", nil}
		},
		"an unknown authority": func(*testing.T) remedied {
			return remedied{withTLS(secure, &tls.Config{}), codeTLS, "in tls: ca <file>", func(o *wire.Options, _ *store.Finding) { o.TLS = &tls.Config{RootCAs: ca.Pool()} }}
		},
		"an authority beside others": func(*testing.T) remedied {
			return remedied{wire.Options{Primary: secure, TLS: &tls.Config{}, AddCertificates: trusting(stranger)}, codeTLS, "add the authority's certificate to the file of ca", func(o *wire.Options, _ *store.Finding) { o.AddCertificates = trusting(ca) }}
		},
		"another host's certificate": func(*testing.T) remedied {
			return remedied{withTLS(secure, &tls.Config{RootCAs: ca.Pool(), ServerName: "redis.internal"}), codeTLS, "set server_name", func(o *wire.Options, _ *store.Finding) {
				o.TLS = &tls.Config{RootCAs: ca.Pool(), ServerName: "localhost"}
			}}
		},
		"a missing client certificate": func(t *testing.T) remedied {
			return remedied{withTLS(mutual, &tls.Config{RootCAs: ca.Pool()}), codeTLS, "cert <file> <key>", func(o *wire.Options, _ *store.Finding) {
				pair, err := tls.LoadX509KeyPair(identity.CertFile(), identity.KeyFile())
				must(t, err)
				o.TLS = &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}}
			}}
		},
		"an unverified certificate": func(*testing.T) remedied {
			return remedied{withTLS(secure, &tls.Config{InsecureSkipVerify: true}), codeUnverified, "remove insecure_skip_verify", func(o *wire.Options, _ *store.Finding) { o.TLS = &tls.Config{RootCAs: ca.Pool()} }}
		},
		"TLS that is not spoken": func(*testing.T) remedied {
			return remedied{wire.Options{Primary: primary, TLS: &tls.Config{RootCAs: ca.Pool()}, DialTimeout: 100 * time.Millisecond}, codeUnreachable, "may speak no TLS", func(o *wire.Options, _ *store.Finding) { o.TLS, o.DialTimeout = nil, 0 }}
		},
		"TLS at a port without it": func(*testing.T) remedied {
			return remedied{withTLS(web.Listener.Addr().String(), &tls.Config{RootCAs: ca.Pool()}), codeTLS, "remove tls, or give the port with TLS", func(o *wire.Options, _ *store.Finding) { o.Primary = secure }}
		},
		"a web server": func(*testing.T) remedied {
			return remedied{lone(web.Listener.Addr().String()), codeUnreachable, "give the address of a Redis server", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }}
		},
		"a server that hangs": func(t *testing.T) remedied {
			hung := start(t)
			must(t, hung.Pause())
			return remedied{wire.Options{Primary: hung.Addr(), DialTimeout: 300 * time.Millisecond}, codeUnreachable, "not overloaded", func(*wire.Options, *store.Finding) { must(t, hung.Resume()) }}
		},
		"a node that hangs": func(t *testing.T) remedied {
			hungNode := redistest.StartCluster(t, 1, 0, lasting, redistest.NodeTimeout(redistest.WaitTimeout)).Nodes[0]
			must(t, hungNode.Pause())
			return remedied{wire.Options{Cluster: []string{hungNode.Addr()}, DialTimeout: 300 * time.Millisecond}, codeUnfound, "to answer, and more with a longer check_timeout", func(*wire.Options, *store.Finding) { must(t, hungNode.Resume()) }}
		},
		"a server without a name": func(t *testing.T) remedied {
			nameless := startRenamed(t, sh.Primary, func(int64) string { return "" })
			return remedied{lone(nameless), codeVague, "in place of a proxy's", func(o *wire.Options, _ *store.Finding) { o.Primary = primary }}
		},
		"an expired certificate": func(t *testing.T) remedied {
			old, err := ca.IssueServer(time.Now().Add(time.Hour))
			must(t, err)
			expired := redistest.Start(t, lasting, redistest.TLS(old), redistest.Args("--tls-auth-clients", "no"))
			must(t, old.Renew(time.Now().Add(-time.Hour)))
			must(t, expired.ReloadCertificate(t.Context()))
			return remedied{withTLS(expired.Addr(), &tls.Config{RootCAs: ca.Pool()}), codeTLS, "renew the server's certificate", func(*wire.Options, *store.Finding) {
				must(t, old.Renew(time.Now().Add(time.Hour)))
				must(t, expired.ReloadCertificate(t.Context()))
			}}
		},
		"TLS that is not configured": func(*testing.T) remedied {
			return remedied{lone(secure), codeUnreachable, "see its log; it may speak TLS alone (option tls)", func(o *wire.Options, _ *store.Finding) { o.TLS = &tls.Config{RootCAs: ca.Pool()} }}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := begin(t)
			opts, within := c.Options, redistest.WaitTimeout
			if c.code == codeLag {
				opts.MaxReplicaLag = 200 * time.Millisecond
			}
			lookTimeout := redistest.WaitTimeout
			if c.DialTimeout > 0 && c.code != codeSlow {
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
			var found store.Finding
			eventually(t, name, func() error {
				findings := look()
				i := slices.IndexFunc(findings, func(f store.Finding) bool { return f.Code == c.code && strings.Contains(f.Remedy, c.remedy) })
				if i < 0 {
					return fmt.Errorf("no finding %s with the remedy %q: %+v", c.code, c.remedy, findings)
				}
				found = findings[i]
				return nil
			})
			if c.apply != nil {
				c.apply(&opts, &found)
			} else {
				above, err := time.ParseDuration(strings.Trim(strings.Fields(found.Remedy)[3], ","))
				must(t, err)
				// It works on a machine that is slower than in between.
				within = max(above, redistest.WaitTimeout)
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

// TestRemedyOfSentinelsThatAnnounceOtherwise: one announces the name of the primary, and another one its address.
func TestRemedyOfSentinelsThatAnnounceOtherwise(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, lasting)
	opts := wire.Options{Sentinel: &wire.SentinelOptions{Master: masterName}}
	var last *redistest.Server
	for range 2 {
		last = redistest.StartSentinels(t, masterName, server, 1, redistest.SentinelOptions{DownAfter: time.Hour}).Nodes[0]
		opts.Sentinel.Addrs = append(opts.Sentinel.Addrs, last.Addr())
	}
	_, port, _ := net.SplitHostPort(server.Addr())
	for _, words := range [][]any{
		{"SENTINEL", "CONFIG", "SET", "resolve-hostnames", "yes"}, {"SENTINEL", "CONFIG", "SET", "announce-hostnames", "yes"},
		{"SENTINEL", "REMOVE", masterName}, {"SENTINEL", "MONITOR", masterName, "localhost", port, "1"},
	} {
		must(t, last.Client().Do(t.Context(), words...).Err())
	}
	d := diagnosed(t, opts, nil)
	i := slices.IndexFunc(d.Findings, func(f store.Finding) bool { return f.Code == codeSentinels })
	if i < 0 || !strings.Contains(d.Findings[i].Remedy, "and announce them alike (announce-hostnames)") {
		t.Fatalf("the findings are %+v", d.Findings)
	}
	must(t, last.Client().Do(t.Context(), "SENTINEL", "CONFIG", "SET", "announce-hostnames", "no").Err())
	diagnosedAs(t, opts, nil, "warning no_replica "+server.Addr())
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
	remedy := await(false)
	if !strings.Contains(remedy, "; if one is gone for good, restart the others first, then give its slots to other nodes: redis-cli --cluster fix") {
		t.Errorf("the remedy is %s", remedy)
	}
	fixByCommand(t, remedy)
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
	if i < 0 || !strings.HasPrefix(d.Findings[i].Remedy, "assign them to a node: redis-cli --cluster fix") {
		t.Fatalf("the findings are %+v", d.Findings)
	}
	fixByCommand(t, d.Findings[i].Remedy)
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

// fixByCommand executes the command at the end of a remedy, which asks.
func fixByCommand(t *testing.T, remedy string) {
	t.Helper()
	_, command, _ := strings.Cut(remedy, ": redis-cli ")
	ctx, cancel := context.WithTimeout(t.Context(), redistest.WaitTimeout)
	defer cancel()
	fix := exec.CommandContext(ctx, "redis-cli", strings.Fields(command)...)
	fix.Stdin = strings.NewReader("yes\n")
	if out, err := fix.CombinedOutput(); err != nil {
		t.Logf("%v: %s", err, out)
	}
}
