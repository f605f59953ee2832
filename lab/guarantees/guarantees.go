// Package guarantees measures how much more than their limits, and how much less, clients
// get from real Caddys on real Redis servers whose replica lags. It compares that with
// the promises of docs/guarantees.md, and writes its observations there. A cell is one
// combination of settings, an outcome its observations, a loss the effect of a fault on
// a client's charges; a limit computes the bounds.
package guarantees

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

var (
	flags  = flag.NewFlagSet("guarantees", flag.ExitOnError)
	target = flags.String("document", "../docs/guarantees.md", "file to write the tables to, below the mark")
	only   = flags.String("only", "", "try the cells that match this expression, such as 'gcra.*4 Caddys', and write no document")
	binary = flags.String("caddy", "", "the Caddy to try; without it, it is built")
	lasts  = flags.Duration("lasts", 5*window/2, "how long each cell is tried")
)

// settings are what is the same for all cells.
type settings struct {
	shop  *site.Workshop
	lasts time.Duration // how long each cell runs
}

// Run tries all cells and faults.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits where they are wrong
	wanted, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("read -only: %w", err)
	}
	shop, err := site.Open(*binary)
	if err != nil {
		return err
	}
	defer shop.Close()
	set, began := settings{shop, *lasts}, time.Now()
	outcomes, err := tryCells(ctx, set, wanted)
	losses, failed := tryFaults(ctx, set, wanted)
	err = errors.Join(err, failed)
	if *only == "" && ctx.Err() == nil {
		err = errors.Join(err, report.Rewrite(*target, "guarantees", document(set, time.Since(began), outcomes, losses)))
	}
	return err
}

func exceeded(breaches []string) error {
	var errs []error
	for _, text := range breaches {
		fmt.Println("EXCEEDED", text)
		errs = append(errs, errors.New(text))
	}
	return errors.Join(errs...)
}

// tryCells tries the wanted cells. It goes on where a bound is exceeded; the error names
// the bounds.
func tryCells(ctx context.Context, set settings, wanted *regexp.Regexp) (all []*outcome, err error) {
	m, err := newMatrix(set, limits(), caddyCounts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.stop()) }()
	for _, group := range groups(m.limits) {
		group = slices.DeleteFunc(group, func(c cell) bool { return !wanted.MatchString(c.String()) })
		if len(group) == 0 {
			continue
		}
		outcomes, failed := m.try(ctx, group)
		if failed != nil {
			return all, errors.Join(err, failed)
		}
		for _, o := range outcomes {
			fmt.Println(o)
			err = errors.Join(err, exceeded(o.breaches()))
		}
		all = append(all, outcomes...)
	}
	return all, err
}

// cell is one combination of settings.
type cell struct {
	limit       limit
	caddys      int
	lag         time.Duration
	connections int // how many requests the client makes at a time
}

func (c cell) String() string {
	return fmt.Sprintf("%s, %d Caddys, lag %v, %d at a time", c.limit, c.caddys, c.lag, c.connections)
}

var (
	caddyCounts = []int{1, 2, 4}
	lags        = []time.Duration{0, 100 * time.Millisecond, time.Second}
	crowds      = []int{1, 16, 256}
)

// flood is from how many requests at a time on few limits are tried together,
// so that it is Caddy that is busy and not the machine.
const (
	flood        = 100
	floodsAtOnce = 4
)

// groups are all cells. Those of a group are tried at the same time, each with a
// client of its own.
func groups(limits []limit) (all [][]cell) {
	for _, lag := range lags {
		for _, caddys := range caddyCounts {
			for _, connections := range crowds {
				size := len(limits)
				if connections >= flood {
					size = floodsAtOnce
				}
				var group []cell
				for _, l := range limits {
					if len(group) == size {
						all, group = append(all, group), nil
					}
					group = append(group, cell{l, caddys, lag, connections})
				}
				all = append(all, group)
			}
		}
	}
	return all
}

const (
	bystanderPace = 80 * time.Millisecond // bystanderPace keeps the second client of a zone below its limit
)

// rest is how long a connection waits after a refusal. All connections together send 250
// requests a second, so that they soon find room, and refusals leave the processor to
// the measurement.
func rest(connections int) time.Duration {
	return max(20*time.Millisecond, time.Duration(connections)*4*time.Millisecond)
}

// run sends requests of two clients for that long, and returns the responses.
func (c cell) run(ctx context.Context, sites []*site.Site, name string, lasts time.Duration) (seen, others []response) {
	ctx, end := context.WithTimeout(ctx, lasts)
	defer end()
	greedy := &sender{client: name, zone: c.limit.zone(), sites: sites, connections: c.connections, rest: rest(c.connections)}
	modest := &sender{client: name + "-bystander", zone: c.limit.zone(), sites: sites, connections: 1, pace: bystanderPace, rest: bystanderPace}
	var running sync.WaitGroup
	running.Go(func() { seen = greedy.run(ctx) })
	running.Go(func() { others = modest.run(ctx) })
	running.Wait()
	return seen, others
}

// attempts is how often cells are tried if the machine stood still.
const attempts = 3

// matrix runs the cells: a shard, and Caddys in groups of each size.
type matrix struct {
	settings
	limits  []limit
	shard   *redistest.Shard
	backend *backend
	sites   map[int][]*site.Site
	names   int // how many clients there were
}

func newMatrix(set settings, limits []limit, sizes []int) (_ *matrix, err error) {
	m := &matrix{settings: set, limits: limits, sites: map[int][]*site.Site{}}
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
		config := site.Config{
			Log: "exclude http.log.error",
			Stores: fmt.Sprintf("store redis {\nshard a {\nprimary %s\nreplica %s\n}\nkey_prefix group%d\ncheck_timeout 2s\non_error deny\n}",
				m.shard.Primary.Addr(), m.shard.Replicas[0].Addr(), n),
		}
		zones := ""
		for _, l := range limits {
			zones += l.caddyfile()
		}
		config.Routes = []string{"route {\nrate_limit {\n" + zones + "}\nreverse_proxy " + m.backend.addr + "\n}"}
		if m.sites[n], err = set.shop.StartAll(n, config); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *matrix) stop() error {
	var errs []error
	for _, sites := range m.sites {
		errs = append(errs, site.StopAll(sites))
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
	earlier, err := site.AllMetrics(sites)
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
	// Metrics count charges when they are answered.
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

func longestSince(sites []*site.Site, earlier []caddyproc.Metrics) (longest time.Duration, err error) {
	now, err := site.AllMetrics(sites)
	for i := range now {
		longest = max(longest, longestCall(now[i], earlier[i]))
	}
	return longest, err
}

// sender is one client.
type sender struct {
	client, zone string
	sites        []*site.Site
	// connections is how many requests it makes at a time. Where there are fewer
	// than Caddys, they go from one to the next.
	connections int
	// pace is how long a connection waits after an answer, rest after one that
	// does not admit. They vary by half.
	pace, rest time.Duration
}

func (t *sender) run(ctx context.Context) []response {
	client := traffic.NewClient(t.connections)
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var all []response
	var running sync.WaitGroup
	begin := make(chan struct{})
	for c := range t.connections {
		running.Go(func() {
			<-begin // all at once
			var mine []response
			for n := c; ctx.Err() == nil; {
				r := t.ask(client, n%len(t.sites))
				mine = append(mine, r)
				wait := t.pace
				if !r.isAdmitted() {
					wait = t.rest
				}
				if wait > 0 {
					time.Sleep(wait/2 + rand.N(wait))
				}
				if t.connections < len(t.sites) {
					n++
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, mine...)
		})
	}
	close(begin)
	running.Wait()
	return all
}

func (t *sender) ask(client *http.Client, caddy int) response {
	x := traffic.Ask(client, "http://"+t.sites[caddy].Addrs[0]+"/"+t.zone, map[string]string{clientHeader: t.client})
	reset, _ := strconv.ParseInt(x.Header.Get("X-RateLimit-Reset"), 10, 64)
	return response{caddy: caddy, begun: x.Begun, ended: x.Ended, status: x.Status, reset: reset}
}

// response is one response to a client. Its request spent its event between the two
// instants or, with charge after, within the arrival time of a charge after them.
type response struct {
	caddy        int
	begun, ended time.Time
	status       int   // 0 where there was no response
	reset        int64 // the reset that the response names, 0 if none
}

func (r *response) isAdmitted() bool { return r.status == http.StatusOK }
func (r *response) isRefused() bool  { return r.status == http.StatusTooManyRequests }

func those(all []response, is func(*response) bool) (some []response) {
	for i := range all {
		if is(&all[i]) {
			some = append(some, all[i])
		}
	}
	return some
}

func count(all []response, is func(*response) bool) (n int64) {
	for i := range all {
		if is(&all[i]) {
			n++
		}
	}
	return n
}

func byEnd(all []response) []response {
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b response) int { return a.ended.Compare(b.ended) })
	return sorted
}

// clientHeader names the client that is limited.
const clientHeader = "X-Client"

// backend is the server behind Caddy. It takes as long for each request as the zone in
// its path says, and counts concurrent requests.
type backend struct {
	server *http.Server
	addr   string

	mu      sync.Mutex
	running map[string]int64
	most    map[string]int64
}

func startBackend(limits []limit) (*backend, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start the backend: %w", err)
	}
	b := &backend{addr: listener.Addr().String(), running: map[string]int64{}, most: map[string]int64{}}
	takes := map[string]time.Duration{}
	for _, l := range limits {
		takes["/"+l.zone()] = l.takes
	}
	b.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client := r.Header.Get(clientHeader)
		b.add(client, 1)
		time.Sleep(takes[r.URL.Path])
		b.add(client, -1)
		w.WriteHeader(http.StatusOK)
	})}
	go func() { _ = b.server.Serve(listener) }()
	return b, nil
}

func (b *backend) add(client string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running[client] += n
	b.most[client] = max(b.most[client], b.running[client])
}

func (b *backend) peak(client string) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most[client]
}

func (b *backend) stop() { _ = b.server.Close() }

// lagKey holds the instant at which it was written last.
const lagKey = "guarantees:lag"

// lagWatch measures how far a replica is behind.
type lagWatch struct {
	most    atomic.Int64
	stop    context.CancelFunc
	running sync.WaitGroup
}

const (
	// writePace is how often something is written, readPace how often it is looked
	// for.
	writePace = 20 * time.Millisecond
	readPace  = 4 * time.Millisecond
)

// watchLag writes instants to the primary, and looks when each is first seen at
// the replica: that is the lag, and at most the pace of reading beyond it.
func watchLag(shard *redistest.Shard) *lagWatch {
	ctx, stop := context.WithCancel(context.Background())
	w := &lagWatch{stop: stop}
	began := time.Now().UnixMicro()
	w.running.Go(func() {
		for ctx.Err() == nil {
			shard.Primary.Client().Set(ctx, lagKey, time.Now().UnixMicro(), 0)
			time.Sleep(writePace)
		}
	})
	w.running.Go(func() {
		for last := began; ctx.Err() == nil; time.Sleep(readPace) {
			if n, err := shard.Replicas[0].Client().Get(ctx, lagKey).Int64(); err == nil && n > last {
				last = n
				w.most.Store(max(w.most.Load(), time.Now().UnixMicro()-n))
			}
		}
	})
	return w
}

func (w *lagWatch) end() time.Duration {
	w.stop()
	w.running.Wait()
	return time.Duration(w.most.Load()) * time.Microsecond
}

// setLag delays a shard's replication, and waits until the replica lags by that
// and no longer by more.
func setLag(ctx context.Context, shard *redistest.Shard, lag time.Duration) error {
	if err := shard.Replicas[0].DelayReplication(lag); err != nil {
		return err
	}
	written := time.Now()
	if err := shard.Primary.Client().Set(ctx, lagKey, written.UnixMicro(), 0).Err(); err != nil {
		return fmt.Errorf("write to the primary: %w", err)
	}
	if err := shard.WaitReplicated(ctx); err != nil {
		return err
	}
	if took := time.Since(written); took < lag {
		return fmt.Errorf("a replica that should lag by %v lags by %v", lag, took)
	}
	// Writes in flight with the old delay may arrive before that.
	time.Sleep(lag)
	return nil
}

// duration is the histogram of what commands to servers take.
const duration = "caddy_rate_limit_store_duration_seconds_bucket"

// longestCall bounds what the commands took by which a bucket changes, since earlier
// figures were read: it is the upper end of the slowest class that grew.
func longestCall(m, earlier caddyproc.Metrics) (d time.Duration) {
	for _, operation := range []string{"charge", "take", "refund"} {
		// Classes hold what is in lower ones as well.
		total, of := 0.0, map[float64]float64{}
		for key, n := range m {
			if !caddyproc.Has(key, duration, `operation="`+operation+`"`) {
				continue
			}
			end, err := strconv.ParseFloat(caddyproc.Label(key, "le"), 64)
			if err != nil {
				continue
			}
			of[end] += n - earlier[key]
			total = max(total, of[end])
		}
		least := math.Inf(1)
		for end, n := range of {
			if n == total {
				least = min(least, end)
			}
		}
		if total == 0 {
			continue
		}
		// Longer than the last class is longer than charge_timeout's patience.
		d = max(d, time.Duration(min(least, 5)*float64(time.Second)))
	}
	return d
}
