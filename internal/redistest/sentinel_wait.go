package redistest

import (
	"context"
	"fmt"
	"net"

	goredis "github.com/redis/go-redis/v9"
)

// WaitForMaster returns the address of the primary as soon as all running
// sentinels name the same one, which is not old, and have completed the
// failover to it. An old primary that runs need not be a replica then, see
// [Sentinels.WaitForReplicas]. It waits until ctx ends, at most a minute.
func (s *Sentinels) WaitForMaster(ctx context.Context, old string) (string, error) {
	var master string
	err := s.wait(ctx, func(ctx context.Context) (err error) {
		if master, err = s.Master(ctx); err != nil {
			return err
		}
		if master == old {
			return fmt.Errorf("the primary is still %s", old)
		}
		return s.each(ctx, func(sight sentinelSight) error {
			return sight.requireMaster(master)
		})
	})
	if err != nil {
		return "", fmt.Errorf("wait until the primary of %s is not %s: %w", s.master, old, err)
	}
	return master, nil
}

// WaitForReplicas returns when every running sentinel knows that n replicas are
// connected to the present primary, and reaches all other running sentinels. It
// waits until ctx ends, at most a minute.
func (s *Sentinels) WaitForReplicas(ctx context.Context, n int) error {
	err := s.wait(ctx, func(ctx context.Context) error {
		master, err := s.Master(ctx)
		if err != nil {
			return err
		}
		others := len(running(s.Nodes)) - 1
		return s.each(ctx, func(sight sentinelSight) error {
			if err := sight.requireMaster(master); err != nil {
				return err
			}
			if got := sight.replicasOf(master); got != n {
				return fmt.Errorf("it knows %d replicas of %s", got, master)
			}
			if got := sight.reachableSentinels(); got < others {
				return fmt.Errorf("it reaches %d of %d other sentinels", got, others)
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("wait until sentinels know %d replicas of %s: %w", n, s.master, err)
	}
	return nil
}

// wait polls until done returns nil.
func (s *Sentinels) wait(ctx context.Context, done func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, groupPatience)
	defer cancel()
	return pollEvery(ctx, groupPollInterval, func() error { return done(ctx) })
}

// each calls require with what each running sentinel sees, until an error.
func (s *Sentinels) each(ctx context.Context, require func(sentinelSight) error) error {
	for _, node := range running(s.Nodes) {
		sight, err := s.look(ctx, node)
		if err == nil {
			err = require(sight)
		}
		if err != nil {
			return fmt.Errorf("sentinel %s: %w", node.Addr(), err)
		}
	}
	return nil
}

// sentinelSight is what one sentinel sees: the fields of the primary, of the
// replicas, and of the other sentinels.
type sentinelSight struct {
	master              map[string]string
	replicas, sentinels []map[string]string
}

func (s *Sentinels) look(ctx context.Context, node *Server) (sentinelSight, error) {
	master := goredis.NewMapStringStringCmd(ctx, "SENTINEL", "MASTER", s.master)
	replicas := goredis.NewMapStringStringSliceCmd(ctx, "SENTINEL", "REPLICAS", s.master)
	sentinels := goredis.NewMapStringStringSliceCmd(ctx, "SENTINEL", "SENTINELS", s.master)
	for _, question := range []goredis.Cmder{master, replicas, sentinels} {
		if err := node.client.Process(ctx, question); err != nil {
			return sentinelSight{}, err
		}
	}
	return sentinelSight{master.Val(), replicas.Val(), sentinels.Val()}, nil
}

// requireMaster checks that the primary is at addr, in good health, and that
// no failover is under way.
func (v sentinelSight) requireMaster(addr string) error {
	seen := net.JoinHostPort(v.master["ip"], v.master["port"])
	flags, role := v.master["flags"], v.master["role-reported"]
	if seen != addr || flags != "master" || role != "master" {
		return fmt.Errorf("the primary is %s, %s, with role %s; want %s", seen, flags, role, addr)
	}
	return nil
}

// replicasOf is the number of replicas that are connected to the primary addr.
func (v sentinelSight) replicasOf(addr string) (n int) {
	for _, replica := range v.replicas {
		source := net.JoinHostPort(replica["master-host"], replica["master-port"])
		if replica["flags"] == "slave" && replica["master-link-status"] == "ok" && source == addr {
			n++
		}
	}
	return n
}

func (v sentinelSight) reachableSentinels() (n int) {
	for _, sentinel := range v.sentinels {
		if sentinel["flags"] == "sentinel" {
			n++
		}
	}
	return n
}
