package faults

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/lab/shards"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// outcome holds the observations of a cell.
type outcome struct {
	cell
	clients []*client
	// start is when responses first were normal; begin and end are those of the fault.
	start, begin, end time.Time
	buckets           map[string]shards.Bucket // on both shards, by client
	metrics           metrics
	// normalAfter and equalAfter are the times from the end of the fault until all
	// responses were normal and until no charge was outstanding.
	normalAfter, equalAfter time.Duration
	log                     string // of Caddy
}

// conclude completes the outcome once Caddy has ended.
func (e *experiment) conclude() *outcome {
	o := e.outcome
	o.clients, o.log = e.crowd.clients, e.site.Logs.String()
	for _, c := range o.concerned() {
		for _, r := range c.responses() {
			if !o.isNormal(c, &r) {
				o.normalAfter = max(o.normalAfter, r.ended.Sub(o.end))
			}
		}
	}
	o.equalAfter = o.owedFor(e.samples)
	return o
}

func (o *outcome) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s; %s; %s. Counted beyond what was served: %d; failed charges and refunds: %v, lost refunds: %d",
		o.cell, o.statuses(earlier), o.statuses(meanwhile), o.statuses(afterwards), -o.missing(), o.metrics.undelivered[faulty], o.metrics.lostRefunds)
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

func (o *outcome) concerned() []*client { return traffic.Those(o.clients, isConcerned) }

// isLocal reports whether Caddy's local counts decided a response: they have another
// window than the store's. If the store lost its window, or Caddy knows it, the two look alike.
// A refusal that names a second names no window: if the end of a hold was lost, the store refuses so for ten minutes.
func (o *outcome) isLocal(c *client, r *response) bool {
	return o.onError == local && o.fault.loses == nothing && r.limited && r.reset != o.buckets[c.name].Reset && !r.waitsForOthers()
}

func (o *outcome) isNormal(c *client, r *response) bool { return r.isNormal() && !o.isLocal(c, r) }

// owedFor is how long after the end of the fault a charge was outstanding that arrived
// later. Requests in flight do not count.
func (o *outcome) owedFor(samples []sample) time.Duration {
	slack := 2 * int64(len(o.concerned()))
	for i := len(samples) - 1; i >= 0; i-- {
		if s := samples[i]; s.owed-o.missing() > slack {
			return s.at.Sub(o.end)
		}
	}
	return 0
}

// breach is a broken promise of docs/failure-modes.md.
type breach struct {
	promise promise
	text    string
}

type promise int

const (
	responses  promise = iota // the store decides, or on_error where the store cannot
	refusals                  // only of clients that have nothing left
	resets                    // one for each window
	admissions                // within the limit
	doubles                   // no request counts twice
	omissions                 // every request that was served counts
	others                    // clients of the other shard do not notice the fault
	losses                    // none while a window lasts
	soundness                 // of Caddy, and of the experiment
)

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

func (o *outcome) decides(c *client) reach {
	switch {
	case c.role == bystander:
		return there
	case o.takes() || c.role == late:
		return o.fault.primary // which takes from windows and opens them
	default:
		return o.fault.checks
	}
}

// wrongResponses are neither normal nor according to on_error, or according to on_error
// though nobody should notice the fault.
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

// isWrongBefore reports whether on_error decided a request before the fault.
func (o *outcome) isWrongBefore() bool {
	return slices.ContainsFunc(o.clients, func(c *client) bool {
		return slices.ContainsFunc(c.responses(), func(r response) bool {
			return o.phaseOf(&r) == earlier && !o.mayBe(c, &r, earlier)
		})
	})
}

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

// wrongRefusals are refusals of clients below their limit, and refusals whose headers
// claim that. The take of a denied request may have run.
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
			if r.limited && r.reset != first && !r.waitsForOthers() {
				all = append(all, fmt.Sprintf("%s: headers name a reset at %s and at %s", c, first, r.reset))
				break
			}
		}
	}
	return all
}

// waitsForOthers reports whether a refusal names a second, because only holds are in the way.
func (r *response) waitsForOthers() bool {
	seconds, err := strconv.ParseInt(r.reset, 10, 64)
	reset := time.Unix(seconds, 0)
	return err == nil && r.status == http.StatusTooManyRequests && !reset.Before(r.begun) && !reset.After(r.ended.Add(2*time.Second))
}

func (o *outcome) wrongAdmissions() (all []string) {
	if o.fault.loses != nothing {
		return nil
	}
	for _, c := range o.clients {
		// The event of a charge that did not run is available again.
		most := c.events + o.metrics.undelivered[faulty]["uncertain"]
		switch {
		case o.onError == allow:
			most += c.count((*response).isUnchecked)
		case o.onError == local && o.takes():
			most += c.events // of takes without a reply, which no metric counts
		}
		if n := c.served(); n > most {
			all = append(all, fmt.Sprintf("%s: %d requests served, at most %d should be", c, n, most))
		}
	}
	return all
}

func (o *outcome) wrongOthers() (all []string) {
	for _, c := range traffic.Those(o.clients, isBystander) {
		if n := o.buckets[c.name].Count; n != c.served() {
			all = append(all, fmt.Sprintf("%s: %d counted, want %d", c, n, c.served()))
		}
	}
	if n := o.metrics.failed(sound); n > 0 {
		all = append(all, fmt.Sprintf("%d charges of the other shard failed", n))
	}
	return all
}

// wrongLosses are charges that were given up although they certainly did not run, and any
// failure though nobody should notice the fault.
func (o *outcome) wrongLosses() (all []string) {
	of := o.metrics.undelivered[faulty]
	if lost := of["lost"] - o.metrics.lostRefunds; lost > 0 || of["expired"] > 0 {
		all = append(all, fmt.Sprintf("%d charges are lost and %d expired, though their windows last", lost, of["expired"]))
	}
	if strings.Contains(o.log, "charges were lost at exit") {
		all = append(all, "charges were lost at exit")
	}
	if n := o.metrics.storeErrors + of["uncertain"]; o.fault.isUnnoticed() && n > 0 {
		all = append(all, fmt.Sprintf("%d checks, takes or charges failed, though nobody should notice", n))
	}
	return all
}

// wrongSoundness is a data race, or a fault without effect.
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

func (o *outcome) missing() int64 { return missing(o.concerned(), o.buckets) }

func missing(clients []*client, buckets map[string]shards.Bucket) int64 {
	n := served(clients)
	for _, c := range clients {
		n -= buckets[c.name].Count
	}
	return n
}

// extremes are the least and the most by which the count of a client exceeds what it was
// served.
func (o *outcome) extremes() (least, most int64) {
	var beyond []int64
	for _, c := range o.concerned() {
		beyond = append(beyond, o.buckets[c.name].Count-c.served())
	}
	return slices.Min(beyond), slices.Max(beyond)
}

func (o *outcome) wrongDoubles() (all []string) {
	for _, c := range o.concerned() {
		if n, most := o.buckets[c.name].Count, o.mostCounted(c); n > most {
			all = append(all, fmt.Sprintf("%s: %d counted, at most %d should be", c, n, most))
		}
	}
	return all
}

// mostCounted is the highest count that a client may have: its served requests, and
// those whose take may have run though they were not served.
func (o *outcome) mostCounted(c *client) int64 {
	most := c.served()
	if !o.takes() || o.decides(c) == there {
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

func (o *outcome) wrongOmissions() []string {
	if missing, most := o.missing(), o.mostMissing(); missing > most {
		return []string{fmt.Sprintf("%d requests are not counted, at most %d may be missing", missing, most)}
	}
	return nil
}

// margin bounds, on a busy machine, how long a charge takes to reach the replicas, and
// how long a momentary fault lasts.
const margin = time.Second

// mostMissing is how many served requests may be missing from the counts: those whose
// charges Caddy reports as failed, and those that Redis loses.
func (o *outcome) mostMissing() int64 {
	most := o.metrics.failed(faulty)
	if o.takes() {
		most += o.metrics.storeErrors // a take without an answer may or may not count
	}
	switch o.fault.loses {
	case tail:
		most += o.servedWithin(o.begin.Add(-margin), o.begin.Add(margin))
	case fork:
		most += o.servedWithin(o.begin.Add(-margin), o.end)
	case everything:
		most += o.servedWithin(time.Time{}, o.begin.Add(margin))
	}
	return most
}

func (o *outcome) servedWithin(from, to time.Time) (n int64) {
	for _, c := range o.concerned() {
		n += c.count(func(r *response) bool { return r.isServed() && r.ended.After(from) && r.ended.Before(to) })
	}
	return n
}

// deviation is a promise that is known to be broken, and the reason.
type deviation struct {
	promise  promise
	concerns func(o *outcome) bool // reports whether an outcome shows this deviation
	text     string
}

var deviations = []deviation{
	{
		promise: responses,
		concerns: func(o *outcome) bool {
			return !o.takes() && slices.Contains(successions, o.fault.name) && o.mostStrays() <= int64(2*time.Second/pace)
		},
		text: "when a primary is restarted or replaced, replicas that do not follow it yet are left out as if they were another's, and Sentinel closes connections; for up to two seconds `on_error` then decides requests about open windows, although there are replicas.",
	},
}

// mostStrays is the most requests of one client that the store did not decide although
// the servers that decide about the client were reachable.
func (o *outcome) mostStrays() (most int64) {
	for _, c := range o.concerned() {
		if o.decides(c) == there {
			most = max(most, c.count(func(r *response) bool { return !o.isNormal(c, r) }))
		}
	}
	return most
}

// knownAs returns the number of the deviation that b is, from 1, or 0.
func (o *outcome) knownAs(b breach) int {
	for i, d := range deviations {
		if d.promise == b.promise && d.concerns(o) {
			return i + 1
		}
	}
	return 0
}

func (o *outcome) unknown() []breach {
	return traffic.Those(o.breaches(), func(b breach) bool { return o.knownAs(b) == 0 })
}

func (o *outcome) known() (all []int) {
	for _, b := range o.breaches() {
		if n := o.knownAs(b); n > 0 && !slices.Contains(all, n) {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}

// statuses describes the responses to concerned clients.
func (o *outcome) statuses(p phase) string {
	var some []response
	ofCaddy := 0
	for _, c := range o.concerned() {
		for _, r := range o.seen(c, p) {
			some = append(some, r)
			if o.isLocal(c, &r) {
				ofCaddy++
			}
		}
	}
	text := describe(some)
	if ofCaddy > 0 {
		text += fmt.Sprintf(" (local: %d)", ofCaddy)
	}
	return text
}

func (o *outcome) seen(c *client, p phase) (some []response) {
	for _, r := range c.responses() {
		if !r.ended.Before(o.start) && o.phaseOf(&r) == p {
			some = append(some, r)
		}
	}
	return some
}

// describe counts responses by kind, which is the status of normal ones.
func describe(some []response) string {
	count := map[string]int{}
	for _, r := range some {
		count[kindOf(&r)]++
	}
	var words []string
	for _, kind := range slices.Sorted(maps.Keys(count)) {
		words = append(words, fmt.Sprintf("%d × %s", count[kind], kind))
	}
	return strings.Join(words, ", ")
}

func kindOf(r *response) string {
	switch {
	case r.status == 0:
		return "no response"
	case r.isUnchecked():
		return "200 unchecked"
	default:
		return strconv.Itoa(r.status)
	}
}

func (o *outcome) latencies(p phase) (all []time.Duration) {
	for _, c := range o.concerned() {
		for _, r := range o.seen(c, p) {
			all = append(all, r.ended.Sub(r.begun))
		}
	}
	slices.Sort(all)
	return all
}

// added is how much higher a quantile was during the fault.
func (o *outcome) added(q float64) time.Duration {
	return loadgen.Quantile(o.latencies(meanwhile), q) - loadgen.Quantile(o.latencies(earlier), q)
}
