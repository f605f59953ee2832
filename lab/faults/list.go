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

// fault is what happens to a shard while requests come.
type fault struct {
	name   string
	launch launcher // launch starts the kind of shard that it can happen to
	// bring brings it on, waits while it shall last, and ends it. It returns when
	// the servers do again what they should.
	bring bringer
	// checks and primary are how much is left of what decides requests: of the
	// servers that check windows that are open, and of the primary, which takes
	// and opens windows.
	checks, primary reach
	// loses is what Redis itself forgets, persistence and replication being as
	// they are.
	loses loss
}

type bringer func(ctx context.Context, s *shard, lasting time.Duration) error

// reach is how much is left of what decides.
type reach int

const (
	there  reach = iota // no request may notice
	partly              // some requests are decided, and for the others on_error is
	away                // requests notice, and on_error decides
)

// loss is what Redis forgets.
type loss int

const (
	nothing    loss = iota // nothing that Redis has replied to
	tail                   // what a primary had not passed on to the replica that is promoted
	fork                   // what a primary takes after another one was promoted
	everything             // everything that was counted
)

func (f *fault) isUnnoticed() bool {
	return f.checks == there && f.primary == there && f.loses == nothing
}

func lasts(begin, end step) bringer {
	return func(ctx context.Context, s *shard, lasting time.Duration) error {
		if err := begin(ctx, s); err != nil {
			return err
		}
		if err := traffic.Pause(ctx, lasting); err != nil {
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

// processFaults are those of a server's process.
var processFaults = []*fault{
	{
		name: restart, launch: static(2),
		bring: stops(primary), primary: away,
	},
	{
		name: "one of two replicas killed", launch: static(2),
		bring: stops(firstReplica),
	},
	{
		name: "all replicas killed", launch: static(2),
		bring: stops(replicas),
	},
	{
		name: "whole shard killed", launch: static(2),
		bring:  stops(all),
		checks: away, primary: away,
	},
	{
		name: "primary stopped (SIGSTOP)", launch: static(2),
		bring:   lasts(each(primary, (*redistest.Server).Pause), each(primary, (*redistest.Server).Resume)),
		primary: away,
	},
	{
		name: "TLS certificate expired", launch: encrypted,
		bring: lasts(
			func(_ context.Context, s *shard) error { return s.renew(time.Now().Add(-time.Minute)) },
			func(_ context.Context, s *shard) error { return s.renew(validUntil()) }),
		checks: away, primary: away,
	},
}

// step is one of the things that a fault does.
type step func(ctx context.Context, s *shard) error

func each(some func(*shard) []*redistest.Server, do func(*redistest.Server) error) step {
	return func(_ context.Context, s *shard) error {
		var errs []error
		for _, server := range some(s) {
			errs = append(errs, do(server))
		}
		return errors.Join(errs...)
	}
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

const (
	delay              = 200 * time.Millisecond // how much later replies come
	repliesBeforeReset = 1000                   // repliesBeforeReset, in bytes, are a handful of replies
)

// networkFaults are those of the network between Caddy and all servers.
var networkFaults = []*fault{
	{
		name: "network cut", launch: proxied,
		bring: lasts(onProxies((*redistest.Proxy).Down), onProxies((*redistest.Proxy).Up)), checks: away, primary: away,
	},
	{
		name: "replies delayed by 200 ms", launch: proxied,
		bring: lasts(
			onProxies(func(p *redistest.Proxy) error { return p.Delay(delay) }),
			onProxies((*redistest.Proxy).Pass)),
		checks: partly, primary: partly,
	},
	{
		name: "nothing arrives, connections stay", launch: proxied,
		bring:  lasts(onProxies((*redistest.Proxy).SwallowAll), onProxies((*redistest.Proxy).Pass)),
		checks: away, primary: away,
	},
	{
		name: "replies do not arrive", launch: proxied,
		bring:  lasts(onProxies((*redistest.Proxy).SwallowReplies), onProxies((*redistest.Proxy).Pass)),
		checks: away, primary: away,
	},
	{
		name: "connections reset in mid-reply", launch: proxied,
		bring: lasts(
			onProxies(func(p *redistest.Proxy) error { return p.ResetReplies(repliesBeforeReset) }),
			onProxies((*redistest.Proxy).Pass)),
		checks: partly, primary: partly,
	},
}

func onProxies(do func(*redistest.Proxy) error) step {
	return func(_ context.Context, s *shard) error {
		var errs []error
		for _, proxy := range s.Proxies {
			errs = append(errs, do(proxy))
		}
		return errors.Join(errs...)
	}
}

// stateFaults are those of a server that runs and is reached.
var stateFaults = []*fault{
	{
		name: "primary out of memory (noeviction)", launch: static(2), primary: away,
		bring: lasts(onPrimary("CONFIG", "SET", "maxmemory", 1), onPrimary("CONFIG", "SET", "maxmemory", 0)),
	},
	{
		name: "primary's disk full (MISCONF)", launch: static(2, "--save", "3600 1"), primary: away,
		bring: lasts(obstructDisk, clearDisk),
	},
	{
		name: "CLIENT PAUSE at the primary", launch: static(2), primary: away,
		bring: func(ctx context.Context, s *shard, lasting time.Duration) error {
			// Nobody can end it before it ends by itself.
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
		name: "SCRIPT FLUSH on all servers, again and again", launch: static(2),
		bring: repeats(250*time.Millisecond, func(ctx context.Context, s *shard) error {
			var errs []error
			for _, server := range s.Servers {
				errs = append(errs, server.Client().ScriptFlush(ctx).Err())
			}
			return errors.Join(errs...)
		}),
	},
	{
		name: "FLUSHALL", launch: static(2), loses: everything,
		bring: onceInTheMiddle(onPrimary("FLUSHALL")),
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

// onceInTheMiddle is a fault that is one moment, which requests are looked at
// before and after.
func onceInTheMiddle(do step) bringer {
	return lasts(do, func(context.Context, *shard) error { return nil })
}

// snapshotTimeout bounds the writing of a snapshot of a few keys.
const snapshotTimeout = time.Minute

// obstructDisk makes snapshots fail, after which Redis takes no writes: where the
// file should be, there is a folder.
func obstructDisk(ctx context.Context, s *shard) error {
	file, err := s.snapshotFile(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(file), os.Mkdir(file, 0o700)); err != nil {
		return fmt.Errorf("obstruct the disk: %w", err)
	}
	return s.snapshot(ctx, "err")
}

func clearDisk(ctx context.Context, s *shard) error {
	file, err := s.snapshotFile(ctx)
	if err != nil {
		return err
	}
	if err := os.Remove(file); err != nil {
		return fmt.Errorf("clear the disk: %w", err)
	}
	return s.snapshot(ctx, "ok")
}

func (s *shard) snapshotFile(ctx context.Context) (string, error) {
	config, err := s.Primary().Client().ConfigGet(ctx, "dir").Result()
	if err != nil {
		return "", fmt.Errorf("find the primary's folder: %w", err)
	}
	return filepath.Join(config["dir"], "dump.rdb"), nil
}

func (s *shard) snapshot(ctx context.Context, want string) error {
	return traffic.Poll(ctx, snapshotTimeout, func() error {
		info, err := s.Primary().Info("persistence")
		switch {
		case err != nil:
			return err
		case info["rdb_bgsave_in_progress"] != "0":
			return errors.New("the snapshot is being written")
		case info["rdb_last_bgsave_status"] == want:
			return nil
		}
		// Another child may be at work, as one that rewrites the log.
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

// changePassword changes it at the primary, which goes on serving connections
// that exist, and ends these.
func changePassword(ctx context.Context, s *shard) error {
	if err := s.allow(ctx, secondPassword); err != nil {
		return err
	}
	return onPrimary("CLIENT", "KILL", "USER", login)(ctx, s)
}

// groupFaults are those of servers that Sentinel watches, and of a Redis Cluster.
var groupFaults = []*fault{
	{
		name: "a sentinel killed", launch: watched,
		bring: stops(sentinel),
	},
	{
		name: orderedFailover, launch: watched, primary: partly, loses: fork,
		bring: failOver((*redistest.Sentinels).Failover),
	},
	{
		name: killedFailover, launch: watched, primary: away, loses: tail,
		bring: killAndFailOver(primary),
	},
	{
		name: doubleFailover, launch: watched, primary: away, loses: tail,
		bring: killAndFailOver(primary, sentinel),
	},
	{
		name: "slots migrate in a Cluster", launch: clustered,
		bring: migrateSlots,
	},
	{
		name: "Cluster node killed, its replica promoted", launch: clustered, checks: partly, primary: partly, loses: tail,
		bring: killNode,
	},
}

// successions are the faults after which the primary has another history.
var successions = []string{restart, orderedFailover, killedFailover, doubleFailover}

const (
	restart         = "primary killed and restarted"
	orderedFailover = "failover ordered from Sentinel"
	killedFailover  = "primary killed, failover by Sentinel"
	doubleFailover  = "primary and a sentinel killed, failover"
)

// failOver is a fault that makes the sentinels promote a replica. The old primary
// goes on as a replica of that.
func failOver(order func(*redistest.Sentinels, context.Context) error) bringer {
	return func(ctx context.Context, s *shard, _ time.Duration) error {
		old := s.Primary()
		if err := order(s.Sentinels, ctx); err != nil {
			return err
		}
		if _, err := s.Sentinels.WaitForMaster(ctx, old.Addr()); err != nil {
			return err
		}
		return s.Sentinels.WaitForReplicas(ctx, len(s.Servers)-1)
	}
}

// killAndFailOver is a fault that kills the primary, and others, for good.
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

// migrateSlots moves the slot of each bucket to another node, one after the
// other.
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
		if err := s.Cluster.MigrateSlot(ctx, slot, from, next(masters, from)); err != nil {
			return err
		}
	}
	return nil
}

func next(servers []*redistest.Server, after *redistest.Server) *redistest.Server {
	for i, s := range servers {
		if s == after {
			return servers[(i+1)%len(servers)]
		}
	}
	return servers[0]
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

// shard is the servers that faults happen to.
type shard struct {
	*shards.Shard
	certificate *redistest.Certificate
	secret      string // the file in which Caddy finds the password
}

func (s *shard) clients(ctx context.Context, zone string) ([]string, error) {
	buckets, err := s.Buckets(ctx, zone)
	return slices.Sorted(maps.Keys(buckets)), err
}

// launcher starts a shard. What it writes is in dir.
type launcher func(dir string) (*shard, error)

// downAfter is how long a primary is silent until sentinels find it down.
const downAfter = time.Second

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
	watched   = plain(func() (*shards.Shard, error) { return shards.Watched(downAfter) })
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
