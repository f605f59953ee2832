// Package soak runs two Caddys on three shards of different kinds under load, breaks
// something every few seconds, and finally balances the books: each served request must
// be counted in Redis or reported as lost or uncertain, and neither memory nor goroutines
// may have grown. Clients that come to one Caddy must have been served as such. A world is
// the shards and their faults, a load the requests, an account the outcome of a zone's
// requests.
package soak

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/shards"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

var (
	flags    = flag.NewFlagSet("soak", flag.ExitOnError)
	duration = flags.Duration("duration", 10*time.Minute, "how long the load lasts")
	seed     = flags.Uint64("seed", 0, "of the faults; 0 means another one each time")
	pause    = flags.Duration("pause", 3*time.Second, "how long all is well between two faults, on average")
)

// counted are the options of the zones whose counts are compared with the served
// requests. Each zone has a path of its own.
var counted = map[string]string{
	"after":  "events 1000000000",
	"before": "events 1000000000\ncharge before\non_error deny",
	"batch":  "events 1000000\ncharge before\nbatch auto\non_error deny",
	"local":  "events 1000000000\non_error local",
	often:    "events 1000000000",
	seldom:   "events 1000000000",
}

// others is the path of the zones that are not compared. The clients of often and seldom
// come to one Caddy each; each of these zones is in a store of its own, so that metrics
// tell them apart.
const others, often, seldom = "others", "often", "seldom"

// settled is how many clients come to each Caddy alone.
var settled = map[string]int64{often: 2, seldom: 200}

// seldomRate is how many requests of seldom a Caddy gets in a second at most. Each client
// comes again when the primary's last answer is older than what counts for all requests.
const seldomRate = 100

// storeOf is the name of a zone's store.
func storeOf(zone string) string {
	if settled[zone] > 0 {
		return zone
	}
	return "default"
}

const (
	caddys = 2
	// stay is how long a client that moves stays at a Caddy.
	stay = 20 * time.Second
)

// client names the client of the n-th request to a Caddy for a path. Most are the same 50
// at all Caddys. Some of those that come to one Caddy alone move at times.
func client(path string, caddy int, n int64, since time.Duration) string {
	clients, found := settled[path]
	if !found {
		return "client-" + strconv.FormatInt(n%50, 10)
	}
	n %= clients
	if n%4 == 0 {
		caddy = (caddy + int(since/stay)) % caddys
	}
	return fmt.Sprintf("client-%d-of-%d", n, caddy)
}

func route() string {
	zone := func(name, options string) string {
		return "zone " + name + " {\nkey {header.X-Key}\n" + options + "\n}\n"
	}
	handle := func(path, zones string) string {
		return "handle /" + path + " {\nrate_limit {\nstore " + storeOf(path) + "\n" + zones + "}\n}\n"
	}
	text := handle(others, zone("sliding", "events 50\nwindow 2s\nalgorithm sliding_window")+
		zone("pace", "events 100\nwindow 1s\nalgorithm gcra")+zone("slots", "events 20\nwindow 5s\nalgorithm concurrency"))
	for name, options := range counted {
		text += handle(name, zone(name, "window 24h\n"+options))
	}
	return text + "respond ok"
}

// Run runs the soak.
func Run(ctx context.Context, args []string) (err error) {
	_ = flags.Parse(args) // it exits if a flag is invalid
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number will do
	}
	shop, err := site.Open("")
	if err != nil {
		return err
	}
	defer shop.Close()
	w, err := launchWorld()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	config := site.Config{Log: "level WARN", Routes: []string{route()}}
	for _, name := range []string{storeOf(others), often, seldom} {
		config.Stores += "store " + name + " redis {\n" + w.config() + "}\n"
	}
	sites, err := shop.StartAll(caddys, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.StopAll(sites)) }() // delivers pending charges

	fmt.Printf("seed %d, %v of load\n", *seed, *duration)
	loading, end := context.WithTimeout(ctx, *duration)
	defer end()
	served := startLoad(loading, sites)
	// After a tenth of the load, everything has been in use.
	_ = traffic.Pause(loading, min(*duration/10, time.Minute))
	early, err := needOf(sites)
	if err != nil {
		return err
	}
	faults := w.bringFaults(loading, rand.New(rand.NewPCG(*seed, 1)))
	served.running.Wait()
	if err := w.mended(ctx); err != nil {
		return fmt.Errorf("mend what is broken (seed %d): %w", *seed, err)
	}
	fmt.Println(faults)
	return balance(ctx, w, sites, served, early)
}

// load sends requests and counts the answers.
type load struct {
	running  sync.WaitGroup
	mu       sync.Mutex
	statuses map[string]map[int]int64 // by path
	failed   []error
}

func startLoad(ctx context.Context, sites []*site.Site) *load {
	l := &load{statuses: map[string]map[int]int64{others: {}}}
	for zone := range counted {
		l.statuses[zone] = map[int]int64{}
	}
	for path := range l.statuses {
		for caddy, s := range sites {
			l.running.Go(func() { l.run(ctx, caddy, s.Addrs[0], path) })
		}
	}
	return l
}

// run sends requests for a path to a Caddy, four at a time, until ctx ends. Each call of
// loadgen lasts a second and is completed.
func (l *load) run(ctx context.Context, caddy int, addr, path string) {
	var sent atomic.Int64
	began := time.Now()
	rate := 0.0
	if path == seldom {
		rate = seldomRate
	}
	for ctx.Err() == nil {
		result, err := loadgen.Run(context.Background(), loadgen.Options{
			Addr: addr, Path: "/" + path, Header: "X-Key", Connections: 4, Rate: rate, Duration: time.Second,
			Key:        func(int64) string { return client(path, caddy, sent.Add(1), time.Since(began)) },
			OnResponse: func(string, *http.Response) { time.Sleep(5 * time.Millisecond) },
		})
		l.mu.Lock()
		for status, n := range result.Status {
			l.statuses[path][status] += n
		}
		if err != nil {
			l.failed = append(l.failed, fmt.Errorf("%s: %w", path, err))
		}
		l.mu.Unlock()
		if err != nil {
			return
		}
	}
}

type need struct{ memory, goroutines float64 }

func needOf(sites []*site.Site) (n need, err error) {
	all, err := site.AllMetrics(sites)
	for _, m := range all {
		n.memory += m.Sum("process_resident_memory_bytes")
		n.goroutines += m.Sum("go_goroutines")
	}
	return n, err
}

// Memory and goroutines may grow by a factor and by some more after everything has been
// in use.
const (
	mostGrowth  = 1.5
	spareMemory = 30e6
	spareRoutes = 200
)

type account struct {
	zone           string
	served, counts int64
	undelivered    int64 // charges that may not have counted
	unanswered     int64 // takes that may have counted, though nothing was served
	inBatches      bool  // set if an unanswered take may be of any number of events
}

// isBalanced reports whether all served requests were counted, and nothing else, except
// for calls whose outcome is unknown.
func (a account) isBalanced() bool {
	return a.served <= a.counts+a.undelivered+a.unanswered && (a.counts <= a.served+a.unanswered || a.inBatches && a.unanswered > 0)
}

// balance compares the books once all pending charges have been delivered, and the
// Caddys' needs with the early ones.
func balance(ctx context.Context, w *world, sites []*site.Site, l *load, early need) error {
	errs := l.failed
	var accounts []account
	var err error
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		accounts, err = open(ctx, w, sites, l)
		isBalanced := err == nil && !slices.ContainsFunc(accounts, func(a account) bool { return !a.isBalanced() })
		if isBalanced || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		return err
	}
	late, err := needOf(sites)
	if err != nil {
		return err
	}
	for path, statuses := range l.statuses {
		fmt.Printf("/%s: %v\n", path, statuses)
	}
	for _, a := range accounts {
		fmt.Printf("%-7s served %d, counted %d, of %d charges undelivered and %d takes unanswered\n", a.zone, a.served, a.counts, a.undelivered, a.unanswered)
		if !a.isBalanced() {
			errs = append(errs, fmt.Errorf("the books of %s do not balance", a.zone))
		}
	}
	fmt.Printf("memory of both Caddys: %.1f MB early, %.1f MB late; goroutines: %.0f early, %.0f late\n",
		early.memory/1e6, late.memory/1e6, early.goroutines, late.goroutines)
	if late.memory > mostGrowth*early.memory+spareMemory || late.goroutines > mostGrowth*early.goroutines+spareRoutes {
		errs = append(errs, errors.New("memory or goroutines have grown"))
	}
	errs = append(errs, servedAlone(sites, l))
	for _, s := range sites {
		errs = append(errs, s.Logs.Fault())
	}
	if err = errors.Join(errs...); err == nil {
		fmt.Println("the books balance")
	}
	return err
}

const (
	leastAddedUp = 3 // requests for each charge of a client that comes often
	mostChecked  = 3 // requests for each that is not checked of a client that comes seldom
)

// servedAlone requires that charges of clients that come often to one Caddy were held and
// added up, and that those that come seldom were admitted on older answers.
func servedAlone(sites []*site.Site, l *load) error {
	all, err := site.AllMetrics(sites)
	if err != nil {
		return err
	}
	var charges, unchecked int64
	for _, m := range all {
		charges += int64(m.Sum("caddy_rate_limit_store_duration_seconds_count", `operation="charge"`, `store="`+often+`"`))
		unchecked += int64(m.Sum("caddy_rate_limit_ledger_unasked_admissions_total", `store="`+seldom+`"`))
	}
	busy, rare := l.statuses[often][http.StatusOK], l.statuses[seldom][http.StatusOK]
	fmt.Printf("%d charges of %d requests of clients that come often to one Caddy; %d of %d that come seldom admitted without a check\n",
		charges, busy, unchecked, rare)
	if leastAddedUp*charges > busy {
		err = errors.New("charges of clients that come often to one Caddy were not added up")
	}
	if mostChecked*unchecked < rare {
		err = errors.Join(err, errors.New("clients that come seldom to one Caddy were checked"))
	}
	return err
}

// open reads the books. Caddy does not count undelivered charges by zone, so each zone
// may have lost all of those of its store.
func open(ctx context.Context, w *world, sites []*site.Site, l *load) (accounts []account, err error) {
	all, err := site.AllMetrics(sites)
	if err != nil {
		return nil, err
	}
	for zone := range counted {
		a := account{zone: zone, served: l.statuses[zone][http.StatusOK], inBatches: zone == "batch"}
		store := `store="` + storeOf(zone) + `"`
		for _, m := range all {
			// Charges expire only in the zones with short windows.
			for _, outcome := range []string{`outcome="lost"`, `outcome="uncertain"`} {
				a.undelivered += int64(m.Sum("caddy_rate_limit_undelivered_total", `operation="charge"`, outcome, store))
			}
			if zone == "before" || zone == "batch" {
				a.unanswered += int64(m.Sum("caddy_rate_limit_store_errors_total", store))
			}
		}
		for _, shard := range w.shards() {
			buckets, err := shard.Buckets(ctx, zone)
			if err != nil {
				return nil, err
			}
			for _, b := range buckets {
				a.counts += b.Count
			}
		}
		accounts = append(accounts, a)
	}
	return accounts, nil
}

// world is the shards: a primary with a replica behind proxies, one that
// sentinels watch, and a cluster.
type world struct {
	static, watched, cluster *shards.Shard
	unfinished               []migration // those that a fault interrupted
}

// migration is a slot of the cluster that moves from one node to another.
type migration struct {
	slot     int
	from, to *redistest.Server
}

// longDown is how long sentinels and nodes wait before they replace a primary. It is
// longer than any fault, because a failover loses writes unnoticed.
const longDown = time.Minute

func launchWorld() (w *world, err error) {
	w = new(world)
	if w.static, err = shards.Proxied(1); err == nil {
		if w.watched, err = shards.Watched(longDown); err == nil {
			w.cluster, err = shards.Clustered("--cluster-node-timeout", fmt.Sprint(longDown.Milliseconds()))
		}
	}
	if err != nil {
		return nil, errors.Join(err, w.stop())
	}
	return w, nil
}

func (w *world) shards() []*shards.Shard {
	return slices.DeleteFunc([]*shards.Shard{w.static, w.watched, w.cluster}, func(s *shards.Shard) bool { return s == nil })
}

func (w *world) stop() error { return traffic.Each(w.shards(), (*shards.Shard).Stop) }

func (w *world) config() string {
	return w.static.Text("static") + w.watched.Text("watched") + w.cluster.Text("cluster")
}

func (w *world) servers() (all []*redistest.Server) {
	for _, s := range w.shards() {
		all = append(all, s.Servers...)
	}
	return all
}

// mended mends the world. It retries, because a step fails while another server is not
// ready.
func (w *world) mended(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		if err := w.mend(ctx); err == nil || traffic.Pause(ctx, time.Second) != nil {
			return err
		}
	}
}

// mend ends all faults, and waits until every shard is whole: the cluster agrees on its
// slots, no slot is half moved, replicas are in sync, and the sentinels see them all.
func (w *world) mend(ctx context.Context) error {
	var errs []error
	for _, p := range w.static.Proxies {
		errs = append(errs, p.Up(), p.Pass(), p.Delay(0))
	}
	for _, s := range append(w.servers(), w.watched.Sentinels.Nodes...) {
		if s.Resume() != nil || s.Client().Ping(ctx).Err() != nil {
			errs = append(errs, s.Restart())
		}
	}
	for _, s := range w.servers() {
		errs = append(errs, s.Client().ConfigSet(ctx, "maxmemory", "0").Err(), s.Client().ClientUnpause(ctx).Err())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := w.cluster.Cluster.WaitUntilOK(ctx); err != nil {
		return err
	}
	for _, m := range w.unfinished {
		owner, err := w.cluster.Cluster.Owner(ctx, m.slot)
		if err == nil && owner != m.to {
			err = w.cluster.Cluster.MigrateSlot(ctx, m.slot, m.from, m.to)
		}
		if err != nil {
			return err
		}
	}
	if err := w.cluster.Cluster.WaitUntilOK(ctx); err != nil {
		return err
	}
	if err := w.static.Replicas()[0].WaitInSync(ctx); err != nil {
		return err
	}
	return w.watched.Sentinels.WaitForReplicas(ctx, len(w.watched.Replicas()))
}

var background = context.Background()

type fault struct {
	name  string
	bring func(d time.Duration) error
}

// faults returns faults that lose nothing that a primary has acknowledged: the writes
// that Redis itself loses in a failover cannot be counted.
func (w *world) faults(rng *rand.Rand) []fault {
	proxy, sentinels := w.static.Proxies[0], w.watched.Sentinels.Nodes
	list := []fault{
		{"static shard: network cut", during(proxy.Down, proxy.Up)},
		{"static shard: replica's network cut", during(w.static.Proxies[1].Down, w.static.Proxies[1].Up)},
		{"static shard: replies swallowed", during(proxy.SwallowReplies, proxy.Pass)},
		{"static shard: all swallowed", during(proxy.SwallowAll, proxy.Pass)},
		{"static shard: connections cut", func(d time.Duration) error {
			for start := time.Now(); time.Since(start) < d; time.Sleep(d / 20) {
				if err := proxy.Cut(); err != nil {
					return err
				}
			}
			return nil
		}},
		{"static shard: packets 200 ms late", during(
			func() error { return proxy.Delay(100 * time.Millisecond) },
			func() error { return proxy.Delay(0) })},
		killed("watched replica", w.watched.Servers[1]), silent("watched replica", w.watched.Servers[2]),
		killed("a sentinel", sentinels[0]), silent("a sentinel", sentinels[1]),
		{"cluster: a slot moves", func(time.Duration) error { return w.moveSlot(rng) }},
	}
	victims := map[string]*redistest.Server{
		"static primary": w.static.Primary(), "static replica": w.static.Servers[1], "watched primary": w.watched.Primary(),
	}
	for i, node := range w.cluster.Servers {
		victims[fmt.Sprint("cluster node ", i)] = node
	}
	for name, server := range victims {
		list = append(list, killed(name, server), silent(name, server))
	}
	for _, name := range []string{"static primary", "watched primary", "cluster node 0"} {
		client := victims[name].Client()
		list = append(list,
			fault{name + ": scripts flushed", func(time.Duration) error { return client.ScriptFlush(background).Err() }},
			fault{name + ": out of memory", during(
				func() error { return client.ConfigSet(background, "maxmemory", "1").Err() },
				func() error { return client.ConfigSet(background, "maxmemory", "0").Err() })},
			fault{name + ": clients paused", func(d time.Duration) error {
				return client.Do(background, "CLIENT", "PAUSE", d.Milliseconds(), "ALL").Err()
			}})
	}
	// The same seed chooses the same faults.
	slices.SortFunc(list, func(a, b fault) int { return strings.Compare(a.name, b.name) })
	return list
}

func during(begin, end func() error) func(time.Duration) error {
	return func(d time.Duration) error {
		if err := begin(); err != nil {
			return err
		}
		time.Sleep(d)
		return end()
	}
}

func killed(name string, s *redistest.Server) fault {
	return fault{name + " killed", during(s.Kill, s.Restart)}
}
func silent(name string, s *redistest.Server) fault {
	return fault{name + " silent", during(s.Pause, s.Resume)}
}

func (w *world) moveSlot(rng *rand.Rand) error {
	nodes := w.cluster.Servers
	from := nodes[1+rng.IntN(2)]
	key, err := from.Client().RandomKey(background).Result()
	if err != nil {
		return fmt.Errorf("find a slot to move: %w", err)
	}
	ctx, cancel := context.WithTimeout(background, 20*time.Second)
	defer cancel()
	m := migration{redistest.Keyslot(key), from, nodes[0]}
	if err = w.cluster.Cluster.MigrateSlot(ctx, m.slot, m.from, m.to); err != nil {
		w.unfinished = append(w.unfinished, m)
	}
	return err
}

type tale map[string]int

func (w *world) bringFaults(ctx context.Context, rng *rand.Rand) tale {
	t, faults := tale{}, w.faults(rng)
	for traffic.Pause(ctx, time.Duration(rng.Int64N(int64(2**pause)))) == nil {
		f := faults[rng.IntN(len(faults))]
		if err := f.bring(time.Duration(200+rng.IntN(4000)) * time.Millisecond); err != nil && !errors.Is(err, context.Canceled) {
			fmt.Printf("%s: %v\n", f.name, err)
		}
		t[f.name]++
	}
	return t
}

func (t tale) String() string {
	var lines []string
	total := 0
	for name, n := range t {
		lines = append(lines, fmt.Sprintf("  %3d × %s", n, name))
		total += n
	}
	slices.Sort(lines)
	return fmt.Sprintf("%d faults:\n%s", total, strings.Join(lines, "\n"))
}
