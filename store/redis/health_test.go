package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// journal keeps the events of a shard.
type journal struct {
	mu     sync.Mutex
	events []Event
}

func keepJournal(s *Shard) *journal {
	j := new(journal)
	s.Listen(func(e Event) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.events = append(j.events, e)
	})
	return j
}

// all returns the events of a kind that concern a server.
func (j *journal) all(kind EventKind, addr string) (some []Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.events {
		if e.Kind == kind && e.Addr == addr {
			some = append(some, e)
		}
	}
	return some
}

func (j *journal) await(t *testing.T, kind EventKind, addr string) Event {
	t.Helper()
	var found []Event
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
		for _, e := range j.all(Misconfigured, addr) {
			missing := false
			for _, word := range words {
				missing = missing || !strings.Contains(e.Err.Error(), word)
			}
			if !missing {
				return nil
			}
		}
		return fmt.Errorf("the events are %+v", j.all(Misconfigured, addr))
	})
}

// TestLaggingReplicaIsLeftOut until it has caught up.
func TestLaggingReplicaIsLeftOut(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 2)
	opts := ShardOptions{Primary: sh.Primary.Addr(), MaxReplicaLag: time.Second}
	for _, r := range sh.Replicas {
		opts.Replicas = append(opts.Replicas, r.Addr())
	}
	shard := newShard(t, opts)
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	behind := sh.Replicas[0]
	ask := func() {
		must(t, store.Answers(t.Context(), s.Charge, ask("k"))[0].Err)
		must(t, store.Answers(t.Context(), s.Check, ask("k"))[0].Err)
	}
	ask()
	must(t, sh.WaitReplicated(t.Context()))
	must(t, behind.PauseReplication())
	eventually(t, "the replica is left out", func() error {
		ask()
		if len(j.all(ReplicaLags, behind.Addr())) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	asked := calls(t, behind, "hmget")
	for range 50 {
		ask()
	}
	if n := calls(t, behind, "hmget"); n != asked {
		t.Errorf("the lagging replica was asked %d times", n-asked)
	}
	if n := len(j.all(ReplicaLags, behind.Addr())); n != 1 {
		t.Errorf("the lag was reported %d times", n)
	}
	must(t, behind.ResumeReplication())
	j.await(t, ReplicaCaughtUp, behind.Addr())
	for range 50 {
		ask()
	}
	if n := calls(t, behind, "hmget"); n == asked {
		t.Error("the replica is not asked although it has caught up")
	}
}

// TestReplicaOfAnotherPrimaryIsLeftOut, because it does not have the buckets.
func TestReplicaOfAnotherPrimaryIsLeftOut(t *testing.T) {
	sh, other := redistest.StartShard(t, 0), redistest.StartShard(t, 1)
	foreigner := other.Replicas[0]
	shard := newShard(t, ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{foreigner.Addr()}})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	must(t, store.Answers(t.Context(), s.Charge, ask("k"))[0].Err)
	if e := j.await(t, ReplicaLags, foreigner.Addr()); e.Err == nil || !strings.Contains(e.Err.Error(), "another primary") {
		t.Errorf("the event has error %v", e.Err)
	}
	before := calls(t, foreigner, "hmget")
	for range 20 {
		used(t, "check", store.Answers(t.Context(), s.Check, ask("k"))[0], 1)
	}
	if n := calls(t, foreigner, "hmget"); n != before {
		t.Errorf("the replica was asked %d times", n-before)
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
	must(t, store.Answers(t.Context(), s.Charge, ask("k"))[0].Err)
	if e := j.await(t, ReplicaLags, attached.Addr()); !errors.Is(e.Err, errUnsynced) {
		t.Errorf("the event has error %v", e.Err)
	}
	if f := s.Shards()[0].Servers[1]; f.State != store.ServerLagging || f.LagKnown {
		t.Errorf("the replica is %+v", f)
	}
	used(t, "check", store.Answers(t.Context(), s.Check, ask("k"))[0], 1)
}

// TestMisconfiguredServersAreReportedOnce, with the remedy.
func TestMisconfiguredServersAreReportedOnce(t *testing.T) {
	evicting := redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	sh := redistest.StartShard(t, 1)
	lone := redistest.Start(t)
	for _, c := range []struct {
		ShardOptions
		addr  string
		words []string
	}{
		{ShardOptions{Primary: evicting.Addr()}, evicting.Addr(), []string{"allkeys-lru", "noeviction"}},
		{ShardOptions{Primary: sh.Replicas[0].Addr()}, sh.Replicas[0].Addr(), []string{"replica of 127.0.0.1:", "sentinel"}},
		{ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{lone.Addr()}}, lone.Addr(), []string{"is a primary", "REPLICAOF"}},
	} {
		shard := newShard(t, c.ShardOptions)
		j := keepJournal(shard)
		shard.start()
		j.awaitProblem(t, c.addr, c.words...)
		before := len(j.all(Misconfigured, c.addr))
		eventually(t, "the server was inspected", func() error {
			if len(j.all(Met, c.addr)) == 0 {
				return fmt.Errorf("it was not")
			}
			return nil
		})
		shard.examineServers(t.Context(), shard.topology.Load().servers[0])
		if after := len(j.all(Misconfigured, c.addr)); after != before {
			t.Errorf("%s was reported %d times", c.addr, after)
		}
	}
}

// TestServerThatComesBackIsLookedAtAgain: a changed policy is reported once, and so is
// its correction.
func TestServerThatComesBackIsLookedAtAgain(t *testing.T) {
	t.Parallel()
	first, second := redistest.Start(t), redistest.Start(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	var behind atomic.Pointer[redistest.Server]
	behind.Store(first)
	const addr = "redis:6379"
	shard := newShard(t, ShardOptions{Primary: addr, dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, behind.Load().Addr())
	}})
	j := keepJournal(shard)
	shard.start()
	j.await(t, Met, addr)
	times := func(kind EventKind, n int) {
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
	times(Met, 3)
	times(Misconfigured, 1)
	setPolicy("noeviction")
	times(Mended, 1)
	if e := j.all(Mended, addr)[0]; e.Err == nil || !strings.Contains(e.Err.Error(), "allkeys-lru") {
		t.Errorf("the corrected fault is %v", e.Err)
	}
	setPolicy("volatile-ttl")
	j.awaitProblem(t, addr, "volatile-ttl", "noeviction")
	setPolicy("allkeys-lfu")
	j.awaitProblem(t, addr, "allkeys-lfu", "noeviction")
	for range 3 {
		shard.examineServers(t.Context(), shard.topology.Load().servers[0])
	}
	times(Misconfigured, 3)
	times(Mended, 1)
}

// TestVersionsAndClocks covers values that no server of these tests has.
func TestVersionsAndClocks(t *testing.T) {
	for text, want := range map[string]bool{
		"redis_version:6.2.14\r\n":                        true,
		"redis_version:7.0.0\r\n":                         false,
		"redis_version:7.0.15\r\n":                        false,
		"redis_version:8.2.1\r\n":                         false,
		"redis_version:7.2.4\r\nvalkey_version:8.0.1\r\n": false,
		"redis_version:unheard-of\r\n":                    false,
		"":                                                false,
	} {
		if got := parseInfo(text).isBefore(oldestMajor, oldestMinor); got != want {
			t.Errorf("%q is too old: %v, want %v", text, got, want)
		}
	}
	at := time.UnixMicro(1_700_000_000_000_000)
	if skew, ok := parseInfo("server_time_usec:1700000002500000\r\n").skew(at); !ok || skew != 2500*time.Millisecond {
		t.Errorf("got skew %v, %v", skew, ok)
	}
	if _, ok := parseInfo("").skew(at); ok {
		t.Error("got a skew without the server's time")
	}
}

// TestClockOfAServerIsRead: the server has this machine's clock.
func TestClockOfAServerIsRead(t *testing.T) {
	shard := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	var before time.Time
	var i info
	eventually(t, "the server answers in time", func() (err error) {
		before = time.Now()
		i, err = shard.owner(0).checks.info(t.Context())
		return err
	})
	// A server updates its cached time ten times a second.
	if behind, ok := i.skew(before); !ok || behind < -time.Second {
		t.Errorf("got skew %v, %v before the first call", behind, ok)
	}
	if ahead, ok := i.skew(time.Now()); !ok || ahead > time.Second {
		t.Errorf("got skew %v, %v after the first call", ahead, ok)
	}
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
		shard.start()
	}
	s := New(Options{Members: members})
	eventually(t, "all servers were inspected", func() error {
		for _, shard := range shards {
			shard.mu.Lock()
			n := len(shard.met)
			shard.mu.Unlock()
			if n == 0 {
				return fmt.Errorf("one was not")
			}
		}
		return nil
	})
	if first, second := s.Twins(); first != server.Addr() || second != proxy.Addr() {
		t.Errorf("got %q and %q, want %s and %s", first, second, server.Addr(), proxy.Addr())
	}
	if first, second := New(Options{Members: members[:2]}).Twins(); first != "" || second != "" {
		t.Errorf("got %q and %q of two servers", first, second)
	}
}

// TestServerComesBackByPings without requests, which fail at once while the server is
// left out.
func TestServerComesBackByPings(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr(), PoolSize: 1})
	j := keepJournal(shard)
	s := newStore(t, shard, func(o *Options) { o.CheckTimeout = 100 * time.Millisecond })
	waitUntilUp(t, s)
	must(t, server.Kill())
	eventually(t, "the server is left out", func() error {
		if shard.owner(0).checks.isUp() {
			return fmt.Errorf("check: %w", store.Answers(t.Context(), s.Check, ask("k"))[0].Err)
		}
		return nil
	})
	if e := j.await(t, ServerDown, server.Addr()); e.Purpose != PurposeChecks || e.Err == nil {
		t.Errorf("the event is %+v", e)
	}
	var states []store.State
	for range 1000 {
		states = store.Answers(t.Context(), s.Check, ask("k"))
	}
	if states[0].Err == nil {
		t.Error("a server that is down has answered")
	}
	must(t, server.Restart())
	j.await(t, ServerUp, server.Addr())
	if n := calls(t, server, "evalsha"); n > 0 {
		t.Errorf("%d requests were sent on trial", n)
	}
	if n := len(j.all(ServerDown, server.Addr())); n > 2 {
		t.Errorf("the outage was reported %d times", n)
	}
}

// TestRefusedHealthChecksNameTheirCause: the error suggests +info only for a
// missing right.
func TestRefusedHealthChecksNameTheirCause(t *testing.T) {
	const hint = "+info"
	server, secret := redistest.Start(t), redistest.Start(t)
	must(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">secret", "~*", "+@all", "-info").Err())
	must(t, secret.Client().ConfigSet(t.Context(), "requirepass", "right").Err())
	for _, c := range []struct {
		*redistest.Server
		Credentials
		words []string
		hints bool
	}{
		{server, login("limiter", "secret"), []string{"NOPERM", hint}, true},
		{secret, nil, []string{"NOAUTH", "username", "password"}, false},
		{secret, login("", "wrong"), []string{"WRONGPASS", "username", "password"}, false},
	} {
		shard := newShard(t, ShardOptions{Primary: c.Addr(), Credentials: c.Credentials})
		j := keepJournal(shard)
		shard.start()
		j.awaitProblem(t, c.Addr(), c.words...)
		for _, e := range j.all(Misconfigured, c.Addr()) {
			if strings.Contains(e.Err.Error(), hint) != c.hints {
				t.Errorf("the event has error %v", e.Err)
			}
		}
	}
}

// startBusy starts a server that runs a script, and answers nothing else, until release.
func startBusy(t *testing.T) (server *redistest.Server, release func()) {
	t.Helper()
	server = redistest.Start(t, redistest.Args("--busy-reply-threshold", "1"))
	ended := make(chan error, 1)
	go func() { ended <- server.Client().Eval(context.Background(), "while true do end", nil).Err() }()
	eventually(t, "the server is busy", func() error {
		if err := server.Client().Ping(t.Context()).Err(); err == nil || !strings.Contains(err.Error(), "BUSY") {
			return fmt.Errorf("ping: %w", err)
		}
		return nil
	})
	return server, func() {
		t.Helper()
		must(t, server.Client().ScriptKill(context.Background()).Err())
		if err := <-ended; err == nil {
			t.Error("the script has ended by itself")
		}
	}
}

// TestBusyServerIsNotMisconfigured: a temporary refusal is left to the breaker.
func TestBusyServerIsNotMisconfigured(t *testing.T) {
	server, release := startBusy(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	j := keepJournal(shard)
	shard.examineServers(t.Context(), shard.topology.Load().servers[0])
	release()
	shard.start()
	// Events arrive in order.
	j.await(t, Met, server.Addr())
	if all := j.all(Misconfigured, server.Addr()); len(all) > 0 {
		t.Errorf("the event has error %v", all[0].Err)
	}
}
