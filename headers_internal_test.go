package shardlimit

import (
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestHeadersOfUndecidedZones: a zone that was not asked, as one that may have
// taken before the request waited is not, tells nothing, wherever it stands.
func TestHeadersOfUndecidedZones(t *testing.T) {
	undecided, decided := store.State{}, store.State{Allowed: true, Limit: 5, Remaining: 4, Used: 1, Now: 1, Reset: 2}
	for name, states := range map[string][]store.State{
		"first": {undecided, decided}, "last": {decided, undecided}, "alone": {undecided},
	} {
		for _, format := range []string{headersGitHub, headersBoth} {
			t.Run(name+" "+format, func(t *testing.T) {
				w := httptest.NewRecorder()
				p := &part{limiter: &Limiter{Config: Config{Headers: format}}, states: states}
				for range states {
					limit := &store.Limit{Zone: "api", Window: 1}
					p.zones = append(p.zones, &zoneUse{compiledZone: &compiledZone{Name: "api"}})
					p.reqs = append(p.reqs, store.Request{Limit: limit, Events: 5, Cost: 1})
				}
				tr := &tracker{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, parts: []*part{p}}
				tr.setHeaders()
				want := "4"
				if name == "alone" {
					want = ""
				}
				if got := w.Header().Get("X-RateLimit-Remaining"); got != want {
					t.Errorf("remaining is %q, want %q", got, want)
				}
			})
		}
	}
}
