package limiter

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// silentStore answers nothing while it is silent. The client leaves meanwhile, unless leave is nil.
type silentStore struct {
	*memory.Store
	isSilent atomic.Bool
	leave    func()
}

func (s *silentStore) Take(ctx context.Context, asks []*store.Ask) {
	if s.isSilent.Load() {
		if s.leave != nil {
			s.leave()
		}
		setAll(asks, store.State{Err: store.ErrNotExecuted})
		return
	}
	s.Store.Take(ctx, asks)
}

func (s *silentStore) Inspect(ctx context.Context, r store.Request) store.Inspection {
	if s.isSilent.Load() {
		return store.Inspection{Copies: []store.Copy{{State: store.State{Err: store.ErrNotExecuted}}}}
	}
	return s.Store.Inspect(ctx, r)
}

// treatment is how a zone treats the second request of the test.
type treatment struct {
	limit     int64
	window    time.Duration
	observes  bool
	isBlocked bool
	// onError is set if the store is silent.
	onError string
	// leaves is set if the client leaves while the store is asked.
	leaves bool
}

// handlerOf is a handler of the test: its headers, and its zones.
type handlerOf struct {
	headers string
	zones   []treatment
	// isInErrorRoute is set if it serves the error of the chain of those before.
	isInErrorRoute bool
}

// observed is what a request is told of its verdict, in all places.
type observed struct {
	status                        int
	headers                       http.Header
	zone, outcome, wait, exceeded string
	byZone                        map[string]string
	access, refusal               map[string]any
	counted                       map[string]int64
	simulated                     *Simulation
}

// verdictSite is a chain of handlers whose zones are named z0, z1 and so on, with stores of their own.
type verdictSite struct {
	t        *testing.T
	handlers []handlerOf
	limiters []*Limiter
	zones    []*Zone
	log      *observer.ObservedLogs
	silent   []*silentStore
}

func newVerdictSite(t *testing.T, handlers []handlerOf) *verdictSite {
	t.Helper()
	core, log := observer.New(zapcore.InfoLevel)
	s := &verdictSite{t: t, handlers: handlers, log: log}
	for n, h := range handlers {
		buckets := &silentStore{Store: memory.New(memory.NewBuckets(), memory.Options{})}
		handle := &stores.Handle{Name: fmt.Sprint(t.Name(), n), Module: deafModule{buckets}, Logger: zap.NewNop()}
		_, err := handle.Enter()
		redistest.Must(t, err)
		t.Cleanup(handle.Unload)
		config := Config{Store: handle, Headers: h.headers, Jitter: 3, LogRefusals: LogAll, Logger: zap.New(core), Now: time.Now}
		for _, of := range h.zones {
			z := &Zone{
				Name: "z" + strconv.Itoa(len(s.zones)), Key: []string{"static"}, Events: Quantity{Number: of.limit}, Cost: Quantity{Number: 1},
				Window: max(of.window, time.Hour), ChargeBefore: true, OnError: of.onError,
			}
			if of.observes {
				z.Enforce = new(float64)
			}
			s.zones, config.Zones = append(s.zones, z), append(config.Zones, z)
		}
		s.limiters, s.silent = append(s.limiters, New(config)), append(s.silent, buckets)
	}
	return s
}

// change makes the zones treat the next request as they are to.
func (s *verdictSite) change() {
	n := 0
	for i, h := range s.handlers {
		for _, of := range h.zones {
			z := s.zones[n]
			n++
			s.silent[i].isSilent.Store(s.silent[i].isSilent.Load() || of.onError != "")
			if of.isBlocked {
				redistest.Must(s.t, s.limiters[i].Store.SetOverride(s.t.Context(), store.Override{
					Kind: store.OverrideBlock, Zone: z.Name, ClientKey: z.templates[0].tag + ":", Until: time.Now().Add(3 * time.Hour).UnixMicro(),
				}))
			}
		}
	}
}

// chain is the handlers from n on, of the main route or of the error route.
func (s *verdictSite) chain(n int, isError bool) caddyhttp.Handler {
	for n < len(s.limiters) && s.handlers[n].isInErrorRoute != isError {
		n++
	}
	if n < len(s.limiters) {
		return caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return s.limiters[n].ServeHTTP(w, r, s.chain(n+1, isError))
		})
	}
	return caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		if !isError && s.handlers[len(s.handlers)-1].isInErrorRoute {
			return caddyhttp.Error(http.StatusBadGateway, errTest)
		}
		w.WriteHeader(http.StatusOK)
		return nil
	})
}

// serve serves a request, with the error route if there is one, and simulates it before.
func (s *verdictSite) serve() (got observed) {
	prepare := func() (*httptest.ResponseRecorder, *http.Request, *caddy.Replacer) {
		w, repl := httptest.NewRecorder(), caddy.NewReplacer()
		return w, caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), repl, w, nil), repl
	}
	w, r, _ := prepare()
	got.simulated = NewSimulation(w)
	for _, l := range s.limiters {
		goesOn, err := got.simulated.Meet(l, r)
		redistest.Must(s.t, err)
		if !goesOn {
			break
		}
	}
	before := s.decisions()
	logged := s.log.Len()
	w, r, repl := prepare()
	ctx, leave := context.WithCancel(r.Context())
	defer leave()
	r = r.WithContext(ctx)
	for i, h := range s.handlers {
		if slices.ContainsFunc(h.zones, func(of treatment) bool { return of.leaves }) {
			s.silent[i].leave = leave
		}
	}
	err := s.chain(0, false).ServeHTTP(w, r)
	if err != nil {
		if inner := s.chain(0, true).ServeHTTP(w, r); inner != nil {
			err = inner
		}
		w.Code = statusOf(err)
	}
	show := func(name string) string { return repl.ReplaceAll("{http.rate_limit."+name+"}", "") }
	got.status, got.headers = w.Code, w.Header()
	got.zone, got.outcome, got.wait, got.exceeded = show("zone"), show("outcome"), show("wait"), show("exceeded.name")
	got.byZone, got.counted = map[string]string{}, s.decisions()
	for _, z := range s.zones {
		got.byZone[z.Name] = show(z.Name + ".outcome")
	}
	for name, n := range before {
		got.counted[name] -= n
	}
	access := zapcore.NewMapObjectEncoder()
	redistest.Must(s.t, trackerOf(r).MarshalLogObject(access))
	got.access = access.Fields
	for _, entry := range s.log.All()[logged:] {
		if entry.Message == "rate limit exceeded" {
			got.refusal = entry.ContextMap()
		}
	}
	return got
}

// decisions are what the metrics count, by zone and outcome.
func (s *verdictSite) decisions() map[string]int64 {
	counts := map[string]int64{}
	for _, z := range s.zones {
		for o, c := range z.Counts.Decisions {
			if c != nil {
				counts[z.Name+" "+telemetry.Outcome(o).String()] = telemetry.ValueOf(c)
			}
		}
	}
	return counts
}

// TestAllReadOneVerdict: the response, its headers, placeholders, the access log, the entry about a
// refusal, metrics and a simulation tell the same of a request, whichever of several zones, handlers
// and routes decide. The first request passes, and leaves a zone with a limit of 1 full.
func TestAllReadOneVerdict(t *testing.T) {
	full, left1, left5 := treatment{limit: 1}, treatment{limit: 3}, treatment{limit: 7}
	longer, watched := treatment{limit: 1, window: 2 * time.Hour}, treatment{limit: 1, observes: true}
	blocked := treatment{limit: 9, isBlocked: true}
	denied, fails := treatment{limit: 9, onError: stores.OnErrorDeny}, treatment{limit: 9, onError: stores.OnErrorAllow}
	leaves := treatment{limit: 9, onError: stores.OnErrorAllow, leaves: true}
	route := func(zones ...treatment) []handlerOf { return []handlerOf{{headers: HeadersGitHub, zones: zones}} }
	for name, test := range map[string]struct {
		handlers []handlerOf
		status   int
		// zone and outcome are the verdict, and resource the zone of X-RateLimit-*.
		zone, outcome, resource string
		// policies are the zones of RateLimit-Policy.
		policies []string
	}{
		"the least left":         {route(left5, left1), 200, "z1", "allowed", "z1", nil},
		"the longest wait":       {route(full, longer, left1), 429, "z1", "refused", "z1", nil},
		"refusal before pass":    {route(left1, full), 429, "z1", "refused", "z1", nil},
		"observed":               {route(left1, watched), 200, "z1", "would_refuse", "z1", nil},
		"observed and refused":   {route(longer, watched), 429, "z0", "refused", "z0", nil},
		"blocked":                {route(full, blocked), 429, "z1", "blocked", "z1", nil},
		"no answer":              {route(fails), 200, "z0", "error_allowed", "", nil},
		"no answer, and denied":  {route(denied), 503, "z0", "error_refused", "", nil},
		"left":                   {route(leaves), 499, "", "", "", nil},
		"left inside":            {[]handlerOf{{headers: HeadersGitHub, zones: []treatment{left1}}, {headers: HeadersGitHub, zones: []treatment{leaves, left5}}}, 499, "z0", "allowed", "", nil},
		"an answer beside none":  {[]handlerOf{{headers: HeadersGitHub, zones: []treatment{fails}}, {headers: HeadersGitHub, zones: []treatment{left1}}}, 200, "z1", "allowed", "z1", nil},
		"refused inside":         {[]handlerOf{{headers: HeadersGitHub, zones: []treatment{left1}}, {headers: HeadersGitHub, zones: []treatment{full}}}, 429, "z1", "refused", "z1", nil},
		"refused inside, hidden": {[]handlerOf{{headers: HeadersBoth, zones: []treatment{left1}}, {headers: HeadersNone, zones: []treatment{full}}}, 429, "z1", "refused", "", nil},
		"refused outside":        {[]handlerOf{{headers: HeadersGitHub, zones: []treatment{full}}, {headers: HeadersGitHub, zones: []treatment{longer}}}, 429, "z0", "refused", "z0", nil},
		"denied inside":          {[]handlerOf{{headers: HeadersGitHub, zones: []treatment{left1}}, {headers: HeadersGitHub, zones: []treatment{denied}}}, 503, "z1", "error_refused", "", nil},
		"the least left is hidden": {
			[]handlerOf{{headers: HeadersGitHub, zones: []treatment{left5}}, {headers: HeadersNone, zones: []treatment{left1}}}, 200, "z1", "allowed", "z0", nil,
		},
		"two families": {
			[]handlerOf{{headers: HeadersIETF, zones: []treatment{left1}}, {headers: HeadersBoth, zones: []treatment{left5}}}, 200, "z0", "allowed", "z1", []string{"z0", "z1"},
		},
		"refused with fields": {
			[]handlerOf{{headers: HeadersGitHub, zones: []treatment{left5}}, {headers: HeadersIETF, zones: []treatment{full, left1}}}, 429, "z1", "refused", "", []string{"z1", "z2"},
		},
		"before an error": {
			[]handlerOf{{headers: HeadersGitHub, zones: []treatment{left1}}, {headers: HeadersBoth, zones: []treatment{left5}, isInErrorRoute: true}}, 502, "z0", "allowed", "z0", []string{"z1"},
		},
		"refused in the error route": {
			[]handlerOf{{headers: HeadersBoth, zones: []treatment{left1}}, {headers: HeadersGitHub, zones: []treatment{full}, isInErrorRoute: true}}, 429, "z1", "refused", "z1", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newVerdictSite(t, test.handlers)
			s.serve()
			s.change()
			got := s.serve()
			h := got.headers
			if got.status != test.status || got.zone != test.zone || got.outcome != test.outcome {
				t.Errorf("status %d by %q, which is %q; want %d by %q, %q", got.status, got.zone, got.outcome, test.status, test.zone, test.outcome)
			}
			var policies []string
			for _, item := range strings.Split(h.Get("Ratelimit-Policy"), ", ") {
				if zone, _, found := strings.Cut(item, ";"); found {
					policies = append(policies, strings.Trim(zone, `"`))
				}
			}
			if got := h.Get("X-RateLimit-Resource"); got != test.resource || !slices.Equal(policies, test.policies) {
				t.Errorf("the headers are about %q and %q: %v", got, policies, h)
			}
			// The access log shows what the placeholders do.
			if zone, _ := got.access["zone"].(string); zone != test.zone || test.zone != "" && got.access["outcome"] != test.outcome {
				t.Errorf("the access log has %v", got.access)
			}
			isRefused := test.status == http.StatusTooManyRequests
			wants := ""
			if isRefused {
				wants = test.zone
			}
			if got.exceeded != wants || isRefused != (got.refusal != nil) {
				t.Errorf("exceeded is %q, logged is %v", got.exceeded, got.refusal)
			}
			if isRefused && (got.refusal["zone"] != test.zone || fmt.Sprint(got.refusal["wait"]) != got.wait || h.Get("Retry-After") != got.wait || fmt.Sprint(got.access["wait"]) != got.wait) {
				t.Errorf("Retry-After is %q, the placeholder %q, logged are %v and %v", h.Get("Retry-After"), got.wait, got.refusal, got.access)
			}
			for zone, outcome := range got.byZone {
				for o := range telemetry.Outcomes {
					want := int64(0)
					if o.String() == outcome && outcome != "" {
						want = 1
					}
					if n := got.counted[zone+" "+o.String()]; n != want {
						t.Errorf("zone %s is %q; the metrics count %d as %q", zone, outcome, n, o)
					}
				}
			}
			s.checkSimulation(got, test.outcome)
		})
	}
}

// checkSimulation compares what was foreseen with what a request got.
func (s *verdictSite) checkSimulation(got observed, outcome string) {
	s.t.Helper()
	answer := got.simulated.Answer
	decision, zone := "allowed", ""
	switch outcome {
	case "refused", "blocked", "error_refused":
		decision, zone = outcome, got.zone
	case "error_allowed":
		decision = outcome
	case "":
		// The client left. That of a simulation cannot.
		return
	}
	// Jitter is not foreseen.
	if isRefused := got.refusal != nil; answer.Decision.String() != decision || answer.Zone != zone || (answer.Wait > 0) != isRefused {
		s.t.Errorf("foreseen is %+v; it was %q by %q, and waits %q", answer, outcome, got.zone, got.wait)
	}
	for _, z := range answer.Zones {
		if served := got.byZone[z.Name]; z.Outcome.String() != served && served != "" {
			s.t.Errorf("zone %s was foreseen as %q, and is %q", z.Name, z.Outcome, served)
		}
	}
}

// TestDecisionOfARequestThatWaitedIsCountedOnce: the zone of an outer handler let it pass before, and
// refuses it afterwards.
func TestDecisionOfARequestThatWaitedIsCountedOnce(t *testing.T) {
	outer := &Zone{Name: "outer", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: 2}, Window: time.Hour}
	inner := &Zone{Name: "inner", Key: []string{clientKey}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: time.Second, MaxWait: time.Minute}
	s := newQueueSite(t, []*Zone{outer}, []*Zone{inner})
	synctest.Test(t, func(t *testing.T) {
		first := s.send(t.Context(), "x")
		waits := s.send(t.Context(), "x")
		other := s.send(t.Context(), "y")
		pass(time.Minute)
		synctest.Wait()
		mustAll(t, "those that fit", []*sent{first, other}, http.StatusOK, 0)
		if got := waits.got(); got.status != http.StatusTooManyRequests || got.headers.Get("X-RateLimit-Resource") != "outer" {
			t.Errorf("the one that waited got %+v", got)
		}
	})
	for outcome, want := range map[telemetry.Outcome]int64{telemetry.Allowed: 2, telemetry.Refused: 1} {
		if n := telemetry.ValueOf(outer.Counts.Decisions[outcome]); n != want {
			t.Errorf("%d decisions are %v, want %d", n, outcome, want)
		}
	}
	if n := telemetry.ValueOf(outer.Counts.Requests); n != 3 {
		t.Errorf("%d requests are counted, want 3", n)
	}
}

// TestDecisionsBeforeAWaitStand: the zone of an outer handler decided before the request waited for
// an inner one. What it would say while the request waits is no decision.
func TestDecisionsBeforeAWaitStand(t *testing.T) {
	second := func() *Zone {
		return &Zone{Name: "inner", Key: []string{clientKey}, ChargeBefore: true, Events: Quantity{Number: 1}, Window: 5 * time.Second, MaxWait: time.Minute}
	}
	outer := func(events int64) *Zone {
		return &Zone{Name: "outer", Key: []string{"static"}, ChargeBefore: true, Events: Quantity{Number: events}, Window: 10 * time.Second, MaxWait: time.Minute}
	}
	observed := func(events int64) *Zone {
		z := outer(events)
		z.Enforce, z.MaxWait = new(float64), 0
		return z
	}
	type outcomes map[telemetry.Outcome]int64
	for name, c := range map[string]struct {
		outer *Zone
		play  func(s *queueSite, stays, leaves context.Context)
		want  outcomes
	}{
		"the client leaves while the outer zone refuses": {outer(2), func(s *queueSite, stays, leaves context.Context) {
			s.send(stays, "x")
			s.send(leaves, "x")
			s.send(stays, "y")
			pass(6 * time.Second)
		}, outcomes{telemetry.Allowed: 3}},
		"the client leaves, and the outer zone observes": {observed(1), func(s *queueSite, stays, leaves context.Context) {
			s.send(stays, "x")
			s.send(leaves, "x")
			z := s.limiters[1].Zones[0]
			AskAgain(ZoneID{s.handles[0].Name, z.Name}, z.templates[0].tag+":x")
			synctest.Wait()
		}, outcomes{telemetry.Allowed: 1, telemetry.WouldRefuse: 1}},
		"the outer zone observes, and is full after the wait": {observed(3), func(s *queueSite, stays, _ context.Context) {
			for _, client := range []string{"x", "x", "y", "z"} {
				s.send(stays, client)
			}
			pass(6 * time.Second)
		}, outcomes{telemetry.Allowed: 4}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newQueueSite(t, []*Zone{c.outer}, []*Zone{second()})
			synctest.Test(t, func(t *testing.T) {
				leaves, leave := context.WithCancel(t.Context())
				c.play(s, t.Context(), leaves)
				leave()
				pass(time.Minute)
			})
			got := outcomes{}
			for o, counter := range c.outer.Counts.Decisions {
				if counter == nil {
					continue
				}
				if n := telemetry.ValueOf(counter); n > 0 {
					got[telemetry.Outcome(o)] = n
				}
			}
			if !maps.Equal(got, c.want) {
				t.Errorf("the outer zone decided %v, want %v", got, c.want)
			}
		})
	}
}
