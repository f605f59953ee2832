package e2e

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestRemediesOfProblems applies the remedy of each problem, after which the problem is over and requests are counted.
func TestRemediesOfProblems(t *testing.T) {
	t.Parallel()
	site := func(lines ...string) string {
		return zonesSite(caddytest.RedisStore(append(lines, "charge_timeout 100ms")...), zoneWith("api", "charge before", "on_error deny", "events 1000000"), "respond ok")
	}
	shard := func(lines ...string) string { return caddytest.ShardWith("a", lines...) }
	do := func(t *testing.T, server *redistest.Server, words ...any) {
		t.Helper()
		must(t, fmt.Sprint(words...), server.Client().Do(t.Context(), words...).Err())
	}
	ask := func(c *caddytest.Caddy) int { return c.Get("/", "X-Key: k").StatusCode }
	// provoked is a problem, and what ends it.
	type provoked struct {
		site, kind, remedy string
		provoke            func(c *caddytest.Caddy)
		apply              func(c *caddytest.Caddy)
	}
	// reads returns a change of the config to what the text of a problem says to write.
	reads := func(kind, pattern string) func(c *caddytest.Caddy) {
		return func(c *caddytest.Caddy) {
			c.T.Helper()
			m := regexp.MustCompile(pattern).FindStringSubmatch(strings.Join(problemsOf(c)[kind], "; "))
			if m == nil {
				c.T.Fatalf("no problem matches %s: %v", pattern, problemsOf(c))
			}
			c.MustLoad(site(shard(m[1:]...)))
		}
	}
	textOf := func(c *caddytest.Caddy, p *provoked) string { return strings.Join(problemsOf(c)[p.kind], "; ") }
	for name, begin := range map[string]func(t *testing.T) provoked{
		"sentinel leads to a server": func(t *testing.T) provoked {
			return provoked{site: site(shard("sentinel m " + redistest.Start(t).Addr())), kind: "no_primary", remedy: "give the sentinel's address, or write primary", apply: reads("no_primary", `write (primary \S+) in place of sentinel`)}
		},
		"sentinel leads to a node": func(t *testing.T) provoked {
			node := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(redistest.WaitTimeout)).Addrs()[0]
			return provoked{site: site(shard("sentinel m " + node)), kind: "no_primary", remedy: "in place of sentinel", apply: reads("no_primary", `write (cluster \S+) in place of sentinel`)}
		},
		"cluster leads to a replica": func(t *testing.T) provoked {
			return provoked{
				site: site(shard("cluster " + redistest.StartShard(t, 1).Replicas[0].Addr())), kind: "no_primary", remedy: "in place of cluster",
				apply: reads("no_primary", `write (primary \S+) and (replica \S+) in place of cluster`),
			}
		},
		"cluster leads to a sentinel": func(t *testing.T) provoked {
			addr := redistest.StartSentinels(t, "limits", redistest.Start(t), 1, redistest.SentinelOptions{DownAfter: time.Hour}).Addrs()[0]
			return provoked{
				site: site(shard("cluster " + addr)), kind: "no_primary", remedy: "or write sentinel, the name of the master and this address in place of cluster",
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("sentinel limits " + addr))) },
			}
		},
		"primary leads to a sentinel": func(t *testing.T) provoked {
			addr := redistest.StartSentinels(t, "limits", redistest.Start(t), 1, redistest.SentinelOptions{DownAfter: time.Hour}).Addrs()[0]
			return provoked{
				site: site(shard("primary " + addr)), kind: "misconfigured", remedy: "write sentinel, and the name of the master",
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("sentinel limits " + addr))) },
			}
		},
		"another name of the master": func(t *testing.T) provoked {
			addr := redistest.StartSentinels(t, "limits", redistest.Start(t), 1, redistest.SentinelOptions{DownAfter: time.Hour}).Addrs()[0]
			return provoked{
				site: site(shard("sentinel mymaster " + addr)), kind: "no_primary", remedy: "write a name in the option sentinel that SENTINEL MASTERS lists",
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("sentinel limits " + addr))) },
			}
		},
		"primary and replica exchanged": func(t *testing.T) provoked {
			s := redistest.StartShard(t, 1)
			return provoked{
				site: site(shard("primary "+s.Replicas[0].Addr(), "replica "+s.Primary.Addr())), kind: "misconfigured", remedy: "exchange the two",
				apply: func(c *caddytest.Caddy) {
					c.MustLoad(site(shard("primary "+s.Primary.Addr(), "replica "+s.Replicas[0].Addr())))
				},
			}
		},
		"the primary as its own replica": func(t *testing.T) provoked {
			addr := redistest.Start(t).Addr()
			return provoked{
				site: site(shard("primary "+addr, "replica "+strings.Replace(addr, "127.0.0.1", "localhost", 1))), kind: "misconfigured", remedy: "is the primary itself: remove it",
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("primary " + addr))) },
			}
		},
		"takes at a replica": func(t *testing.T) provoked {
			s := redistest.StartShard(t, 1)
			return provoked{
				site: site(shard("primary " + s.Replicas[0].Addr())), kind: "store_errors", remedy: "the primary is a replica: end the failover, or correct the address",
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("primary " + s.Primary.Addr()))) },
			}
		},
		"a replica that takes writes": func(t *testing.T) provoked {
			s := redistest.StartShard(t, 1)
			do(t, s.Replicas[0], "CONFIG", "SET", "replica-read-only", "no")
			return provoked{
				site: site(shard("primary "+s.Primary.Addr(), "replica "+s.Replicas[0].Addr())), kind: "misconfigured", remedy: "set replica-read-only yes (CONFIG SET, and in its configuration)",
				apply: func(*caddytest.Caddy) { do(t, s.Replicas[0], "CONFIG", "SET", "replica-read-only", "yes") },
			}
		},
		"a full server": func(t *testing.T) provoked {
			server := redistest.Start(t)
			return provoked{
				site: site(shard("primary " + server.Addr())), kind: "store_errors", remedy: "give Redis more memory, set max_new_buckets, or shorten windows",
				provoke: func(*caddytest.Caddy) { do(t, server, "CONFIG", "SET", "maxmemory", "1mb") },
				apply:   func(*caddytest.Caddy) { do(t, server, "CONFIG", "SET", "maxmemory", "0") },
			}
		},
		"a server that lacks replicas": func(t *testing.T) provoked {
			server := redistest.Start(t)
			return provoked{
				site: site(shard("primary " + server.Addr())), kind: "store_errors", remedy: "see in its log why it cannot persist, or lacks replicas",
				provoke: func(*caddytest.Caddy) { do(t, server, "CONFIG", "SET", "min-replicas-to-write", "1") },
				apply:   func(*caddytest.Caddy) { do(t, server, "CONFIG", "SET", "min-replicas-to-write", "0") },
			}
		},
		"a busy server": func(t *testing.T) provoked {
			server := redistest.Start(t, redistest.Args("--busy-reply-threshold", "1"))
			program, end := context.WithCancel(t.Context())
			return provoked{
				site: site(shard("primary " + server.Addr())), kind: "store_errors", remedy: "end its script (SCRIPT KILL), and find the program that runs it",
				provoke: func(*caddytest.Caddy) { go server.Client().Eval(program, "while true do end", nil) },
				apply: func(*caddytest.Caddy) {
					end()
					do(t, server, "SCRIPT", "KILL")
				},
			}
		},
		"a right that is lacking": func(t *testing.T) provoked {
			server := redistest.Start(t)
			do(t, server, "ACL", "SETUSER", "lim", "on", ">s", "~*", "&*", "+@all", "-evalsha")
			lines := site(shard("primary "+server.Addr()), "username lim", "password s")
			return provoked{
				site: lines, kind: "store_errors", remedy: "let caddy rate-limit check list the rights that its user lacks",
				apply: func(*caddytest.Caddy) {
					// The command is that of the finding.
					m := regexp.MustCompile(`remedy: ACL SETUSER <user> (.*)`).FindStringSubmatch(checks(t, 1, nil, configOf(t, caddytest.RedisStore(shard("primary "+server.Addr()), "username lim", "password s"))))
					if m == nil {
						t.Fatal("check lists no right")
					}
					words := []any{"ACL", "SETUSER", "lim"}
					for _, word := range strings.Fields(m[1]) {
						words = append(words, word)
					}
					do(t, server, words...)
				},
			}
		},
		"keys of another program": func(t *testing.T) provoked {
			server := redistest.Start(t)
			return provoked{
				site: site(shard("primary " + server.Addr())), kind: "store_errors", remedy: "let no other program write keys with this key_prefix",
				provoke: func(*caddytest.Caddy) {
					for _, key := range server.Client().Keys(t.Context(), "rl:*:api:*").Val() {
						do(t, server, "SET", key, "text")
					}
				},
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("primary "+server.Addr()), "key_prefix other")) },
			}
		},
		"overrides of another program": func(t *testing.T) provoked {
			server := redistest.Start(t)
			return provoked{
				site: site(shard("primary " + server.Addr())), kind: "damaged_overrides", remedy: "another program wrote that key: delete it",
				provoke: func(*caddytest.Caddy) { do(t, server, "SET", "rl:#overrides2", "text") },
				apply:   func(*caddytest.Caddy) { do(t, server, "DEL", "rl:#overrides2") },
			}
		},
		"a slow link": func(t *testing.T) provoked {
			link := redistest.StartProxy(t, redistest.Start(t).Addr())
			return provoked{
				site: site(shard("primary "+link.Addr()), "check_timeout 300ms"), kind: "no_primary", remedy: "see whether the server, or the network, is slow, or raise check_timeout",
				provoke: func(*caddytest.Caddy) { must(t, "delay", link.Delay(time.Second)) },
				apply:   func(c *caddytest.Caddy) { c.MustLoad(site(shard("primary " + link.Addr()))) },
			}
		},
		"a server that is down": func(t *testing.T) provoked {
			server := redistest.Start(t)
			return provoked{
				site: site(shard("primary " + server.Addr())), kind: "no_primary", remedy: "see that the server runs, and that its maxclients suffices",
				provoke: func(*caddytest.Caddy) { must(t, "kill", server.Kill()) },
				apply:   func(*caddytest.Caddy) { must(t, "restart", server.Restart()) },
			}
		},
		"a host without an address": func(t *testing.T) provoked {
			addr := redistest.Start(t).Addr()
			return provoked{
				site: site(shard("primary redis.invalid:6379")), kind: "no_primary", remedy: "correct the name of the host, or the DNS",
				apply: func(c *caddytest.Caddy) { c.MustLoad(site(shard("primary " + addr))) },
			}
		},
		"requests that pass unchecked": func(t *testing.T) provoked {
			server := redistest.Start(t)
			store := caddytest.RedisStore(shard("primary " + server.Addr()))
			return provoked{
				site: zonesSite(store, zoneWith("api", "charge before", "on_error allow"), "respond ok"), kind: "unchecked",
				remedy:  "restore the store; with on_error local this Caddy would count them meanwhile",
				provoke: func(*caddytest.Caddy) { must(t, "kill", server.Kill()) },
				// The requests before are a problem of their zone for a minute.
				apply: func(c *caddytest.Caddy) {
					c.MustLoad(zonesSite(store, zoneWith("local", "charge before", "on_error local", "events 1000000"), "respond ok"))
				},
			}
		},
		"a store that is gone from the config": func(t *testing.T) provoked {
			addr := redistest.Start(t).Addr()
			return provoked{
				site: site(shard("primary " + addr)), kind: "disagreement", remedy: "because no store is configured: configure it again, or write store memory if that is meant",
				provoke: func(c *caddytest.Caddy) { c.MustLoad(zonesSite("", zoneWith("api", "charge before"), "respond ok")) },
				apply:   func(c *caddytest.Caddy) { c.MustLoad(site(shard("primary " + addr))) },
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := begin(t)
			c := caddytest.Start(t, p.site)
			if p.provoke != nil {
				eventually(t, "a request before", func() error { return want("status", ask(c), http.StatusOK) })
				p.provoke(c)
			}
			eventually(t, "the problem, with its remedy", func() error {
				if p.provoke != nil || p.kind == "store_errors" {
					ask(c) // Where no servers are found, a request waits for them.
				}
				all := textOf(c, &p)
				return want(fmt.Sprintf("%q having a remedy", all), all != "" && strings.Contains(all, p.remedy) && !strings.Contains(all, "in place of primary and replica: see"), true)
			})
			p.apply(c)
			eventually(t, "the remedy works", func() error {
				status := ask(c)
				return want(fmt.Sprint("status, and problems ", problemsOf(c)), fmt.Sprintf("%d %s", status, textOf(c, &p)), "200 ")
			})
		})
	}
}

// TestReplicaThatRefusesStaleReads answers checks by the remedy of the problem, while its primary is away.
func TestReplicaThatRefusesStaleReads(t *testing.T) {
	t.Parallel()
	s := redistest.StartShard(t, 1)
	must(t, "set", s.Replicas[0].Client().ConfigSet(t.Context(), "replica-serve-stale-data", "no").Err())
	c := caddytest.Start(t, zonesSite(caddytest.RedisStore(caddytest.ShardOf("a", s)), zoneWith("api", "events 1", "window 1h", "on_error deny"), "respond ok"))
	must(t, "before", want("status", c.Get("/", "X-Key: k").StatusCode, http.StatusOK))
	eventually(t, "a refusal", func() error { return want("status", c.Get("/", "X-Key: k").StatusCode, http.StatusTooManyRequests) })
	must(t, "in sync", s.Replicas[0].WaitInSync(t.Context()))
	must(t, "kill", s.Primary.Kill())
	awaitProblem(c, "misconfigured", "it answers no checks while its primary is away: set replica-serve-stale-data yes (CONFIG SET, and in its configuration)")
	awaitProblem(c, "no_replica", "see that its primary runs, and that the sentinels or the cluster name one")
	must(t, "the remedy", s.Replicas[0].Client().ConfigSet(t.Context(), "replica-serve-stale-data", "yes").Err())
	awaitProblem(c, "misconfigured", "")
	// Another Caddy knows no client.
	other := caddytest.Start(t, zonesSite(caddytest.RedisStore(caddytest.ShardOf("a", s)), zoneWith("api", "events 1", "window 1h", "on_error deny"), "respond ok"))
	eventually(t, "the replica refuses", func() error { return want("status", other.Get("/", "X-Key: k").StatusCode, http.StatusTooManyRequests) })
	must(t, "restart", s.Primary.Restart())
	awaitProblem(c, "no_replica", "")
}
