package redistest

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

// Shard is a primary with its replicas.
type Shard struct {
	// Primary is the server that takes writes, unless sentinels chose another.
	Primary *Server
	// Replicas replicate Primary at first; there may be none.
	Replicas []*Server
}

// LaunchShard starts a primary and as many replicas as asked for, all with the
// same extra redis-server arguments, and returns when they are in sync. It fails
// like [Launch], and then stops what it has started.
func LaunchShard(replicas int, args ...string) (*Shard, error) {
	return LaunchShardWith(replicas, Options{Args: args})
}

// LaunchShardWith is [LaunchShard] with the same options for all servers,
// except that ReplicaOf has no meaning.
func LaunchShardWith(replicas int, opts Options) (*Shard, error) {
	opts.ReplicaOf = nil
	primary, err := Launch(opts)
	if err != nil {
		return nil, fmt.Errorf("launch primary: %w", err)
	}
	shard := &Shard{Primary: primary}
	opts.ReplicaOf = primary
	for range replicas {
		replica, err := Launch(opts)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("launch replica: %w", err), shard.Stop())
		}
		shard.Replicas = append(shard.Replicas, replica)
	}
	return shard, nil
}

// StartShard launches a shard like [LaunchShard] and stops it when the test
// ends. The test fails if the shard cannot be launched.
func StartShard(tb testing.TB, replicas int, args ...string) *Shard {
	tb.Helper()
	return StartShardWith(tb, replicas, Options{Args: args})
}

// StartShardWith launches a shard like [LaunchShardWith] and stops it when the
// test ends. The test fails if the shard cannot be launched.
func StartShardWith(tb testing.TB, replicas int, opts Options) *Shard {
	tb.Helper()
	shard, err := LaunchShardWith(replicas, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := shard.Stop(); err != nil {
			tb.Error(err)
		}
	})
	return shard
}

// Stop stops all servers of the shard. Stopping it again does nothing.
func (s *Shard) Stop() error {
	var errs []error
	for _, replica := range s.Replicas {
		errs = append(errs, replica.Stop())
	}
	errs = append(errs, s.Primary.Stop())
	return errors.Join(errs...)
}

// WaitReplicated returns when every replica has applied what the primary has
// executed so far. A replica whose replication is paused never gets there. It
// waits until ctx ends, at most a minute for each replica.
func (s *Shard) WaitReplicated(ctx context.Context) error {
	for _, replica := range s.Replicas {
		if err := replica.WaitInSync(ctx); err != nil {
			return err
		}
	}
	return nil
}
