package shardlimit

import (
	"context"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/admin"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/redisstore"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

func TestNearest(t *testing.T) {
	zone := option.Names(new(Zone).options(httpcaddyfile.Helper{}))
	redis := option.Names(redisstore.Rows())
	for _, test := range []struct {
		word  string
		known []string
		want  string
	}{
		// Slips.
		{"evnets", zone, "events"},
		{"event", zone, "events"},
		{"windw", zone, "window"},
		{"windows", zone, "window"},
		{"ley", zone, "key"},
		{"kye", zone, "key"},
		{"costs", zone, "cost"},
		{"max_wiat", zone, "max_wait"},
		{"max_wait_que", zone, "max_wait"},
		{"ipv5_prefix", zone, "ipv4_prefix"},
		{"check_timout", redis, "check_timeout"},
		{"pasword", redis, "password"},
		// Other forms.
		{"countStatus", zone, "count_status"},
		{"count-status", zone, "count_status"},
		{"EVENTS", zone, "events"},
		// Beginnings, and what has more at its end.
		{"algo", zone, "algorithm"},
		{"ipv6", zone, "ipv6_prefix"},
		{"on", zone, "on_error"},
		{"window_size", zone, "window"},
		{"max", zone, "max_wait"},
		{"ipv", zone, ""},
		// Parts.
		{"max_events", zone, "events"},
		{"redis_password", redis, "password"},
		// Other words.
		{"limit", zone, ""},
		{"rate", zone, ""},
		{"", zone, ""},
		{"k", zone, ""},
		{"x", nil, ""},
	} {
		if got := option.Nearest(test.word, test.known); got != test.want {
			t.Errorf("nearest to %q is %q, want %q", test.word, got, test.want)
		}
	}
}

// TestNearestIsItself checks that a known word is the nearest to itself.
func TestNearestIsItself(t *testing.T) {
	blocks := [][]option.Row{new(Handler).options(nil), new(Zone).options(httpcaddyfile.Helper{}), redisstore.Rows()}
	for _, row := range redisstore.Rows() {
		blocks = append(blocks, row.Block)
	}
	for _, block := range blocks {
		known := option.Names(block)
		for _, word := range known {
			if got := option.Nearest(word, known); got != word {
				t.Errorf("nearest to %s is %s", word, got)
			}
		}
	}
}

func TestSlips(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"", "abc", 3},
		{"abc", "", 3},
		{"abc", "abc", 0},
		{"abc", "acb", 1},
		{"abcd", "badc", 2},
		{"kitten", "sitting", 3},
		{"events", "evnets", 1},
	} {
		if got := option.Slips(test.a, test.b); got != test.want {
			t.Errorf("from %q to %q are %d slips, want %d", test.a, test.b, got, test.want)
		}
		if back := option.Slips(test.b, test.a); back != test.want {
			t.Errorf("from %q to %q are %d slips, want %d", test.b, test.a, back, test.want)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	known := []string{"events", "window"}
	if got := option.DidYouMean("evnts", known); got != ", did you mean events?" {
		t.Errorf("it says %q", got)
	}
	if got := option.DidYouMean("limit", known); got != "" {
		t.Errorf("it says %q", got)
	}
}

// BenchmarkHandler measures one allowed request on the memory store without a server, and
// separately Caddy's preparation of the request. own-allocs/op counts the allocations of this
// module's code, and own-B/op their bytes.
func BenchmarkHandler(b *testing.B) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: b.Context()})
	defer cancel()
	h := &Handler{Limits: Limits{Zones: []*Zone{{Name: "api", Key: Texts{"{http.request.header.X-Api-Key}"}, Events: "4503599627370496", Window: caddy.Duration(3600e9)}}}}
	app := new(App)
	redistest.Must(b, app.Provision(ctx))
	zone, err := h.Zones[0].provision(ctx)
	redistest.Must(b, err)
	config := limiter.Config{
		Zones: []*limiter.Zone{zone}, Store: app.handles[defaultStore], Headers: limiter.HeadersGitHub, LogRefusals: limiter.LogFirst,
		Logger: ctx.Logger(), Now: time.Now,
	}
	h.limiter = limiter.New(config)
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		return nil
	})
	base := httptest.NewRequest(http.MethodGet, "/", nil)
	base.Header.Set("X-Api-Key", "abc")
	// Caddy's server sets this header before its handlers run.
	server := []string{"Caddy"}
	prepare := func() (http.ResponseWriter, *http.Request) {
		w := httptest.NewRecorder()
		w.Header()["Server"] = server
		return w, caddyhttp.PrepareRequest(base, caddy.NewReplacer(), w, nil)
	}
	serve := func() {
		w, r := prepare()
		if err := h.ServeHTTP(w, r, next); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("prepare", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			prepare()
		}
	})
	b.Run("prepare and serve", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			serve()
		}
	})
	b.Run("own allocations", func(b *testing.B) {
		// Enough requests to make one-time allocations negligible.
		const requests = 10_000
		defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
		runtime.MemProfileRate = 1
		before, bytesBefore := ownAllocations(b)
		for range requests {
			serve()
		}
		after, bytesAfter := ownAllocations(b)
		for b.Loop() {
			serve()
		}
		b.ReportMetric(float64(after-before)/requests, "own-allocs/op")
		b.ReportMetric(float64(bytesAfter-bytesBefore)/requests, "own-B/op")
	})
}

// ownAllocations counts the allocations so far by this module's code, without those of its callees
// and of its tests, and their bytes.
func ownAllocations(b *testing.B) (objects, bytes int64) {
	b.Helper()
	// A profile is complete up to the garbage collection before the last.
	runtime.GC()
	runtime.GC()
	n, _ := runtime.MemProfile(nil, true)
	records := make([]runtime.MemProfileRecord, n+1000)
	n, ok := runtime.MemProfile(records, true)
	if !ok {
		b.Fatal("the profile has grown")
	}
	for _, record := range records[:n] {
		frames := runtime.CallersFrames(record.Stack())
		frame, more := frames.Next()
		for more && isRuntime(frame.Function) {
			frame, more = frames.Next()
		}
		if strings.HasPrefix(frame.Function, "github.com/shardlimit/") && !strings.HasSuffix(frame.File, "_test.go") {
			objects += record.AllocObjects
			bytes += record.AllocBytes
		}
	}
	return objects, bytes
}

// isRuntime reports whether a function allocates on behalf of its caller.
func isRuntime(function string) bool {
	return strings.HasPrefix(function, "runtime.") || strings.HasPrefix(function, "internal/runtime/") || strings.HasPrefix(function, "strconv.")
}

// awayModule opens stores that are unreachable while away is set.
type awayModule struct{ away *atomic.Bool }

func (m awayModule) OpenStore(string) (store.Store, error) {
	return awayStore{memory.New(memory.NewBuckets(), memory.Options{}), m.away}, nil
}
func (awayModule) CloseStore()            {}
func (awayModule) OnErrorDefault() string { return stores.OnErrorAllow }

type awayStore struct {
	*memory.Store
	away *atomic.Bool
}

func (s awayStore) ChargeReported(reqs []store.Request, report func(i int, st store.State)) {
	for i := range reqs {
		if s.away.Load() {
			report(i, store.State{Err: store.ErrNotExecuted})
		} else {
			report(i, store.Answers(context.Background(), s.Charge, reqs[i:i+1])[0])
		}
	}
}

func (s awayStore) RefundReported(reqs []store.Request, report func(i int, st store.State)) {
	s.ChargeReported(reqs, report)
}

func (s awayStore) PenalizeDetached(reqs []store.Request) {
	store.Answers(context.Background(), s.Penalize, reqs)
}

func (awayStore) Owner(string) string { return "a" }

func (awayStore) Hurry(string) {}

func (awayStore) Warm(context.Context) {}

var _ store.Remote = awayStore{}

// TestConfigDeliversOnceItHasStarted: Caddy ends the previous config right afterwards, and no other
// config may deliver in between.
func TestConfigDeliversOnceItHasStarted(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	var away atomic.Bool
	away.Store(true)
	start := func() *stores.Opened {
		handle, err := stores.Open(ctx, t.Name(), awayModule{&away})
		redistest.Must(t, err)
		open, err := handle.Enter()
		redistest.Must(t, err)
		t.Cleanup(func() {
			handle.Unload()
			handle.Leave()
		})
		app := &App{unnamed: []*stores.Handle{handle}}
		app.watch = admin.NewWatch(app, ctx.Logger(), time.Now)
		t.Cleanup(app.watch.Stop)
		redistest.Must(t, app.Start())
		return open
	}
	before := start()
	before.Charge([]store.Request{{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: "alice", Events: 100, Cost: 1,
	}})
	if !before.Accounts.IsNeeded() {
		t.Fatal("no charge is pending")
	}
	running := start()
	if before.Accounts.IsNeeded() {
		t.Error("the previous config delivers pending charges")
	}
	// Pending charges keep the ledger, and other tests check for leftovers.
	away.Store(false)
	caddytest.Eventually(t, "pending charges are delivered", func() error {
		return caddytest.Want("charges pending", running.Accounts.IsNeeded(), false)
	})
}
