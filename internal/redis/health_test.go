package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// journal keeps the events of a shard.
type journal struct {
	mu     sync.Mutex
	events []wire.Event
}

func keepJournal(s *Shard) *journal {
	j := new(journal)
	s.Listen(func(e wire.Event) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.events = append(j.events, e)
	})
	return j
}

// all returns the events of a kind that concern a server.
func (j *journal) all(kind wire.EventKind, addr string) (some []wire.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.events {
		if e.Kind == kind && e.Addr == addr {
			some = append(some, e)
		}
	}
	return some
}

func (j *journal) await(t *testing.T, kind wire.EventKind, addr string) wire.Event {
	t.Helper()
	var found []wire.Event
	eventually(t, fmt.Sprintf("event %d of %s arrives", kind, addr), func() error {
		if found = j.all(kind, addr); len(found) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	return found[0]
}

// awaitProblem waits for the event of a misconfigured server whose error contains
// all of the words.
func (j *journal) awaitProblem(t *testing.T, addr string, words ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("a fault of %s with %q is reported", addr, words), func() error {
		for _, e := range j.all(wire.Misconfigured, addr) {
			missing := false
			for _, word := range words {
				missing = missing || !strings.Contains(e.Err.Error(), word)
			}
			if !missing {
				return nil
			}
		}
		return fmt.Errorf("the events are %+v", j.all(wire.Misconfigured, addr))
	})
}

// TestLaggingReplicaIsLeftOut until it has caught up.
func TestLaggingReplicaIsLeftOut(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 2)
	opts := ShardOptions{Primary: sh.Primary.Addr(), MaxReplicaLag: 5 * time.Second}
	for _, r := range sh.Replicas {
		opts.Replicas = append(opts.Replicas, r.Addr())
	}
	shard := newShard(t, opts)
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	behind := sh.Replicas[0]
	call := func() {
		must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
		must(t, store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
	}
	call()
	must(t, sh.WaitReplicated(t.Context()))
	must(t, behind.PauseReplication())
	call()
	j.await(t, wire.ReplicaLags, behind.Addr())
	asked := calls(t, behind, "hmget")
	for range 50 {
		call()
	}
	if n := calls(t, behind, "hmget"); n != asked {
		t.Errorf("the lagging replica was asked %d times", n-asked)
	}
	if n := len(j.all(wire.ReplicaLags, behind.Addr())); n != 1 {
		t.Errorf("the lag was reported %d times", n)
	}
	must(t, behind.ResumeReplication())
	j.await(t, wire.ReplicaCaughtUp, behind.Addr())
	eventually(t, "the replica is asked again", func() error {
		call()
		if calls(t, behind, "hmget") == asked {
			return errors.New("it is not")
		}
		return nil
	})
}

// TestAddressThatLeadsToServersInTurn has a fault. It is left out unless the servers have the same data, of which one
// takes writes.
func TestAddressThatLeadsToServersInTurn(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	for name, other := range map[string]*redistest.Server{"a replica": sh.Replicas[0], "another primary": redistest.Start(t)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers, dialled := []*redistest.Server{sh.Primary, other}, new(atomic.Int64)
			const addr = "127.0.0.1:1"
			shard := newShard(t, ShardOptions{Primary: addr, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, servers[dialled.Add(1)%2].Addr())
			}})
			j := keepJournal(shard)
			s := newStore(t, shard, nil)
			store.Answers(t.Context(), s.Check, oneOf("k"))
			j.awaitProblem(t, addr, "several servers in turn", "leads to the primary alone")
			isLeftOut := other != sh.Replicas[0]
			eventually(t, "calls are made of a pair alone", func() error {
				if checks, charges := shard.Owner(0).Checks.IsUp(), shard.Owner(0).Charges.IsUp(); checks == isLeftOut || charges == isLeftOut {
					return fmt.Errorf("checks: %t, charges: %t", checks, charges)
				}
				return nil
			})
		})
	}
}

// TestServerThatIsNotIdentified is no fault of its setup.
func TestServerThatIsNotIdentified(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	text, err := server.Client().Info(t.Context()).Result()
	must(t, err)
	// A time that stands still would be a wrong clock.
	text = strings.NewReplacer("run_id:", "run:", "server_time_usec:", "time:").Replace(text)
	filter := redistest.StartFilter(t, server.Addr(), redistest.Refusing(fmt.Sprintf("$%d\r\n%s", len(text), text), "info"))
	shard := newShard(t, ShardOptions{Primary: filter.Addr()})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	store.Answers(t.Context(), s.Check, oneOf("k"))
	eventually(t, "it is not identified", func() error {
		if f := s.Shards()[0].Servers[0]; !strings.Contains(f.Unidentified, "give the address of a Redis server") || len(f.Faults) > 0 || !shard.Owner(0).Checks.IsUp() {
			return fmt.Errorf("it has %+v", f)
		}
		return nil
	})
	if found := j.all(wire.Misconfigured, filter.Addr()); len(found) > 0 {
		t.Errorf("events: %+v", found)
	}
}

// TestReplicaOfAnotherPrimaryIsLeftOut, because it does not have the buckets.
func TestReplicaOfAnotherPrimaryIsLeftOut(t *testing.T) {
	sh, other := redistest.StartShard(t, 0), redistest.StartShard(t, 1)
	foreigner := other.Replicas[0]
	shard := newShard(t, ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{foreigner.Addr()}})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	if e := j.await(t, wire.ReplicaLags, foreigner.Addr()); e.Err == nil || !strings.Contains(e.Err.Error(), "another primary") {
		t.Errorf("the event has error %v", e.Err)
	}
	before := calls(t, foreigner, "hmget")
	for range 20 {
		used(t, "check", store.Answers(t.Context(), s.Check, oneOf("k"))[0], 1)
	}
	if n := calls(t, foreigner, "hmget"); n != before {
		t.Errorf("the replica was asked %d times", n-before)
	}
}

// TestPromotedReplicaIsLeftOut once it was written to, with the one that follows it: what they have is
// no longer what the primary has.
func TestPromotedReplicaIsLeftOut(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 2)
	promoted, chained := sh.Replicas[0], sh.Replicas[1]
	shard := shardOf(t, sh)
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	host, port, err := net.SplitHostPort(promoted.Addr())
	must(t, err)
	must(t, promoted.Client().Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
	must(t, chained.Client().Do(t.Context(), "REPLICAOF", host, port).Err())
	must(t, promoted.Client().Set(t.Context(), "filler", "more than the primary has", 0).Err())
	for _, server := range sh.Replicas {
		if e := j.await(t, wire.ReplicaLags, server.Addr()); e.Err == nil || !strings.Contains(e.Err.Error(), "was made one") {
			t.Errorf("the event of %s has error %v", server.Addr(), e.Err)
		}
	}
}

// TestReplicaThatWasJustAttachedLags: while it copies its primary's data for the first time,
// it is left out, and taken for no other primary's.
func TestReplicaThatWasJustAttachedLags(t *testing.T) {
	// The copy does not begin.
	primary := redistest.Start(t, redistest.Args("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "3600"))
	attached := redistest.Start(t)
	host, port, err := net.SplitHostPort(primary.Addr())
	must(t, err)
	must(t, attached.Client().Do(t.Context(), "REPLICAOF", host, port).Err())
	shard := newShard(t, ShardOptions{Primary: primary.Addr(), Replicas: []string{attached.Addr()}})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	if e := j.await(t, wire.ReplicaLags, attached.Addr()); e.Err == nil || !strings.Contains(e.Err.Error(), "does not have its primary's data") {
		t.Errorf("the event has error %v", e.Err)
	}
	if f := s.Shards()[0].Servers[1]; f.State != store.ServerLagging || f.LagKnown {
		t.Errorf("the replica is %+v", f)
	}
	used(t, "check", store.Answers(t.Context(), s.Check, oneOf("k"))[0], 1)
}

// TestMisconfiguredServersAreReportedOnce, with the remedy.
func TestMisconfiguredServersAreReportedOnce(t *testing.T) {
	evicting := redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	sh := redistest.StartShard(t, 1)
	lone := redistest.Start(t)
	for _, c := range []struct {
		ShardOptions
		*redistest.Server
		words []string
	}{
		{ShardOptions{Primary: evicting.Addr()}, evicting, []string{"allkeys-lru", "noeviction"}},
		{ShardOptions{Primary: sh.Replicas[0].Addr()}, sh.Replicas[0], []string{"replica of 127.0.0.1:", "sentinel"}},
		{ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{lone.Addr()}}, lone, []string{"is a primary", "REPLICAOF"}},
	} {
		shard := newShard(t, c.ShardOptions)
		j := keepJournal(shard)
		shard.Await(t.Context())
		j.awaitProblem(t, c.Addr(), c.words...)
		before := len(j.all(wire.Misconfigured, c.Addr()))
		eventually(t, "the server was inspected", func() error {
			if len(j.all(wire.Met, c.Addr())) == 0 {
				return fmt.Errorf("it was not")
			}
			return nil
		})
		awaitExaminations(t, c.Server, 2)
		if after := len(j.all(wire.Misconfigured, c.Addr())); after != before {
			t.Errorf("%s was reported %d times", c.Addr(), after)
		}
	}
}

// awaitExaminations waits until a server was examined that many more times.
func awaitExaminations(t *testing.T, server *redistest.Server, more int64) {
	t.Helper()
	before := calls(t, server, "info")
	eventually(t, "the server is examined again", func() error {
		if n := calls(t, server, "info") - before; n < more {
			return fmt.Errorf("it was examined %d times", n)
		}
		return nil
	})
}

// TestServerThatComesBackIsLookedAtAgain: a changed policy is reported once, and so is
// its correction.
func TestServerThatComesBackIsLookedAtAgain(t *testing.T) {
	t.Parallel()
	first, second := redistest.Start(t), redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	var behind atomic.Pointer[redistest.Server]
	behind.Store(first)
	const addr = "redis:6379"
	shard := newShard(t, ShardOptions{Primary: addr, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, behind.Load().Addr())
	}})
	j := keepJournal(shard)
	shard.Await(t.Context())
	j.await(t, wire.Met, addr)
	times := func(kind wire.EventKind, n int) {
		t.Helper()
		eventually(t, fmt.Sprintf("event %d arrives %d times", kind, n), func() error {
			if all := j.all(kind, addr); len(all) != n {
				return fmt.Errorf("the events are %+v", all)
			}
			return nil
		})
	}
	setPolicy := func(policy string) { must(t, second.Client().ConfigSet(t.Context(), "maxmemory-policy", policy).Err()) }

	behind.Store(second)
	must(t, first.Kill())
	j.awaitProblem(t, addr, "allkeys-lru", "noeviction")
	must(t, second.Restart())
	times(wire.Met, 3)
	times(wire.Misconfigured, 1)
	setPolicy("noeviction")
	times(wire.Mended, 1)
	if e := j.all(wire.Mended, addr)[0]; e.Err == nil || !strings.Contains(e.Err.Error(), "allkeys-lru") {
		t.Errorf("the corrected fault is %v", e.Err)
	}
	setPolicy("volatile-ttl")
	j.awaitProblem(t, addr, "volatile-ttl", "noeviction")
	setPolicy("allkeys-lfu")
	j.awaitProblem(t, addr, "allkeys-lfu", "noeviction")
	awaitExaminations(t, second, 3)
	times(wire.Misconfigured, 3)
	times(wire.Mended, 1)
}

// TestTwinsAreFound: two shards are the same server.
func TestTwinsAreFound(t *testing.T) {
	server, other := redistest.Start(t), redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	shards := []*Shard{
		newShard(t, ShardOptions{Primary: server.Addr()}),
		newShard(t, ShardOptions{Primary: other.Addr()}),
		newShard(t, ShardOptions{Primary: proxy.Addr()}),
	}
	var members []Member
	for i, shard := range shards {
		members = append(members, Member{Name: string(rune('a' + i)), Shard: shard})
		shard.Await(t.Context())
	}
	s := New(Options{Members: members})
	eventually(t, "all servers were inspected", func() error {
		for _, f := range s.Shards() {
			if f.Servers[0].State == store.ServerUnmet {
				return fmt.Errorf("that of shard %s was not", f.Name)
			}
		}
		return nil
	})
	want := store.Twin{Shard: "c", Address: proxy.Addr(), OtherShard: "a", OtherAddress: server.Addr()}
	if got := store.Twins(s.Shards()); !slices.Equal(got, []store.Twin{want}) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := store.Twins(New(Options{Members: members[:2]}).Shards()); len(got) != 0 {
		t.Errorf("got %v of two servers", got)
	}
}

// TestServerComesBackByPings without requests, which fail at once while the server is
// left out.
func TestServerComesBackByPings(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr(), PoolSize: 1})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	waitUntilUp(t, s)
	must(t, server.Kill())
	eventually(t, "the server is left out", func() error {
		if shard.Owner(0).Checks.IsUp() {
			return fmt.Errorf("check: %w", store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
		}
		return nil
	})
	if e := j.await(t, wire.ServerDown, server.Addr()); e.Purpose != wire.PurposeChecks || e.Err == nil {
		t.Errorf("the event is %+v", e)
	}
	var states []store.State
	for range 1000 {
		states = store.Answers(t.Context(), s.Check, oneOf("k"))
	}
	if states[0].Err == nil {
		t.Error("a server that is down has answered")
	}
	must(t, server.Restart())
	j.await(t, wire.ServerUp, server.Addr())
	if n := calls(t, server, "evalsha"); n > 0 {
		t.Errorf("%d requests were sent on trial", n)
	}
	if n := len(j.all(wire.ServerDown, server.Addr())); n > 2 {
		t.Errorf("the outage was reported %d times", n)
	}
}

// TestRefusedHealthChecksNameTheirCause: the error suggests +info only for a
// missing right.
func TestRefusedHealthChecksNameTheirCause(t *testing.T) {
	const right, hint = "+info", "allow it (+info)"
	server, secret := redistest.Start(t), redistest.Start(t)
	must(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">secret", "~*", "+@all", "-info").Err())
	must(t, secret.Client().ConfigSet(t.Context(), "requirepass", "right").Err())
	for _, c := range []struct {
		*redistest.Server
		wire.Credentials
		words []string
		hints bool
	}{
		{server, login("limiter", "secret"), []string{"NOPERM", hint}, true},
		{secret, nil, []string{"NOAUTH", "username", "password"}, false},
		{secret, login("", "wrong"), []string{"WRONGPASS", "username", "password"}, false},
	} {
		shard := newShard(t, ShardOptions{Primary: c.Addr(), Credentials: c.Credentials})
		j := keepJournal(shard)
		shard.Await(t.Context())
		j.awaitProblem(t, c.Addr(), c.words...)
		for _, e := range j.all(wire.Misconfigured, c.Addr()) {
			if strings.Contains(e.Err.Error(), hint) != c.hints {
				t.Errorf("the event has error %v", e.Err)
			}
		}
		if c.hints {
			must(t, c.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", right).Err())
			j.await(t, wire.Mended, c.Addr())
		}
	}
}

// TestServersOfTheWrongKind answer, and cannot keep the buckets: no calls are made of them, so that
// on_error decides, and the log, check and status name the remedy.
func TestServersOfTheWrongKind(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
	node := cluster.Nodes[0].Addr()
	hides := func(reply string) ShardOptions {
		return ShardOptions{Primary: redistest.StartFilter(t, node, redistest.Refusing(reply, "info", "cluster")).Addr()}
	}
	for name, c := range map[string]struct {
		opts   ShardOptions
		remedy string
	}{
		"a cluster's node":                        {ShardOptions{Primary: node}, "write cluster"},
		"a cluster's node without the right INFO": {hides("-NOPERM this user has no permissions to run the 'info' command"), "write cluster"},
		"a cluster's node that hides INFO":        {hides("-ERR unknown command 'info'"), "write cluster"},
		"a cluster's node that a sentinel names":  {sentinelOptions(redistest.StartSentinels(t, masterName, cluster.Nodes[1], 1, redistest.SentinelOptions{})), "write cluster"},
		"a sentinel":                              {ShardOptions{Primary: redistest.StartSentinels(t, "main", redistest.Start(t), 1, redistest.SentinelOptions{}).Nodes[0].Addr()}, "write sentinel"},
	} {
		t.Run(name, func(t *testing.T) {
			shard := newShard(t, c.opts)
			j := keepJournal(shard)
			s := newStore(t, shard, nil)
			_ = store.Answers(t.Context(), s.Take, oneOf("k"))
			j.awaitProblem(t, shard.Servers()[0].Primary, c.remedy)
			eventually(t, "no calls are made", func() error {
				if err := store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err; !errors.Is(err, wire.ErrUnfit) || !errors.Is(err, store.ErrNotExecuted) || store.KindOf(err) != store.KindMisconf {
					return fmt.Errorf("error is %w", err)
				}
				return nil
			})
			server := s.Shards()[0].Servers[0]
			if server.State != store.ServerLeftOut || !strings.Contains(strings.Join(server.Faults, " "), c.remedy) || server.Lanes[0].Breaker != store.BreakerUnfit {
				t.Errorf("the server's figures are %+v", server)
			}
			isNamed := func(f store.Finding) bool {
				return f.Severity == store.SeverityError && strings.Contains(f.Remedy, c.remedy)
			}
			if d := s.Diagnose(t.Context()); !slices.ContainsFunc(d.Findings, isNamed) {
				t.Errorf("the findings are %+v", d.Findings)
			}
		})
	}
}

// TestServerWithoutTime counts nothing, because scripts lack TIME, and is reported.
func TestServerWithoutTime(t *testing.T) {
	t.Parallel()
	programs, err := redistest.Family()
	must(t, err)
	for _, program := range programs {
		t.Run(filepath.Base(program), func(t *testing.T) {
			server := redistest.Start(t, redistest.Program(program), redistest.Args("--rename-command", "TIME", "")).Addr()
			shard := newShard(t, ShardOptions{Primary: server})
			j := keepJournal(shard)
			s := newStore(t, shard, nil)
			if err := store.Answers(t.Context(), s.Take, oneOf("k"))[0].Err; !errors.Is(err, store.ErrFinal) {
				t.Errorf("error is %v", err)
			}
			j.awaitProblem(t, server, "command TIME", "undo its rename-command")
		})
	}
}

// TestOnlyNodeOfACluster has all slots, so that it serves as a primary; the log says what to write before
// it gets company.
func TestOnlyNodeOfACluster(t *testing.T) {
	t.Parallel()
	node := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(waitTimeout)).Nodes[0]
	shard := newShard(t, ShardOptions{Primary: node.Addr()})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err)
	j.awaitProblem(t, node.Addr(), "write cluster")
	awaitExaminations(t, node, 2)
	eventually(t, "the node serves", func() error {
		err := store.Answers(t.Context(), s.Check, oneOf("k"))[0].Err
		if server := s.Shards()[0].Servers[0]; err == nil && server.State != store.ServerUp {
			err = fmt.Errorf("the server's figures are %+v", server)
		}
		return err
	})
}
