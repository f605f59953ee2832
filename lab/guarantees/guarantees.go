// Package guarantees measures how much more or less than their limits clients get from
// real Caddys on real Redis servers whose replica lags. It compares that with the bounds
// of docs/evidence/guarantees.md, and writes its observations to guarantees.md. A cell is
// one combination of settings, a roam the traffic of a client that changes Caddys, an
// outcome holds the observations of a cell, a loss is the effect of a fault on a client's
// charges, and a limit computes the bounds.
package guarantees

import (
	"context"
	_ "embed"
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
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

var (
	flags  = flag.NewFlagSet("guarantees", flag.ExitOnError)
	out    = report.Out(flags)
	only   = report.Only(flags, "gcra.*4 Caddys")
	binary = flags.String("caddy", "", "the Caddy to try; without it, it is built")
	lasts  = flags.Duration("lasts", 5*window/2, "how long each cell is tried")
)

//go:embed guarantees.md
var template string

type settings struct {
	shop  *site.Workshop
	lasts time.Duration // how long each cell runs
}

// Run tries all cells and faults.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	shop, err := site.Open(*binary)
	if err != nil {
		return err
	}
	defer shop.Close()
	set, began := settings{shop, *lasts}, time.Now()
	outcomes, err := tryCells(ctx, set, only, plan{limits: limits(), sizes: caddyCounts, groups: groups(limits())})
	roamed, failed := tryCells(ctx, set, only, plan{limits: roamLimits(), sizes: roamCounts, groups: roamGroups(roamLimits()), isApart: true})
	err = errors.Join(err, failed)
	losses, failed := tryFaults(ctx, set, only)
	err = errors.Join(err, failed)
	if only.String() == "" && ctx.Err() == nil {
		err = errors.Join(err, report.Write(*out, "guarantees.md", template, document(set, time.Since(began), outcomes, roamed, losses),
			map[string]fmt.Stringer{"guarantees.svg": draw(excesses(outcomes))}))
	}
	return err
}

func exceeded(breaches []string) error {
	return traffic.Each(breaches, func(text string) error {
		fmt.Println("EXCEEDED", text)
		return errors.New(text)
	})
}

// plan is cells in groups, and what they need.
type plan struct {
	limits  []limit
	sizes   []int // the numbers of Caddys
	isApart bool  // set if each limit has a store of its own, so that metrics tell them apart
	groups  [][]cell
}

// tryCells tries the wanted cells of a plan. The error names the bounds that were exceeded.
func tryCells(ctx context.Context, set settings, wanted *regexp.Regexp, p plan) (all []*outcome, err error) {
	var wantedGroups [][]cell
	for _, group := range p.groups {
		if some := traffic.Those(group, func(c cell) bool { return wanted.MatchString(c.String()) }); len(some) > 0 {
			wantedGroups = append(wantedGroups, some)
		}
	}
	if len(wantedGroups) == 0 {
		return nil, nil
	}
	m, err := newMatrix(set, p)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.stop()) }()
	for _, group := range wantedGroups {
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
	connections int    // how many requests the client makes at a time
	roam        string // the name of the client's way from Caddy to Caddy, if it has one
}

func (c cell) String() string {
	text := fmt.Sprintf("%s, %d Caddys, lag %v, %d at a time", c.limit, c.caddys, c.lag, c.connections)
	if c.roam != "" {
		text += ", " + c.roam
	}
	return text
}

var (
	caddyCounts = []int{1, 2, 4}
	lags        = []time.Duration{0, 100 * time.Millisecond, time.Second}
	crowds      = []int{1, 16, 256}
)

// With at least flood requests at a time, only floodsAtOnce limits are tried together, so
// that Caddy is busy and not the machine.
const (
	flood        = 100
	floodsAtOnce = 4
)

// groups are all cells. Those of a group are tried at the same time, each with a client
// of its own.
func groups(limits []limit) (all [][]cell) {
	for _, lag := range lags {
		for _, caddys := range caddyCounts {
			for _, connections := range crowds {
				size := len(limits)
				if connections >= flood {
					size = floodsAtOnce
				}
				for some := range slices.Chunk(limits, size) {
					var group []cell
					for _, l := range some {
						group = append(group, cell{limit: l, caddys: caddys, lag: lag, connections: connections})
					}
					all = append(all, group)
				}
			}
		}
	}
	return all
}

// bystanderPace keeps the second client of a zone below its limit.
const bystanderPace = 80 * time.Millisecond

// rest is how long a connection waits after a refusal. All connections together send 250
// requests a second: often enough to find room soon, and not so often that refusals
// disturb the measurement.
func rest(connections int) time.Duration {
	return max(20*time.Millisecond, time.Duration(connections)*4*time.Millisecond)
}

// run sends requests of two clients for some time, or of one that roams, and returns the
// responses.
func (c cell) run(ctx context.Context, sites []*site.Site, name string, lasts time.Duration) (seen, others []response) {
	if c.roam != "" {
		return c.runRoam(ctx, sites, name), nil
	}
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

// matrix runs the cells: a shard, and Caddys in groups of each size.
type matrix struct {
	settings
	shard   *redistest.Shard
	backend *backend
	sites   map[int][]*site.Site
	names   int // how many clients there have been
}

func newMatrix(set settings, p plan) (_ *matrix, err error) {
	m := &matrix{settings: set, sites: map[int][]*site.Site{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.stop())
		}
	}()
	if m.shard, err = redistest.LaunchShard(1); err != nil {
		return nil, err
	}
	if m.backend, err = startBackend(p.limits); err != nil {
		return nil, err
	}
	for _, n := range p.sizes {
		// Each group has buckets of its own, so that only its Caddys share its batches.
		// A busy machine exceeds the default timeout.
		const checkTimeout = 2 * time.Second
		var stores, handlers string
		if group := fmt.Sprint("group", n); p.isApart {
			stores, handlers = apart(p.limits, m.shard.Primary.Addr(), m.shard, group, checkTimeout)
		} else {
			stores = storeText("", m.shard.Primary.Addr(), m.shard, group, checkTimeout)
			handlers = "rate_limit {\n"
			for _, l := range p.limits {
				handlers += l.caddyfile()
			}
			handlers += "}\n"
		}
		if m.sites[n], err = set.shop.StartAll(n, site.Config{
			Log: "exclude http.log.error", Stores: stores,
			Routes: []string{"route {\n" + handlers + "reverse_proxy " + m.backend.addr + "\n}"},
		}); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// apart returns a store and a handler for each limit, in the Caddyfile.
func apart(limits []limit, primary string, shard *redistest.Shard, prefix string, checkTimeout time.Duration) (stores, handlers string) {
	for _, l := range limits {
		stores += storeText(l.zone(), primary, shard, prefix+l.zone(), checkTimeout)
		handlers += "rate_limit {\nstore " + l.zone() + "\n" + l.caddyfile() + "}\n"
	}
	return stores, handlers
}

// storeText is a store in the Caddyfile that reaches the shard's primary at an address.
func storeText(name, primary string, shard *redistest.Shard, prefix string, checkTimeout time.Duration) string {
	return fmt.Sprintf("store %s redis {\nshard a {\nprimary %s\nreplica %s\n}\nkey_prefix %s\ncheck_timeout %v\non_error deny\n}\n",
		name, primary, shard.Replicas[0].Addr(), prefix, checkTimeout)
}

func (m *matrix) stop() (err error) {
	for _, sites := range m.sites {
		err = errors.Join(err, site.StopAll(sites))
	}
	if m.backend != nil {
		_ = m.backend.server.Close()
	}
	if m.shard != nil {
		err = errors.Join(err, m.shard.Stop())
	}
	return err
}

// try tries a group of cells with the same Caddys and the same lag, and up to two times
// more if the machine stalled.
func (m *matrix) try(ctx context.Context, group []cell) (outcomes []*outcome, err error) {
	if err := setLag(ctx, m.shard, group[0].lag); err != nil {
		return nil, err
	}
	for range 3 {
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
		if !o.isIdle() && !o.isChecked() {
			continue
		}
		// On a busy machine a client may reach its limit only when it is alone.
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
	endWatch := watchLag(m.shard)
	seen, others := make([][]response, len(group)), make([][]response, len(group))
	name := func(i int) string { return fmt.Sprintf("client-%d", m.names+1+i) }
	_ = traffic.Together(len(group), func(i int) error {
		seen[i], others[i] = group[i].run(ctx, sites, name(i), m.lasts)
		return nil
	})
	lagged := endWatch()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	// Metrics count charges when they are answered. The machine is idle now.
	time.Sleep(300 * time.Millisecond)
	now, err := site.AllMetrics(sites)
	if err != nil {
		return nil, err
	}
	var longest time.Duration
	for i := range now {
		longest = max(longest, longestCall(now[i], earlier[i]))
	}
	outcomes := make([]*outcome, len(group))
	for i, c := range group {
		outcomes[i] = c.judge(seen[i], others[i], m.backend.peak(name(i)), lagged, longest)
		outcomes[i].unchecked = c.unchecked(now, earlier)
	}
	m.names += len(group)
	return outcomes, nil
}

type sender struct {
	client, zone string
	sites        []*site.Site
	// connections is how many requests it makes at a time. If there are fewer of them
	// than Caddys, each goes from one Caddy to the next.
	connections int
	// pace is how long a connection waits after an admission, rest how long after any
	// other response. They vary by half.
	pace, rest time.Duration
}

func (t *sender) run(ctx context.Context) []response {
	client := traffic.NewClient(t.connections)
	defer client.CloseIdleConnections()
	seen := make([][]response, t.connections)
	var starting sync.WaitGroup
	starting.Add(t.connections)
	_ = traffic.Together(t.connections, func(c int) error {
		starting.Done()
		starting.Wait() // so that all begin at once
		for n := c; ctx.Err() == nil; {
			r := t.ask(client, n%len(t.sites))
			seen[c] = append(seen[c], r)
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
		return nil
	})
	return slices.Concat(seen...)
}

func (t *sender) ask(client *http.Client, caddy int) response {
	x := traffic.Ask(client, "http://"+t.sites[caddy].Addrs[0]+"/"+t.zone, map[string]string{clientHeader: t.client})
	reset, _ := strconv.ParseInt(x.Header.Get("X-RateLimit-Reset"), 10, 64)
	return response{caddy: caddy, begun: x.Begun, ended: x.Ended, status: x.Status, reset: reset}
}

// response is one response to a client. Its request spent its event between the two
// instants or, with charge after, up to the arrival time of a charge later.
type response struct {
	caddy        int
	begun, ended time.Time
	status       int   // 0 if there was no response
	reset        int64 // 0 if the response has none
}

func (r response) isAdmitted() bool { return r.status == http.StatusOK }
func (r response) isRefused() bool  { return r.status == http.StatusTooManyRequests }

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

// backend is the server behind Caddy. A request takes as long as the limit of the zone in
// its path says. The backend counts the concurrent requests of each client.
type backend struct {
	server        *http.Server
	addr          string
	mu            sync.Mutex
	running, most map[string]int64
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

// lagKey holds the instant of its last write.
const lagKey = "guarantees:lag"

// watchLag writes instants to the primary, and observes when each arrives at the replica.
// The function that it returns ends that, and returns the longest lag, which is too long
// by at most the pause between two readings.
func watchLag(shard *redistest.Shard) (end func() time.Duration) {
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	last, most := time.Now().UnixMicro(), int64(0)
	running.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
			shard.Primary.Client().Set(ctx, lagKey, time.Now().UnixMicro(), 0)
		}
	})
	running.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(4 * time.Millisecond) {
			if n, err := shard.Replicas[0].Client().Get(ctx, lagKey).Int64(); err == nil && n > last {
				last, most = n, max(most, time.Now().UnixMicro()-n)
			}
		}
	})
	return func() time.Duration {
		stop()
		running.Wait()
		return time.Duration(most) * time.Microsecond
	}
}

// setLag delays a shard's replication, and waits until the replica lags by that and not
// by more.
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

// duration is the histogram of the time that commands take.
const duration = "caddy_rate_limit_store_duration_seconds_bucket"

// longestCall bounds the time of the commands that changed buckets since the earlier
// figures: it is the upper end of the slowest class that grew.
func longestCall(m, earlier caddyproc.Metrics) (d time.Duration) {
	for _, operation := range []string{"charge", "take", "refund"} {
		// A class includes the lower ones.
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
		if total > 0 {
			// No command takes longer than charge_timeout.
			d = max(d, time.Duration(min(least, 5)*float64(time.Second)))
		}
	}
	return d
}
