package redistest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// Shard is a primary with its replicas.
type Shard struct {
	// Primary is the server that takes writes, unless sentinels chose another.
	Primary *Server
	// Replicas replicate Primary at first; there may be none.
	Replicas []*Server
}

// LaunchShard starts a primary and its replicas, all with the same options, and
// returns when they are in sync. It fails like [Launch], and then stops what it
// has started.
func LaunchShard(replicas int, opts ...Option) (*Shard, error) {
	each := collect(opts)
	each.primary = nil
	primary, err := launch(each, reservePort)
	if err != nil {
		return nil, fmt.Errorf("launch primary: %w", err)
	}
	shard := &Shard{Primary: primary}
	each.primary = primary
	for range replicas {
		replica, err := launch(each, reservePort)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("launch replica: %w", err), shard.Stop())
		}
		shard.Replicas = append(shard.Replicas, replica)
	}
	return shard, nil
}

// StartShard launches like [LaunchShard] for a test, which fails if the launch
// does. When the test ends, the shard passes to another test or is stopped, see [Start].
func StartShard(tb testing.TB, replicas int, opts ...Option) *Shard {
	tb.Helper()
	return borrow(tb, fmt.Sprint("shard ", replicas), collect(opts), func() (*Shard, []*Server, error) {
		s, err := LaunchShard(replicas, opts...)
		if err != nil {
			return nil, nil, err
		}
		return s, append([]*Server{s.Primary}, s.Replicas...), nil
	})
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

// errNotReplica is the error of replication operations on a server that was
// not launched as a replica, or that was promoted since.
var errNotReplica = errors.New("the server is not a replica")

// errOtherLink is the error of operations on a replica's link when the replica
// does not use it.
var errOtherLink = errors.New("the replica connects to its primary in another way")

// PauseReplication disconnects a replica from its primary and keeps it so. The
// replica remains a replica and serves the data it has. Once PauseReplication
// has returned nothing changes there, except that keys expire in time. It is not
// for replicas that sentinels watch: they choose a replica's connection, and do
// so at once.
func (s *Server) PauseReplication() error {
	if err := s.pauseReplication(); err != nil {
		return fmt.Errorf("pause replication to %s: %w", s.Addr(), err)
	}
	return nil
}

func (s *Server) pauseReplication() error {
	if s.link == nil {
		return errNotReplica
	}
	s.disturbed.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	if _, err := s.linked(ctx); err != nil {
		return err
	}
	if err := s.link.Down(); err != nil {
		return err
	}
	// The replica still applies what had arrived before it notices the end.
	return poll(ctx, func() error {
		info, err := s.info(ctx, "replication")
		if err == nil && info["master_link_status"] == "up" {
			err = errors.New("the link is still up")
		}
		return err
	})
}

// ResumeReplication ends a PauseReplication and returns when the replica is in
// sync again, by a partial or a full resynchronization, within a minute.
func (s *Server) ResumeReplication() error {
	if err := s.resumeReplication(); err != nil {
		return fmt.Errorf("resume replication to %s: %w", s.Addr(), err)
	}
	return nil
}

func (s *Server) resumeReplication() error {
	if s.link == nil {
		return errNotReplica
	}
	if err := s.link.Up(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	info, err := s.linked(ctx)
	if err != nil {
		return err
	}
	if info["master_link_status"] != "up" {
		if err := s.reconnect(ctx); err != nil {
			return err
		}
	}
	return s.settle(ctx)
}

// linked returns what a replica says of its replication, which must go through
// its link.
func (s *Server) linked(ctx context.Context) (map[string]string, error) {
	info, err := s.info(ctx, "replication")
	switch {
	case err != nil:
		return nil, err
	case info["role"] != "slave":
		return nil, errNotReplica
	case info["master_port"] != strconv.Itoa(s.link.port.number):
		return nil, errOtherLink
	default:
		return info, nil
	}
}

// settle waits until a replica is in sync and gets further writes without
// delay.
func (s *Server) settle(ctx context.Context) error {
	if err := s.WaitInSync(ctx); err != nil {
		return err
	}
	// After a full resynchronization the primary sends no writes before the
	// replica's first acknowledgement, and overlooks it if its own child process
	// has not ended by then. The next one comes a second later. A partial
	// resynchronization, which this is, needs none.
	if err := s.reconnect(ctx); err != nil {
		return err
	}
	return s.WaitInSync(ctx)
}

// reconnect makes a replica connect to its primary at once. On its own it
// tries once a second.
func (s *Server) reconnect(ctx context.Context) error {
	// REPLICAOF does nothing when it names the present primary. Naming another
	// one (itself) in between makes it connect, and in one transaction there is
	// no time to replicate that one. A replica that changes its primary keeps its
	// data and its place in the replication stream.
	_, err := s.client.TxPipelined(ctx, func(tx goredis.Pipeliner) error {
		tx.ReplicaOf(ctx, loopback, strconv.Itoa(s.port.number))
		tx.ReplicaOf(ctx, loopback, strconv.Itoa(s.link.port.number))
		return nil
	})
	if err != nil {
		return fmt.Errorf("reconnect the replica: %w", err)
	}
	return nil
}

// WaitInSync returns when a replica is connected to its primary and has
// applied everything that the primary had executed when WaitInSync was called.
// The primary is that of the launch. It waits until ctx ends, at most a minute.
func (s *Server) WaitInSync(ctx context.Context) error {
	if s.primary == nil {
		return fmt.Errorf("wait until %s is in sync: %w", s.Addr(), errNotReplica)
	}
	return s.WaitInSyncWith(ctx, s.primary)
}

// WaitInSyncWith is [Server.WaitInSync] for a server whose primary is not, or
// not any more, that of its launch.
func (s *Server) WaitInSyncWith(ctx context.Context, primary *Server) error {
	ctx, cancel := context.WithTimeout(ctx, replicationTimeout)
	defer cancel()

	var target history
	err := poll(ctx, func() error {
		source, err := primary.history(ctx, "master_repl_offset")
		if err != nil {
			return err
		}
		// The first replica, or a restart, begins a new history with offsets
		// that say nothing about those of another one.
		if target.id != source.id {
			target = source
		}
		replica, err := s.history(ctx, "slave_repl_offset")
		if err != nil {
			return err
		}
		if !replica.connected || replica.id != target.id || replica.offset < target.offset {
			return fmt.Errorf("it has %+v, the primary had %+v", replica, target)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wait until %s is in sync with %s: %w", s.Addr(), primary.Addr(), err)
	}
	return nil
}

// history is how far a server is in a replication stream.
type history struct {
	id        string
	offset    int64
	connected bool // whether a replica's link is up
}

// history reads the server's place from the offset field of that name.
func (s *Server) history(ctx context.Context, field string) (history, error) {
	info, err := s.info(ctx, "replication")
	if err != nil {
		return history{}, err
	}
	offset, err := strconv.ParseInt(info[field], 10, 64)
	if err != nil {
		return history{}, fmt.Errorf("read %s of %s, whose role is %s: %w", field, s.Addr(), info["role"], err)
	}
	return history{
		id:        info["master_replid"],
		offset:    offset,
		connected: info["master_link_status"] == "up",
	}, nil
}

// DelayReplication makes everything that a replica hears of its primary arrive
// later by d, rounded up to whole milliseconds; 0 ends it. The replica goes on
// to receive all of it, in order, so it lags by d and never falls behind. It is
// not for replicas that sentinels watch: they choose a replica's connection.
func (s *Server) DelayReplication(d time.Duration) error {
	if s.link == nil {
		return fmt.Errorf("delay replication to %s: %w", s.Addr(), errNotReplica)
	}
	s.disturbed.Store(true)
	if err := s.link.Delay(d); err != nil {
		return fmt.Errorf("delay replication to %s: %w", s.Addr(), err)
	}
	return nil
}
