package replay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/routes"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// outcomes are what zones decided, by request and zone.
type outcomes map[string]map[string]string

func (o outcomes) set(id, zone, outcome string) {
	if outcome == "" {
		return
	}
	if o[id] == nil {
		o[id] = map[string]string{}
	}
	o[id][zone] = outcome
}

// replayed returns what the zones decide about a log, by the parameter id of the requests.
func replayed(t *testing.T, caddyfile string, c replay.Config) outcomes {
	t.Helper()
	again := outcomes{}
	c.Suggest = -1
	c.Decided = func(l *replay.Line, d limiter.Decision) {
		again.set(idOf(l.URI), d.Zone.Name, d.Outcome.String())
	}
	a, err := rerun(t, caddyfile, c)
	redistest.Must(t, err)
	if len(a.LeftOut) > 0 {
		t.Errorf("zones are left out: %v", a.LeftOut)
	}
	t.Log(strings.Join(a.Notes, "\n"))
	return again
}

func idOf(uri string) string {
	target, err := url.Parse(uri)
	if err != nil {
		return ""
	}
	return target.Query().Get("id")
}

// compare fails the test where the replay decides otherwise, and returns how often each zone decided
// what.
func compare(t *testing.T, live, again outcomes) map[string]int {
	t.Helper()
	counts := map[string]int{}
	wrong := 0
	for id := range live {
		if !maps.Equal(live[id], again[id]) {
			if wrong++; wrong < 10 {
				t.Errorf("request %s: served with %v, replayed with %v", id, live[id], again[id])
			}
		}
		for zone, outcome := range live[id] {
			counts[zone+" "+outcome]++
		}
	}
	if len(again) != len(live) {
		t.Errorf("%d requests were decided, and %d when they were replayed", len(live), len(again))
	}
	return counts
}

// clock is set by a test.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = now
}

// timedModule is a store in memory with a clock.
type timedModule struct{ clock *clock }

func (m timedModule) OpenStore(string) (store.Store, error) {
	return memory.New(memory.NewBuckets(), memory.Options{Now: m.clock.Now}), nil
}

func (timedModule) CloseStore() {}

func (timedModule) OnErrorDefault() string { return stores.OnErrorAllow }

// everyKind are zones of each algorithm, with what a log can show of their other options.
const everyKind = `http://example.com {
	rate_limit {
		zone all {
			key {client_ip}
			events 13
			window 10s
		}
		zone aligned {
			key {header.X-User} {client_ip}
			events 7
			window 4s aligned
			count_status not 404
		}
		zone smooth {
			match {
				path /api/*
			}
			key {client_ip}
			events 9
			window 10s
			burst 4
			algorithm gcra
		}
		zone logins {
			match {
				path /login
				method POST
			}
			key {header.X-User} {client_ip}
			events 2
			window 30s
			algorithm sliding_log
			count_status 401 200
		}
		zone sliding {
			key {client_ip}
			events 11
			window 7s
			algorithm sliding_window
			charge before
		}
		zone slots {
			key {client_ip}
			events 2
			algorithm concurrency
		}
		zone watched {
			key {header.X-User}
			events 3
			window 5s
			enforce 0
		}
	}
	handle /api/* {
		rate_limit {
			zone inner {
				key {header.X-User} {client_ip}
				events 6
				window 12s
				penalty 2s
				obey_upstream
				reset_status 201
				cost {http.response.header.X-Cost}
			}
		}
	}
}
`

// site serves requests by the routes of a Caddyfile, with the clock of a test.
type site struct {
	t       *testing.T
	clock   clock
	handler caddyhttp.Handler
	log     bytes.Buffer
	access  *zap.Logger
	live    outcomes
	zones   []string
}

// served is a request that is being served.
type served struct {
	id      string
	began   time.Time
	request *http.Request
	w       *httptest.ResponseRecorder
	// answer takes the status of the response, and done the error at its end.
	answer chan int
	done   chan error
}

var errAnswer = errors.New("the test answers")

func newSite(t *testing.T, caddyfile string) *site {
	s := &site{t: t, live: outcomes{}}
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	redistest.Must(t, err)
	var root struct {
		Apps struct {
			HTTP struct {
				Servers map[string]struct {
					Routes caddyhttp.RouteList `json:"routes"`
				} `json:"servers"`
			} `json:"http"`
		} `json:"apps"`
	}
	redistest.Must(t, json.Unmarshal(text, &root))
	loaded, err := caddy.ProvisionContext(&caddy.Config{Logging: quiet})
	redistest.Must(t, err)
	ctx, unload := caddy.NewContext(loaded)
	t.Cleanup(unload)
	list := root.Apps.HTTP.Servers["srv0"].Routes
	redistest.Must(t, list.Provision(ctx))
	handle, err := stores.Open(ctx, "timed", timedModule{&s.clock})
	redistest.Must(t, err)
	t.Cleanup(handle.Unload)
	s.inject(list, handle)
	s.handler = list.Compile(caddyhttp.HandlerFunc(s.serve))
	encoder := zapcore.NewJSONEncoder(zapcore.EncoderConfig{
		MessageKey: "msg", LevelKey: "level", TimeKey: "ts", NameKey: "logger",
		EncodeLevel: zapcore.LowercaseLevelEncoder, EncodeTime: zapcore.EpochTimeEncoder, EncodeDuration: zapcore.SecondsDurationEncoder,
	})
	s.access = zap.New(zapcore.NewCore(encoder, zapcore.AddSync(&s.log), zapcore.InfoLevel), zap.WithClock(&s.clock)).Named("http.log.access.log0")
	return s
}

// NewTicker implements [zapcore.Clock].
func (*clock) NewTicker(d time.Duration) *time.Ticker { return time.NewTicker(d) }

// inject gives the limiters the clock of the test. It is called before the routes are compiled.
func (s *site) inject(list caddyhttp.RouteList, handle *stores.Handle) {
	for i, route := range list {
		// The test answers, behind all routes.
		list[i].Terminal = false
		for _, h := range route.Handlers {
			switch h := h.(type) {
			case routes.Limiting:
				config := h.Limiter().Config
				config.Now, config.Store = s.clock.Now, handle
				*h.Limiter() = *limiter.New(config)
				for _, z := range config.Zones {
					s.zones = append(s.zones, z.Name)
				}
			case *caddyhttp.Subroute:
				s.inject(h.Routes, handle)
			}
		}
	}
}

type servedKey struct{}

// serve answers when and as the test says.
func (s *site) serve(w http.ResponseWriter, r *http.Request) error {
	v := r.Context().Value(servedKey{}).(*served)
	v.done <- errAnswer
	status := <-v.answer
	w.Header().Set("X-Cost", fmt.Sprint(1+status%2))
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", fmt.Sprint(status%5))
	}
	w.WriteHeader(status)
	return nil
}

// arrive begins to serve a request, and reports whether it is being answered.
func (s *site) arrive(v *served, method, target string, header http.Header, client string) bool {
	v.began, v.w, v.answer, v.done = s.clock.Now(), httptest.NewRecorder(), make(chan int), make(chan error)
	r := httptest.NewRequestWithContext(context.WithValue(s.t.Context(), servedKey{}, v), method, "http://example.com"+target, http.NoBody)
	r.RequestURI, r.Header, r.RemoteAddr = target, header, client+":1234"
	v.request = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), v.w, &caddyhttp.Server{})
	go func() { v.done <- s.handler.ServeHTTP(v.w, v.request) }()
	if err := <-v.done; !errors.Is(err, errAnswer) {
		s.finish(v, err)
		return false
	}
	return true
}

// end answers a request.
func (s *site) end(v *served, status int) {
	v.answer <- status
	s.finish(v, <-v.done)
}

// finish logs a request as Caddy does, and notes what its zones have decided.
func (s *site) finish(v *served, err error) {
	status := v.w.Code
	if handlerErr := new(caddyhttp.HandlerError); errors.As(err, handlerErr) {
		status = handlerErr.StatusCode
	}
	repl := v.request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for _, zone := range s.zones {
		outcome, _ := repl.GetString("http.rate_limit." + zone + ".outcome")
		s.live.set(v.id, zone, outcome)
	}
	s.access.Info("handled request",
		zap.Object("request", caddyhttp.LoggableHTTPRequest{Request: v.request}),
		zap.Int("bytes_read", 0), zap.String("user_id", ""),
		zap.Duration("duration", s.clock.Now().Sub(v.began)), zap.Int("size", v.w.Body.Len()), zap.Int("status", status),
		zap.Any("resp_headers", v.w.Header()))
}

// TestDecidesAsServed serves random requests, many at a time, by the routes of Caddy and the limiters
// with a clock that the test sets, and replays their log: each zone decides the same about each.
func TestDecidesAsServed(t *testing.T) {
	for seed := range uint64(sweep.Size(1, 40)) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			s := newSite(t, everyKind)
			s.serveRandomly(rand.New(rand.NewPCG(seed, 1)), 2000)
			counts := compare(t, s.live, replayed(t, everyKind, replay.Config{Logs: []string{"-"}, Stdin: &s.log}))
			t.Log(counts)
			for _, zone := range s.zones {
				refused := "refused"
				if zone == "watched" {
					refused = "would_refuse"
				}
				if counts[zone+" allowed"] == 0 || counts[zone+" "+refused] == 0 {
					t.Errorf("zone %s has not decided both ways: %v", zone, counts)
				}
			}
		})
	}
}

// serveRandomly serves requests of few clients, whose responses end in another order. No two things
// happen in the same millisecond: a log does not show which was first.
func (s *site) serveRandomly(random *rand.Rand, requests int) {
	now := began
	var running []*served
	for n := 0; n < requests || len(running) > 0; {
		now = now.Add(time.Duration(1+random.IntN(120)) * time.Millisecond)
		if random.IntN(400) == 0 {
			now = now.Add(time.Duration(random.IntN(20_000)) * time.Millisecond)
		}
		// The longest request of all, which began first, takes less than the minute in which a replay
		// puts requests in order.
		isOld := len(running) > 0 && now.Sub(running[0].began) > 30*time.Second
		s.clock.set(now)
		if isOld || len(running) > 12 || n == requests || len(running) > 0 && random.IntN(5) < 2 {
			i := random.IntN(len(running))
			if isOld {
				i = 0
			}
			s.end(running[i], []int{200, 200, 200, 304, 404, 401, 201, 429, 503}[random.IntN(9)])
			running = append(running[:i], running[i+1:]...)
			continue
		}
		v := &served{id: fmt.Sprint(n)}
		n++
		header := http.Header{"User-Agent": {"test"}}
		if random.IntN(4) > 0 {
			header.Set("X-User", fmt.Sprint("user", random.IntN(4)))
		}
		method, path := http.MethodGet, []string{"/", "/api/x", "/api/y", "/login"}[random.IntN(4)]
		if path == "/login" {
			method = http.MethodPost
		}
		if s.arrive(v, method, path+"?id="+v.id, header, fmt.Sprint("192.0.2.", 1+random.IntN(3))) {
			running = append(running, v)
		}
	}
}

// TestReplaysCaddysAccessLog serves requests by a Caddy that listens, and replays the log that it has
// written. Clients send one request after the other, beside each other: their limits are their own.
func TestReplaysCaddysAccessLog(t *testing.T) {
	port, release, err := process.ReservePort()
	redistest.Must(t, err)
	defer func() { _ = release() }()
	address := fmt.Sprint("127.0.0.1:", port)
	file := filepath.Join(t.TempDir(), "access.log")
	caddyfile := strings.NewReplacer("{{address}}", address, "{{log}}", file).Replace(`{
	admin off
	persist_config off
	default_bind 127.0.0.1
	servers {
		trusted_proxies static private_ranges
	}
}
http://{{address}} {
	log {
		output file {{log}}
	}
	rate_limit {
		zone all {
			key {client_ip}
			events 30
			window 1h
		}
		zone api {
			match {
				path /api/*
			}
			key {header.X-User}
			events 10
			window 1h
			algorithm sliding_window
			charge before
		}
		zone smooth {
			match not path /free
			key {header.X-User}
			events 8
			window 10h
			algorithm gcra
			enforce 0
		}
	}
	log_append all {http.rate_limit.all.outcome}
	log_append api {http.rate_limit.api.outcome}
	log_append smooth {http.rate_limit.smooth.outcome}
	respond /api/unchanged 304
	respond /api/missing 404
	respond "hello"
}
`)
	caddyfile = strings.Replace(caddyfile, "match not path /free", "match {\n\t\t\t\tnot path /free\n\t\t\t}", 1)
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	redistest.Must(t, err)
	redistest.Must(t, caddy.Load(text, true))
	var clients sync.WaitGroup
	for client := range 6 {
		clients.Go(func() {
			paths := []string{"/", "/api/x", "/api/unchanged", "/api/missing", "/free"}
			for n := range 60 {
				r, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://%s%s?id=%d.%d", address, paths[(n*7+client)%len(paths)], client, n), http.NoBody)
				r.Header.Set("X-Forwarded-For", fmt.Sprint("198.51.100.", client))
				r.Header.Set("X-User", fmt.Sprint("user", client))
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	clients.Wait()
	redistest.Must(t, caddy.Stop())
	live := readOutcomes(t, file)
	counts := compare(t, live, replayed(t, caddyfile, replay.Config{Logs: []string{file}}))
	t.Log(counts)
	if len(live) != 360 || counts["all refused"] == 0 || counts["api refused"] == 0 || counts["smooth would_refuse"] == 0 {
		t.Errorf("%d requests were served, with %v", len(live), counts)
	}
}

// readOutcomes returns what the zones have decided when the requests were served, by the log.
func readOutcomes(t *testing.T, file string) outcomes {
	t.Helper()
	text, err := os.ReadFile(file)
	redistest.Must(t, err)
	live := outcomes{}
	for line := range bytes.Lines(text) {
		var entry struct {
			Request          struct{ URI string }
			All, API, Smooth string
		}
		redistest.Must(t, json.Unmarshal(line, &entry))
		for zone, outcome := range map[string]string{"all": entry.All, "api": entry.API, "smooth": entry.Smooth} {
			live.set(idOf(entry.Request.URI), zone, outcome)
		}
	}
	return live
}
