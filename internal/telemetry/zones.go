package telemetry

import (
	"math"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Counter is one series of a zone. It is exported once it is above 0, and before that if it
// is expected: a rate over a series that begins with the first event would miss that event.
type Counter struct {
	n          atomic.Int64
	isExpected atomic.Bool
}

// Add adds n.
func (c *Counter) Add(n int64) { c.n.Add(n) }

// Inc adds 1.
func (c *Counter) Inc() { c.n.Add(1) }

// Value returns the sum. Sums of costs can reach 2^63, where the counter begins anew, because it must not be negative.
func (c *Counter) Value() int64 { return c.n.Load() & math.MaxInt64 }

// Expect has the series exported from now on.
func (c *Counter) Expect() { c.isExpected.Store(true) }

// Option is an option of a zone whose number may come from a placeholder.
type Option int

// The options.
const (
	OptionEvents Option = iota
	OptionBurst
	OptionCost
	options
)

// String returns the name of the option in configs, metrics and logs.
func (o Option) String() string { return [options]string{"events", "burst", "cost"}[o] }

// ZoneCounters are the counters of one zone, in all its stores.
type ZoneCounters struct {
	Requests, Declined      Counter
	Decisions               [Outcomes]Counter
	Charged, Free, Refunded Counter
	Forgiven, Near, Waited  Counter
	// Overflowed counts requests that share a bucket, and Evicted buckets in memory that were forgotten.
	Overflowed, Evicted Counter
	// Unreadable counts requests for which a placeholder yielded no number, by cause.
	Unreadable [options][Causes]Counter
}

// zones are the counters of the zones in use, by name, and how often each is used. They are a
// collector that needs no memory for a series.
type zones struct {
	mu   sync.RWMutex
	used map[string]*usedZone
}

type usedZone struct {
	ZoneCounters
	name  *dto.LabelPair
	users int
}

// Zone returns the counters of a zone, for use until ForgetZone is called as often as Zone.
func (m *Metrics) Zone(name string) *ZoneCounters {
	m.zones.mu.Lock()
	defer m.zones.mu.Unlock()
	z := m.zones.used[name]
	if z == nil {
		z = &usedZone{name: label("zone", name)}
		m.zones.used[name] = z
	}
	z.users++
	return &z.ZoneCounters
}

// ForgetZone ends one use of a zone. The last one ends its metrics.
func (m *Metrics) ForgetZone(name string) {
	m.zones.mu.Lock()
	defer m.zones.mu.Unlock()
	z := m.zones.used[name]
	if z.users--; z.users == 0 {
		delete(m.zones.used, name)
	}
}

// OfZone counts an event of a zone by its name, if the zone is in use.
func (m *Metrics) OfZone(name string, count func(c *ZoneCounters)) {
	m.zones.mu.RLock()
	defer m.zones.mu.RUnlock()
	if z := m.zones.used[name]; z != nil {
		count(&z.ZoneCounters)
	}
}

// zoneSeries are the series that a zone can have.
var zoneSeries = allZoneSeries()

// series is one of them. Its labels, besides the zone, are in alphabetical order before it.
type series struct {
	desc   *prometheus.Desc
	labels []*dto.LabelPair
	of     func(c *ZoneCounters) *Counter
}

func allZoneSeries() (all []series) {
	family := func(name, help string, labels ...string) func(of func(c *ZoneCounters) *Counter, values ...string) {
		desc := prometheus.NewDesc(prometheus.BuildFQName("caddy", "rate_limit", name), help, append(labels, "zone"), nil)
		return func(of func(c *ZoneCounters) *Counter, values ...string) {
			s := series{desc: desc, of: of}
			for i, value := range values {
				s.labels = append(s.labels, label(labels[i], value))
			}
			all = append(all, s)
		}
	}
	family("requests_total", "Requests that a zone decided about.")(func(c *ZoneCounters) *Counter { return &c.Requests })
	family("declined_requests_total", "Requests that a zone refused.")(func(c *ZoneCounters) *Counter { return &c.Declined })
	decisions := family("decisions_total", "Decisions of zones: "+strings.ReplaceAll(Listed(OutcomeWords()), "`", "")+".", "outcome")
	for o := Allowed; o < Outcomes; o++ {
		decisions(func(c *ZoneCounters) *Counter { return &c.Decisions[o] }, o.String())
	}
	settled := family("settled_cost_total",
		"Cost of requests by what the response made of it: charged, free because of the status, or refunded. Zones with concurrency spend nothing and are not counted.", "kind")
	settled(func(c *ZoneCounters) *Counter { return &c.Charged }, "charged")
	settled(func(c *ZoneCounters) *Counter { return &c.Free }, "free")
	settled(func(c *ZoneCounters) *Counter { return &c.Refunded }, "refunded")
	family("overflowed_requests_total",
		"Requests of new clients beyond max_new_buckets, which share one bucket.")(func(c *ZoneCounters) *Counter { return &c.Overflowed })
	family("evicted_buckets_total",
		"Buckets in memory that were forgotten although they counted, because there were max_buckets.")(func(c *ZoneCounters) *Counter { return &c.Evicted })
	family("forgiven_total",
		"Responses whose status has emptied the bucket of their client (reset_status).")(func(c *ZoneCounters) *Counter { return &c.Forgiven })
	family("near_clients_total",
		"Clients that have used up the share of a zone's limit that warn names, once for each window.")(func(c *ZoneCounters) *Counter { return &c.Near })
	family("waited_requests_total",
		"Requests that were held in a line (max_wait), by the first zone for which they waited.")(func(c *ZoneCounters) *Counter { return &c.Waited })
	unreadable := family("unreadable_total",
		"Requests for which the placeholder of an option (events, burst or cost) yielded no number, or one out of range, so that the fallback or the nearest number counted.", "cause", "option")
	for option := range options {
		for cause := NotFound; cause < Causes; cause++ {
			unreadable(func(c *ZoneCounters) *Counter { return &c.Unreadable[option][cause] }, cause.String(), option.String())
		}
	}
	return all
}

func label(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }

// Describe implements [prometheus.Collector].
func (*zones) Describe(descs chan<- *prometheus.Desc) {
	var last *prometheus.Desc
	for _, s := range zoneSeries {
		if s.desc != last {
			descs <- s.desc
		}
		last = s.desc
	}
}

// Collect implements [prometheus.Collector]. It holds no lock while it sends.
func (z *zones) Collect(found chan<- prometheus.Metric) {
	z.mu.RLock()
	used := make([]*usedZone, 0, len(z.used))
	for _, zone := range z.used {
		used = append(used, zone)
	}
	z.mu.RUnlock()
	for _, zone := range used {
		for i := range zoneSeries {
			if c := zoneSeries[i].of(&zone.ZoneCounters); c.isExpected.Load() || c.Value() != 0 {
				found <- sample{&zoneSeries[i], zone.name, c.Value()}
			}
		}
	}
}

// sample is the value of one series of a zone.
type sample struct {
	of    *series
	zone  *dto.LabelPair
	value int64
}

// Desc implements [prometheus.Metric].
func (s sample) Desc() *prometheus.Desc { return s.of.desc }

// Write implements [prometheus.Metric].
func (s sample) Write(to *dto.Metric) error {
	value := float64(s.value)
	to.Label, to.Counter = append(s.of.labels[:len(s.of.labels):len(s.of.labels)], s.zone), &dto.Counter{Value: &value}
	return nil
}
