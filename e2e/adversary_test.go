package e2e

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adversary"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

var (
	adversarySeeds    = flag.Int("adversary.seeds", 0, "how many histories TestAdversary goes through; 0 for a sample")
	adversaryFirst    = flag.Uint64("adversary.seed", sweep.Seed(), "the first of them")
	adversarySteps    = flag.Int("adversary.steps", 40, "how many steps a history has")
	adversaryPatience = flag.Duration("adversary.patience", caddytest.Patience, "how long a count may take to be what it should")
)

// TestAdversary drives whole Caddys with random histories, and compares all that they show with the model of
// internal/adversary: status, headers, placeholders, the access log, simulate, get, top, near and metrics.
func TestAdversary(t *testing.T) {
	t.Parallel()
	n := *adversarySeeds
	if n == 0 {
		n = sweep.Size(20, 200)
	}
	var judged atomic.Int64
	t.Cleanup(func() {
		if all := int64(n); n >= 20 && !t.Failed() && judged.Load() < all/2 {
			t.Errorf("only %d of %d histories were judged to their end", judged.Load(), all)
		}
	})
	for i := range n {
		seed := *adversaryFirst + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			h := newAdversary(t, seed)
			if h.run(*adversarySteps); h.model.Doubt == "" {
				judged.Add(1)
			}
		})
	}
}

// adversaryRun is a history.
type adversaryRun struct {
	t       *testing.T
	seed    uint64
	rng     *rand.Rand
	kind    adversary.Kind
	model   *adversary.Model
	servers caddytest.Shards
	caddys  []*caddytest.Caddy
	gate    *adversaryGate
	began   time.Time
	// steps are for a failure.
	steps []string
	open  []*adversaryRequest
	sent  int
	// answers are those of each Caddy by request, outcomes what it decided, by zone and outcome, and refusals
	// whom it refused, by zone and client.
	answers            []map[string]caddytest.Answer
	outcomes, refusals []map[[2]string]int64
}

// adversaryRequest is a request that runs.
type adversaryRequest struct {
	id      string
	ask     adversary.Request
	headers []string
	waiting caddytest.Running
	leave   context.CancelFunc
	run     *adversary.Running
	// outcomes are those of its zones.
	outcomes map[string]string
}

// adversaryKinds are the kinds of histories, which count in memory if there are no shards. Where windows end, a
// charge that arrives later than its response may be on either side: only in memory none does.
var adversaryKinds = []struct {
	adversary.Kind
	shards, replicas int
}{
	{Kind: adversary.Kind{Caddys: 1, Moves: true}},
	{adversary.Kind{Caddys: 1}, 1, 0},
	{adversary.Kind{Caddys: 2}, 2, 1},
	{Kind: adversary.Kind{Caddys: 1}},
	{Kind: adversary.Kind{Caddys: 1, Moves: true}},
	{adversary.Kind{Caddys: 2}, 1, 0},
	{adversary.Kind{Caddys: 1}, 2, 1},
}

// adversaryKeys are the clients.
var adversaryKeys = []string{"a", "a", "b"}

func newAdversary(t *testing.T, seed uint64) *adversaryRun {
	t.Helper()
	h := &adversaryRun{t: t, seed: seed, began: time.Now(), rng: rand.New(rand.NewPCG(seed, 1)), gate: startAdversaryGate(t)}
	kind := adversaryKinds[seed%uint64(len(adversaryKinds))]
	h.kind = kind.Kind
	store, options := "", []string(nil)
	if h.kind.Caddys > 1 {
		options = []string{"ledger_trust 0"}
	}
	if kind.shards > 0 {
		h.servers = caddytest.StartShards(t, kind.shards, kind.replicas)
		store = h.servers.Store(options...)
	}
	zones := make([]*adversary.Zone, 1+h.rng.IntN(3))
	for i := range zones {
		zones[i] = adversary.DrawZone(h.rng, fmt.Sprintf("%c%d", 'x'+i, seed), h.kind)
		zones[i].Inner = i > 0 && (zones[i-1].Inner || h.rng.IntN(3) == 0)
	}
	h.model = adversary.NewModel(zones)
	h.caddys = caddytest.StartMany(t, h.kind.Caddys, h.site(store))
	for range h.caddys {
		h.answers = append(h.answers, map[string]caddytest.Answer{})
		h.outcomes = append(h.outcomes, map[[2]string]int64{})
		h.refusals = append(h.refusals, map[[2]string]int64{})
	}
	return h
}

// adversaryShown are the placeholders that responses show of each zone, and of the one they are about.
var adversaryShown = []string{"outcome", "limit", "used", "remaining", "reset", "cost", "reason", "wait"}

// site returns the config.
func (h *adversaryRun) site(store string) string {
	shown := ""
	for _, z := range append([]string{""}, h.names()...) {
		var texts []string
		for _, name := range adversaryShown {
			texts = append(texts, "{http.rate_limit."+strings.TrimPrefix(z+"."+name, ".")+"}")
		}
		shown += "X-Shown-" + z + " \"" + strings.Join(texts, "|") + "\"\n"
	}
	outer, inner := "", ""
	for _, z := range h.model.Zones {
		if z.Inner {
			inner += z.String()
		} else {
			outer += z.String()
		}
	}
	route := ""
	for _, zones := range []string{outer, inner} {
		if zones != "" {
			route += "rate_limit {\nlog_refusals none\n" + zones + "}\n"
		}
	}
	return caddytest.Site(store, "log\nheader {\ndefer\n"+shown+"}\nroute {\n"+route+proxyTo(h.gate.server.Listener.Addr().String())+"\n}\n"+
		"handle_errors {\nheader {\n"+shown+"}\nrespond no {err.status_code}\n}\n")
}

func (h *adversaryRun) names() (names []string) {
	for _, z := range h.model.Zones {
		names = append(names, z.Name)
	}
	return names
}

// failf fails the test with all that it takes to repeat it.
func (h *adversaryRun) failf(format string, args ...any) {
	h.t.Helper()
	zones := ""
	for _, z := range h.model.Zones {
		zones += fmt.Sprintf("inner %v %v", z.Inner, z)
	}
	hint := ""
	if h.kind.Moves {
		hint = " (windows end by real clocks: try it several times)"
	}
	h.t.Fatalf("%s\n%s\n%sto repeat it: go test ./e2e -run 'TestAdversary$' -adversary.seed %d -adversary.seeds 1%s",
		fmt.Sprintf(format, args...), strings.Join(h.steps, "\n"), zones, h.seed, hint)
}

func (h *adversaryRun) note(format string, args ...any) {
	h.steps = append(h.steps, fmt.Sprintf(format, args...))
}

// run takes steps, and then looks at all that is counted over a history.
func (h *adversaryRun) run(steps int) {
	for range steps {
		switch p := h.rng.IntN(100); {
		case p < 50 && len(h.open) < 6 || len(h.open) == 0:
			h.start()
		case p < 80:
			h.finish()
		case p < 84 && !h.kind.Moves: // a client that left is charged later
			h.leave()
		case p < 90:
			h.look(pick(h.rng, h.model.Zones...), pick(h.rng, adversaryKeys...))
		case h.kind.Moves:
			time.Sleep(time.Duration(h.rng.IntN(1000)) * time.Millisecond) // windows end by real clocks
		case h.kind.Caddys > 1:
			h.reset()
		case p < 92:
			h.reload()
		case p < 94:
			h.reset()
		default:
			h.change()
		}
		if h.model.Doubt != "" {
			break
		}
	}
	for len(h.open) > 0 {
		h.finish()
	}
	if h.model.Doubt == "" {
		h.judgeAll()
	}
	if h.model.Doubt != "" {
		h.t.Logf("seed %d is judged up to step %d: %s", h.seed, len(h.steps), h.model.Doubt)
	}
}

func pick[T any](rng *rand.Rand, values ...T) T { return values[rng.IntN(len(values))] }

// draw returns a random request.
func (h *adversaryRun) draw() *adversaryRequest {
	h.sent++
	r := &adversaryRequest{
		id: fmt.Sprint(h.sent), outcomes: map[string]string{},
		ask: adversary.Request{
			Caddy: h.rng.IntN(len(h.caddys)), Key: pick(h.rng, adversaryKeys...),
			Cost: pick(h.rng, "", "", "1", "2", "3", "0", "x", "1.5"), Events: map[string]string{},
		},
	}
	r.headers = []string{"X-Key: " + r.ask.Key}
	if r.ask.Cost != "" {
		r.headers = append(r.headers, "X-Cost: "+r.ask.Cost)
	}
	for _, z := range h.model.Zones {
		if events := pick(h.rng, "", "", "1", "2", "4", "6", "0", "unlimited", "nope", "-3"); z.Dynamic && events != "" {
			r.ask.Events[z.Name] = events
			r.headers = append(r.headers, "X-Events-"+z.Name+": "+events)
		}
	}
	return r
}

// keepClear waits while a window or penalty of a client is about to end.
func (h *adversaryRun) keepClear(key string) {
	const soon = 150_000
	now := time.Now().UnixMicro()
	time.Sleep(time.Duration(h.model.Clear(key, now, soon)-now) * time.Microsecond) // until then, by real clocks
}

// start sends a request, which is refused or runs.
func (h *adversaryRun) start() {
	r := h.draw()
	h.keepClear(r.ask.Key)
	c := h.caddys[r.ask.Caddy]
	var foreseen *simulated
	sent := time.Now()
	if h.rng.IntN(3) == 0 {
		foreseen = h.foresee(c, r)
	}
	arrived := h.gate.expect(r.id)
	ctx, leave := context.WithCancel(h.t.Context())
	r.leave = leave
	r.waiting = c.Begin(ctx, "/?id="+r.id, r.headers...)
	var answer *caddytest.Answer
	select {
	case <-arrived:
	case a := <-r.waiting.Answer:
		answer = &a
	case err := <-r.waiting.Err:
		h.failf("request %s has no answer: %v", r.id, err)
	case <-time.After(caddytest.Patience):
		h.failf("request %s neither arrives nor is answered", r.id)
	}
	now := h.since(sent)
	verdicts := h.model.Decide(&r.ask, now)
	if answer == nil {
		h.note("request %s of %s at Caddy %d %q runs", r.id, r.ask.Key, r.ask.Caddy, r.headers)
		h.admitted(r, verdicts, now)
		h.open = append(h.open, r)
	} else {
		h.note("request %s of %s at Caddy %d %q has status %d %v", r.id, r.ask.Key, r.ask.Caddy, r.headers, answer.Status, answer.Header)
		leave()
		h.refused(r, verdicts, answer, now)
	}
	if foreseen != nil && h.model.Doubt == "" {
		h.judgeForesight(foreseen, r, answer, verdicts)
	}
	if answer != nil || h.kind.Caddys > 1 { // a zone that observes begins its penalty later
		h.settle(r.ask.Key)
	}
}

// since returns the span of a call that began at a time. With Redis it begins with the history, because the
// estimate of a primary's clock may be as far behind as its last replies were late.
func (h *adversaryRun) since(began time.Time) adversary.Span {
	if h.servers != nil {
		began = h.began
	}
	return adversary.SpanOf(began, time.Now())
}

// take removes one of the running requests.
func (h *adversaryRun) take() *adversaryRequest {
	i := h.rng.IntN(len(h.open))
	r := h.open[i]
	h.open = slices.Delete(h.open, i, i+1)
	h.keepClear(r.ask.Key)
	return r
}

// finish answers a request.
func (h *adversaryRun) finish() {
	r := h.take()
	status, cost := pick(h.rng, 200, 200, 200, 201, 304, 304, 401, 403, 404, 500), pick(h.rng, "", "1", "3", "0", "7", "x")
	before := time.Now()
	h.gate.answer(r.id, status, cost)
	var answer caddytest.Answer
	select {
	case answer = <-r.waiting.Answer:
	case err := <-r.waiting.Err:
		h.failf("request %s has no answer: %v", r.id, err)
	case <-time.After(caddytest.Patience):
		h.failf("request %s is not answered", r.id)
	}
	r.leave()
	now := h.since(before)
	h.note("request %s ends with status %d, cost %q: %d %v", r.id, status, cost, answer.Status, answer.Header)
	shown := h.model.End(r.run, status, cost, now)
	if h.model.Doubt == "" {
		h.judgeAnswer(r, shown, &answer, status)
	}
	h.settle(r.ask.Key)
}

// leave makes the client of a request leave.
func (h *adversaryRun) leave() {
	if slices.ContainsFunc(h.model.Zones, func(z *adversary.Zone) bool { return z.Algorithm == adversary.Concurrency }) {
		return // what runs on is counted as long as it commonly takes
	}
	r := h.take()
	before := time.Now()
	r.leave()
	r.waiting.Leaves(h.t)
	h.gate.awaitLeft(h.t, r.id)
	h.note("the client of request %s leaves", r.id)
	h.model.Leave(r.run, h.since(before))
	for _, v := range r.run.Verdicts {
		h.count(r.ask.Caddy, v.Zone.Name, r.outcomes[v.Zone.Name])
	}
	h.settle(r.ask.Key)
}

// operate makes a change.
func (h *adversaryRun) operate(change adversary.Change) {
	c := pick(h.rng, h.caddys...)
	before := time.Now()
	status, text := c.AdminCall(change.Method, "/rate_limit/"+change.Path, "", "")
	h.note("%s %s: %d %s", change.Method, change.Path, status, text)
	if status != http.StatusOK {
		h.failf("the change fails")
	}
	change.Do(h.since(before))
	h.servers.AwaitReplicas(h.t)
}

func (h *adversaryRun) change() { h.operate(h.model.DrawChange(h.rng, adversaryKeys...)) }

func (h *adversaryRun) reset() {
	if change, ok := h.model.DrawReset(h.rng, adversaryKeys...); ok {
		h.operate(change)
	}
}

// reload loads a config in which a limit is another.
func (h *adversaryRun) reload() {
	z := pick(h.rng, h.model.Zones...)
	if z.Algorithm != adversary.GCRA {
		z.Events = max(pick[int64](h.rng, 1, 3, 6), z.Cost.Constant)
	}
	h.note("reload: zone %s has %d events", z.Name, z.Events)
	store := ""
	if h.servers != nil {
		store = h.servers.Store()
	}
	h.caddys[0].MustLoad(h.site(store) + "# " + strconv.Itoa(len(h.steps)) + "\n")
}

// adversaryGate is a backend that answers requests on command, by their id.
type adversaryGate struct {
	server *httptest.Server
	mu     sync.Mutex
	calls  map[string]*adversaryCall
}

type adversaryCall struct {
	arrived, left chan struct{}
	answer        chan [2]string
}

func startAdversaryGate(t *testing.T) *adversaryGate {
	t.Helper()
	g := &adversaryGate{calls: map[string]*adversaryCall{}}
	ended := make(chan struct{})
	g.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		call := g.call(r.FormValue("id"))
		close(call.arrived)
		select {
		case a := <-call.answer:
			if a[1] != "" {
				w.Header().Set("X-Cost", a[1])
			}
			status, _ := strconv.Atoi(a[0])
			w.WriteHeader(status)
		case <-r.Context().Done():
			close(call.left)
		case <-ended:
		}
	}))
	t.Cleanup(func() {
		close(ended)
		g.server.Close()
	})
	return g
}

func (g *adversaryGate) call(id string) *adversaryCall {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls[id]
}

// expect returns a channel that is closed when a request with that id arrives.
func (g *adversaryGate) expect(id string) <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls[id] = &adversaryCall{make(chan struct{}), make(chan struct{}), make(chan [2]string, 1)}
	return g.calls[id].arrived
}

func (g *adversaryGate) answer(id string, status int, cost string) {
	g.call(id).answer <- [2]string{strconv.Itoa(status), cost}
}

// awaitLeft waits until Caddy has given up a request.
func (g *adversaryGate) awaitLeft(t *testing.T, id string) {
	t.Helper()
	select {
	case <-g.call(id).left:
	case <-time.After(caddytest.Patience):
		t.Fatal("Caddy goes on although the client has left")
	}
}
