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

// Default outlive configs, so that they do not start over at a reload.
var Default = newMetricSet()

type Metrics struct {
	Requests    *prometheus.CounterVec
	declined    *prometheus.CounterVec
	decisions   *prometheus.CounterVec
	settled     *prometheus.CounterVec
	StoreErrors *prometheus.CounterVec
	// StoreDuration is how long commands take.
	StoreDuration *prometheus.HistogramVec
	Undelivered   *prometheus.CounterVec
	Overflowed    *prometheus.CounterVec
}

// Outcome is what a zone decided about a request.
type Outcome int

const (
	// Undecided: the zone was not asked, because another refused before.
	Undecided Outcome = iota
	Allowed
	Refused
	// WouldRefuse: the client is only observed, and would have been refused.
	WouldRefuse
	// ErrorAllowed and errorRefused: the store could not answer, and on_error
	// decided.
	ErrorAllowed
	ErrorRefused
	Outcomes
)

// String is the outcome's name in metrics, placeholders and logs.
func (o Outcome) String() string {
	return [Outcomes]string{"", "allowed", "refused", "would_refuse", "error_allowed", "error_refused"}[o]
}

// ZoneCounters are one zone's, looked up once.
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
		Requests: counter("requests_total", "Requests that a zone decided on.", "zone"),
		declined: counter("declined_requests_total", "Requests that were refused because of a zone.", "zone"),
		decisions: counter("decisions_total",
			"What zones decided: allowed, refused, would_refuse (where enforce only observes), and error_allowed and error_refused where the store could not answer.",
			"zone", "outcome"),
		settled: counter("settled_cost_total",
			"Cost of requests, once their response was known: charged, free because of the status, or refunded after it was taken. Without concurrency, where nothing is spent.",
			"zone", "kind"),
		StoreErrors: counter("store_errors_total",
			"Checks and takes that a store could not answer, by the kind of error.", "store", "kind"),
		StoreDuration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: "store_duration_seconds",
			Help:    "How long commands to the servers of shards take, waiting for others to be sent with included.",
			Buckets: durationBuckets,
		}, []string{"store", "shard", "role", "operation"}),
		Overflowed: counter("overflowed_requests_total",
			"Requests of new clients beyond max_new_buckets, which were counted in the bucket that these share.", "zone"),
		Undelivered: counter("undelivered_total",
			"Charges, refunds and penalties that failed: lost ones surely did not count, of uncertain ones it is not known; expired ones were for a window that is over.",
			"store", "shard", "operation", "outcome"),
	}
}

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

// Register adds the metrics, and other collectors, to the registry of a config, of which there is a
// new one for every config.
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

// ExportUndelivered exports the counters of what was not delivered while they
// are 0: of a series that begins with the first failure, rates miss that one.
func (m *Metrics) ExportUndelivered(store string, shards []string) {
	for _, shard := range shards {
		for _, op := range []algorithm.Operation{algorithm.Charge, algorithm.Refund, algorithm.Penalize} {
			for _, outcome := range []string{"lost", "uncertain", "expired"} {
				m.Undelivered.WithLabelValues(store, shard, op.String(), outcome)
			}
		}
	}
}

// OutcomeLabel names the outcome of a charge that failed.
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

// durationBuckets span what a call to a near server takes and how long a charge
// is waited for.
var durationBuckets = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}

// ValueOf returns what a counter counts.
func ValueOf(c prometheus.Counter) int64 {
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		return 0
	}
	return int64(m.GetCounter().GetValue())
}
