package limiter

import (
	"math/bits"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Placeholders of a call of rate_limit_service.
const (
	// Descriptor is all of a descriptor: its keys and values.
	Descriptor = "rate_limit_service"
	// DescriptorPrefix begins those of single entries, before their keys.
	DescriptorPrefix = Descriptor + "."
	// DescriptorText is the key of zones that have none.
	DescriptorText = "{" + Descriptor + "}"
)

// Item is what a call asks of one zone. A call has no handlers behind it, and may ask several zones,
// or one zone about several clients.
type Item struct {
	Zone *Zone
	// Request names the client. Its context has a replacer and variables.
	Request *http.Request
	// Hits is how many times the zone's cost is charged. With 0 nothing is charged, and the call is
	// refused if nothing is left; less than 0 gives back.
	Hits int64
	// Always is set if what Hits cost is charged although it does not fit, because it was used already.
	Always bool
	// Postpaid is set if the same item looks whether anything is left, and reports what was used: the call is
	// refused if nothing was left before, and what Hits cost is charged whole, even if the call is refused.
	Postpaid bool
	// Exactly is set if what is taken is written down: the zone takes no batch for it, because another process
	// may give it back, and what is taken once counts although the caller has left.
	Exactly bool
	// Reserves is set if what is taken is held until [Limiter.GiveBack] or [Limiter.EndHold] is called for it.
	Reserves bool
	// Cost is what a hit costs. MeetEach sets it.
	Cost int64
}

func (i *Item) replacer() *caddy.Replacer {
	return i.Request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
}

// CanGiveBack reports whether an [Item] of the zone may give back what others have spent: not where
// events are kept one by one.
func (z *Zone) CanGiveBack() bool { return !z.needsID }

// MeetEach resolves what the items ask of zones of l, as one evaluation: if a zone refuses, none is
// charged. Items of one bucket are added up. It returns for each item the place of its decision
// among those that Decisions visits, or -1 where the zone does not limit it.
func (p *Passage) MeetEach(l *Limiter, items []Item) (places []int, err error) {
	var e *evaluation
	chosen := choice{limiter: l}
	chosen.make(items[0].Zone, items[0].Request, items[0].replacer())
	for n := range items {
		item := &items[n]
		asked, isAsked, err := item.Zone.meet(item.Request, item.replacer(), &chosen)
		if err != nil {
			p.tracker = nil
			return nil, err
		}
		if !isAsked {
			places = append(places, -1)
			continue
		}
		if e == nil {
			p.tracker = newTracker(p.w, nil, len(items))
			e = p.tracker.newEvaluation(l, item.replacer())
		}
		if item.Cost = asked.req.Cost; item.Exactly {
			asked.req.Batch = 0
		}
		asked.req.Hold = item.Zone.newHold(item)
		places = append(places, e.addItem(&asked, item))
	}
	if e != nil {
		p.tracker.enroll(e, items[0].Request)
	}
	for n := range items {
		l.reportEmptyKeys(items[n].Request)
	}
	return places, nil
}

// addItem adds what an item asks to its bucket, and returns the bucket's place. Of two limits for one
// bucket the lower holds.
func (e *evaluation) addItem(in *resolved, item *Item) int {
	amount := Times(item.Hits, item.Cost)
	place := slices.IndexFunc(e.zones, func(z *inZone) bool {
		return z.boundZone == in.zone && z.ask.ClientKey == in.req.ClientKey
	})
	if place < 0 {
		place = len(e.zones)
		e.add(in).ensureRare().item = item
	}
	z := e.zones[place]
	req, rare := &z.ask.Request, z.rare
	if in.req.Events < req.Events {
		req.Events, req.Burst, req.Reserved = in.req.Events, in.req.Burst, in.req.Reserved
	}
	if item.Hits != 0 {
		rare.item = item
	}
	rare.amount = min(max(rare.amount+amount, -store.MaxEvents), store.MaxEvents)
	if item.Always || item.Postpaid {
		rare.always = min(rare.always+max(amount, 0), store.MaxEvents)
	}
	if item.Postpaid {
		rare.isPostpaid, rare.used = true, min(rare.used+max(amount, 0), store.MaxEvents)
	}
	req.Cost = max(rare.amount-rare.always, 0)
	return place
}

// Times returns the cost of some hits, which is at most the largest.
func Times(hits, cost int64) int64 {
	if hi, lo := bits.Mul64(uint64(max(hits, -hits)), uint64(cost)); hi == 0 && lo <= store.MaxEvents {
		return hits * cost
	}
	if hits < 0 {
		return -store.MaxEvents
	}
	return store.MaxEvents
}

// itemOf returns the item of the zone, or nil where a request asks all zones of a handler.
func (z *inZone) itemOf() *Item {
	if z.rare == nil {
		return nil
	}
	return z.rare.item
}

// replOf returns the replacer of the request in the zone.
func (z *inZone) replOf() *caddy.Replacer {
	if item := z.itemOf(); item != nil {
		return item.replacer()
	}
	return z.of.repl
}

// requestOf returns the request in the zone, which is r unless it is an item's.
func (z *inZone) requestOf(r *http.Request) *http.Request {
	if item := z.itemOf(); item != nil {
		return item.Request
	}
	return r
}

// newHold returns a Hold for a request, or for an item unless that is nil.
func (z *Zone) newHold(item *Item) uint32 {
	isItem := item != nil
	switch {
	case z.isLease:
		return 0
	case isItem && item.Reserves, !isItem && z.mayGiveBack:
		return store.NewHold()
	case isItem, z.Batch != 0:
		// Only batches, and what others take, may come back.
		return store.HearsHeld
	}
	return 0
}

// keepsHold reports whether what the zone has taken stays held once the call has settled.
func (z *inZone) keepsHold() bool {
	item := z.itemOf()
	return item != nil && item.Reserves && z.stored == phaseTaken
}

// refund returns what the call gives back in the zone.
func (z *inZone) refund() int64 {
	if z.itemOf() == nil || !z.isTaken() {
		return 0
	}
	return max(-z.rare.amount, 0)
}

// refund gives back what other requests have spent in the zone, where a take without a cost has shown
// which window is open.
func (s *settlements) refund(z *inZone, back int64) {
	req, to := z.ask.Request, &s.store
	if z.isLocal() {
		req, to = z.localRequest(), &s.local
	}
	req.Cost = back
	to.refunds = append(to.refunds, &req)
	z.Counts.Refunded.Add(back)
	z.show(back, 0)
}

// findsNothing reports whether the call looks whether anything is left in the zone, takes nothing of it, and
// nothing is.
func (z *inZone) findsNothing() bool {
	item := z.itemOf()
	switch {
	case item == nil || z.ask.Remaining > 0:
		return false
	case z.rare.isPostpaid:
		return z.ask.Cost == 0 && z.rare.amount >= 0
	default:
		return item.Hits == 0 && !item.Always
	}
}

// used returns what postpaid items report, which is charged whatever becomes of the call.
func (z *inZone) used() int64 {
	if z.rare == nil || z.ask.Events == 0 {
		return 0
	}
	return z.rare.used
}

// chargeUsed charges what postpaid items report, because it was used although the call is refused.
func (e *evaluation) chargeUsed() {
	var all settlements
	for _, z := range e.zones {
		if used := z.used(); used > 0 {
			all.store.add(z.ask.Request, phaseNone, costsMore, 0, used)
			z.show(0, used)
			z.Counts.Charged.Add(used)
		}
	}
	all.send(e.open)
}

// refuseLook makes the zone refuse a call that finds nothing left.
func (z *inZone) refuseLook() {
	st := &z.ask.State
	st.Allowed, st.RetryAfter = false, max(time.Duration(st.Reset-st.Now)*time.Microsecond, leastWait)
	least := z.ask.Request
	least.Cost = 1
	algorithm.ShowHeld(st, &least, int64(st.Held))
	z.answer = hasNoRoom
}
