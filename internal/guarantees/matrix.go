package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// settings are what is the same for all cells.
type settings struct {
	caddy, dir string
	// lasts is how long each cell is tried.
	lasts time.Duration
}

// attempts is how often cells are tried where the machine stood still.
const attempts = 3

// matrix is where cells are tried: a shard, and Caddys in groups of each size.
type matrix struct {
	settings
	limits  []limit
	shard   *redistest.Shard
	backend *backend
	sites   map[int][]*site
	// names is how many clients there were.
	names int
}

// newMatrix starts groups of so many Caddys on a primary and a replica.
func newMatrix(set settings, limits []limit, sizes []int) (_ *matrix, err error) {
	m := &matrix{settings: set, limits: limits, sites: map[int][]*site{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.stop())
		}
	}()
	if m.shard, err = redistest.LaunchShard(1); err != nil {
		return nil, err
	}
	if m.backend, err = startBackend(limits); err != nil {
		return nil, err
	}
	for _, n := range sizes {
		// Each group has buckets of its own, so that its batches are shared by
		// its Caddys alone. A machine that is busy exceeds the default timeout.
		stores := fmt.Sprintf("store redis {\nshard a {\nprimary %s\nreplica %s\n}\nkey_prefix group%d\ncheck_timeout 2s\non_error deny\n}",
			m.shard.Primary.Addr(), m.shard.Replicas[0].Addr(), n)
		zones := "rate_limit {\n"
		for _, l := range limits {
			zones += l.caddyfile()
		}
		dir := filepath.Join(set.dir, fmt.Sprintf("group-%d", n))
		if m.sites[n], err = startSites(n, set.caddy, dir, stores, zones+"}", "reverse_proxy "+m.backend.addr); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// stop ends it all.
func (m *matrix) stop() error {
	var errs []error
	for _, sites := range m.sites {
		errs = append(errs, stopSites(sites))
	}
	if m.backend != nil {
		m.backend.stop()
	}
	if m.shard != nil {
		errs = append(errs, m.shard.Stop())
	}
	return errors.Join(errs...)
}

// try tries a group of cells, which have the Caddys and the lag in common, and
// again if the machine stood still.
func (m *matrix) try(ctx context.Context, group []cell) (outcomes []*outcome, err error) {
	if err := setLag(ctx, m.shard, group[0].lag); err != nil {
		return nil, err
	}
	for range attempts {
		if outcomes, err = m.tryOnce(ctx, group); err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(outcomes, (*outcome).isStill) {
			break
		}
	}
	if len(group) == 1 {
		return outcomes, nil
	}
	for i, o := range outcomes {
		if !o.isIdle() {
			continue
		}
		// On a busy machine it reaches its limit when it is alone.
		again, err := m.try(ctx, group[i:i+1])
		if err != nil {
			return nil, err
		}
		outcomes[i] = again[0]
	}
	return outcomes, nil
}

func (m *matrix) tryOnce(ctx context.Context, group []cell) ([]*outcome, error) {
	sites := m.sites[group[0].caddys]
	earlier, err := readMetrics(sites)
	if err != nil {
		return nil, err
	}
	watch := watchLag(m.shard)
	seen, others, names := make([][]response, len(group)), make([][]response, len(group)), make([]string, len(group))
	var running sync.WaitGroup
	for i, c := range group {
		m.names++
		names[i] = fmt.Sprintf("client-%d", m.names)
		running.Go(func() { seen[i], others[i] = c.run(ctx, sites, names[i], m.lasts) })
	}
	running.Wait()
	lagged := watch.end()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	// Charges are told of when they are answered.
	time.Sleep(settleTime)
	longest, err := longestSince(sites, earlier)
	if err != nil {
		return nil, err
	}
	var outcomes []*outcome
	for i, c := range group {
		outcomes = append(outcomes, c.judge(seen[i], others[i], m.backend.peak(names[i]), lagged, longest))
	}
	return outcomes, nil
}

// settleTime is enough for the charges of a group to arrive, on a machine that
// is idle again.
const settleTime = 300 * time.Millisecond

func readMetrics(sites []*site) (all []caddyproc.Metrics, err error) {
	for _, s := range sites {
		m, err := s.Metrics()
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// longestSince is the longest that a command took since figures were read.
func longestSince(sites []*site, earlier []caddyproc.Metrics) (longest time.Duration, err error) {
	now, err := readMetrics(sites)
	for i := range now {
		longest = max(longest, longestCall(now[i], earlier[i]))
	}
	return longest, err
}
