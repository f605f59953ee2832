package shardlimit_test

import (
	"errors"
	"flag"
	"hash/fnv"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
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

// pairPatience bounds every wait.
const pairPatience = time.Minute

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
	for deadline := time.Now().Add(pairPatience); ; time.Sleep(20 * time.Millisecond) {
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
			t.Logf("to try this pair alone: go test -run 'TestPairs$' -pairs.only '%s' -pairs.seed %d .", which, seed)
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
