// Package limiter takes one request through the zones of a handler.
//
// A [Limiter], which New makes of a [Config], serves the requests of one handler.
// Each request has one tracker, however many handlers it passes; each handler adds
// an evaluation to it: the zones that match there. An evaluation asks a store,
// waits if a zone has max_wait, and settles once the status of the response is
// known. A [Simulation] asks without counting.
package limiter

import (
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// Config are the settings of a Limiter.
type Config struct {
	Zones []*Zone
	// Store is where the zones count, except for the clients that Rollout moves.
	Store *stores.Handle
	// Rollout is nil if no clients are moved.
	Rollout *Rollout
	// IsService is set if calls of rate_limit_service are limited, which ask zones each about a client of its own.
	IsService bool
	// Headers is HeadersGitHub, HeadersIETF, HeadersBoth or HeadersNone.
	Headers string
	// Jitter is the fraction of Retry-After by up to which it is lengthened at
	// random.
	Jitter float64
	// Problem is set if refused requests get a body of RFC 9457.
	Problem bool
	// GRPC is set if refused calls of gRPC get a status of gRPC.
	GRPC bool
	// LogRefusals is LogFirst, LogAll or LogNone.
	LogRefusals string
	// LogKey is set if client keys are shown.
	LogKey bool

	Logger *zap.Logger
	Events telemetry.Events
	Now    func() time.Time
	// AfterFunc is nil for [time.AfterFunc], unless Now is another clock.
	AfterFunc func(d time.Duration, f func()) Timer
}

// Limiter limits the requests of one handler: each has to fit into all zones that
// match it.
type Limiter struct {
	Config
	// simulation is nil, except for the copy of a Limiter that a simulation uses.
	simulation *Simulation
	arrived    *arrivals
	// onRun are called when the config runs.
	onRun []func()
}

// New returns a limiter whose zones count in open stores.
func New(c Config) *Limiter {
	l := &Limiter{Config: c, arrived: new(arrivals)}
	if c.Rollout != nil {
		c.Rollout.moved = cohortsIn(c.Rollout.Percent)
	}
	for _, z := range c.Zones {
		z.prepare()
		z.reportDoubts(l)
		for in, handle := range l.Stores() {
			z.countIn(in, handle)
		}
	}
	l.reportOtherClients()
	return l
}

// reportOtherClients logs the zones whose clients a rollout gives a limit in each store.
func (l *Limiter) reportOtherClients() {
	const problem = " have a limit in each store while the rollout's percentage is between 0 and 100"
	switch {
	case l.Rollout == nil || len(l.Zones) == 0:
		return
	case l.IsService:
		l.Logger.Warn("clients that calls do not name in the first descriptor"+problem, zap.String("hint", "let each call have one descriptor"))
		return
	}
	first := l.Zones[0]
	for _, z := range l.Zones[1:] {
		if !z.hasClientsOf(first) {
			l.Logger.Warn("clients of a zone"+problem, zap.String("zone", z.Name), zap.Strings("key", z.Key),
				zap.String("moved_by", first.Name), zap.String("hint", "give the zone the key of the handler's first zone, or a handler of its own"))
		}
	}
}

// OnRun makes Run call f.
func (l *Limiter) OnRun(f func()) { l.onRun = append(l.onRun, f) }

// Run makes requests that wait, also those of earlier configs, resolve their limits by l: the
// config runs.
func (l *Limiter) Run() {
	for _, f := range l.onRun {
		f()
	}
	for _, z := range l.Zones {
		for in := range l.Stores() {
			z.bound[in].run()
		}
	}
}

// Stores returns the stores in which the zones count.
func (l *Limiter) Stores() []*stores.Handle {
	if l.Rollout == nil {
		return []*stores.Handle{l.Store}
	}
	return []*stores.Handle{l.Store, l.Rollout.Store}
}

// ServeHTTP answers r, or hands it to next.
func (l *Limiter) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	l.arrived.note()
	err := l.handle(w, r, next)
	l.reportEmptyKeys(r)
	return err
}

func (l *Limiter) handle(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	t := trackerOf(r)
	if t != nil && t.isEnded() {
		// This is an error route of a request that was refused.
		return next.ServeHTTP(w, r)
	}
	if r.URL.Opaque != "" {
		// The path of "a:http://host/path" is empty here, and /path for the backend that Caddy sends it to.
		prepareRefusal(w.Header())
		return caddyhttp.Error(http.StatusBadRequest, errRootless)
	}
	// An outer handler wraps the writer already, and settles for this one too.
	nested := t != nil && !t.settled
	t, e, err := l.collect(t, w, r)
	switch {
	case err != nil:
		prepareRefusal(w.Header())
		return err
	case e == nil:
		return next.ServeHTTP(w, r)
	case !nested:
		err = l.serve(t, e, w, r, next)
	default:
		if err = l.admit(t, e, w, r); err == nil {
			// The outer handler's writer sees the final status. An inner handler may ask e again, which
			// then ends the request.
			err = next.ServeHTTP(w, r)
		}
	}
	return l.respond(t, e, w, r, err)
}

// errRootless is the error of a request whose target has a scheme and no path.
var errRootless = errors.New("the request target has a scheme and no path")

// trackerVar is the request variable that holds the request's tracker.
const trackerVar = "rate_limit.tracker"

func trackerOf(r *http.Request) *tracker {
	t, _ := caddyhttp.GetVar(r.Context(), trackerVar).(*tracker)
	return t
}

// serve admits e, the first evaluation of t, runs the rest of the chain if the
// request may pass, and settles, at the latest when the chain ends.
func (l *Limiter) serve(t *tracker, e *evaluation, w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	how := ending{ctx: r.Context(), panicked: true}
	defer func() {
		// Deferred, because a store may panic while the request settles.
		defer t.end()
		defer func() { t.finish(how) }()
		// The chain panicked: the request was made, and the server failed.
		if !t.settled {
			t.settle(t.unlessLeft(http.StatusInternalServerError))
		}
	}()
	err := l.admit(t, e, w, r)
	if err == nil {
		err = next.ServeHTTP(t, r)
	}
	how.err, how.panicked = err, false
	status := http.StatusOK
	if err != nil {
		// Error routes write to the outer writer; it has the same headers.
		status = statusOf(err)
	}
	t.commitAs(status)
	return err
}

var errStoreDown = errors.New("rate limit store cannot answer, and on_error is deny")

// admit asks the stores of e, and returns nil if the request may pass.
func (l *Limiter) admit(t *tracker, e *evaluation, w http.ResponseWriter, r *http.Request) error {
	if t.response != nil {
		// What the request waits for here is no part of its duration.
		began := l.Now()
		defer func() { t.response.held += l.Now().Sub(began) }()
	}
	e.enter()
	v, err := t.decide(e, r)
	if err != nil {
		for _, z := range e.zones {
			// The client has left: no zone has decided.
			z.answer = notAsked
		}
		t.endBy(verdict{by: e})
		prepareRefusal(w.Header())
		return err
	}
	for _, z := range e.zones {
		if z.outcome() == telemetry.WouldRefuse {
			z.reportRefusal(r)
		}
	}
	switch {
	case refuses(v.outcome):
		if v.by != e {
			// An outer handler was asked again after the request had waited.
			v.by.conclude()
		}
		return t.refuse(v, w, r)
	case endsRequest(v.outcome):
		t.endBy(v)
		prepareRefusal(w.Header())
		return caddyhttp.Error(http.StatusServiceUnavailable, errStoreDown)
	}
	for _, e := range t.own {
		e.holdLeases()
	}
	t.admitted = l.stamp()
	return nil
}

// decide asks the stores of e, the newest evaluation, and returns the verdict of all handlers, or the error
// that ends the request.
func (t *tracker) decide(e *evaluation, r *http.Request) (v verdict, err error) {
	if !e.refusesOutright() {
		e.countOverflow(r)
		if err := t.askZones(e, r); err != nil {
			return v, err
		}
	}
	e.conclude()
	return t.verdict(anyHandler), nil
}

// mayLog reports whether to log a condition that a request met, as
// [telemetry.LogThrottle.Report] does. A simulated request logs nothing.
func (l *Limiter) mayLog(t *telemetry.LogThrottle) (times int64, log bool) {
	if l.simulation != nil {
		return 0, false
	}
	return t.Report(l.Now())
}
