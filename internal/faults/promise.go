package main

import (
	"fmt"
	"net/http"
	"strings"
)

// breach is a promise of docs/failure-modes.md that was not kept.
type breach struct {
	promise promise
	text    string
}

// promise is what an outcome is held to.
type promise int

const (
	// responses are decided by the store, or as on_error says where it cannot.
	responses promise = iota
	// refusals are of clients that have nothing left.
	refusals
	// resets: the reset is one.
	resets
	// admissions stay within the limit.
	admissions
	// doubles: no request counts twice.
	doubles
	// omissions: every request that was served counts.
	omissions
	// others do not notice what happens to a shard.
	others
	// losses are reported, and are none while a window lasts.
	losses
	// soundness of Caddy, and of the experiment.
	soundness
)

// breaches are the promises that were not kept.
func (o *outcome) breaches() (all []breach) {
	for kind, look := range map[promise]func(*outcome) []string{
		responses: (*outcome).wrongResponses, refusals: (*outcome).wrongRefusals, resets: (*outcome).wrongResets,
		admissions: (*outcome).wrongAdmissions, doubles: (*outcome).wrongDoubles, omissions: (*outcome).wrongOmissions,
		others: (*outcome).wrongOthers, losses: (*outcome).wrongLosses, soundness: (*outcome).wrongSoundness,
	} {
		for _, text := range look(o) {
			all = append(all, breach{kind, text})
		}
	}
	return all
}

// decides is how much is left of what decides about a client.
func (o *outcome) decides(c *client) reach {
	switch {
	case c.role == bystander:
		return there
	case o.charge == before || c.role == late:
		// It has to be taken from the bucket, or opened.
		return o.fault.primary
	default:
		return o.fault.checks
	}
}

// wrongResponses are those that are neither normal nor what on_error says, and
// those of the latter where nobody should notice.
func (o *outcome) wrongResponses() (all []string) {
	for _, c := range o.clients {
		wrong := map[phase][]response{}
		for _, r := range c.responses() {
			if p := o.phaseOf(&r); !o.mayBe(c, &r, p) {
				wrong[p] = append(wrong[p], r)
			}
		}
		for p, some := range wrong {
			all = append(all, fmt.Sprintf("%s: %s %s", c, describe(some), p))
		}
	}
	return all
}

// mayBe tells whether a response is right.
func (o *outcome) mayBe(c *client, r *response, p phase) bool {
	switch {
	case o.isNormal(c, r):
		return true
	case p == earlier || o.decides(c) == there:
		return false
	case o.onError == allow:
		return r.status == http.StatusOK
	case o.onError == deny:
		return r.status == http.StatusServiceUnavailable
	default:
		return r.isNormal()
	}
}

// wrongRefusals are those of clients that have something left, and those that say
// so. What was denied may have been spent by a take of unknown outcome.
func (o *outcome) wrongRefusals() (all []string) {
	for _, c := range o.clients {
		spent := int64(0)
		for _, r := range c.responses() {
			switch r.status {
			case http.StatusOK, http.StatusServiceUnavailable:
				spent++
			case http.StatusTooManyRequests:
				if spent < c.events || r.remaining != "0" {
					return append(all, fmt.Sprintf("%s: refused after %d of %d, with %s remaining", c, spent, c.events, r.remaining))
				}
			}
		}
	}
	return all
}

// wrongResets are windows of which clients were told two ends.
func (o *outcome) wrongResets() (all []string) {
	if o.onError == local || o.fault.loses != nothing {
		return nil
	}
	for _, c := range o.clients {
		first := ""
		for _, r := range c.responses() {
			if first == "" {
				first = r.reset
			}
			if r.limited && r.reset != first {
				all = append(all, fmt.Sprintf("%s: told of a reset at %s and at %s", c, first, r.reset))
				break
			}
		}
	}
	return all
}

// wrongAdmissions are those beyond the limit.
func (o *outcome) wrongAdmissions() (all []string) {
	if o.fault.loses != nothing {
		return nil
	}
	for _, c := range o.clients {
		// What turns out not to be charged is there again.
		most := c.events + o.metrics.undelivered[faulty]["uncertain"]
		switch o.onError {
		case allow:
			most += c.unchecked()
		case local:
			// Caddy alone admits the same limit once more.
			most += c.events
		}
		if n := c.served(); n > most {
			all = append(all, fmt.Sprintf("%s: %d requests served, at most %d should be", c, n, most))
		}
	}
	return all
}

// unchecked is how many requests were let through without a look at the limit.
func (c *client) unchecked() (n int64) {
	for _, r := range c.responses() {
		if r.status == http.StatusOK && !r.limited {
			n++
		}
	}
	return n
}

// wrongOthers are counts of the shard to which nothing happens.
func (o *outcome) wrongOthers() (all []string) {
	for _, c := range those(o.clients, isBystander) {
		if n := o.buckets[c.name].count; n != c.served() {
			all = append(all, fmt.Sprintf("%s: %d counted, want %d", c, n, c.served()))
		}
	}
	if n := o.metrics.failed(sound); n > 0 {
		all = append(all, fmt.Sprintf("%d charges of the other shard failed", n))
	}
	return all
}

// wrongLosses are charges that surely did not run and were given up, and, where
// nobody should notice, any that failed.
func (o *outcome) wrongLosses() (all []string) {
	of := o.metrics.undelivered[faulty]
	if of["lost"] > 0 || of["expired"] > 0 {
		all = append(all, fmt.Sprintf("%d charges are lost and %d expired, though their windows last", of["lost"], of["expired"]))
	}
	if strings.Contains(o.log, "charges were lost at exit") {
		all = append(all, "charges were lost at exit")
	}
	if n := o.metrics.storeErrors + of["uncertain"]; o.fault.isUnnoticed() && n > 0 {
		all = append(all, fmt.Sprintf("%d checks, takes or charges failed, though nobody should notice", n))
	}
	return all
}

// wrongSoundness tells of a data race, and of a fault that did not do what it is
// there for.
func (o *outcome) wrongSoundness() (all []string) {
	if strings.Contains(o.log, "DATA RACE") {
		all = append(all, "a data race in Caddy:\n"+o.log)
	}
	for _, c := range o.concerned() {
		if o.decides(c) == away && o.metrics.storeErrors == 0 {
			return append(all, "the store answered all the time, so the fault did not happen")
		}
	}
	return all
}
