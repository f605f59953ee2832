package shardlimit

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

// BenchmarkHandler is one allowed request on the memory store, without a server
// around it: whole, and what of it is the request that Caddy prepares. The metric
// own-allocs/op counts the allocations that this module's code makes.
func BenchmarkHandler(b *testing.B) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: b.Context()})
	defer cancel()
	h := &Handler{Zones: []*Zone{{Name: "api", Key: Texts{"{http.request.header.X-Api-Key}"}, Events: "4503599627370496", Window: caddy.Duration(3600e9)}}}
	app := new(App)
	if err := app.Provision(ctx); err != nil {
		b.Fatal(err)
	}
	zone, err := h.Zones[0].provision(ctx)
	if err != nil {
		b.Fatal(err)
	}
	config := limiter.Config{
		Zones: []*limiter.Zone{zone}, Store: app.uses[defaultStore], Headers: limiter.HeadersGitHub, LogRefusals: limiter.LogFirst,
		Logger: ctx.Logger(), Now: time.Now,
	}
	if h.limiter, err = limiter.New(config); err != nil {
		b.Fatal(err)
	}
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		return nil
	})
	base := httptest.NewRequest(http.MethodGet, "/", nil)
	base.Header.Set("X-Api-Key", "abc")
	prepare := func() (http.ResponseWriter, *http.Request) {
		w := httptest.NewRecorder()
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
		// As many as it takes for what is allocated once not to count.
		const requests = 10_000
		defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
		runtime.MemProfileRate = 1
		before := ownAllocations(b)
		for range requests {
			serve()
		}
		each := float64(ownAllocations(b)-before) / requests
		for b.Loop() {
			serve()
		}
		b.ReportMetric(each, "own-allocs/op")
	})
}

// ownAllocations counts the allocations so far that code of this module made, and
// not what it called.
func ownAllocations(b *testing.B) (sum int64) {
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
		if strings.HasPrefix(frame.Function, "github.com/shardlimit/") && !strings.Contains(frame.Function, "Benchmark") {
			sum += record.AllocObjects
		}
	}
	return sum
}

// isRuntime tells whether a function allocates on behalf of its caller.
func isRuntime(function string) bool {
	return strings.HasPrefix(function, "runtime.") || strings.HasPrefix(function, "internal/runtime/") || strings.HasPrefix(function, "strconv.")
}
