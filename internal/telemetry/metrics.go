// Package telemetry has what the limits report of themselves: metrics that outlive
// configs ([Metrics], [Default]), Caddy events ([Events]) and logs of conditions that
// may hold for every request ([LogThrottle]).
package telemetry

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Default are the metrics of the process. They outlive configs, so that they do not
// start over at a reload.
var Default = newMetricSet()

// Metrics are the metrics of zones and of calls of stores.
type Metrics struct {
	zones       zones
	StoreErrors *prometheus.CounterVec
	// StoreDuration measures commands to servers.
	StoreDuration *prometheus.HistogramVec
	Undelivered   *prometheus.CounterVec
}

// Outcome is the decision of a zone about a request.
type Outcome int

const (
	// Undecided means that another zone refused before this one was asked.
	Undecided Outcome = iota
	// Allowed means that the request fits.
	Allowed
	// Refused means that it does not.
	Refused
	// WouldRefuse means that the client is over its limit and only observed.
	WouldRefuse
	// ErrorAllowed means that the store could not answer, and on_error let pass.
	ErrorAllowed
	// ErrorRefused means that the store could not answer, and on_error refused.
	ErrorRefused
	// Blocked means that an operator has blocked the client.
	Blocked
	// Outcomes is the number of outcomes.
	Outcomes
)

// outcomes are the words for outcomes. Without the last row this does not compile, and without another one tests
// fail.
var outcomes = [...]Word{
	Undecided: {}, Allowed: {Name: "allowed"}, Refused: {Name: "refused"},
	WouldRefuse:  {"would_refuse", "`enforce` only observes the client"},
	ErrorAllowed: {"error_allowed", "the store cannot answer, and `on_error` lets pass"},
	ErrorRefused: {"error_refused", "the store cannot answer, and `on_error` refuses"},
	Blocked:      {"blocked", "an operator has blocked the client"},
}

const _ = uint(len(outcomes) - int(Outcomes))

// String returns the name of the outcome in metrics, placeholders and logs.
func (o Outcome) String() string { return outcomes[o].Name }

// OutcomeWords are the words for the outcomes of requests that were decided.
func OutcomeWords() []Word { return outcomes[Allowed:] }

// Cause is why what an option yields for a request is not known.
type Cause int

const (
	// Known means that it is known.
	Known Cause = iota
	// NotFound means that there is no number.
	NotFound
	// NotJSON means that the body of the response is not JSON.
	NotJSON
	// Encoding means that the body could not be decoded.
	Encoding
	// BrokenOff means that the response ended too early.
	BrokenOff
	// OutOfRange means that the number is negative, too large, or NaN.
	OutOfRange
	// Causes is the number of causes.
	Causes
)

// String returns the name of the cause in metrics and logs.
func (c Cause) String() string {
	return [Causes]string{"", "not_found", "not_json", "encoding", "broken_off", "out_of_range"}[c]
}

func newMetricSet() *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: name, Help: help,
		}, labels)
	}
	return &Metrics{
		zones: zones{used: map[string]*usedZone{}},
		StoreErrors: counter("store_errors_total",
			"Checks and takes that a store could not answer, by kind of error.", "store", "kind"),
		StoreDuration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: "store_duration_seconds",
			Help:    "Duration of commands to the servers of shards, including the wait for a pipeline.",
			Buckets: durationBuckets,
		}, []string{"store", "shard", "role", "operation"}),
		Undelivered: counter("undelivered_total",
			"Charges, refunds and penalties that failed: lost (not counted), uncertain (outcome unknown) or expired (their window is over).",
			"store", "shard", "operation", "outcome"),
	}
}

// Reset removes all series of stores. A process of tests that passes to another test begins anew.
func (m *Metrics) Reset() {
	m.StoreErrors.Reset()
	m.StoreDuration.Reset()
	m.Undelivered.Reset()
}

// Register adds the metrics and other collectors to the registry of a config. Every
// config has a registry of its own; nil means that it collects no metrics.
func (m *Metrics) Register(registry *prometheus.Registry, others ...prometheus.Collector) error {
	if registry == nil {
		return nil
	}
	for _, c := range append(others, &m.zones, m.StoreErrors, m.StoreDuration, m.Undelivered) {
		var already prometheus.AlreadyRegisteredError
		if err := registry.Register(c); err != nil && !errors.As(err, &already) {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// ExportUndelivered exports the counters of undelivered operations at a shard while they are 0:
// a rate over a series that begins with the first failure would miss that failure.
func (m *Metrics) ExportUndelivered(store, shard string) {
	for _, op := range []algorithm.Operation{algorithm.Charge, algorithm.Take, algorithm.Refund, algorithm.Penalize} {
		for _, outcome := range []string{OutcomeLost, OutcomeUncertain, "expired"} {
			m.Undelivered.WithLabelValues(store, shard, op.String(), outcome)
		}
	}
}

// OutcomeLost is the label of the outcome of a charge that counts nowhere, and OutcomeUncertain of one that may count.
const (
	OutcomeLost      = "lost"
	OutcomeUncertain = "uncertain"
)

// OutcomeLabel returns the label of the outcome of a failed charge.
func OutcomeLabel(err error) string {
	switch {
	case errors.Is(err, store.ErrUncertain):
		return OutcomeUncertain
	case errors.Is(err, ledger.ErrExpired):
		return "expired"
	default:
		return OutcomeLost
	}
}

// durationBuckets range from a call to a near server to the longest wait for a charge.
var durationBuckets = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}

// CallsOf returns how many of the store commands of some operations, by their names, have been measured,
// and how many seconds they took, by store.
func (m *Metrics) CallsOf(operations ...string) (counts map[string]int64, seconds map[string]float64) {
	counts, seconds = map[string]int64{}, map[string]float64{}
	found := make(chan prometheus.Metric)
	go func() {
		defer close(found)
		m.StoreDuration.Collect(found)
	}()
	for one := range found {
		var of dto.Metric
		if err := one.Write(&of); err != nil {
			continue
		}
		labels := map[string]string{}
		for _, pair := range of.GetLabel() {
			labels[pair.GetName()] = pair.GetValue()
		}
		if slices.Contains(operations, labels["operation"]) {
			counts[labels["store"]] += int64(of.GetHistogram().GetSampleCount())
			seconds[labels["store"]] += of.GetHistogram().GetSampleSum()
		}
	}
	return counts, seconds
}

// ReportInterval is the shortest time between two logs of a condition that may hold
// for every request.
const ReportInterval = time.Minute

// LogThrottle limits the logs of one condition to one in each [ReportInterval], and
// counts those that it suppresses. The zero value is ready for use.
type LogThrottle struct {
	next atomic.Int64
	held atomic.Int64
}

// Report reports whether to log the condition at the instant at, and how many times
// the condition was met since it was last logged, this time included.
func (t *LogThrottle) Report(at time.Time) (times int64, log bool) {
	t.held.Add(1)
	next, now := t.next.Load(), at.UnixNano()
	if now < next || !t.next.CompareAndSwap(next, now+int64(ReportInterval)) {
		return 0, false
	}
	return t.held.Swap(0), true
}

// The names of events, for which a config can have handlers.
const (
	// EventExceeded is emitted when a zone refuses a request.
	EventExceeded = "rate_limit_exceeded"
	// EventWouldRefuse is emitted when a zone would refuse a request of a client for
	// which it is not enforced.
	EventWouldRefuse = "rate_limit_would_refuse"
	// EventNear is emitted for the first request of a client and window with which a
	// share of the limit is used up.
	EventNear = "rate_limit_near"
	// EventOverride is emitted when an operator blocks a client, grants it events, or
	// ends either.
	EventOverride = "rate_limit_override"
	// EventShardDown and EventShardUp are emitted when a server of a shard is left out,
	// and when it is back.
	EventShardDown = "rate_limit_shard_down"
	EventShardUp   = "rate_limit_shard_up"
)

// Events emits events. The zero value emits none.
type Events struct {
	ctx caddy.Context
	app *caddyevents.App
}

// NewEvents returns the events of a config.
func NewEvents(ctx caddy.Context) (Events, error) {
	app, err := ctx.App("events")
	if err != nil {
		return Events{}, fmt.Errorf("load the events app: %w", err)
	}
	return Events{ctx, app.(*caddyevents.App)}, nil
}

// Wants reports whether the config has a handler for an event. Gathering the data of
// an event costs more than asking.
func (e Events) Wants(name string) bool { return e.app != nil && e.app.ShouldEmit(name) }

// Emit emits an event with its data.
func (e Events) Emit(name string, data map[string]any) { e.app.Emit(e.ctx, name, data) }
