package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
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
// sentinels that anyone may ask, of which a majority must agree. No text may
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
	ctx, cancel := context.WithTimeout(context.Background(), groupTimeout)
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
		node, err := launch(each, reservePort)
		if err != nil {
			return err
		}
		s.Nodes = append(s.Nodes, node)
	}
	return s.WaitForReplicas(ctx, replicas)
}

// StartSentinels launches like [LaunchSentinels] for a test, which fails if the
// launch does, and stops the sentinels when the test ends.
func StartSentinels(tb testing.TB, master string, primary *Server, n int, opts SentinelOptions) *Sentinels {
	tb.Helper()
	s, err := LaunchSentinels(master, primary, n, opts)
	return stopAfter(tb, s, err, s.Stop)
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
	client := newClient(net.JoinHostPort(loopback, port), primary.login, new(sync.Map))
	defer func() { err = errors.Join(err, client.Close()) }()
	if err := client.ReplicaOf(ctx, loopback, strconv.Itoa(primary.port.number)).Err(); err != nil {
		return err
	}
	return client.ConfigRewrite(ctx).Err()
}

// options are those of one of n sentinels. It fails if a sentinel would write a
// configuration that it cannot read.
func (o SentinelOptions) options(master string, primary *Server, n int) (options, error) {
	if o.TLS == nil {
		o.TLS = primary.login.certificate
	}
	if o.AuthUser == "" && o.AuthPass == "" {
		o.AuthUser, o.AuthPass = primary.login.username, primary.login.password
	}
	if o.Quorum == 0 {
		o.Quorum = n/2 + 1
	}
	if o.DownAfter == 0 {
		o.DownAfter = defaultDownAfter
	}
	if o.FailoverTimeout == 0 {
		o.FailoverTimeout = defaultFailoverTimeout
	}
	for _, word := range []string{master, o.Username, o.Password, o.AuthUser, o.AuthPass} {
		// Sentinel reads quotes and escapes, but never writes them.
		if strings.ContainsFunc(word, func(r rune) bool { return r <= ' ' || strings.ContainsRune(`"'\`, r) }) {
			return options{}, fmt.Errorf("configure a sentinel: %q has blanks or quotes", word)
		}
	}
	return options{
		// Its log is the only account of what a sentinel saw and did.
		args:     []string{"--loglevel", "notice"},
		login:    login{o.Username, o.Password, o.TLS},
		sentinel: o.lines(master, primary),
	}, nil
}

// lines are what a sentinel's configuration file says at first. A sentinel
// keeps there what it learns.
func (o SentinelOptions) lines(master string, primary *Server) []string {
	lines := []string{
		"sentinel announce-ip " + loopback,
		fmt.Sprintf("sentinel monitor %s %s %d %d", master, loopback, primary.port.number, o.Quorum),
		fmt.Sprintf("sentinel down-after-milliseconds %s %d", master, o.DownAfter.Milliseconds()),
		fmt.Sprintf("sentinel failover-timeout %s %d", master, o.FailoverTimeout.Milliseconds()),
		fmt.Sprintf("sentinel parallel-syncs %s 1", master),
	}
	if o.AuthPass != "" {
		lines = append(lines, fmt.Sprintf("sentinel auth-pass %s %s", master, o.AuthPass))
	}
	if o.AuthUser != "" {
		lines = append(lines, fmt.Sprintf("sentinel auth-user %s %s", master, o.AuthUser))
	}
	return append(lines, o.access()...)
}

// access are the lines about who may use the sentinels.
func (o SentinelOptions) access() []string {
	if o.Password == "" {
		return nil
	}
	lines := []string{fmt.Sprintf("sentinel sentinel-pass %s", o.Password)}
	if o.Username == "" {
		return append(lines, fmt.Sprintf("requirepass %s", o.Password))
	}
	return append(lines,
		fmt.Sprintf("sentinel sentinel-user %s", o.Username),
		"user default off",
		fmt.Sprintf("user %s on >%s ~* &* +@all", o.Username, o.Password))
}

// hurrySentinel makes a sentinel do often what else takes several seconds: to
// find replicas and sentinels, to turn an old primary into a replica, and to
// trust its clock again after it was paused. It forgets that when it ends.
func hurrySentinel(ctx context.Context, client *goredis.Client) error {
	args := []any{"SENTINEL", "DEBUG"}
	for _, period := range []struct {
		name   string
		length time.Duration
	}{
		{"INFO-PERIOD", 500 * time.Millisecond},
		// A replica is promoted only if what it said of itself is no older than
		// five of these, and while its primary is down it is asked once a second.
		{"PING-PERIOD", 300 * time.Millisecond},
		{"ASK-PERIOD", 100 * time.Millisecond},
		// After four of these a sentinel makes a primary that it takes for an old one a
		// replica. The sentinel that has promoted it may need a second to see that, and
		// then one of these to inform the others.
		{"PUBLISH-PERIOD", 600 * time.Millisecond},
		{"TILT-PERIOD", time.Second},
	} {
		args = append(args, period.name, period.length.Milliseconds())
	}
	if err := client.Do(ctx, args...).Err(); err != nil {
		return fmt.Errorf("make the sentinel hurry: %w", err)
	}
	return nil
}

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
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
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
