package telemetry

import (
	"errors"
	"fmt"

	dto "github.com/prometheus/client_model/go"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// Default are the metrics of the process. They outlive configs, so that they do not
// start over at a reload.
var Default = newMetricSet()

// Metrics are the metrics of requests and of calls of stores.
type Metrics struct {
	Requests    *prometheus.CounterVec
	declined    *prometheus.CounterVec
	decisions   *prometheus.CounterVec
	settled     *prometheus.CounterVec
	StoreErrors *prometheus.CounterVec
	// StoreDuration measures commands to servers.
	StoreDuration *prometheus.HistogramVec
	Undelivered   *prometheus.CounterVec
	Overflowed    *prometheus.CounterVec
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
	// Outcomes is the number of outcomes.
	Outcomes
)

// String returns the name of the outcome in metrics, placeholders and logs.
func (o Outcome) String() string {
	return [Outcomes]string{"", "allowed", "refused", "would_refuse", "error_allowed", "error_refused"}[o]
}

// ZoneCounters are the counters of one zone, looked up once.
type ZoneCounters struct {
	Requests, Declined      prometheus.Counter
	Decisions               [Outcomes]prometheus.Counter
	Charged, Free, Refunded prometheus.Counter
}

func newMetricSet() *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: name, Help: help,
		}, labels)
	}
	return &Metrics{
		Requests: counter("requests_total", "Requests that a zone decided about.", "zone"),
		declined: counter("declined_requests_total", "Requests that a zone refused.", "zone"),
		decisions: counter("decisions_total",
			"Decisions of zones: allowed, refused, would_refuse (enforce only observes the client), or error_allowed and error_refused (the store could not answer).",
			"zone", "outcome"),
		settled: counter("settled_cost_total",
			"Cost of requests by what the response made of it: charged, free because of the status, or refunded. Zones with concurrency spend nothing and are not counted.",
			"zone", "kind"),
		StoreErrors: counter("store_errors_total",
			"Checks and takes that a store could not answer, by kind of error.", "store", "kind"),
		StoreDuration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: "store_duration_seconds",
			Help:    "Duration of commands to the servers of shards, including the wait for a pipeline.",
			Buckets: durationBuckets,
		}, []string{"store", "shard", "role", "operation"}),
		Overflowed: counter("overflowed_requests_total",
			"Requests of new clients beyond max_new_buckets, which share one bucket.", "zone"),
		Undelivered: counter("undelivered_total",
			"Charges, refunds and penalties that failed: lost (not counted), uncertain (outcome unknown) or expired (their window is over).",
			"store", "shard", "operation", "outcome"),
	}
}

// Zone returns the counters of a zone.
func (m *Metrics) Zone(name string) ZoneCounters {
	c := ZoneCounters{
		Requests: m.Requests.WithLabelValues(name), Declined: m.declined.WithLabelValues(name),
		Charged:  m.settled.WithLabelValues(name, "charged"),
		Free:     m.settled.WithLabelValues(name, "free"),
		Refunded: m.settled.WithLabelValues(name, "refunded"),
	}
	for o := Allowed; o < Outcomes; o++ {
		c.Decisions[o] = m.decisions.WithLabelValues(name, o.String())
	}
	return c
}

// ForgetZone removes the metrics of a zone.
func (m *Metrics) ForgetZone(name string) {
	for _, c := range []*prometheus.CounterVec{m.Requests, m.declined, m.decisions, m.settled, m.Overflowed} {
		c.DeletePartialMatch(prometheus.Labels{"zone": name})
	}
}

// Register adds the metrics and other collectors to the registry of a config. Every
// config has a registry of its own; nil means that it collects no metrics.
func (m *Metrics) Register(registry *prometheus.Registry, others ...prometheus.Collector) error {
	if registry == nil {
		return nil
	}
	for _, c := range append(others, m.Requests, m.declined, m.decisions, m.settled, m.StoreErrors, m.StoreDuration, m.Undelivered, m.Overflowed) {
		var already prometheus.AlreadyRegisteredError
		if err := registry.Register(c); err != nil && !errors.As(err, &already) {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// ExportUndelivered exports the counters of undelivered operations while they are 0:
// a rate over a series that begins with the first failure would miss that failure.
func (m *Metrics) ExportUndelivered(store string, shards []string) {
	for _, shard := range shards {
		for _, op := range []algorithm.Operation{algorithm.Charge, algorithm.Refund, algorithm.Penalize} {
			for _, outcome := range []string{"lost", "uncertain", "expired"} {
				m.Undelivered.WithLabelValues(store, shard, op.String(), outcome)
			}
		}
	}
}

// OutcomeLabel returns the label of the outcome of a failed charge.
func OutcomeLabel(err error) string {
	switch {
	case errors.Is(err, store.ErrUncertain):
		return "uncertain"
	case errors.Is(err, ledger.ErrExpired):
		return "expired"
	default:
		return "lost"
	}
}

// durationBuckets range from a call to a near server to the longest wait for a charge.
var durationBuckets = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}

// ValueOf returns the value of a counter.
func ValueOf(c prometheus.Counter) int64 {
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		return 0
	}
	return int64(m.GetCounter().GetValue())
}
