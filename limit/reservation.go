package limit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// maxReservations bounds the open reservations of a store in this process: each takes less than 1 KiB.
const maxReservations = 100_000

// RefusedError is the error of [Limit.Reserve] where there is no room.
type RefusedError struct {
	// Result says how long to wait. Allowed is false.
	Result Result
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("limit: there is no room for %s", e.Result.RetryAfter)
}

// Reservation is what was taken by an estimate. It ends once: by [Reservation.Commit], by
// [Reservation.Release], or by itself at its deadline; then it can still be committed. It is safe for
// concurrent use.
type Reservation struct {
	limit   *Limit
	request store.Request
	result  Result
	began   time.Time
	timer   *time.Timer

	mu       sync.Mutex
	deadline time.Time
	phase    phase
	// refunded is closed once the refund at the deadline has ended. Then isHeld says whether it certainly did
	// not run.
	refunded chan struct{}
	isHeld   bool
}

// phase is how far a reservation is.
type phase uint8

const (
	open phase = iota
	// expired: it was released at its deadline.
	expired
	ended
)

// Reserve takes n events, an estimate, if they fit. If they do not, the error is a [*RefusedError], or
// [ErrNever] if n exceeds the limit. End the reservation by Commit or Release: otherwise it is
// released at its deadline, Config.ReserveFor from now, as if nothing had been spent. If the process
// ends before, the estimate stays spent; slots of Concurrency are free once Window is over.
func (l *Limit) Reserve(ctx context.Context, key string, n int64) (*Reservation, error) {
	return l.reserve(ctx, key, n, func(ctx context.Context, r *store.Request) (store.State, error) {
		if r.Cost > r.Capacity() {
			return store.State{}, ErrNever
		}
		st, err := l.take(ctx, r)
		if err == nil && !st.Allowed {
			err = &RefusedError{resultOf(&st)}
		}
		return st, err
	})
}

// WaitReserve is Reserve, but waits until the estimate fits, as [Limit.Wait] does.
func (l *Limit) WaitReserve(ctx context.Context, key string, n int64) (*Reservation, error) {
	return l.reserve(ctx, key, n, l.await)
}

func (l *Limit) reserve(ctx context.Context, key string, n int64, take func(context.Context, *store.Request) (store.State, error)) (*Reservation, error) {
	if err := mayAsk(n); err != nil {
		return nil, err
	}
	request, err := l.request(key, n)
	if err != nil {
		return nil, err
	}
	if request.Hold != 0 {
		request.Hold = store.NewHold()
	}
	if l.store.open.Add(1) > maxReservations {
		l.store.open.Add(-1)
		return nil, ErrTooMany
	}
	st, err := take(ctx, &request)
	if err != nil {
		l.store.open.Add(-1)
		return nil, err
	}
	request.Receipt = st.Receipt
	request.NoteHold(&st)
	now := time.Now()
	r := &Reservation{limit: l, request: request, result: resultOf(&st), began: now, deadline: now.Add(l.config.ReserveFor), refunded: make(chan struct{})}
	r.timer = time.AfterFunc(l.config.ReserveFor, r.expire)
	return r, nil
}

// Deadline is when the reservation is released unless it has ended.
func (r *Reservation) Deadline() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.deadline
}

// Renew keeps the reservation open for Config.ReserveFor from now, but until 24h after Reserve at most: work that
// takes longer than its estimate stays paid for. The error is [ErrEnded] if the reservation has ended, also at its
// deadline. It is an error with Concurrency, whose slots end with Window.
func (r *Reservation) Renew() error {
	if algorithm.Of(r.limit.config.Algorithm).Lease {
		return fmt.Errorf("limit: limit %q: a slot is not renewed: make Window as long as it is needed", r.limit.config.Name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.phase != open {
		return ErrEnded
	}
	deadline := time.Now().Add(r.limit.config.ReserveFor)
	if last := r.began.Add(maxReserveFor); deadline.After(last) {
		deadline = last
	}
	r.deadline = deadline
	r.timer.Reset(time.Until(deadline))
	return nil
}

// Result is what the bucket looked like once the estimate was taken.
func (r *Reservation) Result() Result { return r.result }

// Commit ends the reservation with what was spent in fact: it refunds the rest of the estimate, or
// charges what is more, even if that does not fit. With Concurrency it is Release. A refund counts
// while the window in which the estimate was taken does. If the reservation was released at its deadline, Commit
// charges all that was spent. The error is [ErrEnded] if the reservation was committed or released before, or
// ErrUnavailable: then the estimate stays spent, and the reservation has ended. It corrects the estimate even if
// ctx has ended.
func (r *Reservation) Commit(ctx context.Context, actual int64) error {
	if err := mayAsk(actual); err != nil {
		return err
	}
	if algorithm.Of(r.limit.config.Algorithm).Lease {
		return r.end(ctx, 0, false)
	}
	return r.end(ctx, actual, true)
}

// Release ends the reservation, and refunds the whole estimate: nothing was spent. Its errors are
// those of Commit.
func (r *Reservation) Release(ctx context.Context) error { return r.end(ctx, 0, false) }

// end ends the reservation with its actual cost. With late, one that has expired is ended too.
func (r *Reservation) end(ctx context.Context, actual int64, late bool) error {
	// What is not given back now is lost. Redis.ChargeTimeout bounds it.
	ctx = context.WithoutCancel(ctx)
	switch r.begin(late) {
	case open:
		r.timer.Stop()
		return r.settle(ctx, r.request, actual)
	case expired:
		<-r.refunded
		request := r.request
		if !r.isHeld {
			request.Cost, request.Receipt, request.Hold = 0, store.Receipt{}, 0
		}
		return r.settle(ctx, request, actual)
	default:
		return ErrEnded
	}
}

// begin ends the reservation if it is open or, with late, has expired, and returns the phase from which it does.
func (r *Reservation) begin(late bool) phase {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.phase
	switch {
	case before == open:
		r.limit.store.open.Add(-1)
	case before == expired && !late:
		return ended
	}
	r.phase = ended
	return before
}

// expires ends the reservation at its deadline, and reports whether it was open.
func (r *Reservation) expires() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.phase != open || time.Now().Before(r.deadline) {
		return false
	}
	r.phase = expired
	r.limit.store.open.Add(-1)
	return true
}

// settle refunds or charges what makes the actual cost of what a request has taken.
func (r *Reservation) settle(ctx context.Context, request store.Request, actual int64) error {
	l := r.limit
	switch diff := actual - request.Cost; {
	case diff == 0:
		l.endHold(request)
		return nil
	case diff > 0:
		l.endHold(request)
		if request.Cost = diff; request.ID != "" {
			// What is under the old ID stays.
			request.ID = identity.NewRequestID()
		}
		_, err := l.call(ctx, l.store.buckets.Charge, &request)
		return err
	default:
		request.Cost = -diff
		_, err := l.call(ctx, l.store.buckets.Refund, &request)
		if err == nil {
			l.lines.wake(request.ClientKey)
		}
		return err
	}
}

// expire releases the reservation at its deadline, unless the store is closed.
func (r *Reservation) expire() {
	s := r.limit.store
	if !s.beginExpiring() {
		return
	}
	var err error
	if r.expires() {
		err = r.settle(context.Background(), r.request, 0)
		r.isHeld = errors.Is(err, store.ErrNotExecuted)
		close(r.refunded)
	}
	// Who hears of the error may close the store.
	s.expiring.Done()
	if err != nil {
		s.report(err)
	}
}
