package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/shards"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// fault is something that happens to a shard under load.
type fault struct {
	name   string
	launch launcher // launch starts the kind of shard that it can happen to
	// bring begins the fault, waits, and ends it. It returns once the servers work
	// again.
	bring bringer
	// checks and primary are what is left of the servers that decide requests: of
	// those that check open windows, and of the primary, which takes and opens windows.
	checks, primary reach
	loses           loss // the writes that Redis itself loses
	isCalled        bool // set if it is tried by calls of rate_limit_service as well
}

type bringer func(ctx context.Context, s *shard, lasting time.Duration) error

// reach is how much is left of the servers that decide.
type reach int

const (
	there  reach = iota // no request may notice
	partly              // the store decides some requests, and on_error the others
	away                // on_error decides
)

// loss is the part of the counts that Redis loses.
type loss int

const (
	nothing    loss = iota // nothing that Redis has replied to
	tail                   // the writes that had not reached the replica that is promoted
	fork                   // the writes of a primary after another one was promoted
	everything             // all counts
)

func (f *fault) isUnnoticed() bool {
	return f.checks == there && f.primary == there && f.loses == nothing
}

func lasts(begin, end step) bringer {
	return func(ctx context.Context, s *shard, lasting time.Duration) error {
		s.late.Stop() // a snapshot that has to fail takes its time
		if err := begin(ctx, s); err != nil {
			return err
		}
		s.late.Reset(lasting / 4)
		start := time.Now()
		if err := traffic.Pause(ctx, lasting); err != nil {
			return err
		}
		if err := s.awaitRequests(ctx, start); err != nil {
			return err
		}
		return end(ctx, s)
	}
}

func repeats(every time.Duration, do step) bringer {
	return func(ctx context.Context, s *shard, lasting time.Duration) error {
		for end := time.Now().Add(lasting); time.Now().Before(end); {
			if err := do(ctx, s); err != nil {
				return err
			}
			if err := traffic.Pause(ctx, every); err != nil {
				return err
			}
		}
		return nil
	}
}

// processFaults are the faults of a server's process.
var processFaults = []*fault{
	{name: restart, launch: static(2), bring: stops(primary), primary: away, isCalled: true},
	{name: "one of two replicas killed", launch: static(2), bring: stops(firstReplica)},
	{name: "all replicas killed", launch: static(2), bring: stops(replicas)},
	{name: "whole shard killed", launch: static(2), bring: stops(all), checks: away, primary: away},
	{
		name: "primary stopped (SIGSTOP)", launch: static(2), primary: away, isCalled: true,
		bring: lasts(each(primary, (*redistest.Server).Pause), each(primary, (*redistest.Server).Resume)),
	},
	{
		name: "TLS certificate expired", launch: encrypted, checks: away, primary: away,
		bring: lasts(
			func(_ context.Context, s *shard) error { return s.renew(time.Now().Add(-time.Minute)) },
			func(_ context.Context, s *shard) error { return s.renew(validUntil()) }),
	},
}

type step func(ctx context.Context, s *shard) error

func each(some func(*shard) []*redistest.Server, do func(*redistest.Server) error) step {
	return func(_ context.Context, s *shard) error { return traffic.Each(some(s), do) }
}

func stops(some func(*shard) []*redistest.Server) bringer {
	return lasts(each(some, (*redistest.Server).Kill), each(some, (*redistest.Server).Restart))
}

func primary(s *shard) []*redistest.Server      { return s.Servers[:1] }
func firstReplica(s *shard) []*redistest.Server { return s.Servers[1:2] }
func replicas(s *shard) []*redistest.Server     { return s.Servers[1:] }
func all(s *shard) []*redistest.Server          { return s.Servers }
func sentinel(s *shard) []*redistest.Server     { return s.Sentinels.Nodes[:1] }

func (s *shard) renew(until time.Time) error {
	return errors.Join(s.certificate.Renew(until), s.Primary().Restart())
}

// networkFaults are the faults of the network between Caddy and all servers.
var networkFaults = []*fault{
	{name: "network cut", launch: proxied, checks: away, primary: away, isCalled: true, bring: onProxies((*redistest.Proxy).Down, (*redistest.Proxy).Up)},
	{
		name: "replies delayed by 200 ms", launch: proxied, checks: partly, primary: partly,
		bring: onProxies(func(p *redistest.Proxy) error { return p.Delay(200 * time.Millisecond) }, (*redistest.Proxy).Pass),
	},
	{
		name: "nothing arrives, connections stay", launch: proxied, checks: away, primary: away,
		bring: onProxies((*redistest.Proxy).SwallowAll, (*redistest.Proxy).Pass),
	},
	{
		name: "replies do not arrive", launch: proxied, checks: away, primary: away,
		bring: onProxies((*redistest.Proxy).SwallowReplies, (*redistest.Proxy).Pass),
	},
	{
		// 1000 bytes are a handful of replies.
		name: "connections reset in mid-reply", launch: proxied, checks: partly, primary: partly,
		bring: onProxies(func(p *redistest.Proxy) error { return p.ResetReplies(1000) }, (*redistest.Proxy).Pass),
	},
}

func onProxies(begin, end func(*redistest.Proxy) error) bringer {
	return lasts(
		func(_ context.Context, s *shard) error { return traffic.Each(s.Proxies, begin) },
		func(_ context.Context, s *shard) error { return traffic.Each(s.Proxies, end) })
}

// stateFaults are the faults of a server that runs and can be reached.
var stateFaults = []*fault{
	{
		name: "primary out of memory (noeviction)", launch: static(2), primary: away,
		bring: lasts(onPrimary("CONFIG", "SET", "maxmemory", 1), onPrimary("CONFIG", "SET", "maxmemory", 0)),
	},
	{
		name: "primary's disk full (MISCONF)", launch: static(2, "--save", "3600 1"), primary: away,
		bring: lasts(onDisk(obstruct, "err"), onDisk(os.Remove, "ok")),
	},
	{
		name: "CLIENT PAUSE at the primary", launch: static(2), primary: away,
		bring: func(ctx context.Context, s *shard, lasting time.Duration) error {
			// The pause ends by itself.
			if err := onPrimary("CLIENT", "PAUSE", lasting.Milliseconds(), "ALL")(ctx, s); err != nil {
				return err
			}
			return traffic.Pause(ctx, lasting)
		},
	},
	{
		name: "DEBUG SLEEP at the primary", launch: static(2, "--enable-debug-command", "yes"), primary: away,
		bring: func(ctx context.Context, s *shard, lasting time.Duration) error {
			return onPrimary("DEBUG", "SLEEP", lasting.Seconds())(ctx, s)
		},
	},
	{
		name: "busy script at the primary, then SCRIPT KILL", launch: static(2, "--busy-reply-threshold", "50"), primary: away,
		bring: runBusyScript,
	},
	{
		name: "SCRIPT FLUSH on all servers, repeatedly", launch: static(2),
		bring: repeats(250*time.Millisecond, func(ctx context.Context, s *shard) error {
			return traffic.Each(s.Servers, func(server *redistest.Server) error { return server.Client().ScriptFlush(ctx).Err() })
		}),
	},
	{
		name: "FLUSHALL", launch: static(2), loses: everything, isCalled: true,
		bring: lasts(onPrimary("FLUSHALL"), func(context.Context, *shard) error { return nil }),
	},
	{
		name: "password changed", launch: guarded, checks: away, primary: away,
		bring: lasts(changePassword, func(_ context.Context, s *shard) error { return s.tell(secondPassword) }),
	},
}

func onPrimary(command ...any) step {
	return func(ctx context.Context, s *shard) error {
		if err := s.Primary().Client().Do(ctx, command...).Err(); err != nil {
			return fmt.Errorf("%v: %w", command, err)
		}
		return nil
	}
}

// onDisk changes the file of the snapshot, and waits until one has ended with a status.
// While the last one failed, Redis refuses writes.
func onDisk(change func(file string) error, status string) step {
	return func(ctx context.Context, s *shard) error {
		config, err := s.Primary().Client().ConfigGet(ctx, "dir").Result()
		if err != nil {
			return fmt.Errorf("find the primary's folder: %w", err)
		}
		if err := change(filepath.Join(config["dir"], "dump.rdb")); err != nil {
			return fmt.Errorf("change the snapshot's file: %w", err)
		}
		return s.snapshot(ctx, status)
	}
}

func obstruct(file string) error { return errors.Join(os.RemoveAll(file), os.Mkdir(file, 0o700)) }

func (s *shard) snapshot(ctx context.Context, want string) error {
	return traffic.Poll(ctx, time.Minute, func() error {
		info, err := s.Primary().Info("persistence")
		switch {
		case err != nil:
			return err
		case info["rdb_bgsave_in_progress"] != "0":
			return errors.New("the snapshot is being written")
		case info["rdb_last_bgsave_status"] == want:
			return nil
		}
		// Another child process may be at work, such as one that rewrites the log.
		_ = s.Primary().Client().BgSave(ctx).Err()
		return fmt.Errorf("the snapshot ended as %s, want %s", info["rdb_last_bgsave_status"], want)
	})
}

func runBusyScript(ctx context.Context, s *shard, lasting time.Duration) error {
	ended := make(chan error, 1)
	go func() { ended <- s.Primary().Client().Eval(ctx, "while true do end", nil).Err() }()
	if err := traffic.Pause(ctx, lasting); err != nil {
		return err
	}
	if err := s.Primary().Client().ScriptKill(ctx).Err(); err != nil {
		return fmt.Errorf("kill the script: %w", err)
	}
	if err := <-ended; err == nil {
		return errors.New("the script ended before it was killed")
	}
	return nil
}

// changePassword changes the password at the primary, and ends existing connections,
// which the primary would go on serving.
func changePassword(ctx context.Context, s *shard) error {
	if err := s.allow(ctx, secondPassword); err != nil {
		return err
	}
	return onPrimary("CLIENT", "KILL", "USER", login)(ctx, s)
}

// groupFaults are the faults of servers that Sentinel watches, and of a Redis Cluster.
var groupFaults = []*fault{
	{name: "a sentinel killed", launch: watched, bring: stops(sentinel)},
	{name: orderedFailover, launch: watched, primary: partly, loses: fork, bring: failOver},
	{name: killedFailover, launch: watched, primary: away, loses: tail, bring: killAndFailOver(primary)},
	{name: doubleFailover, launch: watched, primary: away, loses: tail, bring: killAndFailOver(primary, sentinel)},
	{name: "slots migrate in a Cluster", launch: clustered, bring: migrateSlots},
	{
		name: "Cluster node killed, its replica promoted", launch: clustered,
		checks: partly, primary: partly, loses: tail, bring: killNode,
	},
}

// successions are the faults after which the primary has another replication history.
var successions = []string{restart, orderedFailover, killedFailover, doubleFailover}

const (
	restart         = "primary killed and restarted"
	orderedFailover = "failover ordered from Sentinel"
	killedFailover  = "primary killed, failover by Sentinel"
	doubleFailover  = "primary and a sentinel killed, failover"
)

// failOver makes the sentinels promote a replica. The old primary becomes its replica.
func failOver(ctx context.Context, s *shard, _ time.Duration) error {
	if err := s.Sentinels.Failover(ctx); err != nil {
		return err
	}
	if _, err := s.Sentinels.WaitForMaster(ctx, s.Primary().Addr()); err != nil {
		return err
	}
	return s.Sentinels.WaitForReplicas(ctx, len(s.Servers)-1)
}

// killAndFailOver kills servers, the primary among them, for good.
func killAndFailOver(victims ...func(*shard) []*redistest.Server) bringer {
	return func(ctx context.Context, s *shard, _ time.Duration) error {
		for _, some := range victims {
			if err := each(some, (*redistest.Server).Kill)(ctx, s); err != nil {
				return err
			}
		}
		_, err := s.Sentinels.WaitForMaster(ctx, s.Primary().Addr())
		return err
	}
}

// migrateSlots moves the slots of all buckets to other nodes, one after the other.
func migrateSlots(ctx context.Context, s *shard, lasting time.Duration) error {
	keys, err := s.keys(ctx)
	if err != nil {
		return err
	}
	masters := s.Primaries()
	for _, key := range keys {
		if err := traffic.Pause(ctx, lasting/time.Duration(len(keys))); err != nil {
			return err
		}
		slot := redistest.Keyslot(key)
		from, err := s.Cluster.Owner(ctx, slot)
		if err != nil {
			return err
		}
		to := masters[(slices.Index(masters, from)+1)%len(masters)]
		if err := s.Cluster.MigrateSlot(ctx, slot, from, to); err != nil {
			return err
		}
	}
	return nil
}

func (s *shard) keys(ctx context.Context) (keys []string, err error) {
	buckets, err := s.Buckets(ctx, zone)
	for _, b := range buckets {
		keys = append(keys, b.Key)
	}
	if len(keys) == 0 {
		err = errors.Join(err, errors.New("there are no buckets"))
	}
	return keys, err
}

func killNode(ctx context.Context, s *shard, _ time.Duration) error {
	keys, err := s.keys(ctx)
	if err != nil {
		return err
	}
	node, err := s.Cluster.MasterOf(ctx, keys[0])
	if err != nil {
		return err
	}
	if err := node.Kill(); err != nil {
		return err
	}
	return s.Cluster.WaitUntilOK(ctx)
}

// shard is a shard with its credentials.
type shard struct {
	*shards.Shard
	certificate *redistest.Certificate
	secret      string // the file from which Caddy reads the password
	// awaitRequests waits until each client that the fault concerns has had a request since then. On
	// a slow machine, none may have come while the fault lasted.
	awaitRequests func(ctx context.Context, then time.Time) error
	// late starts the late clients, which have their first requests during the fault.
	late *time.Timer
}

func (s *shard) clients(ctx context.Context, zone string) ([]string, error) {
	buckets, err := s.Buckets(ctx, zone)
	return slices.Sorted(maps.Keys(buckets)), err
}

// launcher starts a shard, with its files in dir.
type launcher func(dir string) (*shard, error)

func plain(launch func() (*shards.Shard, error)) launcher {
	return func(string) (*shard, error) {
		s, err := launch()
		return &shard{Shard: s}, err
	}
}

func static(replicas int, args ...string) launcher {
	return plain(func() (*shards.Shard, error) { return shards.Static(replicas, redistest.Args(args...)) })
}

var (
	proxied   = plain(func() (*shards.Shard, error) { return shards.Proxied(2) })
	watched   = plain(func() (*shards.Shard, error) { return shards.Watched(time.Second) })
	clustered = plain(func() (*shards.Shard, error) { return shards.Clustered() })
)

const (
	login          = "caddy"
	firstPassword  = "first"
	secondPassword = "second"
)

func guarded(dir string) (*shard, error) {
	s, err := static(0)(dir)
	if err != nil {
		return nil, err
	}
	s.secret = filepath.Join(dir, "password")
	if err := errors.Join(s.allow(context.Background(), firstPassword), s.tell(firstPassword)); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	s.Config = append(s.Config, "username "+login, "password {file."+s.secret+"}")
	return s, nil
}

func (s *shard) allow(ctx context.Context, password string) error {
	return onPrimary("ACL", "SETUSER", login, "reset", "on", ">"+password, "~*", "&*", "+@all")(ctx, s)
}

func (s *shard) tell(password string) error {
	next := s.secret + ".next"
	if err := os.WriteFile(next, []byte(password+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the password: %w", err)
	}
	return os.Rename(next, s.secret)
}

func encrypted(dir string) (*shard, error) {
	authority, err := redistest.NewAuthority(dir)
	if err != nil {
		return nil, err
	}
	certificate, err := authority.IssueServer(validUntil())
	if err != nil {
		return nil, err
	}
	s, err := shards.Static(0, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no"))
	if err != nil {
		return nil, err
	}
	s.Config = append(s.Config, "tls {\nca "+authority.File()+"\n}")
	return &shard{Shard: s, certificate: certificate}, nil
}

func validUntil() time.Time { return time.Now().Add(time.Hour) }
