package limiter

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// foresee simulates a client's request.
func (w *boundedWorld) foresee(client string) *Simulation {
	w.t.Helper()
	l := &Limiter{Config: Config{Zones: []*Zone{w.zone}, Logger: zap.NewNop(), Now: w.clock.Now, Store: w.handle, LogRefusals: LogNone}}
	response := httptest.NewRecorder()
	sent := httptest.NewRequest(http.MethodGet, "/", nil)
	sent.Header.Set("A", client)
	s := NewSimulation(response)
	if _, err := s.Meet(l, caddyhttp.PrepareRequest(sent, caddy.NewReplacer(), response, nil)); err != nil {
		w.t.Fatal(err)
	}
	return s
}

// TestSimulationForeseesTheOverflow: simulations say which bucket counts a new client, and let nobody
// in.
func TestSimulationForeseesTheOverflow(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(strconv.FormatBool(before), func(t *testing.T) {
			w := newBoundedWorld(t, 2, &Zone{Events: Quantity{Number: 3}, Window: time.Hour, ChargeBefore: before})
			for n := range 10 {
				for _, client := range []string{"first", strconv.Itoa(n)} {
					w.foresee("another")
					s := w.foresee(client)
					status, want := w.ask(client, 1), http.StatusOK
					if s.Answer.Decision == "refused" {
						want = http.StatusTooManyRequests
					}
					isShared := s.Answer.Zones[0].ClientKey == stores.OverflowKey
					if beyond := client != "first" && n > 0; status != want || isShared != beyond {
						t.Errorf("client %s, foreseen %+v, got %d; shared is %v", client, s.Answer, status, isShared)
					}
				}
			}
		})
	}
}
