package redistest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// group is servers that one test has at a time: a single one, a primary with its
// replicas, or the nodes of a cluster.
type group struct {
	servers []*Server
	// what is the *Shard or *Cluster that tests get.
	what any
	// kind says how the group was launched. Groups of one kind are alike.
	kind string
	// original is what the servers showed of themselves after their launch.
	original []string
}

// idle are the groups that no test has, the one that was returned last at the end. A
// process and its first synchronization cost more than most tests do with it, so a group
// whose servers are as they were passes to the next test that asks for its kind.
var idle struct {
	sync.Mutex
	groups []*group
}

// mostIdle bounds how many groups wait for a test.
const mostIdle = 24

// borrow returns an idle group of a kind, or launches one, and takes it back when the test ends. One
// with options that no other test may ask for is launched, and stopped when the test ends.
func borrow[W any](tb testing.TB, kind string, opts options, launch func() (W, []*Server, error)) W {
	tb.Helper()
	if !opts.isCommon() {
		what, servers, err := launch()
		return stopAfter(tb, what, err, func() error { return stopAll(servers) })
	}
	kind += " " + strings.Join(append([]string{opts.program}, opts.args...), " ")
	g := takeIdle(kind)
	for ; g != nil && !g.isWhole(); g = takeIdle(kind) {
		stopWith(tb, g.servers)
	}
	if g == nil {
		what, servers, err := launch()
		if err != nil {
			tb.Fatal(err)
		}
		g = &group{servers: servers, what: what, kind: kind}
		if err := g.note(); err != nil {
			stopWith(tb, servers)
			tb.Fatal(err)
		}
	}
	tb.Cleanup(func() {
		if err := g.giveBack(tb.Failed()); err != nil {
			tb.Logf("redis-server on %s is not used again: %v", g.servers[0].Addr(), err)
			stopWith(tb, g.servers)
		}
	})
	return g.what.(W)
}

// note clears what the launch has left, and remembers how the servers are then.
func (g *group) note() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	if err = g.clear(ctx); err == nil {
		g.original, err = g.traits(ctx)
	}
	return err
}

func stopWith(tb testing.TB, servers []*Server) {
	tb.Helper()
	if err := stopAll(servers); err != nil {
		tb.Error(err)
	}
}

// isCommon reports whether other tests may ask for servers with these options.
func (o options) isCommon() bool {
	return o.login == login{} && o.primary == nil && !slices.ContainsFunc(o.args, func(arg string) bool {
		return strings.HasPrefix(arg, "--") && arg != "--appendonly" && arg != "--appendfsync" && arg != "--cluster-node-timeout"
	})
}

func takeIdle(kind string) *group {
	idle.Lock()
	defer idle.Unlock()
	for i, g := range slices.Backward(idle.groups) {
		if g.kind == kind {
			idle.groups = slices.Delete(idle.groups, i, i+1)
			return g
		}
	}
	return nil
}

// isWhole reports whether an idle group is still as it was. Where the machine is too busy, links
// of replicas break, and nodes of a cluster change roles.
func (g *group) isWhole() bool {
	for _, s := range g.servers {
		if !s.Running() {
			return false
		}
	}
	if len(g.servers) == 1 {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), returnTimeout)
	defer cancel()
	traits, err := g.traits(ctx)
	return err == nil && slices.Equal(traits, g.original)
}

// giveBack makes a group idle. It returns an error, and leaves it alone, unless its servers
// are as after their launch.
func (g *group) giveBack(failed bool) error {
	if failed {
		return errors.New("its test failed")
	}
	for _, s := range g.servers {
		if !s.Running() {
			return errors.New("it does not run")
		}
		if s.disturbed.Load() {
			return errors.New("its test has disturbed it")
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), returnTimeout)
	defer cancel()
	if err := g.reset(ctx); err != nil {
		return err
	}
	idle.Lock()
	defer idle.Unlock()
	if len(idle.groups) == mostIdle {
		return errors.New("enough others are idle")
	}
	idle.groups = append(idle.groups, g)
	return nil
}

// returnTimeout bounds the check of a group that a test returns.
const returnTimeout = 5 * time.Second

// reset empties the servers, and returns an error if they are not as after their launch.
func (g *group) reset(ctx context.Context) error {
	for _, s := range g.servers {
		if err := s.reusable(ctx); err != nil {
			return err
		}
	}
	if err := g.clear(ctx); err != nil {
		return err
	}
	traits, err := g.traits(ctx)
	if err != nil {
		return err
	}
	for i, want := range g.original {
		if traits[i] != want {
			return fmt.Errorf("it is not as it was: %s", difference(want, traits[i]))
		}
	}
	return nil
}

// difference returns the first line of got that want does not have.
func difference(want, got string) string {
	known := strings.Split(want, "\n")
	for line := range strings.SplitSeq(got, "\n") {
		if !slices.Contains(known, line) {
			return line
		}
	}
	return "a line is missing"
}

// traceless are commands whose effect no command shows.
var traceless = []string{"debug", "client|pause", "replicaof", "slaveof", "failover", "cluster|failover", "cluster|setslot", "cluster|forget", "cluster|reset"}

// reusable returns an error if a client of the test still uses the server, or if the test
// has done something to it that does not show.
func (s *Server) reusable(ctx context.Context) error {
	calls, err := s.Calls()
	if err != nil {
		return err
	}
	for _, name := range traceless {
		if calls[name] > 0 {
			return errors.New("its test has called " + name)
		}
	}
	return poll(ctx, func() error {
		list, err := s.client.ClientList(ctx).Result()
		if err != nil {
			return err
		}
		for line := range strings.Lines(list) {
			_, addr, _ := strings.Cut(line, " addr=")
			addr, _, _ = strings.Cut(addr, " ")
			_, isOwn := s.own.Load(addr)
			// Primaries and replicas are clients, too.
			if !isOwn && !strings.Contains(line, " flags=S ") && !strings.Contains(line, " flags=M ") {
				return fmt.Errorf("it has another client: %s", line)
			}
		}
		return nil
	})
}

// clear removes data, scripts and statistics, and waits until replicas have followed.
func (g *group) clear(ctx context.Context) error {
	for _, s := range g.servers {
		pipe := s.client.Pipeline()
		pipe.Do(ctx, "SCRIPT", "FLUSH", "SYNC")
		info, err := s.info(ctx, "replication")
		if err != nil {
			return err
		}
		if info["role"] == "master" {
			pipe.FlushAll(ctx)
			pipe.Do(ctx, "FUNCTION", "FLUSH", "SYNC")
		}
		pipe.Do(ctx, "SLOWLOG", "RESET")
		pipe.Do(ctx, "LATENCY", "RESET")
		pipe.Do(ctx, "ACL", "LOG", "RESET")
		if _, err := pipe.Exec(ctx); err != nil {
			return fmt.Errorf("clear redis-server on %s: %w", s.Addr(), err)
		}
	}
	for _, s := range g.servers {
		if s.primary != nil {
			if err := s.WaitInSync(ctx); err != nil {
				return err
			}
		}
	}
	for _, s := range g.servers {
		if err := s.client.ConfigResetStat(ctx).Err(); err != nil {
			return fmt.Errorf("clear redis-server on %s: %w", s.Addr(), err)
		}
	}
	return nil
}

// traits returns for each server what tests can change and commands show: its settings, its
// users, its place in a group.
func (g *group) traits(ctx context.Context) ([]string, error) {
	all := make([]string, len(g.servers))
	for i, s := range g.servers {
		settings, err := s.client.ConfigGet(ctx, "*").Result()
		if err != nil {
			return nil, err
		}
		users, err := s.client.Do(ctx, "ACL", "LIST").StringSlice()
		if err != nil {
			return nil, err
		}
		info, err := s.info(ctx, "replication")
		if err != nil {
			return nil, err
		}
		lines := users
		for name, value := range settings {
			lines = append(lines, name+" "+value)
		}
		for _, name := range []string{"role", "master_port", "master_link_status", "connected_slaves"} {
			lines = append(lines, name+" "+info[name])
		}
		if s.bus != nil {
			table, err := s.client.ClusterNodes(ctx).Result()
			if err != nil {
				return nil, err
			}
			lines = append(lines, steady(table)...)
		}
		slices.Sort(lines)
		all[i] = strings.Join(lines, "\n")
	}
	return all, nil
}

// steady returns the lines of CLUSTER NODES without times and epochs.
func steady(table string) (lines []string) {
	for line := range strings.Lines(table) {
		if fields := strings.Fields(line); len(fields) >= 8 {
			lines = append(lines, strings.Join(slices.Concat(fields[:4], fields[7:]), " "))
		}
	}
	return lines
}

// stopIdle ends the servers that no test has.
func stopIdle() error {
	idle.Lock()
	defer idle.Unlock()
	var errs []error
	for _, g := range idle.groups {
		errs = append(errs, stopAll(g.servers))
	}
	idle.groups = nil
	return errors.Join(errs...)
}
