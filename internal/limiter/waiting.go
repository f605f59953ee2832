package limiter

import (
	"bytes"
	"context"
	"io"
	"iter"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// DefaultMaxWaitQueue is how many requests of a zone wait at most.
const DefaultMaxWaitQueue = 1000

// askInTurn asks the stores of e, the newest evaluation, some of whose zones hold requests. A
// request that does not fit yet waits if all zones that refuse it do.
func (t *tracker) askInTurn(e *evaluation, r *http.Request) error {
	began := e.limiter.Now()
	if !slices.ContainsFunc(e.zones, (*inZone).hasLine) {
		if err := e.ask(r, nil); err != nil || !t.mayWait(began) {
			return err
		}
		return t.wait(r, began)
	}
	e.resetStates()
	if passes, err := e.answerUnknown(r); err != nil || !passes {
		return err
	}
	return t.wait(r, began)
}

// mayStand reports whether the request may stand in a line of the zone. One without a cost takes
// nothing from others.
func (z *inZone) mayStand() bool { return z.letsWait() && z.ask.Cost > 0 }

// hasLine reports whether others wait in the zone, at the limit that the request has.
func (z *inZone) hasLine() bool {
	return z.mayStand() && z.room.hasLine(lineOf(&z.ask.Request))
}

// timeLeft returns how long the request may still wait for the zone.
func (z *inZone) timeLeft(began time.Time) time.Duration {
	return z.MaxWait - z.of.limiter.Now().Sub(began)
}

// zones are those of all handlers that the request has met.
func (t *tracker) zones() iter.Seq2[int, *inZone] {
	return func(yield func(int, *inZone) bool) {
		n := 0
		for _, e := range t.own {
			for _, z := range e.zones {
				if !yield(n, z) {
					return
				}
				n++
			}
		}
	}
}

// mayWait reports whether zones refuse the request, and all of them let it wait for that long.
func (t *tracker) mayWait(began time.Time) bool {
	isRefused := false
	for _, e := range t.own {
		refused, lets := e.letsAllWait(began)
		if !lets {
			return false
		}
		isRefused = isRefused || refused
	}
	return isRefused
}

// letsAllWait reports whether zones of e refuse the request, and whether none ends it: those that
// refuse it let it wait.
func (e *evaluation) letsAllWait(began time.Time) (refused, lets bool) {
	for _, z := range e.zones {
		switch o := z.outcome(); {
		case !endsRequest(o):
		case !refuses(o):
			return refused, false
		default:
			if refused = true; !z.letsWait() || z.ask.RetryAfter > z.timeLeft(began) {
				return true, false
			}
		}
	}
	return refused, true
}

// trustedAnswer is how old the answers may be by which a request lines up.
const trustedAnswer = time.Second

// wait gives back what the request holds, in all its handlers, and waits until it passes in all
// of them, a zone refuses it for too long, or the client leaves.
func (t *tracker) wait(r *http.Request, began time.Time) (err error) {
	if s := t.own[0].limiter.simulation; s != nil {
		s.foreseeWait(r, began)
		return nil
	}
	t.giveBack()
	before := t.outerAnswers()
	defer func() { t.restoreAnswers(before, err != nil) }()
	asked := t.own[0].limiter.Now()
	if err := readAhead(r); err != nil {
		return err
	}
	if t.own[0].limiter.Now().Sub(asked) > trustedAnswer {
		t.forget()
	}
	w := t.newWaiter(began, r)
	defer w.leave()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for isCounted := false; ; {
		line, waits := t.lineUp(w, r)
		if !waits {
			return nil
		}
		if line != nil && !isCounted {
			isCounted = true
			line.Counts.Waited.Inc()
		}
		switch turn, err := t.awaitTurn(w, line, timer, r); {
		case err != nil:
			return err
		case turn == turnAway:
			t.turnAway(w, line)
			return nil
		case turn == lineUpAgain:
			t.forget()
			continue
		}
		if err := t.askAgain(line, r); err != nil || !t.mayWait(began) {
			return err
		}
		t.giveBack()
	}
}

// outerAnswer is what a zone of an outer handler has answered before the request waited.
type outerAnswer struct {
	of     *inZone
	role   role
	answer answer
	state  store.State
}

// outerAnswers are those of all handlers but the newest.
func (t *tracker) outerAnswers() (all []outerAnswer) {
	for _, e := range t.own[:len(t.own)-1] {
		for _, z := range e.zones {
			all = append(all, outerAnswer{z, z.role, z.answer, z.ask.State})
		}
	}
	return all
}

// restoreAnswers restores the answers of zones that have not decided anew: those that were not asked
// again, those that only observe, whose first answer was logged, and all of them if the client
// has left.
func (t *tracker) restoreAnswers(all []outerAnswer, hasLeft bool) {
	for _, a := range all {
		z := a.of
		switch {
		case hasLeft:
			z.role = a.role
		case z.role != observes && z.answer != notAsked:
			continue
		}
		z.answer, z.ask.State = a.answer, a.state
	}
}

// maxReadAhead bounds what is kept of the body of a request that waits.
const maxReadAhead = 4 << 10

// bodyAhead is a body that was read before its request stood in a line.
type bodyAhead struct {
	io.Reader
	io.Closer
}

// readAhead reads a short body of HTTP/1, which r has from then on: the server notices that a
// client has gone only while it reads from the connection, which it does in the background once
// it has the whole body. HTTP/2 and HTTP/3 tell in any case. A client that sends its body slowly
// holds meanwhile no more than with a handler that reads it. The error is that of a client that
// has left.
func readAhead(r *http.Request) error {
	if r.ProtoMajor != 1 || r.ContentLength <= 0 || r.ContentLength > maxReadAhead || r.Body == nil {
		return nil
	}
	if _, isRead := r.Body.(*bodyAhead); isRead {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(r.Body, maxReadAhead))
	if err != nil && r.Context().Err() != nil {
		return caddyhttp.Error(statusClientClosedRequest, err)
	}
	// What failed fails again.
	r.Body = &bodyAhead{io.MultiReader(bytes.NewReader(text), r.Body), r.Body}
	return nil
}

// giveBack undoes all evaluations, because the request does not go on yet.
func (t *tracker) giveBack() {
	for _, e := range t.own {
		e.showRefunds()
		e.undo()
	}
}

// forget makes the zones be asked, or foreseen, anew.
func (t *tracker) forget() {
	for _, e := range t.own {
		e.resetStates()
	}
}

func (t *tracker) newWaiter(began time.Time, r *http.Request) *waiter {
	w := &waiter{arrived: began, address: addressOf(r), bell: make(chan struct{}, 1)}
	for _, z := range t.zones() {
		req := &z.ask.Request
		w.wants = append(w.wants, want{z.room, req.Limit, req.ClientKey, req.Cost})
	}
	return w
}

// addressOf returns the address of the client, of IPv6 its /64, or "" in a call of rate_limit_service.
func addressOf(r *http.Request) string {
	text, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	addr, isAddr := clientkey.ParseAddr(text)
	if !isAddr || addr.Is4() {
		return text
	}
	network, _ := addr.WithZone("").Prefix(64)
	return network.String()
}

// findLine returns the zone for which the request waits longest, those before it having spent what is ahead,
// or none if none refuses the request any more. It reports false if the request is refused.
func (t *tracker) findLine(w *waiter, ahead []int64, r *http.Request) (line *inZone, waits bool) {
	w.linedUp = t.own[0].limiter.Now()
	for n, z := range t.zones() {
		if ahead[n] > 0 || z.answer == notAsked {
			z.foresee(r.Context(), ahead[n], z.timeLeft(w.arrived))
		}
	}
	if v := t.verdict(anyHandler); refuses(v.outcome) {
		return v.inZone, t.mayWait(w.arrived)
	}
	// The line that it is in goes on as far as the request.
	for n, z := range t.zones() {
		if ahead[n] > 0 && z.mayStand() && (line == nil || w.room == z.room) {
			line = z
		}
	}
	return line, true
}

// lineUp makes w stand in the line that findLine finds; elsewhere it holds no place. It returns what findLine
// does, and reports false as well if the line has no place.
func (t *tracker) lineUp(w *waiter, r *http.Request) (line *inZone, waits bool) {
	ahead := t.ahead(w)
	switch line, waits = t.findLine(w, ahead, r); {
	case !waits:
		return line, false
	case line == nil:
		w.leave()
		return line, true
	}
	id := lineOf(&line.ask.Request)
	stood := w.room == line.room && w.line == id
	if !line.room.stand(w, id, line.latest().MaxWaitQueue) {
		t.turnAway(w, line)
		return line, false
	}
	if !stood && isMore(t.ahead(w), ahead) {
		// Requests that lined up meanwhile may make its wait too long.
		return t.lineUp(w, r)
	}
	return line, true
}

// isMore reports whether any number is more than the one before.
func isMore(now, before []int64) bool {
	for n := range now {
		if now[n] > before[n] {
			return true
		}
	}
	return false
}

// ahead returns for each zone what the requests before w are going to spend in its bucket: those
// that arrived before and stand where w stands or would stand.
func (t *tracker) ahead(w *waiter) []int64 {
	ahead := make([]int64, len(w.wants))
	for n, z := range t.zones() {
		if z.mayStand() {
			w.wants[n].room.addAhead(lineOf(&z.ask.Request), w, ahead)
		}
	}
	return ahead
}

// foresee sets the state of the zone as if the requests before this one had spent the cost ahead.
// If the ledger already knows a wait longer than timeout, it makes no call and returns that wait,
// which may be too short.
func (z *inZone) foresee(ctx context.Context, ahead int64, timeout time.Duration) {
	open := z.of.open
	if open == nil || !z.isAskedAsEnforced() || z.isUncertain() {
		return
	}
	req := z.ask.Request
	if req.Cost > 0 {
		req.Ahead = ahead
	}
	st := open.Accounts.CheckAhead(ctx, req, timeout)
	if st.Err != nil {
		return
	}
	switch {
	case !st.Allowed:
		// What is left is for the requests ahead. If they have to spend it all before anything
		// can become free again, that takes as long as if it were spent now.
		st.Remaining = 0
		if st.RetryAfter == 0 {
			st.RetryAfter = time.Duration(st.ResetOtherwise-st.Now) * time.Microsecond
		}
	case ahead > 0 && z.of.limiter.simulation == nil:
		// Another process may have made room that they do not know of.
		z.room.wake(req.ClientKey)
	}
	z.learn(st)
	z.alone = localNone
}

// turnAway makes a zone refuse a request that may not wait, or not any longer. It makes no call,
// because the store may be silent: what is not known any more is told as it was, less the time
// since.
func (t *tracker) turnAway(w *waiter, line *inZone) {
	known, cancel := context.WithCancel(context.Background())
	cancel()
	st := &line.ask.State
	st.RetryAfter -= line.of.limiter.Now().Sub(w.linedUp)
	ahead := t.ahead(w)
	for n, z := range t.zones() {
		if z == line {
			z.foresee(known, ahead[n], 0)
		}
	}
	if !line.hasAnswered() {
		*st = store.State{Now: line.of.limiter.Now().UnixMicro(), Limit: max(line.ask.Capacity(), 0)}
	}
	st.Allowed, st.Remaining = false, 0
	st.RetryAfter = max(st.RetryAfter, time.Second)
	line.answer = hasNoRoom
}

// askAgain asks the stores of all handlers, beginning with the zone for which the request has
// waited, unless that is nil: others must not show for a moment what is given back. It stops where the
// request is refused.
func (t *tracker) askAgain(line *inZone, r *http.Request) error {
	t.forget()
	all := slices.Clone(t.own)
	isOfLine := func(e *evaluation) bool { return line != nil && e == line.of }
	if at := slices.IndexFunc(all, isOfLine); at > 0 {
		all = slices.Insert(slices.Delete(all, at, at+1), 0, line.of)
	}
	if slices.ContainsFunc(all, (*evaluation).refusesOutright) {
		return nil
	}
	for _, e := range all {
		var first *inZone
		if isOfLine(e) {
			first = line
		}
		if err := e.ask(r, first); err != nil || endsRequest(t.verdict(anyHandler).outcome) {
			return err
		}
	}
	return nil
}

// resolveAgain resolves what the zone admits by the running config, and by what operators have
// changed for the zone and the client.
func (z *inZone) resolveAgain(r *http.Request) {
	req, l := &z.ask.Request, z.of.limiter
	latest, of := z.latest(), stores.ClientOverrides{}
	events, burst := latest.limitBy(z.rule(l), z.replOf(), l)
	if z.bucket == ownBucket {
		of = z.overridesOf(req.ClientKey, l)
	}
	// Where a matcher fails, nothing is kept.
	if _ = latest.setLimit(req, z.requestOf(r), events, burst, of); req.Events == unlimited {
		req.Events = algorithm.Of(z.Algorithm).MostEvents
	}
	if of.Block != nil {
		z.setBlock(of.Block)
	}
}

// AskAgain makes the requests of a client that wait in a zone ask again: its bucket was emptied.
func AskAgain(id ZoneID, clientKey string) {
	if state := findState(id); state != nil {
		state.room.wake(clientKey)
	}
}

// wakeLines makes the requests that wait in some zones ask again: what this request held there
// is given back.
func wakeLines(some []*inZone) {
	for _, z := range some {
		z.room.wake(z.ask.ClientKey)
	}
}

// turn is what a request does after it has waited.
type turn uint8

const (
	// itsTurn: it asks the stores.
	itsTurn turn = iota
	// lineUpAgain: its limit, or what is before it, may have changed.
	lineUpAgain
	// turnAway: it is refused, because its time or its place is gone.
	turnAway
)

// awaitTurn waits in a line until no request is before this one and then, if none was when it
// came, as long as the states say. It returns an error if the client has left.
func (t *tracker) awaitTurn(w *waiter, line *inZone, timer *time.Timer, r *http.Request) (turn, error) {
	if line == nil {
		return itsTurn, nil
	}
	now := w.news()
	wasFirst := now.isFirst
	switch {
	case !now.isFirst:
		timer.Reset(line.timeLeft(w.arrived))
	case refuses(line.outcome()):
		timer.Reset(line.ask.RetryAfter)
	default:
		return itsTurn, nil
	}
	for {
		switch {
		case now.isDisplaced:
			return turnAway, nil
		case now.isWoken:
			for _, z := range t.zones() {
				z.resolveAgain(r)
			}
			switch {
			case now.isFirst, slices.ContainsFunc(t.own, (*evaluation).refusesOutright):
				return itsTurn, nil
			case now.isOvertaken, w.line != lineOf(&line.ask.Request):
				return lineUpAgain, nil
			}
		case now.isFirst && !wasFirst:
			return itsTurn, nil
		case now.isOvertaken && !now.isFirst:
			return lineUpAgain, nil
		}
		select {
		case <-w.bell:
			now = w.news()
		case <-timer.C:
			if now.isFirst {
				return itsTurn, nil
			}
			return turnAway, nil
		case <-r.Context().Done():
			return 0, caddyhttp.Error(statusClientClosedRequest, r.Context().Err())
		}
	}
}
