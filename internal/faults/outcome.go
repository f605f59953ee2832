package main

import (
	"fmt"
	"strings"
	"time"
)

// outcome is what was seen of a cell.
type outcome struct {
	cell
	clients []*client
	// start is when clients were looked at first; begin and end are those of the
	// fault.
	start, begin, end time.Time
	// buckets are what both shards hold, by client.
	buckets map[string]bucket
	metrics metrics
	// normalAfter is how long after the end of the fault all responses were normal,
	// and equalAfter how long after it nothing was owed any more.
	normalAfter, equalAfter time.Duration
	// log is Caddy's.
	log string
}

func (e *experiment) outcome() *outcome {
	o := &outcome{
		cell: e.cell, clients: e.traffic.clients, start: e.start, begin: e.begin, end: e.end,
		buckets: e.buckets, metrics: e.metrics, log: e.site.Logs.String(),
	}
	for _, c := range o.concerned() {
		for _, r := range c.responses() {
			if !o.isNormal(c, &r) && r.ended.Sub(o.end) > o.normalAfter {
				o.normalAfter = r.ended.Sub(o.end)
			}
		}
	}
	o.equalAfter = o.owedFor(e.samples)
	return o
}

// String is what is worth telling while others are tried.
func (o *outcome) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s; %s; %s. Counted beyond what was served: %d; failed charges: %v",
		o.cell, o.statuses(earlier), o.statuses(meanwhile), o.statuses(afterwards), -o.missing(), o.metrics.undelivered[faulty])
	breaches := o.breaches()
	for _, broken := range breaches {
		kind := "WRONG"
		if n := o.knownAs(broken); n > 0 {
			kind = fmt.Sprintf("known as [%d]", n)
		}
		fmt.Fprintf(&b, "\n\t%s: %s", kind, broken.text)
	}
	if len(breaches) > 0 {
		fmt.Fprintf(&b, "\n%s", tailOf(o.log))
	}
	return b.String()
}

// phase is a part of the time.
type phase int

const (
	earlier phase = iota
	meanwhile
	afterwards
)

func (p phase) String() string {
	return [...]string{"before the fault", "during the fault", "after the fault"}[p]
}

func (o *outcome) phaseOf(r *response) phase {
	switch {
	case r.ended.Before(o.begin):
		return earlier
	case r.begun.Before(o.end):
		return meanwhile
	default:
		return afterwards
	}
}

// concerned are the clients of the shard that the fault happened to.
func (o *outcome) concerned() []*client { return those(o.clients, isConcerned) }

// isLocal tells whether a response comes from counts of Caddy's own: these have
// another window than the store's. Where the store's is lost, it cannot be told.
func (c cell) isLocal(buckets map[string]bucket, whose *client, r *response) bool {
	return c.onError == local && c.fault.loses == nothing && r.limited && r.reset != buckets[whose.name].reset
}

// isNormal tells whether the store decided.
func (o *outcome) isNormal(c *client, r *response) bool {
	return r.isNormal() && !o.isLocal(o.buckets, c, r)
}

// owedFor is how long after the end of the fault something was owed that arrived
// later. What each client has on its way does not count.
func (o *outcome) owedFor(samples []sample) time.Duration {
	slack := 2 * int64(len(o.concerned()))
	for i := len(samples) - 1; i >= 0; i-- {
		if s := samples[i]; s.owed-o.missing() > slack {
			return s.at.Sub(o.end)
		}
	}
	return 0
}
