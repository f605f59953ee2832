package limiter

import "github.com/shardlimit/caddy-shardlimit/store"

// inZone is the request in one zone: how the zone treats its client, which bucket counts it, what
// is known of that, and what has been spent.
type inZone struct {
	*boundZone
	role   role
	bucket bucket
	answer
	spend
}

// role is how a zone treats the client.
type role uint8

const (
	// enforces: what has no room is refused.
	enforces role = iota
	// observes: what has no room passes.
	observes
	// blocks: an operator has blocked the client.
	blocks
	roles
)

// bucket is which bucket of a zone counts a request.
type bucket uint8

const (
	// ownBucket is the client's own.
	ownBucket bucket = iota
	// overflowBucket is shared by new clients beyond the bound.
	overflowBucket
	// unknownBucket is shared by clients beyond the bound while the store does not say whether they
	// are new, or answer about the overflow bucket. on_error decides, without asking.
	unknownBucket
)

// answer is what is known of a bucket.
type answer uint8

const (
	// notAsked: after a refusal other zones are not asked.
	notAsked answer = iota
	hasRoom
	hasNoRoom
	// storeFailed: on_error decides.
	storeFailed
	answers
)

// hasAnswered reports whether the state is what a store, or a block, says of the bucket.
func (a answer) hasAnswered() bool { return a == hasRoom || a == hasNoRoom }

// answerOf returns what a state says. A store leaves the states of requests zero that it does not
// decide.
func answerOf(st *store.State) answer {
	switch {
	case st.Err != nil:
		return storeFailed
	case st.Allowed:
		return hasRoom
	case st.Now != 0:
		return hasNoRoom
	default:
		return notAsked
	}
}

// spend is what a request has spent in a zone: in its store, and in the local counts.
type spend struct {
	stored storePhase
	alone  localPhase
}

// storePhase is what a store has of the cost, as far as this process knows.
type storePhase uint8

const (
	phaseNone storePhase = iota
	// phaseHeld: the cost is in flight.
	phaseHeld
	// phaseTaken: the cost was spent, and can be refunded.
	phaseTaken
	// phaseUncertain: a take may have spent the cost or not.
	phaseUncertain
	// phaseUncertainHeld: the same, and the cost is in flight in case it has not.
	phaseUncertainHeld
)

// localPhase is what the local counts have of the cost.
type localPhase uint8

const (
	localNone localPhase = iota
	// localMirrored: the slot that the store gave is taken here as well, because the local counts
	// have to know of it once they decide.
	localMirrored
	// localDecided: the local counts decided, and have nothing of the cost.
	localDecided
	// localHeld: they decided, and the cost is in flight there.
	localHeld
	// localTaken: they decided, and the cost was spent there.
	localTaken
)

// isUncertain reports whether a take may have spent the cost or not.
func (s spend) isUncertain() bool { return s.stored == phaseUncertain || s.stored == phaseUncertainHeld }

// isHeld reports whether the cost is in flight to the store.
func (s spend) isHeld() bool { return s.stored == phaseHeld || s.stored == phaseUncertainHeld }

// isLocal reports whether the local counts decided.
func (s spend) isLocal() bool { return s.alone >= localDecided }

// isTaken reports whether the cost was spent where it was decided, and can be refunded.
func (s spend) isTaken() bool { return s.stored == phaseTaken || s.alone == localTaken }

// hold notes that the cost is in flight to the store.
func (s *spend) hold() {
	if s.isUncertain() {
		s.stored = phaseUncertainHeld
	} else {
		s.stored = phaseHeld
	}
}

// take notes that the cost was spent where it was decided.
func (s *spend) take() {
	if s.isLocal() {
		s.alone = localTaken
	} else {
		s.stored = phaseTaken
	}
}

// becomeUncertain notes that a take may have spent the cost.
func (s *spend) becomeUncertain() {
	if s.isHeld() {
		s.stored = phaseUncertainHeld
	} else {
		s.stored = phaseUncertain
	}
}

// lose notes that what was taken is gone.
func (s *spend) lose() {
	switch {
	case s.alone == localTaken:
		s.alone = localDecided
	case s.stored == phaseTaken:
		s.stored = phaseNone
	}
}

// due is what a store has to do, so that it counts the final cost of a request.
type due uint8

const (
	dueNothing due = iota
	// dueSettle ends what is in flight, with the final cost.
	dueSettle
	// dueCharge charges what the cost is more than what was spent.
	dueCharge
	// dueAgain repeats a take of unknown outcome under its ID, with the final cost.
	dueAgain
	// dueRefund refunds what was spent and is more than the cost, or all of a take of unknown
	// outcome.
	dueRefund
)

// due returns what the store has to do for a request that has spent so much, and costs so much in the
// end. It knows a take of unknown outcome by its ID: it does no harm to refund what was never
// taken, or to charge what was.
func (p storePhase) due(spent, cost int64) due {
	switch {
	case p == phaseHeld:
		return dueSettle
	case p == phaseUncertain && cost == 0:
		return dueRefund
	case p == phaseUncertain:
		return dueAgain
	case cost > spent:
		return dueCharge
	case cost < spent:
		return dueRefund
	default:
		return dueNothing
	}
}
