package limiter

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// tracker is the state of one request, shared by all handlers that it passes: its
// evaluations, and whether it is settled. It is also the response writer of the
// handlers after the outermost one, and so sees the final status in time.
type tracker struct {
	caddyhttp.ResponseWriterWrapper

	// own are the evaluations that the tracker settles.
	own []*evaluation
	// request is what the outermost handler got; nil in tests of the writer alone.
	request *http.Request
	// admitted is when the last handler admitted the request: see [Limiter.stamp].
	admitted uint32
	settled  bool
	// unsent is how much of the body is not written yet, by the length that the header declares;
	// unknownLength without one.
	unsent int64
	// response is nil if no zone settles when the response has ended.
	response *response

	// limitValues are the values of the headers X-RateLimit-*.
	limitValues [5]string

	first evaluation
	room  [1]*evaluation
}

// evaluation is one request in the zones of one handler.
type evaluation struct {
	limiter *Limiter
	repl    *caddy.Replacer
	// zones has room for more: beyond its length there are zones that are not in use yet, or nil.
	zones []*inZone
	// open is the store, until the request has settled and its leases have ended. It is nil if
	// opening it failed.
	open *stores.Opened
	// asks are those of all zones, for the store.
	asks []*store.Ask
	// isAsked is set once the states are.
	isAsked bool
	// posts has room for what the zones charge.
	posts []*store.Request
	// rare is nil for most requests.
	rare *rare
}

// rare holds the fields that few evaluations need. It is allocated on demand.
type rare struct {
	lease *lease
	// openErr is why the store could not be opened.
	openErr error
	// earlier are the evaluations that were settled before this tracker began, in the route
	// whose error is being handled; only the first evaluation of a request has them.
	earlier []*evaluation
	// refusal is the verdict that ended the request; only the first evaluation of a request has it.
	refusal *verdict
}

// rareZone holds what few zones of a request need.
type rareZone struct {
	// block is how an operator has blocked the client.
	block store.Override
	// taken is the take from a zone that forgives, while the request runs.
	taken take
	// own is what the client's own bucket would be asked, where clients share one.
	own ownRequest
	// err is why the unknown bucket counts the request.
	err error
	// item is what a call asks of the zone, or nil where a request asks all zones of a handler.
	item *Item
	// amount is what the call costs, or less than 0 if it gives back; always is the part of it that need
	// not fit.
	amount, always int64
	// isPostpaid is set if an item of the call is, and used is what such items report.
	isPostpaid bool
	used       int64
	// end is how a take without an ID ends that may have spent the cost.
	end *store.Late
	// probe is what the request has taken to find out whether the upstream is open, or nil; awaitsProbe is
	// set if another request finds out.
	probe       *store.Request
	awaitsProbe bool
}

// ownRequest is what sets a client's own bucket apart from one that clients share.
type ownRequest struct {
	clientKey     string
	events, burst int64
}

// ensureRare returns e.rare, and makes it if there is none.
func (e *evaluation) ensureRare() *rare {
	if e.rare == nil {
		e.rare = new(rare)
	}
	return e.rare
}

// ensureRare returns what is rare about the zone.
func (z *inZone) ensureRare() *rareZone {
	if z.rare == nil {
		z.rare = new(rareZone)
	}
	return z.rare
}

// setBlock notes the block of the client.
func (z *inZone) setBlock(block *store.Override) {
	z.ensureRare().block = *block
	z.role = blocks
}

// inZone is the request in one zone: how the zone treats its client, which bucket counts it, what
// is known of that, and what has been spent.
type inZone struct {
	*boundZone
	of *evaluation
	// ask has the request, with its final cost once the zone has settled, and the state.
	ask store.Ask
	// rare is nil for most zones.
	rare   *rareZone
	role   role
	bucket bucket
	// isOneOf is set if the zone counts the request for other clients as well.
	isOneOf bool
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

// spend is what a request has spent in a zone: in its store, and in memory.
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
	// phaseLost and phaseLostHeld are the same of a take without an ID: the request does not take again, and is
	// charged if it turns out that the take spent nothing.
	phaseLost
	phaseLostHeld
	storePhases
)

// localPhase says whether this process decided without the store, and whether a bucket in memory has the cost.
type localPhase uint8

const (
	localNone localPhase = iota
	// localMirrored: the slot that the store gave is taken in memory as well.
	localMirrored
	// localDecided: this process decided, and memory does not have the cost.
	localDecided
	// localTaken: memory decided, and has spent the cost.
	localTaken
)

// isUncertain reports whether a take may have spent the cost or not.
func (s spend) isUncertain() bool { return s.stored >= phaseUncertain }

func (s spend) isLost() bool { return s.stored == phaseLost || s.stored == phaseLostHeld }

// isLocal reports whether this process decided without the store.
func (s spend) isLocal() bool { return s.alone >= localDecided }

// isTaken reports whether the cost was spent where it was decided, and can be refunded.
func (s spend) isTaken() bool { return s.stored == phaseTaken || s.alone == localTaken }
