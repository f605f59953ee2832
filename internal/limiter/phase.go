package limiter

import (
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// inZone is the request in one zone: how the zone treats its client, which bucket counts it, what
// is known of that, and what has been spent.
type inZone struct {
	*boundZone
	// open is the store, until the request has settled and its leases have ended. It is nil if
	// opening it failed.
	open   *stores.Opened
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
	// phaseUncertain: a take may have spent the cost or not. The store knows it by its ID.
	phaseUncertain
	// phaseUncertainHeld: the same, and the cost is in flight in case it has not.
	phaseUncertainHeld
	// phaseLost and phaseLostHeld are the same of a take without an ID: nothing can be done, and
	// the request does not take again.
	phaseLost
	phaseLostHeld
	storePhases
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
func (s spend) isUncertain() bool { return s.stored >= phaseUncertain }

func (s spend) isLost() bool { return s.stored == phaseLost || s.stored == phaseLostHeld }

// isLocal reports whether the local counts decided.
func (s spend) isLocal() bool { return s.alone >= localDecided }

// isTaken reports whether the cost was spent where it was decided, and can be refunded.
func (s spend) isTaken() bool { return s.stored == phaseTaken || s.alone == localTaken }

// hold notes that the cost is in flight to the store.
func (s *spend) hold() {
	switch s.stored {
	case phaseUncertain:
		s.stored = phaseUncertainHeld
	case phaseLost:
		s.stored = phaseLostHeld
	case phaseNone, phaseTaken:
		s.stored = phaseHeld
	case phaseHeld, phaseUncertainHeld, phaseLostHeld:
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

// becomeUncertain notes that a take, which may have an ID, may have spent the cost.
func (s *spend) becomeUncertain(hasID bool) {
	isHeld := s.stored == phaseHeld || s.stored == phaseUncertainHeld || s.stored == phaseLostHeld
	if s.stored = phaseUncertain; !hasID {
		s.stored = phaseLost
	}
	if isHeld {
		s.hold()
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

// final is what a request costs in the end, compared with what it has spent.
type final uint8

const (
	// costsNothing: it has not spent anything either.
	costsNothing final = iota
	costsLess
	costsSame
	costsMore
	// empties: the status of the response empties the bucket.
	empties
	// emptiesOwn: the same, of a bucket that had nothing but the request's take.
	emptiesOwn
	finals
)

func finalOf(spent, cost int64) final {
	switch {
	case cost > spent:
		return costsMore
	case cost < spent:
		return costsLess
	case cost > 0:
		return costsSame
	default:
		return costsNothing
	}
}

// flightDue is what becomes of a cost in flight.
type flightDue uint8

const (
	flightStays flightDue = iota
	// flightCharged: it ends, and the final cost is charged.
	flightCharged
	// flightDropped: it ends, and nothing is charged, because a take may have spent it.
	flightDropped
)

// due is what else a store has to do, so that it counts the final cost.
type due uint8

const (
	dueNothing due = iota
	// dueCharge charges what the cost is more than what was spent.
	dueCharge
	// dueRepeat repeats a take under its ID, with the final cost.
	dueRepeat
	// dueRefund refunds what was spent and is more than the cost, or all of an uncertain take.
	dueRefund
	// dueEmpty empties the bucket.
	dueEmpty
	// dueRefundFirst refunds what was spent, and empties the bucket if the reply shows more.
	dueRefundFirst
)

// dues are what settles a request. The store knows an uncertain take by its ID: it does no harm to
// refund what was never taken, or to charge what was.
var dues = [storePhases][finals]struct {
	flight flightDue
	then   due
}{
	phaseNone: {costsMore: {then: dueCharge}, empties: {then: dueEmpty}},
	phaseHeld: {
		costsNothing: {flight: flightCharged}, costsMore: {flight: flightCharged}, empties: {flightCharged, dueEmpty},
	},
	phaseTaken: {
		costsLess: {then: dueRefund}, costsMore: {then: dueCharge}, empties: {then: dueEmpty}, emptiesOwn: {then: dueRefundFirst},
	},
	phaseUncertain: {
		costsNothing: {then: dueRefund}, costsMore: {then: dueRepeat}, empties: {then: dueEmpty},
	},
	phaseUncertainHeld: {
		costsNothing: {flightDropped, dueRefund}, costsMore: {flightDropped, dueRepeat}, empties: {flightDropped, dueEmpty},
	},
	phaseLost:     {empties: {then: dueEmpty}},
	phaseLostHeld: {costsNothing: {flight: flightDropped}, costsMore: {flight: flightDropped}, empties: {flightDropped, dueEmpty}},
}

// localRows are the rows of dues for the local counts.
var localRows = [...]storePhase{
	localNone: phaseNone, localMirrored: phaseTaken, localDecided: phaseNone, localHeld: phaseHeld, localTaken: phaseTaken,
}
