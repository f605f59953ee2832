package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// Sentinels are Redis Sentinel processes that watch one primary together, and
// make one of its replicas the primary when they agree that it is down. They
// look at the servers, and talk to each other, more often than by default.
// Their methods are safe for concurrent use.
type Sentinels struct {
	// Nodes are the sentinels, each of which can be killed, paused, restarted and
	// asked on its own. A restarted one still knows what it knew.
	Nodes []*Server

	master string
}

// SentinelOptions say how sentinels are launched. The zero value makes
// sentinels that anybody may ask, of which a majority must agree. No text may
// have blanks, quotes or backslashes: a sentinel that restarts could not read it.
type SentinelOptions struct {
	// Username and Password are what clients of the sentinels, the other
	// sentinels among them, must present. With a password alone that is
	// "requirepass"; with both, the default user is off. Empty means nothing.
	Username, Password string

	// AuthUser and AuthPass are what the sentinels present to the servers. The
	// default is what the primary's own client presents.
	AuthUser, AuthPass string

	// TLS is the certificate of the sentinels, which then speak TLS alone, also
	// with each other and with the servers: these must have it, too. Nil means the
	// primary's, and no TLS if it has none.
	TLS *Certificate

	// Quorum is how many sentinels must find the primary down. 0 means a
	// majority.
	Quorum int

	// DownAfter is how long a server does not answer until a sentinel finds it
	// down, in whole milliseconds. 0 means a second.
	DownAfter time.Duration

	// FailoverTimeout bounds the steps of a failover and is half the time until
	// the next attempt, in whole milliseconds. 0 means 3 seconds.
	FailoverTimeout time.Duration
}

const (
	defaultDownAfter       = time.Second
	defaultFailoverTimeout = 3 * time.Second
)

// LaunchSentinels starts n sentinels that watch a primary under the name master,
// and returns when each knows the others and the replicas that the primary has.
//
// These replicas then connect to the primary without the link that
// [Server.PauseReplication] needs. The sentinels make later ones do so when they
// have known them for the failover timeout. An old primary that comes back, or
// that was replaced without being down, is a replica within some seconds.
//
// It fails like [Launch], or if the sentinels do not know each other within a
// minute, and then stops what it has started.
func LaunchSentinels(master string, primary *Server, n int, opts SentinelOptions) (*Sentinels, error) {
	s := &Sentinels{master: master}
	if err := s.launch(primary, n, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("launch sentinels: %w", err), s.Stop())
	}
	return s, nil
}

func (s *Sentinels) launch(primary *Server, n int, opts SentinelOptions) error {
	ctx, cancel := context.WithTimeout(context.Background(), groupPatience)
	defer cancel()
	replicas, err := unlinkReplicas(ctx, primary)
	if err != nil {
		return err
	}
	each, err := opts.options(s.master, primary, n)
	if err != nil {
		return err
	}
	for range n {
		node, err := Launch(each)
		if err != nil {
			return err
		}
		s.Nodes = append(s.Nodes, node)
	}
	return s.WaitForReplicas(ctx, replicas)
}

// StartSentinels launches sentinels like [LaunchSentinels] and stops them when
// the test ends. The test fails if they cannot be launched.
func StartSentinels(tb testing.TB, master string, primary *Server, n int, opts SentinelOptions) *Sentinels {
	tb.Helper()
	s, err := LaunchSentinels(master, primary, n, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Stop(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Stop stops all sentinels; the servers that they watch go on. Stopping them
// again does nothing.
func (s *Sentinels) Stop() error {
	return stopAll(s.Nodes)
}

// Addrs are the addresses of all sentinels, "127.0.0.1:port", in the order of
// Nodes. They never change.
func (s *Sentinels) Addrs() []string {
	return addrs(s.Nodes)
}

// Failover orders a failover although the primary is not down, and returns when
// it has begun; see [Sentinels.WaitForMaster] for its end. The first running
// sentinel gets the order. It fails if there is none, if no replica can be
// promoted, or if a failover is under way.
func (s *Sentinels) Failover(ctx context.Context) error {
	err := errNoneRunning
	if nodes := running(s.Nodes); len(nodes) > 0 {
		err = nodes[0].client.Do(ctx, "SENTINEL", "FAILOVER", s.master).Err()
	}
	if err != nil {
		return fmt.Errorf("order a failover of %s: %w", s.master, err)
	}
	return nil
}

// Master is the address of the primary, "127.0.0.1:port", as all running
// sentinels report it to clients. It fails if they differ, if one cannot be
// asked, and if none runs.
func (s *Sentinels) Master(ctx context.Context) (string, error) {
	var master string
	err := errNoneRunning
	for i, node := range running(s.Nodes) {
		var addr string
		if addr, err = s.masterOf(ctx, node); err != nil {
			break
		}
		if i > 0 && addr != master {
			err = fmt.Errorf("the sentinels differ: %s and %s", master, addr)
			break
		}
		master = addr
	}
	if err != nil {
		return "", fmt.Errorf("get the address of %s: %w", s.master, err)
	}
	return master, nil
}

func (s *Sentinels) masterOf(ctx context.Context, node *Server) (string, error) {
	reply := goredis.NewStringSliceCmd(ctx, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", s.master)
	if err := node.client.Process(ctx, reply); err != nil {
		return "", fmt.Errorf("ask sentinel %s: %w", node.Addr(), err)
	}
	if len(reply.Val()) != 2 {
		return "", fmt.Errorf("ask sentinel %s: got %q", node.Addr(), reply.Val())
	}
	return net.JoinHostPort(reply.Val()[0], reply.Val()[1]), nil
}

// unlinkReplicas makes the replicas of a primary replicate it itself instead of
// the proxies in between, and returns how many these are. The sentinels would
// do it anyway, some seconds later and with all connections closed.
func unlinkReplicas(ctx context.Context, primary *Server) (int, error) {
	info, err := primary.info(ctx, "replication")
	if err != nil {
		return 0, err
	}
	// One that has connected again may be there twice.
	ports := make(map[string]bool)
	for i := 0; ; i++ {
		description, ok := info["slave"+strconv.Itoa(i)]
		if !ok {
			break
		}
		for field := range strings.SplitSeq(description, ",") {
			if port, ok := strings.CutPrefix(field, "port="); ok {
				ports[port] = true
			}
		}
	}
	for port := range ports {
		if err := unlinkReplica(ctx, port, primary); err != nil {
			return 0, fmt.Errorf("make the replica on port %s connect to %s: %w", port, primary.Addr(), err)
		}
	}
	return len(ports), nil
}

func unlinkReplica(ctx context.Context, port string, primary *Server) (err error) {
	client := newClient(net.JoinHostPort(loopback, port), primary.login)
	defer func() { err = errors.Join(err, client.Close()) }()
	if err := client.ReplicaOf(ctx, loopback, strconv.Itoa(primary.port.number)).Err(); err != nil {
		return err
	}
	return client.ConfigRewrite(ctx).Err()
}
