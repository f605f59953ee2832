//go:build check

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
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

var (
	pairsOnly   = flag.String("pairs.only", "", "the only pairs that TestPairs tries, as 'reload+penalty', separated by commas")
	pairsSeed   = flag.Uint64("pairs.seed", sweep.Seed(), "the seed of what happens in a pair")
	pairsAtOnce = flag.Int("pairs.at-once", 4, "how many pairs TestPairs tries at the same time")
)

// pairTimeout bounds every wait.
const pairTimeout = time.Minute

// pairRun is a run of one pair.
type pairRun struct {
	t        *testing.T
	features []*feature
	rng      *rand.Rand

	caddy   *caddytest.Caddy
	client  *http.Client
	backend *httptest.Server
	// reached tells of requests that the backend does not answer.
	reached chan struct{}
	socket  string
	shards  map[string]*redistest.Shard
	filters map[string]*redistest.Filter

	// attachesLater is set if startShard has to attach the replica.
	attachesLater bool

	// These determine the config.
	alike, resharded bool
	life, percent    int
	tuned            string

	// loads counts replaced configs, hangUps requests that lost their connection and were repeated.
	loads, hangUps atomic.Int64

	madeUp    int
	strangers []pairClient
	answers   []pairAnswer
	// acquainted is set once each regular client has sent a request.
	acquainted bool
	// zones are those of the site: no step changes them.
	zones []string
	// newBuckets is how many buckets a zone may have opened for made-up clients, if that is bounded.
	newBuckets float64
	// books is what read returned last.
	books      pairBooks
	complaints int
}

func (p *pairRun) has(name string) bool {
	return slices.ContainsFunc(p.features, func(f *feature) bool { return f.name == name })
}

// await is eventually with pairTimeout.
func (p *pairRun) await(what string, f func() error) {
	p.t.Helper()
	for deadline := time.Now().Add(pairTimeout); ; time.Sleep(20 * time.Millisecond) { // polls
		err := f()
		switch {
		case err == nil:
			return
		case time.Now().After(deadline):
			p.t.Fatalf("waiting until %s: %v", what, err)
		}
	}
}

// TestPairs combines features two at a time. It sends some hundred concurrent requests of several
// clients amid reloads and disturbances of the features, and checks the same invariants for all
// pairs. Incompatible features are refused at load.
func TestPairs(t *testing.T) {
	t.Parallel()
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
		if sweep.IsWhole() {
			return allPairs()
		}
		return sweep.Of(t, somePairs(), 7)
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

// tryPair runs one pair with servers and a Caddy of its own.
func tryPair(t *testing.T, which pair, seed uint64) {
	began := time.Now()
	defer func() {
		if t.Failed() {
			t.Logf("to try this pair alone: go test -tags check -run 'TestPairs$' ./e2e -pairs.only '%s' -pairs.seed %d", which, seed)
		}
	}()
	name := fnv.New64a()
	_, _ = name.Write([]byte(which.String()))
	p := &pairRun{
		t: t, features: []*feature{&features[which[0]], &features[which[1]]}, rng: rand.New(rand.NewPCG(seed, name.Sum64())),
		shards: map[string]*redistest.Shard{}, filters: map[string]*redistest.Filter{}, percent: 30,
		reached: make(chan struct{}, 1),
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
		must(t, "load", want("having "+words+" in "+text, strings.Contains(text, words), true))
		return
	}
	p.zones = p.site().zonesOf()
	p.load()
	ready := time.Since(began)

	p.send(p.mix(1, 1, 0), nil, true)
	p.acquainted = true
	p.load()
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

// steps returns the disturbances and a reload, each at a random place among n requests.
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

// pairClient is a client as its requests describe it.
type pairClient struct {
	key, group string
	// modest clients stay below every limit, so that nothing may refuse them.
	modest, staff bool
}

// regulars send many requests, with keys that are long, binary, or resemble other syntax.
var regulars = []pairClient{
	{key: "alice", group: "calm", modest: true},
	{key: "{braces}:and:colons:", group: "calm", modest: true},
	{key: "{http.request.uri}", group: "calm", modest: true, staff: true},
	{key: strings.Repeat("long", 1000), group: "calm", modest: true},
	{key: "binary \xff\xfe\x80\xc3", group: "calm", modest: true},
	{key: "rl:3:api:fixed_window-3600s:alice", group: "calm", modest: true},
	{key: "greedy", group: "busy"},
	{key: "greedy too", group: "busy", staff: true},
	{key: "greedy \xc3(" + strings.Repeat("{", 100), group: "busy"},
	{key: "greedy " + strings.Repeat("\xf0long", 2000), group: "busy", staff: true},
}

const (
	// pairWorkers is how many requests run at the same time.
	pairWorkers = 24
	// pairSlack is how many requests may begin between the time of a step and its end.
	pairSlack = 40
)

// pairRequest is a request to send.
type pairRequest struct {
	pairClient
	// free requests get a status that costs nothing, logins one that empties the bucket.
	free, login bool
	// refused requests are those that the backend refuses for an hour.
	refused bool
	// low requests have the low limit, where limits differ.
	low bool
	// called requests are calls of the service.
	called bool
}

// pairAnswer is the outcome of a request.
type pairAnswer struct {
	pairRequest
	err    error
	status int
	// life is the store's under the config that answered; even ones count in Redis, odd ones in
	// memory.
	life int
	// outcome is the decision of each zone, if the request passed.
	outcome map[string]string
	header  http.Header
	// healthy is set if no server was down while it ran.
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
			r := pairRequest{pairClient: c, free: p.rng.IntN(8) == 0}
			r.low = p.has("limits differ") && !c.modest && p.rng.IntN(2) == 0
			r.called = p.mayCall(&r) && p.rng.IntN(2) == 0
			all = append(all, r)
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

// pairStep is done once that many requests have been answered.
type pairStep struct {
	after int
	do    func()
}

// send sends requests, many at a time, takes the steps in order, and records the answers. healthy
// says that no server is down during that time.
func (p *pairRun) send(requests []pairRequest, steps []pairStep, healthy bool) {
	p.t.Helper()
	began, loads := time.Now(), p.loads.Load()
	defer func() {
		// Each config begins with the number of a second. One that is being replaced still lets in
		// clients, beside the next one.
		p.newBuckets += float64(1+p.loads.Load()-loads) + 2*time.Since(began).Seconds()
	}()
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
	// A failed step ends the test, but only after the requests have ended.
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

// ask sends one request. A net/http server that shuts down closes connections whose requests no
// handler has seen; a client then retries.
func (p *pairRun) ask(r pairRequest) pairAnswer {
	for {
		a := p.askOnce(r)
		if a.status != 0 || p.hangUps.Add(1) > pairWorkers*p.loads.Load() {
			return a
		}
	}
}

func (p *pairRun) askOnce(r pairRequest) pairAnswer {
	if r.called {
		return p.call(r)
	}
	a := pairAnswer{pairRequest: r}
	path := "/"
	switch {
	case r.free:
		path = "/free"
	case r.login:
		path = "/login"
	case r.refused:
		path = "/refused"
	}
	req, err := p.request(context.Background(), path, r)
	if err != nil {
		a.err = err
		return a
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
	zone := resp.Header.Get("X-Ratelimit-Resource")
	hasStatus := p.has("status") && (zone == zoneAPI || p.alike && zone != "") && r.key != blockedClient.key
	switch {
	case hasStatus && a.status == http.StatusPaymentRequired:
		a.status = http.StatusTooManyRequests
	case hasStatus && a.status == http.StatusTooManyRequests:
		a.err = errors.New("zone " + zone + " refuses with 429 in place of its status")
		return a
	}
	switch {
	case a.status == http.StatusTooManyRequests:
	case a.status == http.StatusOK && !a.free, a.status == http.StatusNotModified && a.free, a.status == http.StatusNoContent && a.login, a.status == http.StatusServiceUnavailable && a.refused:
	default:
		a.err = errors.New("no answer of the site")
	}
	return a
}

func (p *pairRun) request(ctx context.Context, path string, r pairRequest) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://pair"+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Key", r.key)
	req.Header.Set("X-Group", r.group)
	if r.staff {
		req.Header.Set("X-Staff", "yes")
	}
	if r.low {
		req.Header.Set("X-Events", strconv.Itoa(lowLimit))
	}
	return req, nil
}

// startBackend starts the site's backend, which delays requests by up to 8 ms, and makes the
// client.
func (p *pairRun) startBackend() {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Duration(n.Add(1)%9) * time.Millisecond) // so that requests overlap
		switch r.URL.Path {
		case "/free":
			w.WriteHeader(http.StatusNotModified)
		case "/login":
			w.WriteHeader(http.StatusNoContent)
		case "/left":
			p.reached <- struct{}{}
			<-r.Context().Done()
		default:
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Encoding", "gzip")
			if r.URL.Path == "/refused" {
				w.Header().Set("Retry-After", "3600")
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			_, _ = w.Write(usage)
		}
	}))
	p.t.Cleanup(server.Close)
	p.backend = server
	// Caddy hands a Unix socket over at a reload. At a port the system would reset connections that
	// wait to be accepted.
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
