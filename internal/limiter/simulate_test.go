package limiter

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// foresee simulates a client's request, also in some other zones.
func (w *boundedWorld) foresee(client string, others ...*Zone) *Simulation {
	w.t.Helper()
	l := &Limiter{arrived: new(arrivals), Config: Config{Zones: append([]*Zone{w.zone}, others...), Logger: zap.NewNop(), Now: w.clock.Now, Store: w.handle, LogRefusals: LogNone}}
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
					if s.Answer.Decision == telemetry.Refused {
						want = http.StatusTooManyRequests
					}
					isShared := s.Answer.Zones[0].Client.ClientKey == stores.OverflowKey
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
	h := &Limiter{arrived: new(arrivals), Config: Config{Logger: zap.NewNop(), Now: time.Now, Store: handle, LogRefusals: LogNone}}
	for _, name := range []string{"waits", "observes"} {
		z := &Zone{Name: name, Key: []string{name}, Events: Quantity{Number: 1}, Cost: Quantity{Number: 1}, Window: time.Hour, ChargeBefore: true, Counts: telemetry.Default.Zone(name)}
		if name == "waits" {
			z.MaxWait, z.MaxWaitQueue = 2*time.Hour, DefaultMaxWaitQueue
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
	if left := observed.Reset - float64(time.Now().Unix()); !goesOn || s.Answer.Wait < 3500 || observed.Reason != reasonPenalty.String() || left < 2.9*3600 {
		t.Errorf("goes on %v, %+v", goesOn, s.Answer)
	}
}

// foresee simulates a request to the outermost handler.
func (s *queueSite) foresee() (foreseen *Simulation, goesOn bool) {
	s.t.Helper()
	w := httptest.NewRecorder()
	foreseen = NewSimulation(w)
	goesOn, err := foreseen.Meet(s.limiters[0], caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil))
	redistest.Must(s.t, err)
	return foreseen, goesOn
}

// TestSimulationOfARefusalForeseesTheOverflow: what a zone would say that is not asked, because another
// refuses outright, is about the bucket that would count the request.
func TestSimulationOfARefusalForeseesTheOverflow(t *testing.T) {
	for name, outright := range map[string]func(w *boundedWorld, z *Zone){
		"limit of 0": func(_ *boundedWorld, z *Zone) { z.Events.Number = 0 },
		"block": func(w *boundedWorld, z *Zone) {
			redistest.Must(w.t, w.handle.SetOverride(w.t.Context(), store.Override{
				Kind: store.OverrideBlock, Zone: z.Name, ClientKey: z.templates[0].tag + ":new", Until: w.clock.Now().Add(time.Hour).UnixMicro(),
			}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newBoundedWorld(t, 1, &Zone{Events: Quantity{Number: 3}, Window: time.Hour, ChargeBefore: true})
			refuses := &Zone{Name: "refuses", Key: w.zone.Key, Events: Quantity{Number: 3}, Cost: Quantity{Number: 1}, Window: time.Hour}
			refuses.prepare()
			refuses.countIn(ownStore, w.handle)
			if status := w.ask("first", 1); status != http.StatusOK {
				t.Fatalf("the first client gets %d", status)
			}
			outright(w, refuses)
			s := w.foresee("new", refuses)
			own, shared := s.Answer.Zones[1], s.Answer.Zones[0]
			if s.Answer.Zone != refuses.Name || own.Client.ClientKey == stores.OverflowKey || shared.Client.ClientKey != stores.OverflowKey || shared.Outcome != telemetry.Allowed {
				t.Errorf("foreseen %+v", s.Answer)
			}
		})
	}
}

// TestSimulationAsksAllBeforeItWaits: a zone that lets the request wait does not hide one that
// does not.
func TestSimulationAsksAllBeforeItWaits(t *testing.T) {
	for name, maxWait := range map[string]time.Duration{"no max_wait": 0, "a max_wait that is too short": time.Minute} {
		t.Run(name, func(t *testing.T) {
			zone := func(name string, window time.Duration) *Zone {
				return &Zone{Name: name, Key: []string{"static"}, Events: Quantity{Number: 1}, Window: window, MaxWait: time.Minute}
			}
			a, b := zone("a", 5*time.Second), zone("b", time.Hour)
			b.ChargeBefore, b.MaxWait = true, maxWait
			s := newQueueSite(t, []*Zone{a, b})
			synctest.Test(t, func(t *testing.T) {
				mustAll(t, "the first", []*sent{s.send(t.Context(), "x")}, http.StatusOK, 0)
				foreseen, goesOn := s.foresee()
				served := s.send(t.Context(), "x")
				if got := served.got(); goesOn || foreseen.Answer.Zone != "b" || got.status != http.StatusTooManyRequests || got.headers.Get("X-RateLimit-Resource") != "b" {
					t.Errorf("foreseen %+v, served %+v", foreseen.Answer, got)
				}
			})
		})
	}
}

// TestSimulationForeseesTheLine: requests that wait go before the simulated one.
func TestSimulationForeseesTheLine(t *testing.T) {
	inBubbles(t, func(t *testing.T, algorithm store.Algorithm, before bool) {
		zone := &Zone{Name: "a", Key: []string{"static"}, Events: Quantity{Number: 1}, Window: 5 * time.Second, MaxWait: time.Minute, Algorithm: algorithm, ChargeBefore: before}
		s := newQueueSite(t, []*Zone{zone})
		synctest.Test(t, func(t *testing.T) {
			mustAll(t, "the first", []*sent{s.send(t.Context(), "x")}, http.StatusOK, 0)
			s.sendMany(t, "x", 2)
			foreseen, goesOn := s.foresee()
			last := s.send(t.Context(), "x")
			time.Sleep(time.Minute)
			if waited := last.got().waited.Seconds(); !goesOn || foreseen.Answer.Wait < 10 || foreseen.Answer.Wait > waited {
				t.Errorf("foreseen %+v, served %+v", foreseen.Answer, last.got())
			}
		})
	})
}

// TestSimulationWakesNobody: the first in line does not hear of room that a simulation finds.
func TestSimulationWakesNobody(t *testing.T) {
	zone := &Zone{Name: "a", Key: []string{"static"}, Events: Quantity{Number: 3}, Window: time.Hour, MaxWait: 2 * time.Hour}
	s := newQueueSite(t, []*Zone{zone})
	synctest.Test(t, func(t *testing.T) {
		mustAll(t, "the first", s.sendMany(t, "x", 3), http.StatusOK, 0)
		waits := s.send(t.Context(), "x")
		for id := range zone.bound[ownStore].room.lines {
			redistest.Must(t, s.buckets().Reset(t.Context(), store.Request{Limit: &id.limit, ClientKey: id.clientKey}))
		}
		foreseen, _ := s.foresee()
		if synctest.Wait(); waits.ended() || foreseen.Answer.Zones[0].Used != 0 {
			t.Errorf("foreseen %+v, the one that waits got %+v", foreseen.Answer, waits.got())
		}
		time.Sleep(zone.MaxWait)
	})
}

// TestSimulationBehindALineOfASilentStore: on_error decides, as it does once it is the request's turn.
func TestSimulationBehindALineOfASilentStore(t *testing.T) {
	for onError, want := range map[string]telemetry.Outcome{
		stores.OnErrorAllow: telemetry.ErrorAllowed, stores.OnErrorDeny: telemetry.ErrorRefused, stores.OnErrorLocal: telemetry.Allowed,
	} {
		t.Run(onError, func(t *testing.T) {
			buckets := &silentStore{Store: memory.New(memory.NewBuckets(), memory.Options{})}
			s := &queueSite{t: t}
			s.load(buckets, []*Zone{{
				Name: "a", Key: []string{"static"}, Events: Quantity{Number: 1}, Window: 5 * time.Second, MaxWait: time.Minute, OnError: onError, ChargeBefore: true,
			}})
			synctest.Test(t, func(t *testing.T) {
				s.sendMany(t, "x", 2)
				buckets.isSilent.Store(true)
				foreseen, goesOn := s.foresee()
				if row := foreseen.Answer.Zones[0]; foreseen.Answer.Decision != want || row.Outcome != want || goesOn == endsRequest(want) {
					t.Errorf("goes on %v, foreseen %+v", goesOn, foreseen.Answer)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestSimulationForeseesAFullRoom: a request that has no place to wait is refused.
func TestSimulationForeseesAFullRoom(t *testing.T) {
	zone := &Zone{Name: "a", Key: []string{"static"}, Events: Quantity{Number: 1}, Window: 5 * time.Second, MaxWait: time.Minute, MaxWaitQueue: 1}
	s := newQueueSite(t, []*Zone{zone})
	synctest.Test(t, func(t *testing.T) {
		s.sendMany(t, "x", 2)
		foreseen, goesOn := s.foresee()
		if served := s.send(t.Context(), "x").got(); goesOn || foreseen.Answer.Decision != telemetry.Refused || served.status != http.StatusTooManyRequests {
			t.Errorf("foreseen %+v, served %+v", foreseen.Answer, served)
		}
		time.Sleep(time.Minute)
	})
}
