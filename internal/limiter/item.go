package limiter

import (
	"math/bits"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
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
	// Exactly is set if what is taken is written down: the zone takes no batch for it, because another process
	// may give it back, and what is taken once counts although the caller has left.
	Exactly bool
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
	for n := range items {
		item := &items[n]
		in, isAsked, err := item.Zone.meet(item.Request, item.replacer(), l)
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
		if item.Cost = in.req.Cost; item.Exactly {
			in.req.Batch = 0
		}
		places = append(places, e.addItem(&in, item))
	}
	if e != nil {
		p.tracker.enroll(e, items[0].Request)
	}
	for n := range items {
		l.reportEmptyKeys(items[n].Request)
	}
	return places, nil
}

// addItem adds what an item asks to its bucket, and returns the bucket's index. Of two limits for one
// bucket the lower holds.
func (e *evaluation) addItem(in *resolved, item *Item) int {
	amount := Times(item.Hits, item.Cost)
	i := 0
	for i < len(e.zones) && (e.zones[i].boundZone != in.zone || e.reqs[i].ClientKey != in.req.ClientKey) {
		i++
	}
	if i == len(e.zones) {
		e.add(in)
		e.rareZone(i).item = item
	}
	req, rare := &e.reqs[i], &e.rare.zones[i]
	if in.req.Events < req.Events {
		req.Events, req.Burst, req.Reserved = in.req.Events, in.req.Burst, in.req.Reserved
	}
	if item.Hits != 0 {
		rare.item = item
	}
	rare.amount = min(max(rare.amount+amount, -store.MaxEvents), store.MaxEvents)
	if item.Always {
		rare.always = min(rare.always+max(amount, 0), store.MaxEvents)
	}
	req.Cost = max(rare.amount-rare.always, 0)
	return i
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

// itemOf returns the item of zone i, or nil where a request asks all zones of a handler.
func (e *evaluation) itemOf(i int) *Item {
	if e.rare == nil || i >= len(e.rare.zones) {
		return nil
	}
	return e.rare.zones[i].item
}

// replOf returns the replacer of the request in zone i.
func (e *evaluation) replOf(i int) *caddy.Replacer {
	if item := e.itemOf(i); item != nil {
		return item.replacer()
	}
	return e.repl
}

// requestOf returns the request in zone i, which is r unless it is an item's.
func (e *evaluation) requestOf(i int, r *http.Request) *http.Request {
	if item := e.itemOf(i); item != nil {
		return item.Request
	}
	return r
}

// refund returns what the call gives back in zone i.
func (e *evaluation) refund(i int) int64 {
	if e.itemOf(i) == nil || !e.zones[i].isTaken() {
		return 0
	}
	return max(-e.rare.zones[i].amount, 0)
}

// refund gives back what other requests have spent in zone i, where a take without a cost has shown
// which window is open.
func (s *settlements) refund(e *evaluation, i int, back int64) {
	z, in := &e.zones[i], &s[e.zones[i].in]
	req, to := e.reqs[i], &in.store
	if z.isLocal() {
		req, to = e.localRequest(i), &in.local
	}
	req.Cost = back
	to.refunds = append(to.refunds, req)
	z.Counts.Refunded.Add(float64(back))
	e.show(i, back, 0)
}

// findsNothing reports whether the call only looks whether anything is left in zone i, and nothing is.
func (e *evaluation) findsNothing(i int) bool {
	item := e.itemOf(i)
	return item != nil && item.Hits == 0 && !item.Always && e.states[i].Remaining == 0
}

// refuseLook makes zone i refuse a call that finds nothing left.
func (e *evaluation) refuseLook(i int) {
	st := &e.states[i]
	st.Allowed, st.RetryAfter = false, max(time.Duration(st.Reset-st.Now)*time.Microsecond, leastWait)
	e.zones[i].answer = hasNoRoom
}
