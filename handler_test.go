package shardlimit

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// provisioned returns a handler with one zone on the memory store, as Caddy runs it.
func provisioned(tb testing.TB, events Amount) *Handler {
	tb.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: tb.Context()})
	tb.Cleanup(cancel)
	h := &Handler{Limits: Limits{Zones: []*Zone{{Name: "api", Key: Texts{"{http.request.header.X-Api-Key}"}, Events: events, Window: caddy.Duration(time.Hour)}}}}
	app := new(App)
	redistest.Must(tb, app.Provision(ctx))
	tb.Cleanup(func() { redistest.Must(tb, app.Cleanup()) })
	zone, err := h.Zones[0].provision(ctx)
	redistest.Must(tb, err)
	h.limiter = limiter.New(limiter.Config{
		Zones: []*limiter.Zone{zone}, Store: app.handles[defaultStore], Headers: limiter.HeadersGitHub, LogRefusals: limiter.LogFirst,
		Logger: ctx.Logger(), Now: time.Now,
	})
	return h
}

// requestOf returns a request of a client.
func requestOf(client string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set("X-Api-Key", client)
	return r
}

// prepared returns a request as Caddy's server hands it to its handlers, and its response.
func prepared(r *http.Request) (http.ResponseWriter, *http.Request) {
	w := httptest.NewRecorder()
	w.Header()["Server"] = server
	return w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
}

// server is the header that Caddy's server sets before its handlers run.
var server = []string{"Caddy"}

// served answers the requests that the limiter passes.
var served = caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
	w.WriteHeader(http.StatusOK)
	return nil
})

// TestHandler admits what fits for each client, with the headers that say so, and refuses the rest with the
// error that Caddy answers.
func TestHandler(t *testing.T) {
	h := provisioned(t, "2")
	for _, x := range []struct {
		client, left string
		status       int
	}{{"alice", "1", 200}, {"alice", "0", 200}, {"alice", "0", 429}, {"bob", "1", 200}, {"alice", "0", 429}} {
		w, r := prepared(requestOf(x.client))
		status := http.StatusOK
		var answer caddyhttp.HandlerError
		if err := h.ServeHTTP(w, r, served); errors.As(err, &answer) {
			status = answer.StatusCode
		} else {
			redistest.Must(t, err)
		}
		if left := w.Header().Get("X-RateLimit-Remaining"); status != x.status || left != x.left || (w.Header().Get("Retry-After") != "") != (status == 429) {
			t.Errorf("%s: status %d, %s left, headers %v; want status %d, %s left", x.client, status, left, w.Header(), x.status, x.left)
		}
	}
}

// BenchmarkHandler measures one allowed request on the memory store without a server, and
// separately Caddy's preparation of the request. own-allocs/op counts the allocations of this
// module's code, and own-B/op their bytes.
func BenchmarkHandler(b *testing.B) {
	h := provisioned(b, "4503599627370496")
	base := requestOf("abc")
	serve := func() {
		w, r := prepared(base)
		if err := h.ServeHTTP(w, r, served); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("prepare", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			prepared(base)
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
