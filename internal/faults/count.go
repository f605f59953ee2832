package main

import (
	"fmt"
	"net/http"
	"time"
)

// missing is how much less is counted than was served.
func (o *outcome) missing() int64 { return missing(o.concerned(), o.buckets) }

// missing is how much less of clients is counted than was served.
func missing(clients []*client, buckets map[string]bucket) int64 {
	n := served(clients)
	for _, c := range clients {
		n -= buckets[c.name].count
	}
	return n
}

// extremes are the clients that are counted for least and most beyond what they
// were served.
func (o *outcome) extremes() (least, most int64) {
	for i, c := range o.concerned() {
		n := o.buckets[c.name].count - c.served()
		if i == 0 {
			least, most = n, n
		}
		least, most = min(least, n), max(most, n)
	}
	return least, most
}

// wrongDoubles are clients that are counted for more than they may be.
func (o *outcome) wrongDoubles() (all []string) {
	for _, c := range o.concerned() {
		if n, most := o.buckets[c.name].count, o.mostCounted(c); n > most {
			all = append(all, fmt.Sprintf("%s: %d counted, at most %d should be", c, n, most))
		}
	}
	return all
}

// mostCounted is what a client may be counted for: each request that was served
// once, and each that was not but of which it is not known whether it was taken.
func (o *outcome) mostCounted(c *client) int64 {
	most := c.served()
	if o.charge == after || o.decides(c) == there {
		return most
	}
	for _, p := range []phase{meanwhile, afterwards} {
		for _, r := range o.seen(c, p) {
			if r.status == http.StatusServiceUnavailable || r.status == http.StatusTooManyRequests && o.onError == local {
				most++
			}
		}
	}
	if o.onError == deny && o.fault.loses == nothing {
		most = min(most, c.events)
	}
	return most
}

// wrongOmissions is said if less is counted than must be.
func (o *outcome) wrongOmissions() []string {
	if missing, most := o.missing(), o.mostMissing(); missing > most {
		return []string{fmt.Sprintf("%d requests are not counted, at most %d may be missing", missing, most)}
	}
	return nil
}

// margin is how long before a primary is killed a charge has arrived at its
// replicas, and how soon a fault that is one moment is over, on a busy machine.
const margin = time.Second

// mostMissing is how much of what was served may be missing: what Caddy says it
// does not know, and what Redis forgets.
func (o *outcome) mostMissing() int64 {
	most := o.metrics.failed(faulty)
	if o.charge == before {
		// Of takes without an answer it is not known whether they count.
		most += o.metrics.storeErrors
	}
	switch o.fault.loses {
	case tail:
		most += o.servedWithin(o.begin.Add(-margin), o.begin.Add(margin))
	case fork:
		most += o.servedWithin(o.begin.Add(-margin), o.end)
	case everything:
		most += o.servedWithin(time.Time{}, o.begin.Add(margin))
	case nothing:
	}
	return most
}

// servedWithin is how many requests were served whose responses ended then.
func (o *outcome) servedWithin(from, to time.Time) (n int64) {
	for _, c := range o.concerned() {
		for _, r := range c.responses() {
			if r.status == http.StatusOK && r.ended.After(from) && r.ended.Before(to) {
				n++
			}
		}
	}
	return n
}
