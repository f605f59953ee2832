//go:build check

package redistest_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const masterName = "shard-one"

var (
	// swift are sentinels that find a server down soon.
	swift = redistest.SentinelOptions{DownAfter: 2 * time.Second}
	// patient ones fail over by order alone, even on a machine that stands still.
	patient = redistest.SentinelOptions{DownAfter: waitLimit}
)

func TestSentinelsFailOver(t *testing.T) {
	t.Parallel()
	shard := redistest.StartShard(t, 2)
	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 3, swift)
	servers := append(shard.Replicas, shard.Primary)

	old := requireMaster(t, sentinels, shard.Primary.Addr())
	must(t, shard.Primary.Kill())
	before := time.Now()
	now := waitForMaster(t, sentinels, old)
	t.Logf("failed over within %v", time.Since(before))
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	promoted := servers[slices.IndexFunc(servers, func(s *redistest.Server) bool { return s.Addr() == now })]
	set(t, promoted, "key", "value")

	// It comes back as a primary without data, and becomes a replica.
	must(t, shard.Primary.Restart())
	before = time.Now()
	must(t, sentinels.WaitForReplicas(t.Context(), 2))
	t.Logf("the old primary was a replica within %v", time.Since(before))
	for _, s := range servers {
		if s != promoted {
			must(t, s.WaitInSyncWith(t.Context(), promoted))
			requireReplica(t, s)
			requireValue(t, s, "key", "value")
		}
	}

	// Servers keep the roles that the sentinels gave them.
	must(t, promoted.Restart())
	info, err := promoted.Info("replication")
	if err != nil || info["role"] != "master" {
		t.Errorf("restarted with role %q, %v; want master", info["role"], err)
	}
}

func TestOrderedFailover(t *testing.T) {
	t.Parallel()
	shard := redistest.StartShard(t, 1)
	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 1, patient)

	addr := shard.Primary.Addr()
	for i := range 2 {
		if err := sentinels.Failover(t.Context()); err != nil {
			t.Fatalf("failover %d: %v", i, err)
		}
		before := time.Now()
		addr = waitForMaster(t, sentinels, addr)
		t.Logf("failed over within %v", time.Since(before))
		must(t, sentinels.WaitForReplicas(t.Context(), 1))
	}
	if want := shard.Primary.Addr(); addr != want {
		t.Errorf("primary %s after two failovers, want %s", addr, want)
	}
	must(t, shard.Replicas[0].WaitInSync(t.Context()))
	if err := shard.Primary.WaitInSyncWith(deadline(t, 50*time.Millisecond), shard.Replicas[0]); err == nil {
		t.Error("a primary was in sync with its previous primary")
	}
}

func TestSentinelsWithoutReplica(t *testing.T) {
	t.Parallel()
	primary := redistest.Start(t)
	sentinels := redistest.StartSentinels(t, masterName, primary, 1, redistest.SentinelOptions{})
	if err := sentinels.Failover(t.Context()); err == nil || !strings.Contains(err.Error(), "NOGOODSLAVE") {
		t.Errorf("failover without a replica got %v, want NOGOODSLAVE", err)
	}
	// The sentinels find a replica that comes later, and connect it to the primary.
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	if err := replica.PauseReplication(); err == nil {
		t.Error("paused a replication that sentinels control")
	}
}

func TestSentinelsOneByOne(t *testing.T) {
	t.Parallel()
	shard := redistest.StartShard(t, 1)
	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 3, patient)
	addr := shard.Primary.Addr()
	addrs := sentinels.Addrs()
	if len(addrs) != 3 || addrs[1] != sentinels.Nodes[1].Addr() {
		t.Errorf("addresses %v of %d sentinels", addrs, len(sentinels.Nodes))
	}
	killed, paused, asked := sentinels.Nodes[0], sentinels.Nodes[1], sentinels.Nodes[2]
	must(t, killed.Kill())
	must(t, paused.Pause())
	requireMaster(t, sentinels, addr)
	reply, err := asked.Client().Do(t.Context(), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", masterName).StringSlice()
	if err != nil || len(reply) != 2 || reply[0]+":"+reply[1] != addr {
		t.Errorf("the client of a sentinel got %v, %v; want %s", reply, err, addr)
	}
	must(t, asked.Kill())
	if master, err := sentinels.Master(t.Context()); err == nil {
		t.Errorf("no sentinel answers, but the primary is %s", master)
	}
	if err := sentinels.Failover(t.Context()); err == nil {
		t.Error("no sentinel answers, but one fails over")
	}

	must(t, paused.Resume())
	for _, s := range []*redistest.Server{killed, asked} {
		must(t, s.Restart())
	}
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	requireMaster(t, sentinels, addr)
}

func TestSentinelWaitsEndWithContext(t *testing.T) {
	t.Parallel()
	shard := redistest.StartShard(t, 1)
	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 1, patient)
	_, err := sentinels.WaitForMaster(deadline(t, 2*time.Second), shard.Primary.Addr())
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), shard.Primary.Addr()) {
		t.Errorf("got error %v, want one of the context and with the primary's address", err)
	}
	if err := sentinels.WaitForReplicas(deadline(t, 50*time.Millisecond), 2); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got error %v, want one of the context", err)
	}
}

func TestSentinelsWithPasswords(t *testing.T) {
	for name, opts := range map[string]redistest.SentinelOptions{
		"password": {Password: "sentinel-secret", DownAfter: waitLimit},
		"user":     {Username: "watcher", Password: "sentinel-secret", DownAfter: waitLimit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			shard := redistest.StartShard(t, 1, redistest.Args("--requirepass", "server-secret"))
			sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 3, opts)

			stranger := newClient(t, sentinels.Nodes[0], "", "")
			if err := stranger.Ping(t.Context()).Err(); err == nil || !strings.HasPrefix(err.Error(), "NOAUTH") {
				t.Errorf("ping without a password got %v, want NOAUTH", err)
			}
			friend := newClient(t, sentinels.Nodes[0], opts.Username, opts.Password)
			if err := friend.Ping(t.Context()).Err(); err != nil {
				t.Errorf("ping with the password: %v", err)
			}
			must(t, sentinels.Nodes[1].Restart())
			must(t, sentinels.WaitForReplicas(t.Context(), 1))
			must(t, sentinels.Failover(t.Context()))
			waitForMaster(t, sentinels, shard.Primary.Addr())
			must(t, sentinels.WaitForReplicas(t.Context(), 1))
			must(t, shard.Primary.WaitInSyncWith(t.Context(), shard.Replicas[0]))
		})
	}
}

func TestLaunchSentinelsFails(t *testing.T) {
	primary := redistest.Start(t)
	if _, err := redistest.LaunchSentinels("a name", primary, 1, redistest.SentinelOptions{}); err == nil {
		t.Error("launching sentinels for a name with a blank worked")
	}
	must(t, primary.Kill())
	if _, err := redistest.LaunchSentinels(masterName, primary, 1, redistest.SentinelOptions{}); err == nil {
		t.Error("launching sentinels for a killed server worked")
	}
}

func requireMaster(t *testing.T, sentinels *redistest.Sentinels, want string) string {
	t.Helper()
	got, err := sentinels.Master(t.Context())
	if err != nil || got != want {
		t.Fatalf("primary %s, %v; want %s", got, err, want)
	}
	return got
}

func waitForMaster(t *testing.T, sentinels *redistest.Sentinels, old string) string {
	t.Helper()
	master, err := sentinels.WaitForMaster(t.Context(), old)
	must(t, err)
	return master
}
