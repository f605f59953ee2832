package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Owners asks all owners of a client about each of its requests: one or, while the client moves to
// another shard, several. Each has a bucket of its own, is charged the whole cost, and has to allow the
// request, as if the buckets were those of several zones. All processes ask in the order of the shards'
// names: otherwise two takes near the limit would refuse each other.
//
// It is the counterpart of [Local], and its methods are those of a [Ledger].
type Owners struct{ *Ledger }

// NewOwners returns the ledger of all owners.
func NewOwners(l *Ledger) *Owners { return &Owners{l} }

// isOne sets the shard of a request whose client has one owner, and reports whether that is so.
func (o *Owners) isOne(r *store.Request) bool {
	owners := o.Ledger.Owners(r.ClientKey)
	if len(owners) > 1 {
		return false
	}
	r.At = o.placeOf(owners[0])
	return true
}

func (o *Owners) areOne(asks []*store.Ask) bool {
	for _, a := range asks {
		if !o.isOne(&a.Request) {
			return false
		}
	}
	return true
}

// parts are what the owners are asked, by the asks of a call.
type parts struct {
	*Owners
	asks []*store.Ask
	of   [][]*store.Ask
}

func (o *Owners) partsOf(asks []*store.Ask) *parts {
	p := &parts{o, asks, make([][]*store.Ask, len(asks))}
	for i, a := range asks {
		for _, r := range o.at(&a.Request, o.Ledger.Owners(a.ClientKey)) {
			p.of[i] = append(p.of[i], &store.Ask{Request: *r})
		}
	}
	return p
}

func (l *Ledger) placeOf(shard string) *store.Place {
	return l.registry.shards.Place(l.registry.shards.Number(shard))
}

// at returns copies of a request for some shards.
func (l *Ledger) at(r *store.Request, shards []string) (all []*store.Request) {
	for _, shard := range shards {
		part := *r
		part.At = l.placeOf(shard)
		all = append(all, &part)
	}
	return all
}

func (p *parts) all() []*store.Ask { return slices.Concat(p.of...) }

// join sets the states of the asks.
func (p *parts) join() {
	for i, a := range p.asks {
		a.State = joined(p.of[i], p.Ledger.Owner(a.ClientKey))
	}
}

// joined returns the answer that stands for those of all owners: the highest count, the longest wait, and
// the reset of the present owner. An error of one stands for all, unless another one has refused. It is zero
// where one was not asked, and none has refused.
func joined(of []*store.Ask, owner string) (st store.State) {
	isFirst, isWhole, err := true, true, error(nil)
	for _, a := range of {
		switch {
		case a.Err != nil:
			if err == nil || errors.Is(a.Err, store.ErrUncertain) {
				err = a.Err
			}
		case !isAnswered(&a.State):
			isWhole = false
		case isFirst:
			st, isFirst = a.State, false
		case a.Shard() == owner:
			st = mostOf(a.State, st)
		default:
			st = mostOf(st, a.State)
		}
	}
	switch refused := !isFirst && !st.Allowed; {
	case err != nil && (!refused || errors.Is(err, store.ErrUncertain)):
		return store.State{Err: err}
	case !refused && !isWhole:
		return store.State{}
	}
	return st
}

func isAnswered(st *store.State) bool { return st.Now != 0 || st.Allowed }

// mostOf returns a state with what another one has more of.
func mostOf(st, other store.State) store.State {
	switch {
	case !other.Allowed && (st.Allowed || other.RetryAfter > st.RetryAfter):
		st.Allowed, st.InFlight, st.Held = false, other.InFlight, other.Held
		st.RetryAfter, st.ResetOtherwise = other.RetryAfter, other.ResetOtherwise
	case st.Allowed && other.Used > st.Used:
		st.Held = other.Held
	}
	st.Used, st.Remaining = max(st.Used, other.Used), min(st.Remaining, other.Remaining)
	st.Replica, st.IsHeld = st.Replica || other.Replica, st.IsHeld || other.IsHeld
	if st.Penalty = max(st.Penalty, other.Penalty); st.Penalty > 0 {
		st.Reset = max(st.Reset, st.Penalty)
	}
	if st.Content == (store.Content{}) {
		st.Content = other.Content
	}
	return st
}

// RefuseKnown is [Ledger.RefuseKnown].
func (o *Owners) RefuseKnown(asks []*store.Ask) (refused bool) {
	return o.known(asks, o.Ledger.RefuseKnown)
}

// ForeseeKnown is [Ledger.ForeseeKnown].
func (o *Owners) ForeseeKnown(asks []*store.Ask) (refused bool) {
	return o.known(asks, o.Ledger.ForeseeKnown)
}

func (o *Owners) known(asks []*store.Ask, question func([]*store.Ask) bool) (refused bool) {
	if o.areOne(asks) {
		return question(asks)
	}
	p := o.partsOf(asks)
	refused = question(p.all())
	p.join()
	return refused
}

// IsFull is [Ledger.IsFull].
func (o *Owners) IsFull(r *store.Request) bool {
	if o.isOne(r) {
		return o.Ledger.IsFull(r)
	}
	return slices.ContainsFunc(o.at(r, o.Ledger.Owners(r.ClientKey)), o.Ledger.IsFull)
}

// Admit is [Ledger.Admit]. What is admitted by one owner only is not held.
func (o *Owners) Admit(ctx context.Context, asks []*store.Ask) {
	if o.areOne(asks) {
		o.Ledger.Admit(ctx, asks)
		return
	}
	p := o.partsOf(asks)
	if !o.Ledger.RefuseKnown(p.all()) {
		p.open(ctx)
		o.Ledger.Admit(ctx, p.all())
	}
	p.join()
	var reqs []*store.Request
	var held []int64
	for i, a := range asks {
		for _, part := range p.of[i] {
			if part.Allowed && !a.Allowed {
				reqs, held = append(reqs, &part.Request), append(held, part.Cost)
				part.Cost = 0
			}
		}
	}
	o.Ledger.Settle(reqs, held)
}

// opensByRequest reports whether a request decides when a window of the limit ends.
func opensByRequest(limit *store.Limit) bool {
	return algorithm.Of(limit.Algorithm).Windowed() && !limit.Align && limit.Calendar.Unit == ""
}

// opened returns the end of the bucket as far as it is known: see [algorithm.Known.Opened].
func (l *Ledger) opened(r *store.Request) int64 {
	m := l.moment()
	b := l.copyOf(r, &m)
	return b.Opened(r, &m)
}

// open reads what is not known to be open, and makes what is closed open with the end of what is open or, if all
// are closed, with the same. What drains gets that arrival time: otherwise a client that never pauses would have a
// burst more once it has moved.
func (p *parts) open(ctx context.Context) {
	var closed [][]*store.Ask
	var reads []*store.Ask
	for _, of := range p.of {
		limit := of[0].Request.Limit
		if len(of) == 1 || !opensByRequest(limit) && !algorithm.Of(limit.Algorithm).Drains() {
			continue
		}
		if slices.ContainsFunc(of, func(a *store.Ask) bool { return p.opened(&a.Request) == 0 }) {
			closed = append(closed, of)
			for _, a := range of {
				read := &store.Ask{Request: a.Request}
				read.Primary = true
				reads = append(reads, read)
			}
		}
	}
	if len(closed) == 0 {
		return
	}
	p.Ledger.Peek(ctx, reads)
	for _, of := range closed {
		limit, now, ends := of[0].Request.Limit, int64(0), make([]int64, len(of))
		for i, read := range reads[:len(of)] {
			ends[i], now = algorithm.Known{Content: read.Content}.Opened(limit, read.Now), max(now, read.Now)
		}
		end := slices.Max(ends)
		if end == 0 && now > 0 && opensByRequest(limit) {
			end = now + limit.Window.Microseconds()
		}
		for i, a := range of {
			if ends[i] == 0 {
				a.Ends = end
			}
		}
		reads = reads[len(of):]
	}
}

// Take is [Ledger.Take]: from one owner after the other. What one gave is refunded where another refuses.
func (o *Owners) Take(ctx context.Context, asks []*store.Ask) {
	if o.areOne(asks) {
		o.Ledger.Take(ctx, asks)
		return
	}
	p := o.partsOf(asks)
	var later []*store.Ask
	for _, of := range p.of {
		later = append(later, of[1:]...)
	}
	if o.Ledger.RefuseKnown(later) {
		p.join()
		return
	}
	p.open(ctx)
	for n := 0; ; n++ {
		var turn []*store.Ask
		for _, of := range p.of {
			if n < len(of) && (n == 0 || of[n-1].Err == nil && of[n-1].Allowed) {
				turn = append(turn, of[n])
			}
		}
		if len(turn) == 0 {
			break
		}
		o.Ledger.Take(ctx, turn)
	}
	p.join()
	var back []*store.Request
	for i, a := range asks {
		back = append(back, p.taken(i, a)...)
	}
	o.Ledger.RefundDetached(back)
}

// taken notes where an ask has spent its cost, and returns what goes back. Where events are kept one by one
// an uncertain take is repeated or refunded by its ID everywhere.
func (p *parts) taken(i int, a *store.Ask) (back []*store.Request) {
	isUncertain := errors.Is(a.Err, store.ErrUncertain)
	a.At = nil
	for _, part := range slices.Backward(p.of[i]) {
		switch {
		case errors.Is(part.Err, store.ErrUncertain) && a.ID == "":
			a.At = part.At
		case part.Err != nil || !part.Allowed:
		case a.Err == nil && a.Allowed:
			a.At = &store.Place{Shard: part.At.Shard, More: a.At, Receipt: part.State.Receipt}
		case !isUncertain || a.ID == "":
			part.Request.Receipt = part.State.Receipt
			part.NoteHold(&part.State)
			back = append(back, &part.Request)
		}
	}
	return back
}

// refunds returns the refunds of a request: where it was spent or, if that is not known, at all owners. It may be
// r itself.
func (o *Owners) refunds(r *store.Request) (all []*store.Request) {
	switch {
	case r.At == nil:
		return o.at(r, o.Ledger.Owners(r.ClientKey))
	case r.At.More == nil:
		return []*store.Request{r}
	}
	for p := r.At; p != nil; p = p.More {
		part := *r
		part.At, part.Receipt = p, p.Receipt
		all = append(all, &part)
	}
	return all
}

// Refund is [Ledger.Refund].
func (o *Owners) Refund(ctx context.Context, asks []*store.Ask) {
	for _, a := range asks {
		of := asksOf(o.refunds(&a.Request))
		o.Ledger.Refund(ctx, of)
		a.State = refunded(of, o.Ledger.Owner(a.ClientKey))
	}
}

func asksOf(reqs []*store.Request) (asks []*store.Ask) {
	for _, r := range reqs {
		asks = append(asks, &store.Ask{Request: *r})
	}
	return asks
}

// refunded is joined of refunds: what one owner has given back must not be tried again.
func refunded(of []*store.Ask, owner string) store.State {
	failed := slices.IndexFunc(of, func(a *store.Ask) bool { return a.Err != nil })
	if failed < 0 {
		return joined(of, owner)
	}
	err := of[failed].Err
	if slices.ContainsFunc(of, func(a *store.Ask) bool { return !errors.Is(a.Err, store.ErrNotExecuted) }) && errors.Is(err, store.ErrNotExecuted) {
		err = fmt.Errorf("%w: refunded in part: %s", store.ErrUncertain, err.Error())
	}
	return store.State{Err: err}
}

// RefundDetached is [Ledger.RefundDetached].
func (o *Owners) RefundDetached(reqs []*store.Request) {
	all := make([]*store.Request, 0, len(reqs))
	for _, r := range reqs {
		all = append(all, o.refunds(r)...)
	}
	o.Ledger.RefundDetached(all)
}

// RefundReported is [Ledger.RefundReported].
func (o *Owners) RefundReported(r store.Request, report func(st store.State)) {
	of := asksOf(o.refunds(&r))
	var mu sync.Mutex
	left := len(of)
	for _, a := range of {
		o.Ledger.RefundReported(a.Request, func(st store.State) {
			mu.Lock()
			defer mu.Unlock()
			a.State = st
			if left--; left == 0 {
				report(refunded(of, o.Ledger.Owner(r.ClientKey)))
			}
		})
	}
}

// settled are the parts of requests to settle.
type settled struct {
	reqs []*store.Request
	held []int64
}

func (s *settled) add(r *store.Request, hold int64) {
	s.reqs, s.held = append(s.reqs, r), append(s.held, hold)
}

// Settle is [Ledger.Settle]. A request holds its cost at the owners that its config knows, and is charged at
// those that the latest config does.
func (o *Owners) Settle(reqs []*store.Request, held []int64) {
	w := o.writer()
	isMoving := func(r *store.Request) bool {
		if !o.isOne(r) {
			return true
		}
		if w == o.Ledger {
			return false
		}
		now := w.Owners(r.ClientKey)
		return len(now) > 1 || now[0] != r.At.Shard
	}
	if !slices.ContainsFunc(reqs, isMoving) {
		o.Ledger.Settle(reqs, held)
		return
	}
	var all settled
	for i, r := range reqs {
		hold := r.Cost
		if held != nil {
			hold = held[i]
		}
		o.settle(&all, w, r, hold, nil)
	}
	o.Ledger.Settle(all.reqs, all.held)
}

// settle adds the parts of a request, but for those at some shards.
func (o *Owners) settle(all *settled, w *Ledger, r *store.Request, hold int64, but []string) {
	own, now := o.Ledger.Owners(r.ClientKey), w.Owners(r.ClientKey)
	ends := w.ends(r, now)
	for _, part := range o.at(r, union(own, now)) {
		holds := int64(0)
		if slices.Contains(own, part.At.Shard) {
			holds = hold
		}
		if n := slices.Index(now, part.At.Shard); n < 0 {
			part.Cost = 0
		} else {
			part.Ends, part.Shared = ends[n], len(now) > 1
		}
		if (part.Cost > 0 || holds > 0) && !slices.Contains(but, part.At.Shard) {
			all.add(part, holds)
		}
	}
}

func union(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

// ends returns with which end a charge opens the bucket at each shard: 0 where it is open, or none is.
func (l *Ledger) ends(r *store.Request, shards []string) []int64 {
	ends := make([]int64, len(shards))
	if len(shards) == 1 || !opensByRequest(r.Limit) && !algorithm.Of(r.Limit.Algorithm).Drains() {
		return ends
	}
	most := int64(0)
	for n, part := range l.at(r, shards) {
		ends[n] = l.opened(part)
		most = max(most, ends[n])
	}
	for n := range ends {
		if ends[n] == 0 {
			ends[n] = most
		} else {
			ends[n] = 0
		}
	}
	return ends
}

// SettleUnknown is [Ledger.SettleUnknown]. Without an ID, only the shard of the uncertain take may have the
// cost: what others gave has gone back, so they are charged.
func (o *Owners) SettleUnknown(reqs []*store.Request, held []int64, ends []*store.Late) {
	w := o.writer()
	var unknown, others settled
	var late []*store.Late
	for i, r := range reqs {
		own := o.Ledger.Owners(r.ClientKey)
		if r.ID == "" && slices.Contains(own, r.Shard()) {
			own = []string{r.At.Shard}
		}
		for _, part := range o.at(r, own) {
			unknown.add(part, held[i])
			late = append(late, ends[i])
		}
		if r.ID == "" {
			o.settle(&others, w, r, held[i], own)
		}
	}
	o.Ledger.SettleUnknown(unknown.reqs, unknown.held, late)
	if len(others.reqs) > 0 {
		o.Ledger.Settle(others.reqs, others.held)
	}
}

// ChargeDetached is [Ledger.ChargeDetached].
func (o *Owners) ChargeDetached(reqs []*store.Request) { o.Settle(reqs, make([]int64, len(reqs))) }

// ChargeByID is [Ledger.ChargeByID].
func (o *Owners) ChargeByID(reqs []*store.Request) { o.Ledger.ChargeByID(o.spread(o.Ledger, reqs)) }

// PenalizeDetached is [Ledger.PenalizeDetached].
func (o *Owners) PenalizeDetached(reqs []*store.Request) {
	o.Ledger.PenalizeDetached(o.spread(o.writer(), reqs))
}

// spread returns the requests for all owners that a view knows.
func (*Owners) spread(l *Ledger, reqs []*store.Request) (all []*store.Request) {
	for _, r := range reqs {
		all = append(all, l.at(r, l.Owners(r.ClientKey))...)
	}
	return all
}

// Check implements [store.Store].
func (o *Owners) Check(ctx context.Context, asks []*store.Ask) { o.each(ctx, asks, o.Ledger.Check) }

// Charge implements [store.Store].
func (o *Owners) Charge(ctx context.Context, asks []*store.Ask) { o.each(ctx, asks, o.Ledger.Charge) }

// Penalize implements [store.Store].
func (o *Owners) Penalize(ctx context.Context, asks []*store.Ask) {
	o.each(ctx, asks, o.Ledger.Penalize)
}

// Peek implements [store.Store].
func (o *Owners) Peek(ctx context.Context, asks []*store.Ask) { o.each(ctx, asks, o.Ledger.Peek) }

func (o *Owners) each(ctx context.Context, asks []*store.Ask, op func(context.Context, []*store.Ask)) {
	if o.areOne(asks) {
		op(ctx, asks)
		return
	}
	p := o.partsOf(asks)
	op(ctx, p.all())
	p.join()
}

// Reset implements [store.Store].
func (o *Owners) Reset(ctx context.Context, r store.Request) (err error) {
	for _, part := range o.at(&r, o.writer().Owners(r.ClientKey)) {
		err = errors.Join(err, o.Ledger.Reset(ctx, *part))
	}
	return err
}

// oneByOne returns the answer to a request, about which each owner is asked.
func (o *Owners) oneByOne(r *store.Request, ask func(r *store.Request) store.State) store.State {
	of := asksOf(o.at(r, o.Ledger.Owners(r.ClientKey)))
	for _, a := range of {
		a.State = ask(&a.Request)
	}
	return joined(of, o.Ledger.Owner(r.ClientKey))
}

// CheckAhead is [Ledger.CheckAhead].
func (o *Owners) CheckAhead(ctx context.Context, r store.Request, maxWait time.Duration) store.State {
	return o.oneByOne(&r, func(r *store.Request) store.State { return o.Ledger.CheckAhead(ctx, *r, maxWait) })
}

// Foresee is [Ledger.Foresee].
func (o *Owners) Foresee(r store.Request, takes bool, peek PeekFunc) store.State {
	return o.oneByOne(&r, func(r *store.Request) store.State { return o.Ledger.Foresee(*r, takes, peek) })
}

// AdmitAlone is [Ledger.AdmitAlone].
func (o *Owners) AdmitAlone(r *store.Request) store.State {
	var held settled
	st := o.oneByOne(r, func(r *store.Request) store.State {
		st := o.Ledger.AdmitAlone(r)
		if st.Allowed {
			none := *r
			none.Cost = 0
			held.add(&none, r.Cost)
		}
		return st
	})
	if !st.Allowed {
		o.Ledger.Settle(held.reqs, held.held)
	}
	return st
}

// ForeseeAlone is [Ledger.ForeseeAlone].
func (o *Owners) ForeseeAlone(r *store.Request) store.State {
	return o.oneByOne(r, o.Ledger.ForeseeAlone)
}

// Account is [Ledger.Account]: of what each owner has, the highest.
func (o *Owners) Account(r *store.Request) (most *store.Account) {
	for _, part := range o.at(r, o.Ledger.Owners(r.ClientKey)) {
		a := o.Ledger.Account(part)
		if a == nil || most == nil {
			if a != nil {
				most = a
			}
			continue
		}
		most.Used, most.InFlight = max(most.Used, a.Used), max(most.InFlight, a.InFlight)
		most.Unsent, most.Reserved = max(most.Unsent, a.Unsent), max(most.Reserved, a.Reserved)
		most.Full = most.Full || a.Full
	}
	return most
}

// Recall is [Ledger.Recall].
func (o *Owners) Recall(r *store.Request) bool {
	return slices.ContainsFunc(o.at(r, o.Ledger.Owners(r.ClientKey)), func(part *store.Request) bool {
		if !o.Ledger.Recall(part) {
			return false
		}
		r.Events, r.Burst = part.Events, part.Burst
		return true
	})
}
