package main

import (
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

// latencies are how long concerned clients waited, in order.
func (o *outcome) latencies(p phase) (all []time.Duration) {
	for _, c := range o.concerned() {
		for _, r := range o.seen(c, p) {
			all = append(all, r.ended.Sub(r.begun))
		}
	}
	slices.Sort(all)
	return all
}

// added is by how much a quantile was higher while the fault lasted.
func (o *outcome) added(q float64) time.Duration {
	return loadgen.Quantile(o.latencies(meanwhile), q) - loadgen.Quantile(o.latencies(earlier), q)
}
