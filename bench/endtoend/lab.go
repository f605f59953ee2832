package endtoend

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// lab is all that runs: redis-servers, relays, and two Caddys. The second one is
// for what fills its memory, which would change how often the garbage of others
// is collected.
type lab struct {
	opts Options
	dir  string
	// turn is how often all of some cases were measured.
	turn   int
	shards []*redistest.Shard
	stores stores
	// binary is the path of Caddy, and starts how often it was started.
	binary string
	starts int
	caddys []*caddyproc.Process
	// admin is the address of the second Caddy's admin API.
	admin string

	cases, sweep, distances []*site
	// heap are the sites of the second Caddy, whose clients fill its memory.
	heap []*site
}

// stores are those of the cases. Several use the same servers, at other times.
type stores struct {
	base, batched, two, four, alone, followed, many redisStore
	// far are as far away as roundTrips say.
	far []*redisStore
}

func openLab(opts Options) (_ *lab, err error) {
	l := &lab{opts: opts}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if l.dir, err = os.MkdirTemp("", "bench"); err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	// Of shards: four that are alike, one without a replica, one with two, and one
	// for many keys.
	if err := l.launch(1, 1, 1, 1, 0, 2, 1); err != nil {
		return nil, err
	}
	s := &l.stores
	s.base = redisStore{shards: l.shards[:1]}
	s.batched = redisStore{name: "batched", shards: l.shards[1:2]}
	s.two = redisStore{name: "two", shards: l.shards[:2]}
	s.four = redisStore{name: "four", shards: l.shards[:4]}
	s.alone = redisStore{name: "alone", shards: l.shards[4:5]}
	s.followed = redisStore{name: "followed", shards: l.shards[5:6]}
	s.many = redisStore{name: "many", shards: l.shards[6:]}
	for i, d := range roundTrips {
		far, err := s.base.away(fmt.Sprintf("far%d", i), d)
		if err != nil {
			return nil, err
		}
		s.far = append(s.far, far)
	}

	l.cases, l.sweep, l.distances = baseCases(&s.base, &s.batched), l.sweepCases(), l.distanceCases()
	l.heap = []*site{
		{name: memoryStore, status: 200, keys: opts.heapKeys(), store: &s.many, isAlone: true, text: `
	rate_limit {
		store memory
		zone memory {
			key {header.X-Key}
			events 50000000
			window 1h
		}
	}
	respond ok`},
	}
	for _, c := range l.sweep {
		if c.isAlone {
			l.heap = append(l.heap, c)
		}
	}
	return l, l.startCaddys()
}

// launch starts shards with so many replicas, all at once.
func (l *lab) launch(replicas ...int) error {
	l.shards = make([]*redistest.Shard, len(replicas))
	errs := make([]error, len(replicas))
	var wg sync.WaitGroup
	for i, n := range replicas {
		wg.Go(func() { l.shards[i], errs[i] = launchShard(n) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (l *lab) close() error {
	for _, p := range l.caddys {
		p.Stop()
	}
	for _, far := range l.stores.far {
		far.closeRelays()
	}
	var errs []error
	for _, shard := range l.shards {
		if shard != nil {
			errs = append(errs, shard.Stop())
		}
	}
	if l.dir != "" {
		errs = append(errs, os.RemoveAll(l.dir))
	}
	return errors.Join(errs...)
}

// startCaddys runs both, with a site for each case.
func (l *lab) startCaddys() (err error) {
	l.binary = l.opts.Caddy
	if l.binary == "" {
		if l.binary, err = caddyproc.Build(l.dir); err != nil {
			return err
		}
	}
	var first []*site
	for _, c := range slices.Concat(l.cases, l.sweep, l.distances) {
		if !c.isAlone {
			first = append(first, c)
		}
	}
	if err := l.startCaddy(first); err != nil {
		return err
	}
	return l.startCaddy(l.heap)
}

// restartSecond replaces the second Caddy by one that has had no clients yet.
func (l *lab) restartSecond() error {
	l.caddys[1].Stop()
	l.caddys = l.caddys[:1]
	return l.startCaddy(l.heap)
}

// startAttempts is how often a Caddy is started where a port was lost.
const startAttempts = 3

func (l *lab) startCaddy(sites []*site) (err error) {
	for range startAttempts {
		if err = l.tryCaddy(sites); err == nil {
			break
		}
	}
	return err
}

func (l *lab) tryCaddy(sites []*site) error {
	addrs, err := caddyproc.FreeAddrs(len(sites) + 1)
	if err != nil {
		return err
	}
	l.admin = addrs[len(sites)]
	var b strings.Builder
	fmt.Fprintf(&b, "{\nadmin %s\npersist_config off\nlog {\nlevel ERROR\n}\nrate_limit {\nstore memory memory\n", l.admin)
	// Connections of stores that are not used would cost both Caddys something.
	wanted := map[*redisStore]bool{}
	for _, c := range sites {
		if !wanted[c.store] {
			wanted[c.store] = true
			b.WriteString(c.store.text())
		}
	}
	b.WriteString("}\n}\n")
	for i, c := range sites {
		c.addr = addrs[i]
		fmt.Fprintf(&b, "http://%s {\n%s\n}\n", c.addr, c.text)
	}
	l.starts++
	p, err := caddyproc.Start(l.binary, filepath.Join(l.dir, fmt.Sprintf("run%d", l.starts)), b.String(), os.Stderr, addrs...)
	if err != nil {
		return fmt.Errorf("%w; its Caddyfile:\n%s", err, &b)
	}
	l.caddys = append(l.caddys, p)
	for _, c := range sites {
		// It knows nobody: the clients come from the first on.
		c.caddy, c.sent = p, 0
	}
	return nil
}
