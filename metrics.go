package shardlimit

import (
	"errors"
	"fmt"

	dto "github.com/prometheus/client_model/go"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// metrics outlive configs, so that they do not start over at a reload.
var metrics = newMetricSet()

type metricSet struct {
	requests    *prometheus.CounterVec
	declined    *prometheus.CounterVec
	decisions   *prometheus.CounterVec
	settled     *prometheus.CounterVec
	storeErrors *prometheus.CounterVec
	// storeDuration is how long commands take.
	storeDuration *prometheus.HistogramVec
	undelivered   *prometheus.CounterVec
	overflowed    *prometheus.CounterVec
}

// outcome is what a zone decided about a request.
type outcome int

const (
	// undecided: the zone was not asked, because another refused before.
	undecided outcome = iota
	allowed
	refused
	// wouldRefuse: the client is only observed, and would have been refused.
	wouldRefuse
	// errorAllowed and errorRefused: the store could not answer, and on_error
	// decided.
	errorAllowed
	errorRefused
	outcomes
)

// String is the outcome's name in metrics, placeholders and logs.
func (o outcome) String() string {
	return [outcomes]string{"", "allowed", "refused", "would_refuse", "error_allowed", "error_refused"}[o]
}

// zoneCounters are one zone's, looked up once.
type zoneCounters struct {
	requests, declined      prometheus.Counter
	decisions               [outcomes]prometheus.Counter
	charged, free, refunded prometheus.Counter
}

func newMetricSet() *metricSet {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: name, Help: help,
		}, labels)
	}
	return &metricSet{
		requests: counter("requests_total", "Requests that a zone decided on.", "zone"),
		declined: counter("declined_requests_total", "Requests that were refused because of a zone.", "zone"),
		decisions: counter("decisions_total",
			"What zones decided: allowed, refused, would_refuse (where enforce only observes), and error_allowed and error_refused where the store could not answer.",
			"zone", "outcome"),
		settled: counter("settled_cost_total",
			"Cost of requests, once their response was known: charged, free because of the status, or refunded after it was taken. Without concurrency, where nothing is spent.",
			"zone", "kind"),
		storeErrors: counter("store_errors_total",
			"Checks and takes that a store could not answer, by the kind of error.", "store", "kind"),
		storeDuration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "caddy", Subsystem: "rate_limit", Name: "store_duration_seconds",
			Help:    "How long commands to the servers of shards take, waiting for others to be sent with included.",
			Buckets: durationBuckets,
		}, []string{"store", "shard", "role", "operation"}),
		overflowed: counter("overflowed_requests_total",
			"Requests of new clients beyond max_new_buckets, which were counted in the bucket that these share.", "zone"),
		undelivered: counter("undelivered_total",
			"Charges, refunds and penalties that failed: lost ones surely did not count, of uncertain ones it is not known; expired ones were for a window that is over.",
			"store", "shard", "operation", "outcome"),
	}
}

func (m *metricSet) zone(name string) zoneCounters {
	c := zoneCounters{
		requests: m.requests.WithLabelValues(name), declined: m.declined.WithLabelValues(name),
		charged:  m.settled.WithLabelValues(name, "charged"),
		free:     m.settled.WithLabelValues(name, "free"),
		refunded: m.settled.WithLabelValues(name, "refunded"),
	}
	for o := allowed; o < outcomes; o++ {
		c.decisions[o] = m.decisions.WithLabelValues(name, o.String())
	}
	return c
}

// forgetZone removes the metrics of a zone.
func (m *metricSet) forgetZone(name string) {
	for _, c := range []*prometheus.CounterVec{m.requests, m.declined, m.decisions, m.settled, m.overflowed} {
		c.DeletePartialMatch(prometheus.Labels{"zone": name})
	}
}

// register adds the metrics, and other collectors, to the registry of a config, of which there is a
// new one for every config.
func (m *metricSet) register(registry *prometheus.Registry, others ...prometheus.Collector) error {
	if registry == nil {
		return nil
	}
	for _, c := range append(others, m.requests, m.declined, m.decisions, m.settled, m.storeErrors, m.storeDuration, m.undelivered, m.overflowed) {
		var already prometheus.AlreadyRegisteredError
		if err := registry.Register(c); err != nil && !errors.As(err, &already) {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// exportUndelivered exports the counters of what was not delivered while they
// are 0: of a series that begins with the first failure, rates miss that one.
func (m *metricSet) exportUndelivered(store string, shards []string) {
	for _, shard := range shards {
		for _, op := range []algorithm.Operation{algorithm.Charge, algorithm.Refund, algorithm.Penalize} {
			for _, outcome := range []string{"lost", "uncertain", "expired"} {
				m.undelivered.WithLabelValues(store, shard, op.String(), outcome)
			}
		}
	}
}

// outcomeLabel names the outcome of a charge that failed.
func outcomeLabel(err error) string {
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

// valueOf returns what a counter counts.
func valueOf(c prometheus.Counter) int64 {
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		return 0
	}
	return int64(m.GetCounter().GetValue())
}
