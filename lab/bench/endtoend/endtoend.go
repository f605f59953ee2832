// Package endtoend measures the cost of the limiter: CPU time per request in Caddy's
// process and in Redis, and latency. The baseline is the floor, a Caddy without a limiter
// that sends the same headers. All cases run in turn, several rounds; the figure of a
// case is its ratio to, or its difference from, the floor of the same round. A lab is all
// processes, an endpoint is a case, and a Result holds the measurements.
package endtoend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Options say how much is measured.
type Options struct {
	Rounds int           // of which the median counts; 0 means 9
	More   int           // most rounds that are added where these do not decide a goal
	Length time.Duration // of each case in a round; 0 means a second
	Quick  bool          // for tests: fewer clients, and no warm-up
	Caddy  string        // the path of a Caddy with this module; one is built if it is empty

	family []string // the names of the other servers
}

// sizes are the numbers on which the duration of a run depends.
type sizes struct {
	sweep, many int64 // clients in the sweep, and in its case with many keys
	// slices is the number of rounds of latencies in place of one round, each shorter than
	// Options.Length by the factor shorter: a pause of the machine then spoils less.
	slices, shorter int
	// pieces is the number of pieces of a round of the cases that have goals.
	pieces int
	// passes is how often clients that return come before they are measured.
	passes int64
}

func (o *Options) sizes() sizes {
	if o.Quick {
		return sizes{1_000, 5_000, 1, 1, 2, 0}
	}
	return sizes{30_000, 1_000_000, 2, 4, 12, 6}
}

// leadIn is how long a case runs before it is measured for some length, so that Caddy
// knows its clients as well as in the long run.
func leadIn(length time.Duration) time.Duration { return length / 8 }

// Run measures everything, and writes its progress to progress.
func Run(ctx context.Context, opts Options, progress io.Writer) (_ *Result, err error) {
	opts.Rounds, opts.Length = cmp.Or(opts.Rounds, 9), cmp.Or(opts.Length, time.Second)
	start := time.Now()
	say := func(format string, args ...any) {
		fmt.Fprintf(progress, "%4.0fs "+format+"\n", append([]any{time.Since(start).Seconds()}, args...)...)
	}
	l, err := openLab(opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	for _, other := range l.family {
		opts.family = append(opts.family, other.name)
	}
	r := &Result{
		opts: opts, baseCases: l.cases, cases: samples{}, sweep: samples{}, returning: samples{}, delays: samples{},
		latency: map[string]rounds{},
	}
	say("fill Redis with %d buckets, then memory: %d rounds", l.sizes.many, opts.Rounds)
	if err := l.fill(ctx, r); err != nil {
		return nil, err
	}
	if r.pings, err = l.pings(ctx); err != nil {
		return nil, err
	}
	if err := l.greet(ctx); err != nil {
		return nil, err
	}
	compared := append(slices.Clone(l.cases), l.counting(clients), l.pacing(clients, called(l.cases, ChargeAfter)))
	returning := []*endpoint{called(l.cases, Floor), l.returning, l.counting(manyClients), l.pacing(manyClients, l.returning)}
	delays := slices.Clone(l.delays)
	for _, keys := range delayClients {
		delays = append(delays, l.counting(keys))
	}
	for _, step := range []struct {
		name   string
		rounds int
		run    func(isCounted bool) error
		then   func() error // after the rounds; may be nil
	}{
		{
			"cases", opts.Rounds,
			func(isCounted bool) error { return l.measureAll(ctx, compared, l.sizes.pieces, r.cases, isCounted) },
			func() error { return l.addRounds(ctx, r, compared, r.cases, say) },
		},
		{
			"returning clients", opts.Rounds,
			func(isCounted bool) error {
				return l.measureKnown(ctx, returning, l.sizes.pieces, r.returning, isCounted)
			},
			func() error { return l.addRounds(ctx, r, returning, r.returning, say) },
		},
		{"charge_delay", opts.Rounds, func(isCounted bool) error { return l.measureKnown(ctx, delays, 1, r.delays, isCounted) }, nil},
		{"sweep", opts.Rounds, func(isCounted bool) error { return l.measureAll(ctx, l.sweep, 1, r.sweep, isCounted) }, nil},
		{"latency", opts.Rounds * l.sizes.slices, func(isCounted bool) error { return l.measureLatencies(ctx, r, isCounted) }, nil},
	} {
		// The first round opens windows and connections.
		for round := range step.rounds + 1 {
			if round == 0 && opts.Quick {
				continue
			}
			say("%s: round %d of %d", step.name, round, step.rounds)
			if err := step.run(round > 0); err != nil {
				return nil, fmt.Errorf("%s: %w", step.name, err)
			}
		}
		if step.then != nil {
			if err := step.then(); err != nil {
				return nil, fmt.Errorf("%s: %w", step.name, err)
			}
		}
	}
	if err := l.checkFilled(ctx); err != nil {
		return nil, err
	}
	r.took = time.Since(start)
	say("done")
	return r, nil
}

// lab is all processes: redis-servers, proxies, and Caddys. The second Caddy is for the
// case that fills its memory, which would change how often the garbage of other cases is
// collected.
type lab struct {
	opts          Options
	sizes         sizes
	shop          *site.Workshop
	turn          int // pieces that measureAll has measured
	shards        []*redistest.Shard
	family        []relative
	stores        stores
	first, second *site.Site

	cases, sweep, distances, delays []*endpoint
	returning                       *endpoint // measured by itself, with the floor in between
	many                            *endpoint // on the second Caddy
}

// stores are the stores of the cases. Several share servers, at different times.
type stores struct {
	base, batched, seldom, two, four, alone, followed, many redisStore
	far                                                     []*redisStore // in the order of roundTrips
	delayed                                                 []*redisStore // in the order of chargeDelays
}

func openLab(opts Options) (_ *lab, err error) {
	l := &lab{opts: opts, sizes: opts.sizes()}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if l.shop, err = site.Open(opts.Caddy); err != nil {
		return nil, err
	}
	// The shards are four equal ones, one without a replica, one with two, and one for many
	// keys.
	if err := l.launch(1, 1, 1, 1, 0, 2, 1); err != nil {
		return nil, err
	}
	if err := l.launchFamily(); err != nil {
		return nil, err
	}
	s := &l.stores
	*s = stores{
		base: redisStore{shards: l.shards[:1]}, batched: redisStore{name: "batched", shards: l.shards[1:2]},
		seldom: redisStore{name: "seldom", shards: l.shards[:1], options: checked},
		two:    redisStore{name: "two", shards: l.shards[:2], options: checked}, four: redisStore{name: "four", shards: l.shards[:4], options: checked},
		alone: redisStore{name: "alone", shards: l.shards[4:5], options: checked}, followed: redisStore{name: "followed", shards: l.shards[5:6], options: checked},
		many: redisStore{name: "many", shards: l.shards[6:7], options: checked},
	}
	for i, d := range chargeDelays {
		s.delayed = append(s.delayed, &redisStore{name: fmt.Sprintf("delay%d", i), shards: l.shards[:1], options: fmt.Sprintf("charge_delay %v", d), delay: d})
	}
	for i, d := range roundTrips {
		far, err := s.base.away(fmt.Sprintf("far%d", i), d)
		if err != nil {
			return nil, err
		}
		s.far = append(s.far, far)
	}
	l.cases, l.sweep, l.distances, l.delays = baseCases(s), l.sweepCases(), l.distanceCases(), l.delayCases()
	l.returning = l.limiting(ManyClients, &s.base, 1, "")
	l.returning.keys = manyClients
	var first []*endpoint
	for _, c := range slices.Concat(l.cases, []*endpoint{l.returning}, l.sweep, l.distances, l.delays) {
		if c.isAlone {
			l.many = c
		} else {
			first = append(first, c)
		}
	}
	if l.first, err = l.startCaddy(first); err != nil {
		return nil, err
	}
	l.second, err = l.startCaddy([]*endpoint{l.many})
	return l, err
}

// counting returns a case that counts in Redis without a limiter. Its keys are as many as the
// clients of the case that is compared with it: the more keys, the less of Redis's memory is in
// the processor's caches.
func (l *lab) counting(keys int64) *endpoint {
	return &endpoint{name: countingName(keys), status: 200, keys: keys, store: &l.stores.base, direct: l.shards[0].Primary.Client(), caddy: l.first}
}

func countingName(keys int64) string { return Calibration + ", " + grouped(keys) + " keys" }

// pacing returns a case that counts as many requests a second as the clients of another send.
func (l *lab) pacing(keys int64, of *endpoint) *endpoint {
	c := l.counting(keys)
	c.name, c.paceOf = pacingName(keys), of
	return c
}

func pacingName(keys int64) string { return countingName(keys) + ", at their pace" }

func (l *lab) launch(replicas ...int) error {
	l.shards = make([]*redistest.Shard, len(replicas))
	return traffic.Together(len(replicas), func(i int) (err error) {
		l.shards[i], err = launchShard(replicas[i])
		return err
	})
}

// launchFamily launches a shard of each other server of the family, if the tests have any.
func (l *lab) launchFamily() error {
	programs, err := redistest.Family()
	if err != nil {
		return err
	}
	for i, program := range programs[1:] {
		shard, err := launchShard(1, redistest.Program(program))
		if err != nil {
			return err
		}
		l.shards = append(l.shards, shard)
		l.family = append(l.family, relative{
			filepath.Base(program), &redisStore{name: fmt.Sprintf("family%d", i), shards: []*redistest.Shard{shard}, options: checked},
		})
	}
	return nil
}

// relative is another server of the family, and a store on it.
type relative struct {
	name  string
	store *redisStore
}

func (l *lab) close() (err error) {
	for _, s := range []*site.Site{l.first, l.second} {
		if s != nil {
			s.Stop()
		}
	}
	for _, far := range l.stores.far {
		err = errors.Join(err, traffic.Each(far.proxies, (*redistest.Proxy).Close))
	}
	for _, shard := range l.shards {
		if shard != nil {
			err = errors.Join(err, shard.Stop())
		}
	}
	if l.shop != nil {
		err = errors.Join(err, l.shop.Close())
	}
	return err
}

func (l *lab) startCaddy(cases []*endpoint) (*site.Site, error) {
	config := site.Config{Log: "level ERROR", Stderr: true, Stores: "store memory memory\n"}
	// Connections of unused stores would cost both Caddys something.
	wanted := map[*redisStore]bool{}
	for _, c := range cases {
		if !wanted[c.store] {
			wanted[c.store] = true
			config.Stores += c.store.text()
		}
		config.Routes = append(config.Routes, c.text)
	}
	s, err := l.shop.Start(config)
	if err != nil {
		return nil, err
	}
	for i, c := range cases {
		// A new Caddy knows no client, so its cases start with the first one.
		c.addr, c.caddy, c.sent = s.Addrs[i], s, 0
	}
	return s, nil
}

// redisStore is a store of the Caddyfile with its servers.
type redisStore struct {
	name    string // empty for the default one
	options string
	delay   time.Duration // charge_delay, if it is not the default
	shards  []*redistest.Shard
	proxies []*redistest.Proxy // of the servers of the only shard, the primary first
}

func servers(shard *redistest.Shard) []*redistest.Server {
	return append([]*redistest.Server{shard.Primary}, shard.Replicas...)
}

func shardName(i int) string { return string(rune('a' + i)) }

// text is the store in the Caddyfile. Its timeouts do not pass on a busy machine.
func (s *redisStore) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "store %s redis {\n", s.name)
	for i, shard := range s.shards {
		var addrs []string
		for _, server := range servers(shard) {
			addrs = append(addrs, server.Addr())
		}
		for i, p := range s.proxies {
			addrs[i] = p.Addr()
		}
		fmt.Fprintf(&b, "shard %s {\nprimary %s\n", shardName(i), addrs[0])
		if len(addrs) > 1 {
			fmt.Fprintf(&b, "replica %s\n", strings.Join(addrs[1:], " "))
		}
		b.WriteString("}\n")
	}
	fmt.Fprintf(&b, "check_timeout 5s\ncharge_timeout 5s\n%s\n}\n", s.options)
	return b.String()
}

// away returns a store on the same servers behind proxies that lengthen the round trip.
func (s *redisStore) away(name string, roundTrip time.Duration) (*redisStore, error) {
	far := &redisStore{name: name, shards: s.shards, options: checked}
	for _, server := range servers(s.shards[0]) {
		p, err := redistest.NewProxy(server.Addr())
		if err == nil {
			far.proxies = append(far.proxies, p)
			err = p.Delay(roundTrip)
		}
		if err != nil {
			return nil, errors.Join(err, traffic.Each(far.proxies, (*redistest.Proxy).Close))
		}
	}
	return far, nil
}

// launchShard starts a primary and replicas. The replicas of redistest.LaunchShard reach
// their primary through a proxy in this process, which costs CPU that the load needs.
func launchShard(replicas int, opts ...redistest.Option) (*redistest.Shard, error) {
	primary, err := redistest.Launch(opts...)
	if err != nil {
		return nil, fmt.Errorf("launch primary: %w", err)
	}
	shard := &redistest.Shard{Primary: primary}
	host, port, _ := strings.Cut(primary.Addr(), ":")
	for range replicas {
		replica, err := redistest.Launch(append(opts, redistest.Args("--replicaof", host, port))...)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("launch replica: %w", err), shard.Stop())
		}
		shard.Replicas = append(shard.Replicas, replica)
	}
	return shard, nil
}

// endpoint is a case, a site of the Caddyfile.
type endpoint struct {
	name, text string
	status     int             // of nearly all responses
	floor      string          // the name of the case to compare with, if any
	limit      float64         // the goal for the ratio of CPU to the floor, if any
	keys       int64           // distinct clients
	store      *redisStore     // where it counts, or whose servers idle meanwhile
	limits     []*store.Limit  // those in which clients get buckets beforehand
	isAlone    bool            // in the second Caddy
	isAway     bool            // other cases keep its clients away for longer than they pause
	direct     *goredis.Client // set if it counts in Redis without Caddy
	paceOf     *endpoint       // set if it counts no faster than this case has sent

	addr  string
	caddy *site.Site
	sent  int64   // requests so far; the next ones come from the clients that follow
	rate  float64 // requests/s when it last sent
}

func called(cases []*endpoint, name string) *endpoint {
	return cases[slices.IndexFunc(cases, func(c *endpoint) bool { return c.name == name })]
}

// The cases that other packages use.
const (
	Floor        = "respond, five headers"
	ChargeAfter  = "redis store"
	ManyClients  = "redis store, 50,000 clients"
	NewClients   = "redis store, clients never seen before"
	Calibration  = "INCRBY and EXPIRE, in pipelines of 32"
	ChargeBefore = "redis store, charge before"
	BatchAuto    = "redis store, batch auto"
	Refused      = "redis store, refused"

	SweepBase  = "base"
	TwoShards  = "2 shards"
	FourShards = "4 shards"
)

// The names of other cases that the code refers to.
const (
	memoryStore  = "memory store"
	refusedFloor = "error 429, seven headers"
	refusedHot   = "redis store, one refused key"
	manyKeys     = "many keys"
	fewerKeys    = "fewer keys"
)

// The bounds for the CPU of Caddy, relative to the floor.
const (
	memoryBound      = 1.08
	chargeAfterBound = 1.22
	manyBound        = 1.50
	newBound         = 1.70
	batchBound       = 1.08
	refusedHotBound  = 1.08
)

const (
	clients     = 500
	manyClients = 50_000 // of ManyClients
	connections = 64     // requests at a time
)

const fiveHeaders = `
	header X-RateLimit-Limit 50000000
	header X-RateLimit-Remaining 49999999
	header X-RateLimit-Used 1
	header X-RateLimit-Reset 1800000000
	header X-RateLimit-Resource default
`

func limited(store, zone, key, options string) string {
	return fmt.Sprintf("rate_limit {\n%s\nzone %s {\nkey %s\n%s\n}\n}\nrespond ok", store, zone, key, options)
}

const (
	byHeader = "{header.X-Key}"
	plenty   = "events 50000000\nwindow 24h"
)

// baseCases count in the default store or on its servers, except for one: a Caddy that
// takes batches calls Redis every second from then on, which would show in all other cases.
func baseCases(s *stores) []*endpoint {
	const refusedFloorText, refusedHotText = fiveHeaders + "header Retry-After 86400\nheader Cache-Control no-store\nerror 429", "rate_limit static 1 24h attacked\nrespond ok"
	cases := []*endpoint{
		{name: "respond", text: "respond ok"},
		{name: Floor, text: fiveHeaders + "respond ok"},
		{name: memoryStore, floor: Floor, limit: memoryBound, text: limited("store memory", "memory", byHeader, plenty)},
		{name: ChargeAfter, floor: Floor, limit: chargeAfterBound, text: "rate_limit {header.X-Key} 50000000 24h\nrespond ok"},
		{name: NewClients, floor: Floor, limit: newBound, keys: math.MaxInt64, text: "rate_limit {header.X-Key} 50000000 24h new\nrespond ok"},
		{name: "redis store, one hot key", floor: Floor, text: "rate_limit static 50000000 24h hot\nrespond ok"},
		{name: ChargeBefore, floor: Floor, text: limited("", "before", byHeader, plenty+"\ncharge before")},
		{name: "redis store, charge before, one hot key", floor: Floor, text: limited("", "before_hot", "static", plenty+"\ncharge before")},
		{
			name: BatchAuto, floor: Floor, limit: batchBound, store: &s.batched,
			text: limited("store batched", "batch", "static", "events 1000000\nwindow 1m\ncharge before\nbatch auto"),
		},
		{name: refusedFloor, status: 429, text: refusedFloorText},
		{name: "memory store, refused", status: 429, floor: refusedFloor, text: limited("store memory", "refused", byHeader, "events 1\nwindow 24h")},
		{name: Refused, status: 429, floor: refusedFloor, text: "rate_limit {header.X-Key} 1 24h refused\nrespond ok"},
		{name: refusedHot, status: 429, floor: refusedFloor, limit: refusedHotBound, text: refusedHotText},
	}
	for _, c := range cases {
		c.store = cmp.Or(c.store, &s.base)
		c.keys, c.status = cmp.Or(c.keys, clients), cmp.Or(c.status, 200)
	}
	return cases
}

// checked are the options of a store that checks each request of a client that comes
// seldom, as it does with clients that come to several Caddys.
const checked = "ledger_trust 0"

// chargeDelays and delayClients are what the sweep of charge_delay goes through: a
// client of many comes less often.
var (
	chargeDelays = []time.Duration{0, 10 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond}
	delayClients = []int64{50, 500, 5_000, 50_000}
)

func delayName(clients int64, delay time.Duration) string {
	return fmt.Sprintf("%s clients, %v", grouped(clients), delay)
}

func (l *lab) delayCases() (cases []*endpoint) {
	for _, clients := range delayClients {
		for i, d := range chargeDelays {
			c := l.limiting(delayName(clients, d), l.stores.delayed[i], 1, "")
			c.keys, c.isAway = clients, true
			cases = append(cases, c)
		}
	}
	return cases
}

// roundTrips are the distances of Redis that proxies simulate.
var roundTrips = []time.Duration{0, time.Millisecond, 5 * time.Millisecond}

func (l *lab) limiting(name string, counting *redisStore, zones int, options string) *endpoint {
	c := &endpoint{name: name, status: 200, floor: Floor, keys: l.sizes.sweep, store: counting}
	var b strings.Builder
	b.WriteString("rate_limit {\n")
	if counting.name != "" {
		fmt.Fprintf(&b, "store %s\n", counting.name)
	}
	for i := range zones {
		// Windows of the same length would begin and end together.
		limit := &store.Limit{
			Zone:      strings.NewReplacer(" ", "_", ",", "").Replace(name) + "_" + strconv.Itoa(i),
			Algorithm: store.FixedWindow, Window: time.Duration(i+1) * 24 * time.Hour,
		}
		c.limits = append(c.limits, limit)
		fmt.Fprintf(&b, "zone %s {\nkey {header.X-Key}\nevents 50000000\nwindow %v\n%s\n}\n", limit.Zone, limit.Window, options)
	}
	b.WriteString("}\nrespond ok")
	c.text = b.String()
	return c
}

func (l *lab) sweepCases() []*endpoint {
	s := &l.stores
	oneKey, someKeys := l.limiting("1 key", &s.seldom, 1, ""), l.limiting(fewerKeys, &s.seldom, 1, "")
	oneKey.keys, someKeys.keys = 1, l.sizes.sweep/3
	many := l.limiting(manyKeys, &s.many, 1, "")
	many.keys, many.isAlone = l.sizes.many, true
	cases := []*endpoint{
		{name: Floor, text: fiveHeaders + "respond ok", status: 200, keys: l.sizes.sweep, store: &s.base},
		l.limiting(SweepBase, &s.seldom, 1, ""),
		l.limiting(TwoShards, &s.two, 1, ""),
		l.limiting(FourShards, &s.four, 1, ""),
		l.limiting("no replica", &s.alone, 1, ""),
		l.limiting("2 replicas", &s.followed, 1, ""),
		l.limiting("3 zones", &s.seldom, 3, ""),
		oneKey, someKeys, many,
	}
	for i, far := range s.far {
		cases = append(cases, l.limiting(distanceName(roundTrips[i]), far, 1, ""))
	}
	for _, other := range l.family {
		cases = append(cases, l.limiting(other.name, other.store, 1, ""))
	}
	return cases
}

func (l *lab) distanceCases() (cases []*endpoint) {
	for i, far := range l.stores.far {
		cases = append(cases, l.limiting(beforeName(roundTrips[i]), far, 1, "charge before"))
	}
	return cases
}

func distanceName(roundTrip time.Duration) string {
	if roundTrip == 0 {
		return "a proxy between"
	}
	return fmt.Sprintf("%v ms away", float64(roundTrip)/float64(time.Millisecond))
}

func beforeName(roundTrip time.Duration) string { return distanceName(roundTrip) + ", charge before" }
