package telemetry

import (
	"math"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestCountersAreNotNegative: costs may come to more than 2^63.
func TestCountersAreNotNegative(t *testing.T) {
	var c Counter
	c.Add(math.MaxInt64)
	c.Add(2)
	if n := c.Value(); n != 1 {
		t.Errorf("the counter is %d beyond 2^63, want 1", n)
	}
}

// TestScrapesDuringReloads: each scrape has a zone once, and never less of it, while configs come and go.
func TestScrapesDuringReloads(t *testing.T) {
	const turns = 2000
	m, registry := newMetricSet(), prometheus.NewPedanticRegistry()
	if err := m.Register(registry); err != nil {
		t.Fatal(err)
	}
	kept := m.Zone("kept")
	kept.Requests.Expect()
	var all sync.WaitGroup
	for _, name := range []string{"kept", "passing", "passing"} {
		all.Go(func() {
			for range turns {
				c := m.Zone(name)
				c.Requests.Expect()
				c.Requests.Inc()
				m.OfZone(name, func(c *ZoneCounters) { c.Evicted.Inc() })
				m.ForgetZone(name)
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		all.Wait()
		close(ended)
	}()
	last := 0.0
	scrape := func() {
		families, err := registry.Gather()
		if err != nil {
			t.Error(err)
		}
		n := -1.0
		for _, family := range families {
			for _, metric := range family.GetMetric() {
				if family.GetName() == "caddy_rate_limit_requests_total" && metric.GetLabel()[0].GetValue() == "kept" {
					n = metric.GetCounter().GetValue()
				}
			}
		}
		if n < last {
			t.Errorf("a counter goes from %v to %v, which is -1 if it is absent", last, n)
		}
		last = n
	}
	for isOver := false; !isOver; scrape() {
		select {
		case <-ended:
			isOver = true
		default:
		}
	}
	if n := len(m.zones.used); n != 1 || last != turns {
		t.Errorf("%d zones have metrics, want the one in use, whose requests are %v of %d", n, last, turns)
	}
}
