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

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
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

// TestSimulatedRequestWaits beside a zone that only observes: what that finds after the wait is
// shown, its penalty too.
func TestSimulatedRequestWaits(t *testing.T) {
	handle := &stores.Handle{Name: t.Name(), Module: deafModule{memory.New(memory.NewBuckets(), memory.Options{})}, Logger: zap.NewNop()}
	_, err := handle.Enter()
	redistest.Must(t, err)
	h := &Limiter{Config: Config{Logger: zap.NewNop(), Now: time.Now, Store: handle, LogRefusals: LogNone}}
	for _, name := range []string{"waits", "observes"} {
		z := &Zone{Name: name, Key: []string{name}, Events: Quantity{Number: 1}, Cost: Quantity{Number: 1}, Window: time.Hour, ChargeBefore: true, Counts: telemetry.Default.Zone(name)}
		if name == "waits" {
			z.MaxWait = 2 * time.Hour
		} else {
			z.Penalty, z.Enforce = 3*time.Hour, new(float64)
		}
		z.prepare()
		z.countIn(ownStore, handle)
		h.Zones = append(h.Zones, z)
	}
	if got := h.answeredWith(http.StatusOK).Code; got != http.StatusOK {
		t.Fatalf("the first request gets %d", got)
	}
	w := httptest.NewRecorder()
	s := NewSimulation(w)
	goesOn, err := s.Meet(h, caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil))
	redistest.Must(t, err)
	observed := s.Answer.Zones[1]
	if left := observed.Reset - float64(time.Now().Unix()); !goesOn || s.Answer.Wait < 3500 || observed.Reason != reasonPenalty || left < 2.9*3600 {
		t.Errorf("goes on %v, %+v", goesOn, s.Answer)
	}
}
