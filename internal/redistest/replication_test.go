//go:build check

package redistest_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestReplica(t *testing.T) {
	primary := redistest.Start(t)
	set(t, primary, "before", "1")
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	requireValue(t, replica, "before", "1")

	set(t, primary, "after", "2")
	must(t, replica.WaitInSync(t.Context()))
	requireValue(t, replica, "after", "2")
	requireReplica(t, replica)
	if err := replica.Client().Set(t.Context(), "key", "value", 0).Err(); err == nil ||
		!strings.HasPrefix(err.Error(), "READONLY") {
		t.Errorf("write to a replica got %v, want READONLY", err)
	}
}

func TestPauseReplication(t *testing.T) {
	shard := redistest.StartShard(t, 2)
	primary, paused, other := shard.Primary, shard.Replicas[0], shard.Replicas[1]
	for i := range 3 {
		round, previous := strconv.Itoa(i+1), strconv.Itoa(i)
		if i == 0 {
			previous = ""
		}
		must(t, paused.PauseReplication())
		set(t, primary, "key", round)
		must(t, other.WaitInSync(t.Context()))
		requireValue(t, other, "key", round)
		requireValue(t, paused, "key", previous)
		requireReplica(t, paused)

		before := time.Now()
		must(t, paused.ResumeReplication())
		t.Logf("resumed within %v", time.Since(before))
		requireValue(t, paused, "key", round)
		requireReplica(t, paused)
	}
}

func TestResumeReplicationAfterPrimaryLostData(t *testing.T) {
	primary := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	set(t, primary, "old", "1")
	must(t, replica.WaitInSync(t.Context()))

	must(t, replica.PauseReplication())
	must(t, primary.Restart())
	set(t, primary, "new", "2")
	requireValue(t, replica, "old", "1")

	must(t, replica.ResumeReplication())
	requireValue(t, replica, "old", "")
	requireValue(t, replica, "new", "2")
}

func TestResumeReplicationThatWasNotPaused(t *testing.T) {
	replica := redistest.Start(t, redistest.ReplicaOf(redistest.Start(t)))
	if err := replica.ResumeReplication(); err != nil {
		t.Error(err)
	}
}

func TestReplicaRestarts(t *testing.T) {
	primary := redistest.Start(t)
	replica := redistest.Start(t, redistest.ReplicaOf(primary))
	set(t, primary, "key", "value")
	must(t, replica.Kill())
	must(t, replica.Restart())
	must(t, replica.WaitInSync(t.Context()))
	requireValue(t, replica, "key", "value")
}

func TestReplicationNeedsReplica(t *testing.T) {
	primary := redistest.Start(t)
	promoted := redistest.Start(t, redistest.ReplicaOf(primary))
	must(t, promoted.Client().ReplicaOf(t.Context(), "NO", "ONE").Err())
	for name, operation := range map[string]func() error{
		"pause":           primary.PauseReplication,
		"resume":          primary.ResumeReplication,
		"resume promoted": promoted.ResumeReplication,
		"wait":            func() error { return primary.WaitInSync(t.Context()) },
	} {
		if err := operation(); err == nil || !strings.Contains(err.Error(), "not a replica") {
			t.Errorf("%s got error %v", name, err)
		}
	}
}

func TestWaitReplicated(t *testing.T) {
	shard := redistest.StartShard(t, 2)
	for i := range 20 {
		value := strconv.Itoa(i)
		set(t, shard.Primary, "key", value)
		must(t, shard.WaitReplicated(t.Context()))
		for _, replica := range shard.Replicas {
			requireValue(t, replica, "key", value)
		}
	}
}

func TestWaitReplicatedEndsWithContext(t *testing.T) {
	for name, fault := range map[string]func(*redistest.Shard) error{
		"replication paused": func(s *redistest.Shard) error { return s.Replicas[0].PauseReplication() },
		"primary paused":     func(s *redistest.Shard) error { return s.Primary.Pause() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			shard := redistest.StartShard(t, 1)
			must(t, fault(shard))
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			err := shard.WaitReplicated(ctx)
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), shard.Replicas[0].Addr()) {
				t.Errorf("got error %v, want one of the context and with the replica's address", err)
			}
		})
	}
}

func TestShardWithoutReplicas(t *testing.T) {
	shard := redistest.StartShard(t, 0)
	if err := shard.WaitReplicated(t.Context()); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := shard.Stop(); err != nil {
			t.Error(err)
		}
	}
}

func TestLaunchShardFails(t *testing.T) {
	if _, err := redistest.LaunchShard(1, redistest.Args("--no-such-directive", "1")); err == nil {
		t.Error("launching with a wrong argument worked")
	}
}

func requireReplica(t *testing.T, s *redistest.Server) {
	t.Helper()
	info, err := s.Info("replication")
	must(t, err)
	if info["role"] != "slave" {
		t.Errorf("role %q, want slave", info["role"])
	}
}

func BenchmarkStartReplica(b *testing.B) {
	for b.Loop() {
		shard, err := redistest.LaunchShard(1)
		must(b, err)
		must(b, shard.Stop())
	}
}

// TestDelayedReplicaLags: it hears of everything, that much later.
func TestDelayedReplicaLags(t *testing.T) {
	const lag = 300 * time.Millisecond
	shard := redistest.StartShard(t, 1)
	replica := shard.Replicas[0]
	if err := shard.Primary.DelayReplication(lag); err == nil {
		t.Error("the replication to a primary can be delayed")
	}
	for _, d := range []time.Duration{lag, 0} {
		must(t, replica.DelayReplication(d))
		for i := range 3 {
			begun := time.Now()
			must(t, shard.Primary.Client().Set(t.Context(), "k", i, 0).Err())
			must(t, replica.WaitInSync(t.Context()))
			if got := time.Since(begun); got < d*9/10 {
				t.Errorf("the replica has the write after %v, want at least %v", got, d)
			}
		}
	}
}
