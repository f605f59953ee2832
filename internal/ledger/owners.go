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
	owners := o.Owners(r.ClientKey)
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
		for _, r := range o.atOwners(&a.Request) {
			p.of[i] = append(p.of[i], &store.Ask{Request: *r})
		}
	}
	return p
}

func (l *Ledger) placeOf(shard string) *store.Place {
	return l.registry.shards.Place(l.number(shard))
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

// atOwners returns copies of a request for all owners of its client.
func (l *Ledger) atOwners(r *store.Request) []*store.Request { return l.at(r, l.Owners(r.ClientKey)) }

// asked returns what is asked of all owners: nothing about an ask of which one has failed.
func (p *parts) asked() (all []*store.Ask) {
	for _, of := range p.of {
		if !hasFailed(of) {
			all = append(all, of...)
		}
	}
	return all
}

func hasFailed(of []*store.Ask) bool {
	return slices.ContainsFunc(of, func(a *store.Ask) bool { return a.Err != nil })
}

// turn returns what is asked of the nth owners.
func (p *parts) turn(n int) (turn []*store.Ask) {
	for _, of := range p.of {
		if n < len(of) && !hasFailed(of) {
			turn = append(turn, of[n])
		}
	}
	return turn
}

// refuse lets one owner after the other refuse what they are known to, from the nth on, and reports whether one does.
// That counts once; the others say how long to wait.
func (p *parts) refuse(n int, question func([]*store.Ask) bool) (refused bool) {
	for turn := p.turn(n); len(turn) > 0; turn = p.turn(n) {
		if refused {
			p.Ledger.ForeseeKnown(turn)
		} else {
			refused = question(turn)
		}
		n++
	}
	return refused
}

// join sets the states of the asks.
func (p *parts) join() {
	for i, a := range p.asks {
		a.State = joined(p.of[i], p.Owner(a.ClientKey))
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
	// Each has a clock of its own.
	if by := st.Now - other.Now; other.Penalty > 0 {
		other.Penalty += by
	}
	switch {
	case !other.Allowed && (st.Allowed || other.RetryAfter > st.RetryAfter):
		st.Allowed, st.InFlight, st.Held = false, other.InFlight, other.Held
		st.RetryAfter, st.ResetOtherwise = other.RetryAfter, other.ResetOtherwise+st.Now-other.Now
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
	refused = p.refuse(0, question)
	p.join()
	return refused
}

// IsFull is [Ledger.IsFull].
func (o *Owners) IsFull(r *store.Request) bool {
	if o.isOne(r) {
		return o.Ledger.IsFull(r)
	}
	return slices.ContainsFunc(o.atOwners(r), o.Ledger.IsFull)
}

// Admit is [Ledger.Admit]. What is admitted by one owner only is not held.
func (o *Owners) Admit(ctx context.Context, asks []*store.Ask) {
	if o.areOne(asks) {
		o.Ledger.Admit(ctx, asks)
		return
	}
	p := o.partsOf(asks)
	if !p.refuse(0, o.Ledger.RefuseKnown) {
		p.open(ctx, opensByRequest)
		o.Ledger.Admit(ctx, p.asked())
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

// opensAlike reports whether a charge or a take opens a bucket of the limit as it is open elsewhere.
func opensAlike(limit *store.Limit) bool {
	return opensByRequest(limit) || algorithm.Of(limit.Algorithm).Drains()
}

// left returns how long the bucket is open as far as is known: see [openFor].
func (l *Ledger) left(r *store.Request) int64 {
	m := l.moment()
	b := l.copyOf(r, &m)
	return openFor(r.Limit, b.Left(r, &m))
}

// closing is for how long before its end a window is taken for closed: it may be once a call arrives, which would
// open one there whose end the others do not have.
const closing = 100 * time.Millisecond

// openFor returns how long a bucket is taken for open, of which [algorithm.Known.Left] is so much.
func openFor(limit *store.Limit, left int64) int64 {
	if opensByRequest(limit) && left <= min(closing, limit.Window/16).Microseconds() {
		return 0
	}
	return left
}

// open reads what is not known to be open, of the limits that an operation opens, and makes what is closed open with
// the end of what is open or, if all are closed, with the same. What drains gets that arrival time: otherwise a client
// that never pauses would have a burst more once it has moved. The shards' clocks may differ: what is left at one is
// added to the time of the other. No more is asked about what cannot be read.
func (p *parts) open(ctx context.Context, opens func(*store.Limit) bool) {
	var closed [][]*store.Ask
	var reads []*store.Ask
	for _, of := range p.of {
		if len(of) == 1 || !opens(of[0].Request.Limit) {
			continue
		}
		if slices.ContainsFunc(of, func(a *store.Ask) bool { return p.left(&a.Request) == 0 }) {
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
		limit, left := of[0].Request.Limit, make([]int64, len(of))
		for i, read := range reads[:len(of)] {
			if read.Err != nil {
				of[i].State = store.State{Err: store.NotExecuted(read.Err)}
			}
			left[i] = openFor(limit, algorithm.Known{Content: read.Content}.Left(limit, read.Now))
		}
		most := slices.Max(left)
		if most == 0 && opensByRequest(limit) {
			most = limit.Window.Microseconds()
		}
		for i, a := range of {
			if left[i] == 0 {
				a.Ends = reads[i].Now + most
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
	if p.refuse(1, o.Ledger.RefuseKnown) {
		p.join()
		return
	}
	p.open(ctx, opensAlike)
	turn := p.turn(0)
	for n := 1; len(turn) > 0; n++ {
		o.Ledger.Take(ctx, turn)
		if slices.ContainsFunc(turn, func(a *store.Ask) bool { return a.Err == nil && !a.Allowed }) {
			break
		}
		turn = p.turn(n)
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
func (o *Owners) refunds(r *store.Request) []*store.Request {
	if r.At == nil {
		return o.atOwners(r)
	}
	return r.Parts()
}

func asksOf(reqs []*store.Request) (asks []*store.Ask) {
	for _, r := range reqs {
		asks = append(asks, &store.Ask{Request: *r})
	}
	return asks
}

// refunded is joined of refunds: what one owner has given back must not be tried again, and one that is gone has
// nothing to give back.
func refunded(of []*store.Ask, owner string) store.State {
	of = slices.DeleteFunc(of, func(a *store.Ask) bool { return errors.Is(a.Err, store.ErrGone) })
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
	if isSpread := func(r *store.Request) bool { return r.At == nil || r.At.More != nil }; slices.ContainsFunc(reqs, isSpread) {
		var all []*store.Request
		for _, r := range reqs {
			all = append(all, o.refunds(r)...)
		}
		reqs = all
	}
	o.Ledger.RefundDetached(reqs)
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
				report(refunded(of, o.Owner(r.ClientKey)))
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
	own, now := o.Owners(r.ClientKey), w.Owners(r.ClientKey)
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
	if len(shards) == 1 || !opensAlike(r.Limit) {
		return ends
	}
	most := int64(0)
	for n, part := range l.at(r, shards) {
		ends[n] = l.left(part)
		most = max(most, ends[n])
	}
	for n, left := range ends {
		if ends[n] = 0; left == 0 {
			ends[n] = -most
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
		own := o.Owners(r.ClientKey)
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

// PenalizeAlone is [Ledger.PenalizeAlone].
func (o *Owners) PenalizeAlone(r *store.Request) {
	for _, part := range o.atOwners(r) {
		o.Ledger.PenalizeAlone(part)
	}
}

// spread returns the requests for all owners that a view knows.
func (*Owners) spread(l *Ledger, reqs []*store.Request) (all []*store.Request) {
	for _, r := range reqs {
		all = append(all, l.atOwners(r)...)
	}
	return all
}

// Charge is [Ledger.Charge].
func (o *Owners) Charge(ctx context.Context, asks []*store.Ask) { o.each(ctx, asks, o.Ledger.Charge) }

// Peek is [Ledger.Peek].
func (o *Owners) Peek(ctx context.Context, asks []*store.Ask) { o.each(ctx, asks, o.Ledger.Peek) }

func (o *Owners) each(ctx context.Context, asks []*store.Ask, op func(context.Context, []*store.Ask)) {
	if o.areOne(asks) {
		op(ctx, asks)
		return
	}
	p := o.partsOf(asks)
	op(ctx, p.asked())
	p.join()
}

// Reset is [Ledger.Reset].
func (o *Owners) Reset(ctx context.Context, r store.Request) (err error) {
	for _, part := range o.writer().atOwners(&r) {
		err = errors.Join(err, o.Ledger.Reset(ctx, *part))
	}
	return err
}

// oneByOne returns the answer to a request, about which each owner is asked.
func (o *Owners) oneByOne(r *store.Request, ask func(r *store.Request) store.State) store.State {
	of := asksOf(o.atOwners(r))
	for _, a := range of {
		a.State = ask(&a.Request)
	}
	return joined(of, o.Owner(r.ClientKey))
}

// CheckAhead is [Ledger.CheckAhead].
func (o *Owners) CheckAhead(ctx context.Context, r store.Request, maxWait time.Duration) store.State {
	a := &store.Ask{Request: r}
	p := o.partsOf([]*store.Ask{a})
	p.open(ctx, opensByRequest)
	for _, part := range p.asked() {
		part.State = o.Ledger.CheckAhead(ctx, part.Request, maxWait)
	}
	p.join()
	return a.State
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
	for _, part := range o.atOwners(r) {
		a := o.Ledger.Account(part)
		if a == nil || most == nil {
			if a != nil {
				most = a
			}
			continue
		}
		most.Used, most.InFlight = max(most.Used, a.Used), max(most.InFlight, a.InFlight)
		most.Unsent, most.Reserved = max(most.Unsent, a.Unsent), max(most.Reserved, a.Reserved)
		most.Full, most.IsAlone = most.Full || a.Full, most.IsAlone || a.IsAlone
	}
	return most
}

// Recall is [Ledger.Recall].
func (o *Owners) Recall(r *store.Request) bool {
	return slices.ContainsFunc(o.atOwners(r), func(part *store.Request) bool {
		if !o.Ledger.Recall(part) {
			return false
		}
		r.Events, r.Burst = part.Events, part.Burst
		return true
	})
}
