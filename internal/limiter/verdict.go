package limiter

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// verdict is what a zone decides about a request: of several zones, what the one decides that
// matters most. Serving, headers, placeholders, logs and simulations read it.
type verdict struct {
	*inZone
	// by is the evaluation of the zone, or the one that was asking when the client left.
	by      *evaluation
	outcome telemetry.Outcome
}

// ranks say how much an outcome matters; 0 is not at all.
var ranks = [telemetry.Outcomes]int{
	telemetry.ErrorAllowed: rankError, telemetry.Allowed: 2, telemetry.WouldRefuse: 3,
	telemetry.ErrorRefused: rankEnd, telemetry.Refused: rankRefusal, telemetry.Blocked: rankRefusal,
}

const rankError, rankEnd, rankRefusal = 1, 4, 5

// endsRequest reports whether the request ends here.
func endsRequest(o telemetry.Outcome) bool { return ranks[o] >= rankEnd }

// refuses reports whether the request ends because it has no room, or its client is blocked.
func refuses(o telemetry.Outcome) bool { return ranks[o] == rankRefusal }

// outcomes are what a zone decides by its answer. With on_error deny, a store that failed refuses
// where the zone is enforced.
var outcomes = [answers][roles]telemetry.Outcome{
	notAsked:    {telemetry.Undecided, telemetry.Undecided, telemetry.Undecided},
	hasRoom:     {enforces: telemetry.Allowed, observes: telemetry.Allowed, blocks: telemetry.Blocked},
	hasNoRoom:   {enforces: telemetry.Refused, observes: telemetry.WouldRefuse, blocks: telemetry.Blocked},
	storeFailed: {enforces: telemetry.ErrorAllowed, observes: telemetry.ErrorAllowed, blocks: telemetry.Blocked},
}

// outcome returns what the zone decides.
func (z *inZone) outcome() telemetry.Outcome {
	if z.answer == storeFailed && z.role == enforces && z.onError == stores.OnErrorDeny {
		return telemetry.ErrorRefused
	}
	return outcomes[z.answer][z.role]
}

// outranks reports whether v matters more than another verdict: of those that refuse the one
// that makes the client wait longest, of those that let it pass the one with the least left.
func (v verdict) outranks(other verdict) bool {
	if a, b := ranks[v.outcome], ranks[other.outcome]; a != b || a == 0 {
		return a > b
	}
	if v.outcome == telemetry.Allowed {
		return v.ask.Remaining < other.ask.Remaining
	}
	return v.ask.RetryAfter > other.ask.RetryAfter
}

// anyHandler selects every handler.
func anyHandler(*Limiter) bool { return true }

// verdict returns the verdict of the handlers for which shows holds, also of those before an
// error: what ended the request, or else what outranks the rest. It has no outcome if none of
// their zones has decided.
func (t *tracker) verdict(shows func(*Limiter) bool) (v verdict) {
	if ending := t.refusal(); ending != nil && endsRequest(ending.outcome) {
		if shows(ending.by.limiter) {
			return *ending
		}
		return verdict{}
	}
	for _, e := range t.all() {
		for _, z := range e.zones {
			if of := (verdict{z, e, z.outcome()}); of.outranks(v) && shows(e.limiter) {
				v = of
			}
		}
	}
	return v
}

// leads reports whether z decides for its zone: of the clients that the zone counts the request for, it is the one
// whose verdict matters most.
func (z *inZone) leads() bool {
	if !z.isOneOf {
		return true
	}
	var v verdict
	for _, other := range z.of.zones {
		if of := (verdict{other, z.of, other.outcome()}); other.boundZone == z.boundZone && (v.inZone == nil || of.outranks(v)) {
			v = of
		}
	}
	return v.inZone == z
}

// conclude makes the states of zones that have no room show how long the client has to wait, and
// the penalties that refusals earn.
func (e *evaluation) conclude() {
	for _, z := range e.zones {
		if z.answer != hasNoRoom {
			continue
		}
		z.estimateWait()
		z.notePause()
		if z.showPenalty() {
			z.penalize()
		}
	}
}

// penalize keeps the client of the zone refused until its state says. No request waits for the stores.
func (z *inZone) penalize() {
	if z.isLocal() {
		open, req := z.decider()
		req.Until = z.ask.State.Penalty
		open.Accounts.PenalizeAlone(&req)
		return
	}
	req := z.ask.Request
	req.Until = z.ask.State.Penalty
	z.of.open.Penalize(req)
}

// showPenalty makes the state of the zone show the penalty that its refusal earns, and reports
// whether it earns one. Requests in flight may turn out to be free, so they earn none, and
// nobody earns one for the clients of a shared bucket.
func (z *inZone) showPenalty() bool {
	st := &z.ask.State
	if z.Penalty == 0 || z.bucket != ownBucket && !z.isLocal() || z.role == blocks || st.Penalty != 0 || st.InFlight || st.RetryAfter == store.Never {
		return false
	}
	z.showPenaltyFor(z.Penalty)
	st.RetryAfter = max(st.RetryAfter, z.Penalty)
	return true
}

// showPenaltyFor makes the state of the zone show a penalty that ends so long after its decision.
func (z *inZone) showPenaltyFor(d time.Duration) {
	st := &z.ask.State
	st.Penalty = st.Now + d.Microseconds()
	st.Reset = max(st.Reset, st.Penalty)
	st.Remaining = 0
}

// count counts what the zones decided.
func (e *evaluation) count() {
	for _, z := range e.zones {
		if o := z.outcome(); o != telemetry.Undecided && z.leads() {
			z.Counts.Requests.Inc()
			z.Counts.Decisions[o].Inc()
		}
	}
}

// reason is why a request was, or would have been, refused, or the store did not decide about it.
type reason uint8

const (
	noReason reason = iota
	reasonOverLimit
	reasonInFlight
	reasonPenalty
	reasonReserved
	reasonStoreError
	reasonBlocked
)

// reasons are the words for reasons.
var reasons = [...]telemetry.Word{
	noReason:         {},
	reasonOverLimit:  {Name: "over_limit"},
	reasonInFlight:   {Name: "in_flight", Meaning: "only what may come back is in the way"},
	reasonPenalty:    {Name: "penalty"},
	reasonReserved:   {Name: "reserved", Meaning: "room is kept for others"},
	reasonStoreError: {Name: "store_error"},
	reasonBlocked:    {Name: "blocked"},
}

// String returns the name of the reason in placeholders and logs.
func (r reason) String() string { return reasons[r].Name }

// ReasonWords are the words for the reasons.
func ReasonWords() []telemetry.Word { return reasons[reasonOverLimit:] }

// reason returns why the zone decided as it did; it is noReason if the zone allowed the
// request.
func (z *inZone) reason() reason {
	switch z.outcome() {
	case telemetry.Undecided, telemetry.Allowed:
		return noReason
	case telemetry.ErrorAllowed, telemetry.ErrorRefused:
		return reasonStoreError
	case telemetry.Blocked:
		return reasonBlocked
	}
	st, req := &z.ask.State, &z.ask.Request
	switch {
	case st.Penalty != 0:
		return reasonPenalty
	case st.InFlight:
		return reasonInFlight
	case req.Reserved > 0 && st.Used+req.Cost <= req.Capacity()+req.Reserved:
		return reasonReserved
	default:
		return reasonOverLimit
	}
}

// wait returns how long st makes a client wait, in microseconds; 0 if the client
// was not refused, or waiting does not help.
func wait(st *store.State) int64 {
	if st.RetryAfter == store.Never {
		return 0
	}
	return st.RetryAfter.Microseconds()
}
