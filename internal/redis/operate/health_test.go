package operate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

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
		if got := parseInfo(text).isTooOld(); got != want {
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

// TestClockIsJudgedUntilItIsRight: a pause of this machine, or of the server, looks like a wrong clock.
func TestClockIsJudgedUntilItIsRight(t *testing.T) {
	asked := time.UnixMicro(1_700_000_000_000_000)
	var n sight
	for _, c := range []struct {
		what       string
		lead, took time.Duration
		isFault    bool
	}{
		{"a slow reply", -1500 * time.Millisecond, 2 * time.Second, false},
		{"a server that was paused", -1349 * time.Millisecond, time.Millisecond, true},
		{"a slow reply again", 0, 3 * time.Second, false},
		{"a wrong clock", 2 * time.Second, time.Millisecond, true},
		{"a wrong clock still", 2100 * time.Millisecond, time.Millisecond, true},
		{"a clock that was set", 900 * time.Millisecond, time.Millisecond, false},
		{"a clock that is judged already", 1100 * time.Millisecond, time.Millisecond, false},
	} {
		server, before := asked.Add(c.took/2+c.lead), n.faults[faultClock]
		n.judgeClock(info{"server_time_usec": strconv.FormatInt(server.UnixMicro(), 10)}, asked, c.took)
		if got := n.faults[faultClock] != nil; got != c.isFault {
			t.Errorf("%s: a fault: %t, want %t", c.what, got, c.isFault)
		}
		if now := n.faults[faultClock]; before != nil && now != nil && now.Error() != before.Error() {
			t.Errorf("%s: the fault would be logged again: %v, then %v", c.what, before, now)
		}
	}
}

// TestClockOfAServerIsRead: the server has this machine's clock.
func TestClockOfAServerIsRead(t *testing.T) {
	shard := newShard(t, wire.Options{Primary: redistest.Start(t).Addr()})
	var before time.Time
	var i info
	eventually(t, "the server answers in time", func() (err error) {
		before = time.Now()
		i, err = infoOf(t.Context(), shard.Owner(0).Checks)
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
	shard := newShard(t, wire.Options{Primary: server.Addr()})
	events := make(chan wire.Event, 100)
	shard.Listen(func(e wire.Event) { events <- e })
	shard.examineServers(t.Context(), shard.Servers()[0], new(offsets))
	release()
	shard.Await(t.Context())
	// Events arrive in order.
	for e := range events {
		if e.Kind == wire.Misconfigured {
			t.Errorf("the event has error %v", e.Err)
		}
		if e.Kind == wire.Met {
			return
		}
	}
}

// TestOverridesEndByTheServersClock, whatever this machine's says.
func TestOverridesEndByTheServersClock(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	content := fmt.Sprintf(`{"kind":"block","zone":"z","client_key":"k","since":%d,"until":%d}`, now.UnixMicro(), now.Add(2*time.Minute).UnixMicro())
	for left, want := range map[time.Duration]time.Duration{
		2 * time.Minute:               2 * time.Minute,
		2*time.Minute - 4*time.Second: 2 * time.Minute,
		time.Minute:                   time.Minute,
		7 * time.Minute:               7 * time.Minute,
	} {
		// Its clock is far behind.
		const server = 1_700_000_000_000
		value := string(wire.AppendPacked(nil, 7, server+left.Milliseconds(), server+left.Milliseconds())) + content
		o := (&Operator{asker: &ask.Asker{}}).versionIn("block:z:k", value, server, now).override
		if ends := time.UnixMicro(o.Until).Sub(now); ends != want || o.Until-o.Since != (2*time.Minute).Microseconds() {
			t.Errorf("with %v left it ends in %v, want %v; %+v", left, ends, want, o)
		}
	}
}

// TestRemediesOfAReplicaInACluster: one that the nodes keep taking for the primary becomes it. That it would take writes
// is no fault, because a cluster redirects them.
func TestRemediesOfAReplicaInACluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 1, 1, lasting, redistest.NodeTimeout(redistest.WaitTimeout))
	replica := cluster.Nodes[1]
	must(t, replica.Client().ConfigSet(t.Context(), "replica-read-only", "no").Err())
	finds(t, "a replica that would take writes", diagnosed(t, wire.Options{Cluster: cluster.Addrs()[:1]}, nil))
	look := func() info {
		text, err := replica.Client().Info(t.Context()).Result()
		must(t, err)
		return parseInfo(text)
	}
	var f *wire.Fault
	if n := (sight{}).demotedAfter(sight{demoted: mostDemoted}, look(), true); !errors.As(n.faults[faultRole], &f) || !strings.HasPrefix(f.Remedy, "CLUSTER FAILOVER on it, or see why the nodes do not follow") {
		t.Fatalf("the fault is %v", n.faults[faultRole])
	}
	eventually(t, "it is a primary by the remedy", func() error {
		if err := replica.Client().Do(t.Context(), "CLUSTER", "FAILOVER").Err(); err != nil && look().isReplica() {
			return err
		}
		if look().isReplica() {
			return errors.New("it is a replica")
		}
		return nil
	})
}

// TestPrimaryThatStaysAReplica is a fault, and one in a failover is none.
func TestPrimaryThatStaysAReplica(t *testing.T) {
	primary, other := redistest.Start(t), redistest.Start(t)
	sentinels := redistest.StartSentinels(t, masterName, primary, 1, redistest.SentinelOptions{})
	shard := newShard(t, sentinelOptions(sentinels))
	shard.Await(t.Context())
	must(t, sentinels.Stop())
	host, port, _ := net.SplitHostPort(other.Addr())
	must(t, primary.Client().Do(t.Context(), "replicaof", host, port).Err())
	faultsAfter := func(inspections int) string {
		shard.mu.Lock()
		shard.met = map[string]sight{}
		shard.mu.Unlock()
		for range inspections {
			shard.examineServers(t.Context(), shard.Servers()[0], new(offsets))
		}
		return fmt.Sprint(shard.figures("a").Servers[0].Faults)
	}
	eventually(t, "the fault", func() error {
		if faults := faultsAfter(mostDemoted); !strings.Contains(faults, "it keeps being found as the primary, and is a replica of "+other.Addr()) {
			return fmt.Errorf("faults %s", faults)
		}
		return nil
	})
	if faults := faultsAfter(1); strings.Contains(faults, "is a replica") {
		t.Errorf("after one inspection: %s", faults)
	}
	if faults := faultsAfter(mostDemoted); !strings.Contains(faults, "if no other primary runs: REPLICAOF NO ONE") {
		t.Errorf("the remedy is that of %s", faults)
	}
	must(t, primary.Client().Do(t.Context(), "replicaof", "no", "one").Err())
	if faults := faultsAfter(mostDemoted); strings.Contains(faults, "is a replica") {
		t.Errorf("by the remedy: %s", faults)
	}
}
