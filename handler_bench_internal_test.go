package shardlimit

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// BenchmarkHandler is one allowed request on the memory store, without a server
// around it.
func BenchmarkHandler(b *testing.B) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: b.Context()})
	defer cancel()
	h := &Handler{Zones: []*Zone{{Name: "api", Key: Texts{"{http.request.header.X-Api-Key}"}, Events: "4503599627370496", Window: caddy.Duration(3600e9)}}}
	app := new(App)
	if err := app.Provision(ctx); err != nil {
		b.Fatal(err)
	}
	h.logger = ctx.Logger()
	h.now = time.Now
	h.use = app.uses["default"]
	if err := h.Zones[0].provision(ctx, h.use); err != nil {
		b.Fatal(err)
	}
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		return nil
	})
	b.ReportAllocs()
	base := httptest.NewRequest(http.MethodGet, "/", nil)
	base.Header.Set("X-Api-Key", "abc")
	for b.Loop() {
		w := httptest.NewRecorder()
		repl := caddy.NewReplacer()
		r := caddyhttp.PrepareRequest(base, repl, w, nil)
		if err := h.ServeHTTP(w, r, next); err != nil {
			b.Fatal(err)
		}
	}
}
