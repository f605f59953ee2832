package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// watched is a config with one handler whose zone counts in memory, and its watch, whose clock
// stands still.
type watched struct {
	t       *testing.T
	limiter *limiter.Limiter
	watch   *Watch
	logs    *observer.ObservedLogs
	clock   time.Time
	module  *watchedModule
	// peer is the remote address of requests, or "" for that of httptest.
	peer string
}

func (w *watched) Limiters() []*limiter.Limiter { return []*limiter.Limiter{w.limiter} }
func (w *watched) Stores() []*stores.Handle     { return []*stores.Handle{w.limiter.Store} }
func (w *watched) Watch() *Watch                { return w.watch }
func (*watched) Accept()                        {}
func (*watched) CountsInMemoryNow() bool        { return false }
func (*watched) Warnings() []lint.Warning       { return nil }

// watchedModule opens a store that fails on command.
type watchedModule struct {
	maxBuckets int
	fails      bool
}

type watchedStore struct {
	*memory.Store
	module *watchedModule
}

func (s watchedStore) Check(ctx context.Context, asks []*store.Ask) {
	s.Store.Check(ctx, asks)
	for i := range asks {
		if s.module.fails {
			asks[i].State = store.State{Err: errors.New("away")}
		}
	}
}

func (m *watchedModule) OpenStore(name string) (store.Store, error) {
	return watchedStore{memory.New(memory.NewBuckets(), stores.MemoryOptions(name, nil, m.maxBuckets)), m}, nil
}
func (*watchedModule) CloseStore()            {}
func (*watchedModule) OnErrorDefault() string { return stores.OnErrorAllow }

// startWatched watches a config with a zone of that key, at the beginning of its time.
func startWatched(t *testing.T, key string, maxBuckets int, more ...*limiter.Zone) *watched {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	w := &watched{t: t, logs: logs, clock: time.Now(), module: &watchedModule{maxBuckets: maxBuckets}}
	handle := &stores.Handle{Name: t.Name(), Module: w.module, OnError: stores.OnErrorAllow, Logger: zap.NewNop()}
	if _, err := handle.Enter(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(handle.Unload)
	// Metrics go by the name of a zone.
	zone := &limiter.Zone{Name: nameIn(t, "api"), Key: []string{key}, Window: time.Hour, Events: limiter.Quantity{Number: 1 << 40}, Cost: limiter.Quantity{Number: 1}}
	w.limiter = limiter.New(limiter.Config{Zones: append(more, zone), Store: handle, Logger: zap.NewNop(), Now: func() time.Time { return w.clock }})
	w.watch = NewWatch(w, zap.New(core), func() time.Time { return w.clock })
	w.watch.look()
	return w
}

func nameIn(t *testing.T, zone string) string {
	return strings.ReplaceAll(t.Name(), "/", "_") + "." + zone
}

// ask sends n requests, whose keys key gives, from a proxy that is trusted or not, and looks
// from time to time, and in the end.
func (w *watched) ask(n int, key func(i int) string, isTrusted bool, headers ...string) {
	w.t.Helper()
	for i := range n {
		if i%200 == 0 {
			w.pass(lookPeriod)
		}
		w.request(key, i, isTrusted, headers...)
	}
	w.pass(lookPeriod)
}

func (w *watched) request(key func(i int) string, i int, isTrusted bool, headers ...string) {
	w.t.Helper()
	r, rec := httptest.NewRequest(http.MethodGet, "/", nil), httptest.NewRecorder()
	r.RemoteAddr = cmp.Or(w.peer, r.RemoteAddr)
	for _, header := range headers {
		r.Header.Set(header, "203.0.113.7")
	}
	if key != nil {
		r.Header.Set("X-Key", key(i))
	}
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rec, &caddyhttp.Server{ClientIPHeaders: []string{"X-Forwarded-For", "CF-Connecting-IP"}})
	caddyhttp.SetVar(r.Context(), caddyhttp.TrustedProxyVarKey, isTrusted)
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	if err := w.limiter.ServeHTTP(rec, r, next); err != nil {
		w.t.Fatal(err)
	}
}

// mix sends 100 requests, most of them from one address with a key, and others with neither or with
// headers of a proxy.
func (w *watched) mix(others int, headers ...string) {
	w.t.Helper()
	for i := range 100 {
		if i%5 == 0 && i/5 < others {
			w.request(nil, i, false, headers...)
		} else {
			w.request(each, i, false)
		}
	}
	w.pass(lookPeriod)
}

// pass moves the clock and looks.
func (w *watched) pass(d time.Duration) {
	w.clock = w.clock.Add(d)
	w.watch.look()
}

// requires fails the test unless the problems are of these kinds.
func (w *watched) requires(when string, kinds ...string) {
	w.t.Helper()
	got := []string{}
	for _, p := range w.watch.Problems() {
		got = append(got, string(p.Kind))
	}
	if fmt.Sprint(got) != fmt.Sprint(kinds) {
		w.t.Fatalf("%s: problems are %v, want %v", when, w.watch.Problems(), kinds)
	}
}

func one(int) string { return "k" }

func each(i int) string { return fmt.Sprint("k", i) }

func half(i int) string {
	if i%2 == 0 {
		return "k"
	}
	return each(i)
}

const (
	headerKey = "{http.request.header.X-Key}"
	clientKey = "{http.vars.client_ip}"
)

// TestProblemsOfTraffic begin with requests, and end within a minute and five seconds of the last of them.
func TestProblemsOfTraffic(t *testing.T) {
	// Each is the difference to a case without the problem.
	remediesOf := map[string]string{
		"proxy_address": "add trusted_proxies static with the proxy's address", "one_key": "let it have what tells clients apart; if all should share one limit, write key static",
		"empty_key": "see to it that clients send what key asks for", "evicted": "raise max_buckets, or set max_new_buckets",
	}
	const overSocket, mixed = "a Unix socket", "a Unix socket and an address"
	remediesOfProxies := map[string]string{
		overSocket: "add trusted_proxies_unix to the global option servers, because the proxy uses a Unix socket",
		mixed:      "add trusted_proxies static with the proxy's address, and trusted_proxies_unix for the Unix socket",
	}
	for name, c := range map[string]struct {
		key        string
		maxBuckets int
		ask        func(w *watched)
		want       []string
	}{
		"a proxy that is not trusted": {clientKey, 0, func(w *watched) { w.ask(20, nil, false, "X-Forwarded-For") }, []string{"proxy_address"}},
		overSocket: {clientKey, 0, func(w *watched) {
			w.peer = "@"
			w.ask(20, nil, false, "X-Forwarded-For")
		}, []string{"proxy_address"}},
		mixed: {clientKey, 0, func(w *watched) {
			w.ask(20, nil, false, "X-Forwarded-For")
			w.peer = "@"
			w.ask(20, nil, false, "X-Forwarded-For")
		}, []string{"proxy_address"}},
		"another header":                    {clientKey, 0, func(w *watched) { w.ask(20, nil, false, "CF-Connecting-IP") }, []string{"proxy_address"}},
		"a quarter of the requests":         {clientKey, 0, func(w *watched) { w.ask(60, nil, false); w.ask(20, nil, false, "X-Forwarded-For") }, []string{"proxy_address"}},
		"the peer as the key":               {"{http.request.remote.host}", 0, func(w *watched) { w.ask(20, nil, true, "X-Forwarded-For") }, []string{"proxy_address"}},
		"a proxy, and so one key":           {clientKey, 0, func(w *watched) { w.ask(1200, nil, false, "X-Forwarded-For") }, []string{"proxy_address"}},
		"a trusted proxy":                   {clientKey, 0, func(w *watched) { w.ask(20, nil, true, "X-Forwarded-For") }, nil},
		"few requests":                      {clientKey, 0, func(w *watched) { w.ask(19, nil, false, "X-Forwarded-For") }, nil},
		"a few forged headers":              {clientKey, 0, func(w *watched) { w.mix(20, "X-Forwarded-For") }, nil},
		"a header that nobody configured":   {clientKey, 0, func(w *watched) { w.ask(20, nil, false, "X-Real-IP") }, nil},
		"a key without an address":          {headerKey, 0, func(w *watched) { w.ask(20, each, false, "X-Forwarded-For") }, nil},
		"one key":                           {headerKey, 0, func(w *watched) { w.ask(1000, one, false) }, []string{"one_key"}},
		"one key of few requests":           {headerKey, 0, func(w *watched) { w.ask(999, one, false) }, nil},
		"one key with half":                 {headerKey, 0, func(w *watched) { w.ask(1200, half, false) }, nil},
		"many keys":                         {headerKey, 0, func(w *watched) { w.ask(1200, each, false) }, nil},
		"a key that is the same on purpose": {"static", 0, func(w *watched) { w.ask(1200, one, false) }, nil},
		"empty keys":                        {headerKey, 0, func(w *watched) { w.mix(10) }, []string{"empty_key"}},
		"a few empty keys":                  {headerKey, 0, func(w *watched) { w.mix(9) }, nil},
		"a store that fails": {headerKey, 0, func(w *watched) {
			w.module.fails = true
			w.ask(1, one, true)
			w.module.fails = false
		}, []string{"unchecked"}},
		"a store that answers": {headerKey, 0, func(w *watched) { w.ask(300, each, true) }, nil},
		"too many buckets":     {headerKey, 50, func(w *watched) { w.ask(300, each, true) }, []string{"evicted"}},
		"room for all":         {headerKey, 1000, func(w *watched) { w.ask(300, each, true) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := startWatched(t, c.key, c.maxBuckets)
			w.requires("before")
			c.ask(w)
			w.requires("after the requests", c.want...)
			for _, p := range w.watch.Problems() {
				if remedy := cmp.Or(remediesOfProxies[name], remediesOf[string(p.Kind)]); !strings.Contains(p.Text, remedy) {
					t.Errorf("the remedy is not %q: %s", remedy, p.Text)
				}
			}
			if began := w.logs.FilterMessage("a problem began").Len(); began != len(c.want) {
				t.Errorf("%d beginnings are logged, want %d: %v", began, len(c.want), w.logs.All())
			}
			for range (trafficLasts + problemLasts) / lookPeriod {
				w.pass(lookPeriod)
			}
			w.pass(lookPeriod)
			w.requires("when it is over")
			if ended := w.logs.FilterMessage("a problem is over").Len(); ended != len(c.want) || w.logs.Len() != 2*len(c.want) {
				t.Errorf("logged are %v", w.logs.All())
			}
		})
	}
}

// TestRatesOfProblems are alike in all texts, from the first look on, however long the watch has looked: a
// request that passes in two zones is one, and what happened before, or long ago, does not count.
func TestRatesOfProblems(t *testing.T) {
	other := &limiter.Zone{Name: nameIn(t, "other"), Key: []string{"static"}, Window: time.Hour, Events: limiter.Quantity{Number: 1 << 40}, Cost: limiter.Quantity{Number: 1}}
	w := startWatched(t, headerKey, 0, other)
	asks := func(looks int) {
		for range looks {
			for i := range 20 {
				// A key is empty in every second request.
				w.request(map[bool]func(int) string{true: each}[i%2 == 0], i, true)
			}
			w.pass(lookPeriod)
		}
	}
	says := func(when, unchecked, consequence string) {
		t.Helper()
		var rates []string
		for _, p := range w.watch.Problems() {
			if _, rate, is := strings.Cut(p.Text, "passed unchecked (now "); is {
				rate, _, _ = strings.Cut(rate, ")")
				rates = append(rates, rate)
			} else if !strings.Contains(p.Text, "(about 5.0 a second)") {
				t.Errorf("%s: %s", when, p.Text)
			}
		}
		if got := strings.Join(rates, ", "); got != unchecked {
			t.Errorf("%s: unchecked pass %s, want %s", when, got, unchecked)
		}
		if got := consequences(w, &w.watch.traffic, t.Name()); !strings.HasPrefix(got, consequence) {
			t.Errorf("%s: %s, want %s", when, got, consequence)
		}
	}
	asks(5)
	says("before", "", "requests pass unlimited: ")
	w.module.fails = true
	for range 8 {
		asks(1)
		says("in an outage", "10.0 a second, 10.0 a second", "at least 10.0/s pass unlimited: ")
	}
	for _, entry := range w.logs.FilterField(zap.String("kind", "unchecked")).All() {
		if text := fmt.Sprint(entry.ContextMap()["problem"]); !strings.Contains(text, "(now 10.0 a second)") {
			t.Errorf("logged is %s", text)
		}
	}
	w.module.fails = false
	asks(6)
	says("after it", "0.0 a second, 0.0 a second", "requests pass unlimited: ")
}

// TestRatesAfterAQuietTime are those of the last minute and seconds. Of the quiet time two looks are kept.
func TestRatesAfterAQuietTime(t *testing.T) {
	w := startWatched(t, headerKey, 0)
	for range 3 {
		for range 100 {
			w.pass(lookPeriod)
		}
		if n := len(w.watch.traffic.zones[nameIn(t, "api")].looks); n != 2 {
			t.Errorf("%d looks are kept of a zone without requests, want 2", n)
		}
		w.module.fails = true
		for i := range 20 {
			w.request(map[bool]func(int) string{true: each}[i%2 == 0], i, true)
		}
		w.pass(lookPeriod)
		w.module.fails = false
		texts := ""
		for _, p := range w.watch.Problems() {
			texts += p.Text + "\n"
		}
		for _, want := range []string{"20 of 20 requests in the last minute passed unchecked (now 10.0 a second)", "50 % of the requests (about 0.2 a second)"} {
			if !strings.Contains(texts, want) {
				t.Errorf("problems are %s, want %s", texts, want)
			}
		}
	}
}

// never matches no request.
type never struct{}

// MatchWithError implements [caddyhttp.RequestMatcherWithError].
func (never) MatchWithError(*http.Request) (bool, error) { return false, nil }

// TestIdleZone is a problem once its handler has got requests for ten minutes, until it decides.
func TestIdleZone(t *testing.T) {
	idle := func(t *testing.T) *limiter.Zone {
		return &limiter.Zone{
			Name: nameIn(t, "idle"), Key: []string{"static"}, Window: time.Hour, Events: limiter.Quantity{Number: 1}, Cost: limiter.Quantity{Number: 1},
			Matchers: caddyhttp.MatcherSets{caddyhttp.MatcherSet{never{}}},
		}
	}
	w := startWatched(t, headerKey, 0, idle(t))
	w.ask(1200, each, true)
	w.requires("at first")
	w.pass(idleFor)
	w.requires("after ten minutes", "idle_zone")
	if p := w.watch.Problems()[0]; p.Zone != nameIn(t, "idle") || p.Since != float64(w.clock.UnixMilli())/1e3 || !strings.Contains(p.Text, "see to it that its matcher fits some") {
		t.Errorf("the problem is %+v", p)
	}
	w.limiter.Zones[0].Matchers = nil
	w.ask(1, each, true)
	w.pass(problemLasts)
	w.requires("once it has decided")
	t.Run("without traffic", func(t *testing.T) {
		w := startWatched(t, headerKey, 0, idle(t))
		w.ask(900, each, true)
		w.pass(2 * idleFor)
		w.requires("after twenty minutes")
	})
}

// TestProblemEndsAtOnce in the status, and for the log once it has not been found for a while.
func TestProblemEndsAtOnce(t *testing.T) {
	w := startWatched(t, headerKey, 0)
	w.module.fails = true
	w.ask(1, one, true)
	w.module.fails = false
	w.requires("while it is found", "unchecked")
	for len(w.watch.Problems()) > 0 {
		w.pass(lookPeriod)
	}
	if w.logs.FilterMessage("a problem is over").Len() != 0 {
		t.Errorf("logged are %v", w.logs.All())
	}
	w.pass(problemLasts)
	if w.logs.FilterMessage("a problem is over").Len() != 1 {
		t.Errorf("in the end, logged are %v", w.logs.All())
	}
}

// TestRuleOfProblems: one that is found again within five seconds goes on, whatever its text.
func TestRuleOfProblems(t *testing.T) {
	w := startWatched(t, headerKey, 50)
	w.ask(300, each, true)
	began := w.watch.Problems()[0]
	for range 2 * trafficLasts / lookPeriod {
		w.ask(60, func(i int) string { return fmt.Sprint(w.clock, i) }, true)
	}
	w.requires("while it goes on", "evicted")
	if now := w.watch.Problems()[0]; now.Since != began.Since || now.Text == began.Text || w.logs.Len() != 1 {
		t.Errorf("first it was %+v and is %+v, logged %v", began, now, w.logs.All())
	}
}

// TestManyProblems are counted and not listed.
func TestManyProblems(t *testing.T) {
	zones := make([]*limiter.Zone, 150)
	for i := range zones {
		zones[i] = &limiter.Zone{
			Name: nameIn(t, fmt.Sprint(i)), Key: []string{headerKey}, Window: time.Hour, Events: limiter.Quantity{Number: 1 << 40}, Cost: limiter.Quantity{Number: 1},
		}
	}
	w := startWatched(t, clientKey, 0, zones...)
	// The keys of the zones are empty as well.
	w.ask(20, nil, false, "X-Forwarded-For")
	all := w.watch.Problems()
	if len(all) != mostProblems+1 || all[0].Kind != "proxy_address" || !strings.HasPrefix(all[mostProblems].Text, "201 more problems") {
		t.Errorf("%d problems, first %+v, last %+v", len(all), all[0], all[len(all)-1])
	}
	// A worse one is listed in place of another.
	w.watch.mu.Lock()
	defer w.watch.mu.Unlock()
	if !w.watch.makeRoom(adminapi.ProblemNoPrimary) || len(w.watch.lasting) != mostProblems-1 {
		t.Errorf("%d problems are left", len(w.watch.lasting))
	}
	if w.watch.makeRoom(adminapi.ProblemIdleZone) || len(w.watch.lasting) != mostProblems-1 {
		t.Errorf("%d problems are left, after one that is no worse", len(w.watch.lasting))
	}
}
