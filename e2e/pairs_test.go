package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var (
	pairsAll    = flag.Bool("pairs.all", false, "TestPairs tries all pairs of features, not a handful")
	pairsOnly   = flag.String("pairs.only", "", "the only pairs that TestPairs tries, as 'reload+penalty', separated by commas")
	pairsSeed   = flag.Uint64("pairs.seed", 1, "the seed of TestPairs")
	pairsAtOnce = flag.Int("pairs.at-once", 4, "how many pairs TestPairs tries at the same time")
)

// pairTimeout bounds every wait.
const pairTimeout = time.Minute

// pairRun is a pair that is tried.
type pairRun struct {
	t        *testing.T
	features []*feature
	rng      *rand.Rand

	caddy   *caddytest.Caddy
	client  *http.Client
	backend *httptest.Server
	socket  string
	shards  map[string]*redistest.Shard

	// attachesLater is set if the replica is to be attached when its primary is back.
	attachesLater bool

	// What the config depends on.
	alike, resharded bool
	life, percent    int
	tuned            string

	// loads is how often the config was replaced, hangUps how many requests lost
	// their connection and were repeated.
	loads, hangUps atomic.Int64

	madeUp    int
	strangers []pairClient
	answers   []pairAnswer
	// books are what was read last.
	books      pairBooks
	complaints int
}

func (p *pairRun) has(name string) bool {
	return slices.ContainsFunc(p.features, func(f *feature) bool { return f.name == name })
}

// await is eventually with the patience of pairs.
func (p *pairRun) await(what string, f func() error) {
	p.t.Helper()
	for deadline := time.Now().Add(pairTimeout); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		switch {
		case err == nil:
			return
		case time.Now().After(deadline):
			p.t.Fatalf("waiting until %s: %v", what, err)
		}
	}
}

// TestPairs combines features two at a time: some hundred concurrent requests of
// several clients, with what the features disturb and reloads among them, and the
// same invariants for all of them. Pairs that exclude each other are refused at
// load.
func TestPairs(t *testing.T) {
	began := time.Now()
	all := pairsToTry(t)
	// They spend most of their time waiting, for processes and for delays.
	var running sync.WaitGroup
	slots := make(chan struct{}, *pairsAtOnce)
	for _, p := range all {
		running.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			t.Run(p.String(), func(t *testing.T) { tryPair(t, p, *pairsSeed) })
		})
	}
	running.Wait()
	t.Logf("%d pairs with seed %d in %v", len(all), *pairsSeed, time.Since(began).Round(time.Second))
}

func pairsToTry(t *testing.T) []pair {
	t.Helper()
	if *pairsOnly == "" {
		if *pairsAll {
			return allPairs()
		}
		return somePairs()
	}
	var some []pair
	for name := range strings.SplitSeq(*pairsOnly, ",") {
		a, b, _ := strings.Cut(name, "+")
		i := slices.IndexFunc(allPairs(), func(p pair) bool { return p.String() == a+"+"+b || p.String() == b+"+"+a })
		if i < 0 {
			t.Fatalf("there is no pair %q", name)
		}
		some = append(some, allPairs()[i])
	}
	return some
}

// tryPair runs one pair in a world of its own.
func tryPair(t *testing.T, which pair, seed uint64) {
	began := time.Now()
	defer func() {
		if t.Failed() {
			t.Logf("to try this pair alone: go test -run 'TestPairs$' ./e2e -pairs.only '%s' -pairs.seed %d", which, seed)
		}
	}()
	name := fnv.New64a()
	_, _ = name.Write([]byte(which.String()))
	p := &pairRun{
		t: t, features: []*feature{&features[which[0]], &features[which[1]]}, rng: rand.New(rand.NewPCG(seed, name.Sum64())),
		shards: map[string]*redistest.Shard{}, percent: 30,
	}
	p.alike = p.rng.IntN(2) == 0
	dir, err := os.MkdirTemp("", "pair") // a socket's path is short
	must(t, "make a folder", err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p.socket = filepath.Join(dir, "site")
	p.startBackend()
	p.caddy = caddytest.Start(t, unlimitedSite, exactHeap+"=1")
	before := holdingsOf(p.caddy)
	must(t, "a Caddy without a limiter", errors.Join(want("goroutines", before.Goroutines, 0), want("bytes of stores being few", before.Bytes <= spareBytes, true)))

	if words := which.exclusion(); words != "" {
		status, text := p.caddy.Load(p.site().caddyfile())
		must(t, "load", want("status", status, http.StatusBadRequest))
		must(t, "load", want("telling of "+words+", in "+text, strings.Contains(text, words), true))
		return
	}
	p.load()
	ready := time.Since(began)

	p.send(p.mix(1, 1, 0), nil, true)
	p.send(p.mix(8, 70, 40), p.steps(40*4+8*6), !p.bounds().faults)
	p.awaitWhole()
	p.settle()
	p.send(p.mix(4, 10, 10), []pairStep{{20, p.load}}, true)
	p.settle()
	p.probe()
	counted := p.settle()
	p.check()
	p.unload()
	t.Logf("%s; ready after %v, done after %v", counted, ready.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
}

// steps are what disturbs, and a reload, each at a random time among n requests.
func (p *pairRun) steps(n int) (all []pairStep) {
	draw := func(do []func()) {
		times := make([]int, len(do))
		for i := range times {
			times[i] = p.rng.IntN(n)
		}
		slices.Sort(times)
		for i, f := range do {
			all = append(all, pairStep{times[i], f})
		}
	}
	draw([]func(){p.load})
	for _, f := range p.features {
		if f.disturb != nil {
			draw(f.disturb(p))
		}
	}
	slices.SortStableFunc(all, func(a, b pairStep) int { return a.after - b.after })
	return all
}

// pairClient is a client and what its requests say of it.
type pairClient struct {
	key, group string
	// modest ones stay below every limit, so nothing may refuse them.
	modest, staff bool
}

// regulars come again and again, with keys that are long, binary, or look like
// something else.
var regulars = []pairClient{
	{key: "alice", group: "calm", modest: true},
	{key: "{braces}:and:colons:", group: "calm", modest: true},
	{key: "{http.request.uri}", group: "calm", modest: true, staff: true},
	{key: strings.Repeat("long", 1000), group: "calm", modest: true},
	{key: "binary \xff\xfe\x80\xc3", group: "calm", modest: true},
	{key: "rl:1:api:fixed_window-3600s:alice", group: "calm", modest: true},
	{key: "greedy", group: "busy"},
	{key: "greedy too", group: "busy", staff: true},
	{key: "greedy \xc3(" + strings.Repeat("{", 100), group: "busy"},
	{key: "greedy " + strings.Repeat("\xf0long", 2000), group: "busy", staff: true},
}

const (
	// pairWorkers is how many requests run at the same time.
	pairWorkers = 24
	// pairSlack is how many requests may begin after the instant at which something
	// is to happen, before it has.
	pairSlack = 40
)

// request is one to come.
type pairRequest struct {
	pairClient
	// free ones get a status that costs nothing.
	free bool
}

// pairAnswer is what became of it.
type pairAnswer struct {
	pairRequest
	err    error
	status int
	// life is that of the store under the config that answered; its parity tells
	// where that counts.
	life int
	// outcome is what zones decided, if they let it pass.
	outcome map[string]string
	header  http.Header
	// healthy is set if no server was away while it ran.
	healthy bool
}

func (a *pairAnswer) served() bool { return a.err == nil && a.status == http.StatusOK }

// mix returns requests of the regulars and of made-up clients, in random order.
func (p *pairRun) mix(modest, greedy, madeUp int) (all []pairRequest) {
	for _, c := range regulars {
		n := greedy
		if c.modest {
			n = modest
		}
		for range n {
			all = append(all, pairRequest{c, p.rng.IntN(8) == 0})
		}
	}
	for range madeUp {
		p.madeUp++
		key := fmt.Sprint("made-up-", p.madeUp)
		if p.rng.IntN(4) == 0 {
			key += strings.Repeat("\xfflong", 400)
		}
		c := pairClient{key: key, group: "once"}
		p.strangers = append(p.strangers, c)
		all = append(all, pairRequest{pairClient: c})
	}
	p.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// step is something that happens once as many requests have been answered.
type pairStep struct {
	after int
	do    func()
}

// send makes requests, many at a time, while steps are taken in order, and adds
// what is answered. healthy says that no server is away meanwhile.
func (p *pairRun) send(requests []pairRequest, steps []pairStep, healthy bool) {
	p.t.Helper()
	var (
		mu             sync.Mutex
		changed        = sync.NewCond(&mu)
		begun, ended   int
		taken          int
		workers        sync.WaitGroup
		answers        []pairAnswer
		isAllowedBegin = func() bool {
			return taken == len(steps) || begun < steps[taken].after+pairSlack
		}
	)
	// What fails in a step ends the test, but not before the requests have ended.
	defer func() {
		mu.Lock()
		if p.t.Failed() {
			begun = len(requests)
		}
		taken = len(steps)
		changed.Broadcast()
		mu.Unlock()
		workers.Wait()
		p.answers = append(p.answers, answers...)
	}()
	for range pairWorkers {
		workers.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			for {
				for begun < len(requests) && !isAllowedBegin() {
					changed.Wait()
				}
				if begun == len(requests) {
					return
				}
				r := requests[begun]
				begun++
				mu.Unlock()
				a := p.ask(r)
				a.healthy = healthy
				mu.Lock()
				answers = append(answers, a)
				ended++
				changed.Broadcast()
			}
		})
	}
	for _, step := range steps {
		mu.Lock()
		for ended < min(step.after, len(requests)) {
			changed.Wait()
		}
		mu.Unlock()
		step.do()
		mu.Lock()
		taken++
		changed.Broadcast()
		mu.Unlock()
	}
}

// ask makes one request. While a server of net/http is shut down it hangs up on
// requests that it reads, before anybody sees them; a client then asks again.
func (p *pairRun) ask(r pairRequest) pairAnswer {
	for {
		a := p.askOnce(r)
		if a.status != 0 || p.hangUps.Add(1) > pairWorkers*p.loads.Load() {
			return a
		}
	}
}

func (p *pairRun) askOnce(r pairRequest) pairAnswer {
	a := pairAnswer{pairRequest: r}
	path := "/"
	if r.free {
		path = "/free"
	}
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://pair"+path, nil)
	if err != nil {
		a.err = err
		return a
	}
	req.Header.Set("X-Key", r.key)
	req.Header.Set("X-Group", r.group)
	if r.staff {
		req.Header.Set("X-Staff", "yes")
	}
	resp, err := p.client.Do(req)
	if err != nil {
		a.err = err
		return a
	}
	defer resp.Body.Close()
	if _, a.err = io.Copy(io.Discard, resp.Body); a.err != nil {
		return a
	}
	a.status, a.header = resp.StatusCode, resp.Header
	a.life, _ = strconv.Atoi(resp.Header.Get("X-Life"))
	a.outcome = map[string]string{}
	for _, zone := range []string{zoneAPI, zoneGroup, zoneInner} {
		a.outcome[zone] = resp.Header.Get("X-Outcome-" + zone)
	}
	switch {
	case a.status == http.StatusTooManyRequests:
	case a.status == http.StatusOK && !a.free, a.status == http.StatusNotModified && a.free:
	default:
		a.err = errors.New("no answer of the site")
	}
	return a
}

// startBackend starts what the site limits the way to. It holds each request for
// a moment, and some longer.
func (p *pairRun) startBackend() {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Duration(n.Add(1)%9) * time.Millisecond)
		if r.URL.Path == "/free" {
			w.WriteHeader(http.StatusNotModified)
		}
	}))
	p.t.Cleanup(server.Close)
	p.backend = server
	// Caddy hands a Unix socket on when the config changes. Of connections to a
	// port the system resets those that wait to be accepted then.
	p.client = &http.Client{
		Transport: &http.Transport{
			DisableCompression: true, MaxIdleConnsPerHost: pairWorkers,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", p.socket)
			},
		},
		Timeout: pairTimeout,
	}
	p.t.Cleanup(p.client.CloseIdleConnections)
}
