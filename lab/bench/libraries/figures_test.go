package libraries

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// crowded is a number of goroutines with goals.
const crowded = 256

// twoPeers is a comparison of two peers with two of ours, in two rounds.
func twoPeers() *comparison {
	peer := &limiter{kind: &kind{name: "peer"}}
	return &comparison{
		scene:    scene{goroutines: crowded},
		limiters: []*limiter{peer, peer, {kind: takeFixedWindow}, {kind: checkAndCharge}},
		samples: [][]sample{
			{{rate: 10}, {rate: 40}}, {{rate: 20}, {rate: 30}}, {{rate: 30}, {rate: 50}}, {{rate: 5}, {rate: 30}},
		},
	}
}

// TestRatiosAreToTheFastestPeerInTheSameRound: the second is it by the median,
// though the first is in one of the rounds.
func TestRatiosAreToTheFastestPeerInTheSameRound(t *testing.T) {
	c := twoPeers()
	c.samples[1][1].rate = 32
	if got, want := c.ratio(2), (report.Spread{Median: (1.5 + 50.0/32) / 2, Least: 1.5, Most: 50.0 / 32}); got != want {
		t.Errorf("ratios %v, want %v", got, want)
	}
}

// TestAddedRoundsKeepTheFastestPeer, though it was slower in them than another that had none.
func TestAddedRoundsKeepTheFastestPeer(t *testing.T) {
	c := twoPeers()
	c.samples[1][1].rate = 32
	c.samples[0] = append(c.samples[0], sample{rate: 40})
	for i := 1; i < 3; i++ {
		c.samples[i] = append(c.samples[i], sample{rate: 1}, sample{rate: 2})
	}
	if got, want := c.ratios(2), []float64{1.5, 50.0 / 32, 1, 1}; c.fastest() != 1 || !slices.Equal(got, want) {
		t.Errorf("ratios to peer %d: %v, want %v", c.fastest(), got, want)
	}
}

func TestGoals(t *testing.T) {
	refused := twoPeers()
	refused.scene.refused = true
	r := &Result{shared: []*comparison{twoPeers(), refused}}
	var got []string
	for _, g := range r.Goals() {
		got = append(got, g.What)
	}
	want := []string{
		"Take, fixed window, 256 goroutines ÷ fastest peer",
		"check + charge, fixed window, 256 goroutines ÷ fastest peer",
		"Take, fixed window, 256 goroutines, refused ÷ fastest peer",
	}
	if !slices.Equal(got, want) {
		t.Errorf("goals %q, want %q", got, want)
	}
}

// TestUndecidedLimiters: a limiter whose goal lies within the interval of its rounds has more of
// them, with the fastest peer, and no other has.
func TestUndecidedLimiters(t *testing.T) {
	of := func(rates ...float64) (samples []sample) {
		for _, r := range rates {
			samples = append(samples, sample{rate: r})
		}
		return samples
	}
	slower, peer := of(9, 9, 9, 9, 9, 9, 9, 9, 9), of(10, 10, 10, 10, 10, 10, 10, 10, 10)
	for _, c := range []struct {
		what       string
		goroutines int
		take       []sample
		want       []int
	}{
		{"far above the bound of 1.9", crowded, of(25, 26, 27, 28, 29, 30, 31, 32, 33), nil},
		{"far below it", crowded, of(2, 3, 4, 5, 6, 7, 8, 9, 10), nil},
		{"on both sides of it", crowded, of(25, 18, 25, 25, 25, 25, 25, 25, 25), []int{1, 2}},
		{"without a goal", 3, of(25, 18, 25, 18, 25, 18, 25, 18, 25), nil},
	} {
		compared := &comparison{
			scene:    scene{goroutines: c.goroutines},
			limiters: []*limiter{{kind: &kind{name: "slower"}}, {kind: &kind{name: "peer"}}, {kind: takeFixedWindow}},
			samples:  [][]sample{slower, peer, c.take},
		}
		if got := compared.undecided(); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v are undecided, want %v", c.what, got, c.want)
		}
	}
}

func TestCountCalls(t *testing.T) {
	made := map[string]int64{"time": 7, "eval": 5, "get": 12}
	if n := countCalls(made, map[string]int64{"time": 2, "eval": 1, "setnx": 1}); n != 19 {
		t.Errorf("%d calls, want 19", n)
	}
}

func TestLoadCountsAllDecisions(t *testing.T) {
	const stride = 3
	l := newLoad(4, stride, time.Millisecond)
	decisions, admitted := 0, 0
	for decisions == 0 { // the test's timeout ends this
		if _, err := l.run(func(_ context.Context, key string) (bool, error) {
			return strings.HasPrefix(key, "client-"), nil
		}, new(limiter).settled, time.Millisecond); err != nil {
			t.Fatal(err)
		}
		decisions, admitted = l.counts()
	}
	if decisions%stride != 0 || admitted != decisions {
		t.Errorf("%d of %d decisions admit", admitted, decisions)
	}
	var failed error
	for before := decisions; failed == nil && decisions == before; decisions, _ = l.counts() { // the test's timeout ends this
		_, failed = l.run(func(context.Context, string) (bool, error) { return false, context.Canceled }, new(limiter).settled, time.Millisecond)
	}
	if failed == nil {
		t.Error("an error was lost")
	}
}

func TestShortName(t *testing.T) {
	for module, want := range map[string]string{
		"github.com/redis/go-redis/v9":    "redis/go-redis",
		"github.com/envoyproxy/ratelimit": "envoyproxy/ratelimit",
		"golang.org/x/time":               "x/time",
	} {
		if got := shortName(module); got != want {
			t.Errorf("%s: %s, want %s", module, got, want)
		}
	}
}

func TestAllCount(t *testing.T) {
	server := redistest.Start(t)
	for _, k := range redisKinds {
		requireCounts(t, k, server, 4)
	}
	for _, k := range memoryKinds {
		requireCounts(t, k, nil, 0)
	}
}

func requireCounts(t *testing.T, k *kind, server *redistest.Server, pool int) {
	t.Helper()
	addr := ""
	if server != nil {
		addr = server.Addr()
	}
	l, err := openLimiter(k, addr, pool)
	redistest.Must(t, err)
	defer l.close()
	// Each begins anew.
	for range 2 {
		if err := checkCount(l, server); err != nil {
			t.Errorf("%s: %v", k.name, err)
		}
	}
}

func TestCheckCountFindsThoseThatDoNot(t *testing.T) {
	server := redistest.Start(t)
	for name, d := range map[string]decide{
		"admits all":    func(context.Context, string) (bool, error) { return true, nil },
		"refuses all":   func(context.Context, string) (bool, error) { return false, nil },
		"has one count": onlyFive(),
	} {
		l := &limiter{limit: func(int) (decide, error) { return d, nil }}
		if checkCount(l, server) == nil {
			t.Errorf("a limiter that %s is said to count", name)
		}
	}
}

func onlyFive() decide {
	n := 0
	return func(context.Context, string) (bool, error) {
		n++
		return n <= 5, nil
	}
}

// TestFailuresAreErrors asks peers whose server is gone.
func TestFailuresAreErrors(t *testing.T) {
	server := redistest.Start(t)
	asked := map[string]decide{}
	for _, k := range peers {
		l, err := openLimiter(k, server.Addr(), 1)
		redistest.Must(t, err)
		t.Cleanup(l.close)
		if asked[k.name], err = l.limit(plenty); err != nil {
			t.Fatal(err)
		}
	}
	redistest.Must(t, server.Kill())
	for name, d := range asked {
		if _, err := d(t.Context(), "a"); err == nil {
			t.Errorf("%s: no error without a server", name)
		}
	}
}

// TestTablesTellOfAllRounds: each figure has its least and most, and what is the
// same in all rounds stands alone.
func TestTablesTellOfAllRounds(t *testing.T) {
	first := sample{rate: 1e6, client: 3, server: 5, allocations: 7, bytes: 9, calls: 2, latency: 1}
	second := sample{rate: 2e6, client: 5, server: 7, allocations: 8, bytes: 19, calls: 2, latency: 2}
	peer := sample{rate: 1e6}
	c := &comparison{
		scene:    scene{goroutines: detailedWith},
		limiters: []*limiter{{kind: &kind{name: "peer"}, pool: 8}, {kind: takeFixedWindow, pool: 4}},
		samples:  [][]sample{{peer, peer}, {first, second}},
	}
	refused := *c
	refused.scene.refused, refused.samples = true, [][]sample{{peer, peer}, {first, first}}
	r := &Result{opts: Options{Goroutines: []int{detailedWith}}, shared: []*comparison{c}, apart: []*comparison{&refused, c}}
	text := c.table() + r.memoryTables()
	lines := slices.Collect(strings.Lines(text))
	const name = "| Take, fixed window | "
	for _, want := range []string{
		name + "4 | 1500000 (1000000 to 2000000) | 1.50 (1.00 to 2.00) | 4.0 (3.0 to 5.0) | 6.0 (5.0 to 7.0) | 2.00 | 7.5 (7.0 to 8.0) | 14 (9 to 19) | 1.50 (1.00 to 2.00) |\n",
		name + "1.00 | 1.50 (1.00 to 2.00) |\n",
		name + "1.50 (1.00 to 2.00) | 4.00 (3.00 to 5.00) | 7.5 (7.0 to 8.0) | 14 (9 to 19) |\n",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in\n%s", want, text)
		}
	}
}
